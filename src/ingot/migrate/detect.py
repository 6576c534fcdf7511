"""The config of a command line, whoever's vocabulary it is in: native files, or those of another stack, which are
recognized by their keys and translated. Overrides are in the vocabulary of the files.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ingot.config.base import known_keys
from ingot.config.dotted_keys import all_keys, all_strings, ancestors, flatten
from ingot.config.error_messages import Origins, first_problems
from ingot.config.files import ConfigFile, check_interpolation, read_config_file
from ingot.config.load import build_config, is_override, merge, read_override, refuse_secret, resolve, validate
from ingot.config.recipes import find_recipe
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.migrate.containers import unwrap
from ingot.migrate.foundry import FOUNDRY, native_override
from ingot.migrate.megatron import MEGATRON, read_words
from ingot.migrate.neox import NEOX
from ingot.migrate.shell.script import ScriptArguments
from ingot.migrate.shell.source import (
    SUFFIXES,
    command_line,
    is_script,
    read_source,
    take_options,
    takes_variable,
)  # fmt: skip
from ingot.migrate.translation import Dialect, Translation
from ingot.storage.names import plain_name_from

DIALECTS = {dialect.name: dialect for dialect in (FOUNDRY, NEOX, MEGATRON)}
MICROBATCH = "device_train_microbatch_size"  # native in every vocabulary: out-of-memory errors name it
ANYWHERE = (MICROBATCH, "peer_version", "conf_dir")  # may also come after Megatron's arguments


def load_run_config(arguments: Sequence[str], dialect: str | None = None) -> RunConfig:
    """The config of a run from recipes, files and `key=value` overrides, in order.

    `dialect` names the stack whose vocabulary the files have; by default their keys tell.
    """
    command = _read_command(arguments, dialect)
    if command.dialect is None:
        return build_config(RunConfig, command.files, command.overrides)
    translation = _translate(command, command.dialect)
    translation.check()
    if os.environ.get("RANK", "0") == "0":
        print("".join(f"warning: {warning}\n" for warning in translation.warnings), end="", file=sys.stderr)
    if command.files:
        translation.values.setdefault("name", plain_name_from(command.files[0].path.stem))
    return validate(RunConfig, translation.values, Origins(translation.origins))


def translate(arguments: Sequence[str], dialect: str | None = None) -> Translation:
    """A run description in another stack's vocabulary as ours, with what became of each of its keys."""
    command = _read_command(arguments, dialect)
    if command.dialect is None:
        raise ConfigError("this is a native config already; `ingot config show` prints it with every default")
    return _translate(command, command.dialect)


@dataclass
class Command:
    """A command line, sorted: files, overrides, Megatron's own arguments, and the dialect of all (None: native)."""

    files: list[ConfigFile]
    overrides: list[str]
    words: list[str]
    dialect: Dialect | None
    peer_version: str | None = None
    unsettled: dict[str, str] = field(default_factory=dict)
    """Keys whose values a script takes from elsewhere, and from where."""
    warnings: list[str] = field(default_factory=list)


def _read_command(arguments: Sequence[str], dialect: str | None) -> Command:
    if dialect is not None and dialect not in DIALECTS:
        raise ConfigError(f"there is no dialect {dialect}; there are {', '.join(DIALECTS)}")
    scripts, arguments = take_options(arguments)
    options = {key: value for key, _, value in (a.partition("=") for a in arguments) if key in ANYWHERE}
    arguments = [a for a in arguments if a.partition("=")[0] not in ANYWHERE]
    command, names = Command([], [], [], None, options.get("peer_version")), list[str]()
    if (found := command_line(arguments, scripts)) is not None:
        command.dialect = MEGATRON
        _add_script(command, Path("command line"), found)
    else:
        start = next((i for i, word in enumerate(arguments) if word.startswith("--")), len(arguments))
        command.words = list(arguments[start:])
        command.overrides = [a for a in arguments[:start] if is_override(a)]
        for override in command.overrides:
            refuse_secret(override)
        names = [a for a in arguments[:start] if a not in command.overrides]
    folder = options.get("conf_dir")
    paths = [_in_folder(name, folder) if folder else find_recipe(name) for name in names]
    for override in _variables(command.overrides, [path for path in paths if is_script(path, dialect)]):
        command.overrides.remove(override)
        scripts.supplied.setdefault(*override.split("=", 1))
    for path in paths:
        if (found := read_source(path, scripts, dialect)) is None:
            command.files.append(unwrap(read_config_file(path)))
        else:
            dialect = dialect or MEGATRON.name
            _add_script(command, path, found)
    if (scripts.supplied or scripts.pick is not None) and dialect != MEGATRON.name and not command.dialect:
        raise ConfigError("--set and --pick apply to a script, and none is given")
    if command.dialect is None:
        command.dialect = DIALECTS.get(dialect or (MEGATRON.name if command.words else _detect(command.files)))
    if command.dialect is None:
        command.overrides = native_overrides(command.overrides)
        if command.peer_version is not None:
            raise ConfigError(
                f"--peer-version {command.peer_version} applies to files of another stack, and these are native"
            )
    command.overrides += [f"{MICROBATCH}={options[MICROBATCH]}"] if MICROBATCH in options else []
    return command


