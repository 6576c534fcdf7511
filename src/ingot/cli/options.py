"""Command-line options made of the fields of config sections, so that each option is declared in one place.

A field's docstring is its help, its type is the option's type, and its name is the option's name. In
`Field(json_schema_extra=...)`, `{"flags": ["--out_root", "--output_folder"]}` spells an option out, `{"several": True}`
lets it be given more than once, `{"hidden": True}` keeps it out of the help, and `{"shown": "64MiB"}` is how the help
spells the default.

    @app.command("slurm", cls=OptionCommand)
    @options_from(LaunchSpec, fields=["nodes", "time"])
    def slurm(arguments: Arguments = None, **options: Any) -> None: ...

The function receives in `options` what was given on the command line and nothing else.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo


def options_from(
    *sections: type[BaseModel],
    fields: Collection[str] | None = None,
    panels: Mapping[str, Collection[str]] | None = None,
    underscores: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a function's `**options` by the fields of sections: all of them, or those in `fields`. `panels` maps a
    title of the help to the fields below it."""
    declared = {name: field for section in sections for name, field in section.model_fields.items()
                if fields is None or name in fields}  # fmt: skip
    panel_of = {name: title for title, names in (panels or {}).items() for name in names}

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(_context: typer.Context, **values: Any) -> Any:
            sources = {name: _context.get_parameter_source(name) for name in declared}
            unset = {name for name, source in sources.items() if source is None or source.name != "COMMANDLINE"}
            return function(**{name: value for name, value in values.items() if name not in unset})

        own = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        context = inspect.Parameter("_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        options = [_parameter(name, field, panel_of.get(name), underscores) for name, field in declared.items()]
        parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (context, *own, *options)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return decorate


def _parameter(name: str, field: FieldInfo, panel: str | None, underscores: bool) -> inspect.Parameter:
    extra: Any = field.json_schema_extra or {}
    flags: list[str] = list(extra.get("flags") or ["--" + (name if underscores else name.replace("_", "-"))])
    kind, choices = _option_type(field.annotation, field.metadata)
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
        help=" ".join([inspect.cleandoc(field.description or ""), *([f"One of {choices}."] if choices else [])]),
        hidden=bool(extra.get("hidden")),
        show_default=extra.get("shown") or default not in (None, "", False),
        rich_help_panel=panel,
    )
    if kind is not bool or default is not False:
        kind = kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _option_type(annotation: Any, metadata: Collection[Any] = ()) -> tuple[Any, str]:
    """What the command line takes for a field, and the choices if there are some. The section checks the value."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _option_type(inner[0], [*inner[1:], *metadata])
    if origin in (Union, UnionType):
        return _option_type(next(kind for kind in inner if kind is not type(None)), metadata)
    if origin is Literal:
        return str, ", ".join(map(str, inner))
    if origin in (list, dict) or (origin is tuple and inner[-1] is Ellipsis):  # a dict as NAME=VALUE
        return list[str], ""
    if any(isinstance(item, BeforeValidator) for item in metadata):
        return str, ""  # the section reads text: a size, a path or a name
    return (annotation if annotation in (bool, int, float, Path) else str), ""
