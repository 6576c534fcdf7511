"""The kinds of commands: how arguments are read, and how help fits into 80 columns."""

import copy
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from ingot.errors import ConfigError

_VALUES = {"int": "N", "float": "X", "Path": "PATH"}  # in help, by type; others are TEXT

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OutOption = Annotated[Path | None, typer.Option("-o", "--out", help="Another way to give it.")]
OutputT = TypeVar("OutputT", Path, str)


def output(argument: OutputT | None, option: OutputT | None) -> OutputT:
    """Where to write: the argument OUT or the option -o, one of them."""
    if argument is not None and option is not None:
        raise ConfigError(f"both {argument} and -o {option} say where to write; give one")
    if argument is None and option is None:
        raise ConfigError("nothing says where to write; add -o FOLDER")
    return argument if option is None else option  # type: ignore[return-value]


class OptionCommand(TyperCommand):
    """Accepts options with hyphens or underscores; its help lists each option under its first spelling."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        declared = {flag.replace("-", "_"): flag for p in self.params for flag in (*p.opts, *p.secondary_opts)}

        def spelled(argument: str) -> str:
            name, equals, value = argument.partition("=")
            return declared.get(name.replace("-", "_"), name) + equals + value if name.startswith("--") else argument

        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*map(spelled, args[:end]), *args[end:]])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperCommand.format_help(_for_help(self, ctx), ctx, formatter)


class OptionGroup(TyperGroup):
    """A command with subcommands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperGroup.format_help(_for_help(self, ctx), ctx, formatter)


class Verb(TyperCommand):
    """A command whose module, `ingot.cli.MODULE`, is imported when it is used: `ingot --help` stays fast."""

    def __init__(self, name: str, summary: str, panel: str, module: str):
        super().__init__(name, help=summary, rich_help_panel=panel)
        self.module = module

    def load(self) -> Any:
        """The command itself."""
        command = typer.main.get_command(import_module(f"ingot.cli.{self.module}").app)
        command.name, command.help = self.name, command.help or self.help
        return command

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)


def _for_help(command: Any, ctx: Any) -> Any:
    shown = copy.copy(command)
    shown.params = [_one_spelling(p) if isinstance(p, TyperOption) else p for p in command.get_params(ctx)]
    shown.add_help_option = False  # it is one of these
    return shown


def _one_spelling(option: TyperOption) -> TyperOption:
    shown = copy.copy(option)
    first, *others = [flag for flag in option.opts if flag.startswith("--")] or option.opts
    shown.opts = [flag for flag in option.opts if flag not in others]
    if others := [flag for flag in others if flag.replace("-", "_") != first.replace("-", "_")]:
        shown.help = f"{option.help or ''} Also {', '.join(others)}."
    if option.metavar is None:
        shown.metavar = "" if option.is_flag else _VALUES.get(option.bare_type(), "TEXT")
    return shown