def _variables(overrides: list[str], scripts: list[Path]) -> list[str]:
    """The overrides whose names are not keys, but variables of a script."""
    keys = {override: override.partition("=")[0] for override in overrides}
    others = {o: key for o, key in keys.items() if not MEGATRON.knows(key.lstrip("-").replace("-", "_"))}
    return [override for override, name in others.items() if any(takes_variable(path, name) for path in scripts)]


def _add_script(command: Command, path: Path, source: ScriptArguments) -> None:
    given, lines = read_words(source.words)
    check_interpolation(given, Origins(lines))
    command.files.append(ConfigFile(path, OmegaConf.create(given), lines))
    command.unsettled |= source.unsettled
    command.warnings += source.defaults


def native_overrides(overrides: list[str]) -> list[str]:
    """Overrides of a native recipe, some of them maybe in LLM Foundry's keys, as in the guides' `-y`. `variables` come
    first, since others refine them."""
    native = frozenset(known_keys(RunConfig))
    sections = {section for key in native for section in ancestors(key)}
    found: list[str] = []
    for override in sorted(
        overrides, key=lambda text: not text.startswith(("variables.", "data_local", "data_remote"))
    ):
        key = override.partition("=")[0]
        here = key.startswith(("data.", "eval.", "profiler.")) or key in native or key in sections
        foreign = not here and FOUNDRY.knows(key)
        found += native_override(override) if foreign else [override]
    return found


def _in_folder(name: str, folder: str) -> Path:
    """A file in the folder of `-d`, where NeoX's launcher lets the suffix be left out."""
    path = Path(folder) / name
    return path if path.suffix in (".yml", ".yaml", ".json", *SUFFIXES) else path.with_name(f"{path.name}.yml")


def _detect(files: list[ConfigFile]) -> str:
    """The vocabulary with the most known keys in each file; native where it does not matter."""
    native = frozenset(known_keys(RunConfig))
    possible: dict[str, list[str]] = {}
    for file in files:
        content: Any = OmegaConf.to_container(file.content)
        keys = [key.removeprefix("--").replace("-", "_") for key in flatten(content)]
        scores = {"native": sum(key in native or key.split(".")[0] in ("data", "eval") for key in keys)}
        if scores["native"] < len(keys):  # else the tables of the others need not be read
            scores |= {name: sum(dialect.knows(key) for key in keys) for name, dialect in DIALECTS.items()}
        best = max(scores.values())
        if keys and (not best or (scores.get("native") == best and best < len(keys) / 2)):
            unknown = [key for key in keys if key not in native][:4]
            raise ConfigError(
                f"{file.path}: {'few' if best else 'none'} of its keys (not {', '.join(unknown)}) are known; it "
                f"does not describe a run of ingot, {', '.join(d.title for d in DIALECTS.values())}"
            )
        possible[str(file.path)] = [name for name, score in scores.items() if score == best]
    common = [name for name in ("native", *DIALECTS) if all(name in names for names in possible.values())]
    if not common:
        named = "; ".join(f"{path} is {' or '.join(names)}" for path, names in possible.items())
        raise ConfigError(f"the files are of different vocabularies: {named}; give files of one")
    return common[0]


