"""Where a run's command may be written: a script, whatever its suffix, a Kubernetes manifest, or a command line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ingot.errors import ConfigError
from ingot.migrate.shell.evaluator import Evaluator
from ingot.migrate.shell.processes import NAMED, read_text
from ingot.migrate.shell.script import (
    LAUNCHERS,
    PROGRAM,
    ScriptArguments,
    arguments_of_run,
    read_script,
    without_effect,
)  # fmt: skip
from ingot.migrate.shell.syntax import Simple
from ingot.migrate.shell.values import Array, Fragment, State

SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".sb", ".j2")
CONFIGS = (".yaml", ".yml", ".json")
SCRIPT = re.compile(r"\A#!.*\b(?:ba|da|z|k)?sh\b|^#(?:SBATCH|PBS|BSUB)\b|^[^#\n]*pretrain\w*\.py", re.MULTILINE)
LISTED = re.compile(r"^[\s-]*[\"']?(?:command|args)[\"']?:\s*(?:\[|$)", re.MULTILINE)


@dataclass
class ScriptOptions:
    """`--set NAME=value` and `--pick LINE`, which travel as the arguments `set.NAME=value` and `pick=LINE`."""

    supplied: dict[str, str] = field(default_factory=dict)
    pick: int | None = None


def option_arguments(supplied: Sequence[str] | None, pick: int | None) -> list[str]:
    """The options of a command as arguments, which reach the ranks like all others."""
    for text in supplied or ():
        if not re.match(r"(?:[A-Za-z_]\w*|\d+|@)=", text):
            raise ConfigError(f"--set {text}: write --set NAME=value, with the name of a variable of the script")
    return [*(f"set.{text}" for text in supplied or ()), *([f"pick={pick}"] if pick is not None else [])]


def take_options(arguments: Sequence[str]) -> tuple[ScriptOptions, list[str]]:
    """These arguments again as options, and the other arguments."""
    options, rest = ScriptOptions(), list[str]()
    for argument in arguments:
        key, mark, value = argument.partition("=")
        if key.startswith("set.") and mark:
            options.supplied[key[4:]] = value
        elif key == "pick" and value.isdigit():
            options.pick = int(value)
        else:
            rest.append(argument)
    return options, rest


def is_script(path: Path, dialect: str | None = None) -> bool:
    """Whether a file is a shell script: by its suffix, or by what it says."""
    if path.suffix in CONFIGS or path.suffix in SUFFIXES:
        return path.suffix in SUFFIXES
    try:
        return dialect == "megatron" or bool(SCRIPT.search(path.read_text(encoding="utf-8-sig")))
    except (UnicodeDecodeError, OSError):
        return False


def takes_variable(path: Path, name: str) -> bool:
    """Whether a script names this variable."""
    return bool(re.search(rf"\$\{{?{re.escape(name)}\b|\b{re.escape(name)}\+?=", read_text(path)))


def read_source(path: Path, options: ScriptOptions, dialect: str | None = None) -> ScriptArguments | None:
    """The arguments of the run in a script or a manifest; None for a config file."""
    if is_script(path, dialect):
        return read_script(path, options.supplied, options.pick)
    if path.suffix in (".yaml", ".yml"):
        text = read_text(path)
        if NAMED.search(text) and LISTED.search(text):
            return _manifest(path, text, options)
    return None


def command_line(words: Sequence[str], options: ScriptOptions) -> ScriptArguments | None:
    """The arguments of `torchrun ... pretrain_gpt.py --num-layers ...`, given in place of a file."""
    start = next((i for i, word in enumerate(words) if PROGRAM.search(word)), None)
    if start is None or (start and not any(LAUNCHERS.search(word) for word in words[:start])):
        return None
    return _of_lists([("command line:0", list(words), {})], Path("command line"), options)


def _manifest(path: Path, text: str, options: ScriptOptions) -> ScriptArguments | None:
    """The `command` and `args` of the containers that train, such as a PyTorchJob's."""
    try:
        documents = list(yaml.compose_all(text)) if "{{" not in text else []
    except yaml.YAMLError:
        documents = []
    if not documents:
        raise ConfigError(f"{path}: this template cannot be read as YAML; render it first (helm template), or give "
                          "what follows pretrain_gpt.py after --")  # fmt: skip
    found: list[tuple[str, list[str], dict[str, str | None]]] = []
    for document in documents:
        _find_commands(document, path, found)
    return _of_lists(found, path, options) if found else None


def _find_commands(
    node: yaml.Node | None, path: Path, found: list[tuple[str, list[str], dict[str, str | None]]]
) -> None:
    if isinstance(node, yaml.MappingNode):
        fields: dict[Any, yaml.Node] = {key.value: value for key, value in node.value}
        lists = [value for name in ("command", "args") if isinstance(value := fields.get(name), yaml.SequenceNode)]
        words = [item.value for value in lists for item in value.value if isinstance(item, yaml.ScalarNode)]
        if any(NAMED.search(word) for word in words):
            found.append((f"{path}:{lists[0].start_mark.line + 1}", words, _environment(fields.get("env"))))
    for child in node.value if isinstance(node, yaml.CollectionNode) else []:
        for part in child if isinstance(child, tuple) else [child]:
            _find_commands(part, path, found)


def _environment(node: yaml.Node | None) -> dict[str, str | None]:
    """The variables of a container; None for those from elsewhere."""
    found: dict[str, str | None] = {}
    for item in node.value if isinstance(node, yaml.SequenceNode) else []:
        pair = {key.value: value for key, value in item.value} if isinstance(item, yaml.MappingNode) else {}
        if "name" in pair:
            value = pair.get("value")
            found[pair["name"].value] = value.value if isinstance(value, yaml.ScalarNode) else None
    return found


def _of_lists(
    found: list[tuple[str, list[str], dict[str, str | None]]], path: Path, options: ScriptOptions
) -> ScriptArguments:
    evaluator = Evaluator(path, options.supplied, without_effect)
    for at, words, environment in found:
        state = State(exported=set(environment))
        for name, value in environment.items():
            if value is None or "$(" in value:
                state.fixed[name] = "comes from elsewhere in the cluster"
            else:
                state.values[name] = (Fragment(value, at),)
        state.values["@"] = Array(())
        pieces = [(Fragment(word, at, True),) for word in words]
        evaluator.launch(words[0], list(pieces), Simple(at), state)
    return arguments_of_run(evaluator, path, options.pick)
