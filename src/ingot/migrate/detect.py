"""The config of a command line, whoever's vocabulary it is in: native files, or those of another stack, which are
recognized by their keys and translated. Overrides are in the vocabulary of the files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ingot.config.base import known_keys
from ingot.config.dotted_keys import flatten
from ingot.config.error_messages import Origins
from ingot.config.files import ConfigFile, check_interpolation, read_config_file
from ingot.config.load import build_config, is_override, merge, read_override, resolve, validate
from ingot.config.names import plain_name_from
from ingot.config.recipes import find_recipe
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.migrate.foundry import FOUNDRY
from ingot.migrate.megatron import MEGATRON, read_words
from ingot.migrate.neox import NEOX
from ingot.migrate.script import read_script
from ingot.migrate.translation import Dialect, Translation

DIALECTS = {dialect.name: dialect for dialect in (FOUNDRY, NEOX, MEGATRON)}
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
MICROBATCH = "device_train_microbatch_size"  # native in every vocabulary: out-of-memory errors name it


def load_run_config(arguments: Sequence[str], dialect: str | None = None) -> RunConfig:
    """The config of a run from recipes, files and `key=value` overrides, in order.

    `dialect` names the stack whose vocabulary the files have; by default their keys tell.
    """
    command = _read_command(arguments, dialect)
    if command.dialect is None:
        return build_config(RunConfig, command.files, command.overrides)
    translation = _translate(command, command.dialect)
    translation.check()
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


def _read_command(arguments: Sequence[str], dialect: str | None) -> Command:
    if dialect is not None and dialect not in DIALECTS:
        raise ConfigError(f"there is no dialect {dialect}; there are {', '.join(DIALECTS)}")
    microbatch = [a for a in arguments if a.startswith(f"{MICROBATCH}=")]  # may come after Megatron's arguments
    arguments = [a for a in arguments if a not in microbatch]
    start = next((i for i, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    words = list(arguments[start:])
    overrides = [a for a in arguments[:start] if is_override(a)]
    files = [_read_file(find_recipe(a)) for a in arguments[:start] if a not in overrides]
    name = dialect or ("megatron" if words else _detect(files))
    return Command(files, overrides + microbatch, words, DIALECTS.get(name))


def _read_file(path: Path) -> ConfigFile:
    if path.suffix in SCRIPTS:
        given, lines = read_words(read_script(path))
        check_interpolation(given, Origins(lines))
        return ConfigFile(path, OmegaConf.create(given), lines)
    file = read_config_file(path)
    if isinstance(arguments := file.content.pop("MODEL_ARGS", None), DictConfig):  # a test case of Megatron's own
        lines = {key.removeprefix("MODEL_ARGS."): line for key, line in file.lines.items()}
        file = ConfigFile(path, merge(file.content, arguments, str(path)), lines)
    return file


def _detect(files: list[ConfigFile]) -> str:
    """The vocabulary with the most known keys in each file; native where it does not matter."""
    native = frozenset(known_keys(RunConfig))
    possible: dict[str, list[str]] = {}
    for file in files:
        content: Any = OmegaConf.to_container(file.content)
        keys = [key.removeprefix("--").replace("-", "_") for key in flatten(content)]
        scores = {"native": sum(key in native or key.split(".")[0] == "data" for key in keys)}
        if scores["native"] < len(keys):  # else the tables of the others need not be read
            scores |= {name: sum(dialect.knows(key) for key in keys) for name, dialect in DIALECTS.items()}
        if file.path.suffix in SCRIPTS:
            scores = {"megatron": 1}
        if keys and not any(scores.values()):
            raise ConfigError(
                f"{file.path}: none of its keys ({', '.join(keys[:4])}) is known; it does not describe a run of ingot, "
                f"{', '.join(d.title for d in DIALECTS.values())}"
            )
        best = max(scores.values())
        possible[str(file.path)] = [name for name, score in scores.items() if score == best]
    common = [name for name in ("native", *DIALECTS) if all(name in names for names in possible.values())]
    if not common:
        named = "; ".join(f"{path} is {' or '.join(names)}" for path, names in possible.items())
        raise ConfigError(f"the files are of different vocabularies: {named}; give files of one")
    return common[0]


def _translate(command: Command, dialect: Dialect) -> Translation:
    merged, origins = _merge_files(command, dialect)
    microbatch = {}
    for override in command.overrides:
        key, _, value = override.partition("=")
        if key == MICROBATCH:
            microbatch[key] = read_override(override, origins)[key]
            continue
        key = key.lstrip("-").replace("-", "_") if dialect.name != "foundry" else key
        if key in ("data_local", "data_remote") and f"${{{key}}}" not in OmegaConf.to_yaml(merged):
            raise ConfigError(f"command line: no key of the files refers to ${{{key}}}; set train_loader.dataset.local")
        merged = merge(merged, read_override(f"{key}={value}", origins), f"command line: {override}")
    given = flatten(resolve(merged, origins))
    others = tuple(other for other in DIALECTS.values() if other is not dialect)
    translation = Translation(dialect, given, {key: origins.of(key) for key in given}, others).run()
    for key, value in microbatch.items():
        translation.put(key, value)
    return translation


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