def _translate(command: Command, dialect: Dialect) -> Translation:
    merged, origins = _merge_files(command, dialect)
    text, microbatch, variables = OmegaConf.to_yaml(merged), {}, set[str]()
    for override in command.overrides:
        key, _, value = override.partition("=")
        if key == MICROBATCH:
            microbatch[key] = read_override(override, origins)[key]
            continue
        name = key if dialect.name == "foundry" else key.lstrip("-").replace("-", "_")
        if not dialect.knows(name) and f"${{{key}}}" in text:
            name = key
            variables.add(key)
        elif key.startswith("variables.") or key in ("data_local", "data_remote"):
            _check_variable(key, text)
        merged = merge(merged, read_override(f"{name}={value}", origins), f"command line: {override}")
    _check_open(merged, origins, dialect)
    given = {key: value for key, value in flatten(resolve(merged, origins)).items() if key not in variables}
    others = tuple(other for other in DIALECTS.values() if other is not dialect)
    lines = {key: origins.of(key) for key in given}
    translation = Translation(
        dialect, given, lines, others, command.peer_version, [*command.warnings], unsettled=command.unsettled
    ).run()
    for key, value in microbatch.items():
        translation.put(key, value)
    return translation


def _check_variable(key: str, text: str) -> None:
    """A variable that no key refers to changes nothing, which is not what its user wants."""
    if f"${{{key}}}" not in text:
        other = f"variables.{key}"
        instead = other if f"${{{other}}}" in text else "train_loader.dataset.local and eval_loader.dataset.local"
        raise ConfigError(f"command line: no key of the files refers to ${{{key}}}; set {instead}")


def _check_open(merged: DictConfig, origins: Origins, dialect: Dialect) -> None:
    """Refuse `${NAME}` that nothing sets, all at once; where the key has no effect, keep it as text."""
    raw: Any = OmegaConf.to_container(merged, resolve=False)
    known, problems = set(all_keys(raw)), list[str]()
    for key, value in all_strings(raw):
        names = [n for n in re.findall(r"\$\{([^}]*)\}", value) if n not in known and not n.startswith(".")]
        if names and any(above in dialect.without_effect for above in (key, *ancestors(key))):
            OmegaConf.update(merged, key, value.replace("${", "$"))
        elif names:
            give = " ".join(f"{name}=..." for name in names)
            why = f"the file does not set {' or '.join(names)}; give {give} or {key}=... after the file"
            problems.append(f"{origins.of(key)}: {key} = {value}: {why}")
    if problems:
        raise ConfigError(first_problems(problems))


def _merge_files(command: Command, dialect: Dialect) -> tuple[DictConfig, Origins]:
    """The files and Megatron's own arguments as one mapping."""
    merged, origins = OmegaConf.create({}), Origins()
    for file in command.files:
        content, lines = file.content, file.lines
        if dialect.name != "foundry":
            content, lines = _underscored(file)
        if dialect.name == "neox":
            for key in (str(key) for key in content if key in merged):
                raise ConfigError(f"{lines[key]}: {key} is already set at {origins[key]}; NeoX files may not overlap")
        merged = merge(merged, content, str(file.path))
        origins |= lines
    if command.words:
        given, lines = read_words([(word, "command line") for word in command.words])
        check_interpolation(given, Origins(lines))
        merged = merge(merged, OmegaConf.create(given), "command line")
        origins |= lines
    return merged, origins


def _underscored(file: ConfigFile) -> tuple[DictConfig, dict[str, str]]:
    """NeoX and Megatron take hyphens for underscores."""
    lines: dict[str, str] = {}
    content: dict[str, Any] = {}
    raw: Any = OmegaConf.to_container(file.content, resolve=False)
    for key, value in raw.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in content:
            raise ConfigError(f"{file.lines[str(key)]}: {name} is already set at {lines[name]}")
        content[name] = value
        lines |= {k.replace(str(key), name, 1): v for k, v in file.lines.items() if k.split(".")[0] == key}
    return OmegaConf.create(content), lines
