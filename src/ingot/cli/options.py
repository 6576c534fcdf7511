"""Command-line options made of the fields of a config section, so that each option is declared in one place.

A field's docstring is its help, its type is the option's type, and its name is the option's name. In
`Field(json_schema_extra=...)`, `{"flags": ["--out_root", "--output_folder"]}` spells an option out, `{"several": True}`
lets it be given more than once, `{"hidden": True}` keeps it out of the help, and `{"shown": "64MiB"}` is how the help
spells the default. The section is imported when its command is used, so `ingot --help` does not wait for pydantic.

    @app.command("slurm", cls=SectionCommand)
    @options_from(load_spec, fields=["nodes", "time"])  # load_spec imports and returns the section
    def slurm(arguments: Arguments = None, **options: Any) -> None: ...

The function receives in `options` what was given on the command line and nothing else.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


class OptionCommand(TyperCommand):
    """Accepts options with hyphens or underscores, whichever they are declared with."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        declared = {flag.replace("-", "_"): flag for p in self.params for flag in (*p.opts, *p.secondary_opts)}

        def spelled(argument: str) -> str:
            name, equals, value = argument.partition("=")
            return declared.get(name.replace("-", "_"), name) + equals + value if name.startswith("--") else argument

        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*map(spelled, args[:end]), *args[end:]])


class SectionCommand(TyperCommand):
    """Stands for a command in the list of commands; builds it when it is used."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command = self.callback.build_command()  # type: ignore[union-attr]  # set by options_from
        return command.make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        return ctx.command.invoke(ctx)


def options_from(
    load_section: Callable[[], "type[BaseModel] | Sequence[type[BaseModel]]"],
    *,
    fields: Collection[str] | None = None,
    cls: type[TyperCommand] = OptionCommand,
    underscores: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Replace a function's `**options` by the fields of one section or several: all of them, or those in `fields`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @cache
        def build_command() -> Any:
            loaded = load_section()
            sections = [loaded] if isinstance(loaded, type) else loaded
            declared = {name: field for section in sections for name, field in section.model_fields.items()}
            names = [name for name in declared if fields is None or name in fields]
            own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]

            def run(**values: Any) -> Any:
                context = values.pop("_context")
                unset = {n for n in names if context.get_parameter_source(n).name != "COMMANDLINE"}
                return function(**{name: value for name, value in values.items() if name not in unset})

            options = [_parameter(name, declared[name], underscores) for name in names]
            context = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
            parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (context, *own, *options)]
            run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
            run.__annotations__ = {p.name: p.annotation for p in parameters}
            run.__name__, run.__doc__ = function.__name__, function.__doc__
            app = typer.Typer(add_completion=False, rich_markup_mode="rich")
            app.command(cls=cls)(run)
            return typer.main.get_command(app)

        def stand_in() -> None: ...

        stand_in.__name__, stand_in.__doc__ = function.__name__, function.__doc__
        stand_in.build_command = build_command  # type: ignore[attr-defined]
        return stand_in

    return decorate


def _parameter(name: str, field: "FieldInfo", underscores: bool) -> inspect.Parameter:
    extra: Any = field.json_schema_extra or {}
    flags: list[str] = list(extra.get("flags") or ["--" + (name if underscores else name.replace("_", "-"))])
    kind, metavar = _option_type(field.annotation, field.metadata)
    if extra.get("several"):
        kind = list[str]
    default = field.get_default(call_default_factory=True)
    if field.is_required() or (isinstance(default, list | tuple | dict) and not default):
        default = None
    elif kind == list[str]:
        default = [default] if isinstance(default, str) else list(default)
    if kind is bool and default is not False and "/" not in flags[0]:  # on by default, or neither: needs both forms
        flags[0] += "/--no-" + flags[0].removeprefix("--")
    option: Any = typer.Option(
        *flags,
        help=inspect.cleandoc(field.description or ""),
        metavar=metavar,
        hidden=bool(extra.get("hidden")),
        show_default=extra.get("shown") or default not in (None, "", False),
    )
    if kind is not bool or default is not False:
        kind = kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _option_type(annotation: Any, metadata: Collection[Any] = ()) -> tuple[Any, str | None]:
    """What the command line takes for a field, and what its help shows as a value. The section checks the value."""
    from pydantic import BeforeValidator

    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _option_type(inner[0], [*inner[1:], *metadata])
    if origin in (Union, UnionType):
        return _option_type(next(kind for kind in inner if kind is not type(None)), metadata)
    if origin is Literal:
        return str, "|".join(map(str, inner))
    if origin in (list, dict) or (origin is tuple and inner[-1] is Ellipsis):  # a dict as NAME=VALUE
        return list[str], None
    if any(isinstance(item, BeforeValidator) for item in metadata):
        return str, None  # the section reads text: a size, a path or a name
    return (annotation if annotation in (bool, int, float, Path) else str), None
