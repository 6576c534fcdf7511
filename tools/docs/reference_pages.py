"""The reference pages that are made from the code: verbs, config keys, recipes, files, variables and exit codes."""

import inspect
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from peer_pages import native_names
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ingot.cli.config_keys import config_fields, default_text, type_name
from ingot.cli.main import all_commands
from ingot.config.load import load_config
from ingot.config.recipes import recipe_names
from ingot.config.run import RunConfig
from ingot.launch import protocol


def pages() -> dict[str, str]:
    return {
        "docs/reference/verbs.md": verbs_page(),
        "docs/reference/config.md": config_page(),
        "docs/reference/recipes.md": recipes_page(),
        "docs/reference/files-of-a-launch.md": protocol_page("Files of a launch", "Files of", "Environment variables"),
        "docs/reference/environment-variables.md": protocol_page(
            "Environment variables of a launch", "Environment variables", "Exit codes"
        ),
        "docs/reference/exit-codes.md": protocol_page("Exit codes", "Exit codes", None),
    }


def cell(text: str) -> str:
    """A table cell: one line, with the characters escaped that would end it."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def code(text: object) -> str:
    return f"`{text}`".replace("|", "\\|")


# --- verbs


def commands() -> Iterator[tuple[str, Any]]:
    """Every verb with its full name, in the order of `ingot --help`; of a group, its subcommands."""
    for name, command in all_commands():
        if not getattr(command, "commands", None):
            yield name, command


def verbs_page() -> str:
    lines = [
        "# Verbs",
        "",
        "Made from the command line's own help. Every verb also takes `--debug`: the stack trace of a failure then goes to "
        "`ingot-debug.log`. Options are accepted with hyphens or underscores.",
    ]
    for name, command in commands():
        lines += ["", f"## {name}", "", *_help(command.help or "")]
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [
            p for p in command.params if p not in arguments and not getattr(p, "hidden", False) and p.name != "help"
        ]
        lines += _parameter_table("argument", [(p.metavar or p.name.upper(), p) for p in arguments])
        lines += _parameter_table("option", [("` `".join((*p.opts, *p.secondary_opts)), p) for p in options])
    return "\n".join(lines) + "\n"


def _help(text: str) -> Iterator[str]:
    """Help as Markdown; what follows `Examples:` becomes code."""
    prose, _, examples = inspect.cleandoc(text).replace("\b\n", "").partition("Examples:\n")
    for paragraph in prose.strip().split("\n\n"):
        yield from (" ".join(paragraph.split()).replace("<", "&lt;"), "")
    if examples.strip():
        yield from ("```text", inspect.cleandoc(examples), "```", "")


def _parameter_table(title: str, parameters: list[tuple[str, Any]]) -> list[str]:
    if not parameters:
        return []
    rows = [f"| {title} | default | meaning |", "|---|---|---|"]
    for spelling, parameter in parameters:
        meaning = cell(getattr(parameter, "help", "") or "")
        rows.append(f"| {code(spelling)} | {_default(parameter)} | {meaning} |")
    return [*rows, ""]


def _default(parameter: Any) -> str:
    """The default as the help shows it; nothing for an option that is off."""
    default = parameter.default
    if isinstance(parameter.show_default, str):
        return code(parameter.show_default)
    if default is True:
        return "on"
    is_shown = isinstance(default, int | float | str) or (isinstance(default, list | tuple) and default)
    if default in ("", False) or not is_shown:
        return ""
    return code(", ".join(map(str, default)) if isinstance(default, list | tuple) else default)


# --- config keys


def type_cell(annotation: Any) -> str:
    """A type in words; values that are written as they are become code."""
    if get_origin(annotation) is Literal:
        return " or ".join(code(value) for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(type_cell(kind) for kind in get_args(annotation) if kind is not type(None))
    return type_name(annotation)


def default_cell(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    return "" if default is None else code(default_text(default))


def config_page() -> str:
    lines = [
        "# Config keys",
        "",
        "Made from the schemas in `src/ingot/config`. Set a key in a YAML file or on the command line by its dotted name: "
        "`ingot train mpt-125m optimizer.lr=3e-4`. A key that does not exist is an error that names the closest one. "
        "`ingot config show RECIPE` prints all of them with their values, `ingot config schema` is a JSON Schema for editors.",
        "",
        "*Execution* keys may change between two starts of a run; the others are part of the mathematics "
        "([what is math and what is execution](../explanation/math-and-execution.md)). A duration has a unit: `4800ba` "
        "batches, `1ep` epochs, `2.5Btok` tokens, `1Msp` samples, `0.1dur` of the run; where wall-clock time makes sense "
        "also `30min` or `23.5h`. *Elsewhere* lists what LLM Foundry, Megatron-LM and GPT-NeoX call a key, where the value "
        "is taken as it is; [all of their keys](peers/index.md).",
    ]
    names = native_names()
    sections: dict[str, list[tuple[str, FieldInfo, Any]]] = {}
    for key, field, schema in config_fields():
        sections.setdefault(key.rpartition(".")[0], []).append((key, field, schema))
    for section, rows in sections.items():
        doc = inspect.cleandoc(rows[0][2].__doc__ or "")
        lines += ["", f"## {section or 'The run'}", "", cell(doc), ""]
        lines += ["| key | type | default | meaning | elsewhere |", "|---|---|---|---|---|"]
        for key, field, _ in rows:
            peers = "; ".join(f"{peer} {', '.join(map(code, keys))}" for peer, keys in names.get(key, {}).items())
            meaning = cell(field.description or "")
            lines.append(
                f"| {code(key)} | {type_cell(field.annotation)} | {default_cell(field)} | {meaning} | {peers} |"
            )
    return "\n".join(lines) + "\n"


# --- recipes


def recipes_page() -> str:
    lines = [
        "# Recipes",
        "",
        "Made from `src/ingot/config/recipes`. `ingot recipes show NAME` prints one, to start your own file from; "
        "`ingot train NAME KEY=VALUE ...` runs one. The values are those that each project published. *Tokens* is what the "
        "published duration comes to.",
        "",
        "| recipe | parameters | layers | width | heads | sequence | batch | peak learning rate | duration | tokens |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in recipe_names():
        run = load_config(RunConfig, [name])
        lines.append(
            f"| {code(name)} | {run.model.parameters:,} | {run.model.n_layers} | {run.model.d_model} | {run.model.n_heads} "
            f"| {run.max_seq_len} | {run.global_train_batch_size} | {run.optimizer.lr:g} | {run.max_duration} "
            f"| {_tokens(run)} |"
        )
    return "\n".join(lines) + "\n"


def _tokens(run: RunConfig) -> str:
    units = {"ba": run.global_train_batch_size * run.max_seq_len, "sp": run.max_seq_len, "tok": 1}
    if run.max_duration.unit not in units:
        return ""
    return f"{run.max_duration.value * units[run.max_duration.unit] / 1e9:.4g} billion"


# --- the launch protocol


def protocol_page(title: str, begin: str, end: str | None) -> str:
    """A part of the protocol's docstring, whose tables are Markdown already."""
    text = inspect.cleandoc(protocol.__doc__ or "")
    start = re.search(rf"^{begin}", text, re.MULTILINE)
    stop = re.search(rf"^{end}", text[start.end():], re.MULTILINE) if start and end else None  # fmt: skip
    assert start, f"the docstring of ingot.launch.protocol has no section that begins with '{begin}'"
    part = text[start.start() : start.end() + stop.start() if stop else None]
    return f"# {title}\n\n{PREFACES[title]}\n\n" + part.replace("<", "&lt;") + "\n"


PREFACES: Mapping[str, str] = {
    "Exit codes": (
        "What a script should do with the exit code of an `ingot` command:\n\n"
        "| code | meaning | what to do |\n|---|---|---|\n"
        "| 0 | finished | |\n"
        "| 75 | stopped on request, with a checkpoint | run the same command again |\n"
        "| 1 | a fault: disk, network, a lost process | run the same command again |\n"
        "| 2 | a user error: config, data, another run in this folder, a NaN or infinite loss | fix it first |\n"
        "| 3 | gave up after retrying: the same failure twice, or three attempts without a new checkpoint "
        "| read `failures.jsonl` |\n"
        "| 130 | interrupted by a second Ctrl-C | run the same command again |\n\n"
        "The same codes inside a launch, from the docstring of `ingot.launch.protocol`:"
    ),
    "Files of a launch": "From the docstring of `ingot.launch.protocol`, which defines them. "
    "[Files of a run and of a dataset](file-formats.md) has the rest.",
    "Environment variables of a launch": "From the docstring of `ingot.launch.protocol`, which defines them. "
    "[Environment variables](environment.md) lists those that you may set yourself.",
}
