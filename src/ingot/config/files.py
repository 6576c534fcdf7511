"""Reading one config file: OmegaConf for the values, the YAML parser for the line of each key.

A config is data only: `${other.key}` is resolved, and every other `${...}` is refused, because OmegaConf's resolvers
run code, such as reading the environment.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ingot.config.dotted_keys import all_keys, all_strings
from ingot.config.error_messages import Origins
from ingot.errors import ConfigError

PLAIN = re.compile(r"(?<!\\)\$\{[^${}:\\]*\}")  # a colon makes a resolver of it
SLASHES = "// does not start a comment in JSON or YAML; use #"


@dataclass
class ConfigFile:
    """One file: its keys and values, and the FILE:LINE of each key."""

    path: Path
    content: DictConfig
    lines: dict[str, str]


def read_config_file(path: Path) -> ConfigFile:
    """Read a YAML or JSON file of keys and values."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            text = text.expandtabs(1)  # JSON may be indented with tabs, YAML may not
        node = yaml.compose(text) or yaml.MappingNode("", [])  # an empty file
        content = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_error(path, text, error)) from None
    except (OmegaConfBaseException, ValueError, OSError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, DictConfig) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: a config file must be a mapping of keys to values")
    if path.suffix == ".json":
        _refuse_slashes(node, path)
    lines = _key_lines(node, path)
    check_interpolation(content, Origins(lines))
    return ConfigFile(path, content, lines)


def check_interpolation(content: Any, origins: Origins, allowed: re.Pattern[str] | None = PLAIN) -> None:
    """Refuse all `${...}` but plain `${other.key}`, before OmegaConf looks at a value, which may already resolve it."""
    if isinstance(content, DictConfig):
        content = OmegaConf.to_container(content, resolve=False)
    for key in all_keys(content):
        check_key(key, origins.of(key))
    for key, value in all_strings(content):
        if "${" in (allowed.sub("", value) if allowed else value):
            raise ConfigError(
                f"{origins.of(key)}: {key} = {value!r} calls a resolver, or nests or escapes ${{...}}; "
                "only ${other.key} is allowed"
            )


def check_key(key: str, origin: str) -> None:
    if "${" in key:
        raise ConfigError(f"{origin}: a key may not contain ${{...}}: {key!r}; write the key out")


def _syntax_error(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    line = error.problem_mark.line + 1 if error.problem_mark else 0
    if path.suffix == ".json":
        unquoted = (re.sub(r'"(?:\\.|[^"\\])*"', "", text_of) for text_of in text.splitlines()[:line])
        if comment := next((number for number, text_of in enumerate(unquoted, 1) if "//" in text_of), 0):
            return f"{path}:{comment}: {SLASHES}"
        try:
            json.loads(text)
        except json.JSONDecodeError as strict:  # the better message, unless it is about what YAML allows
            if strict.lineno == line:
                return f"{path}:{line}:{strict.colno}: not valid JSON: {strict.msg}"
    kind = "JSON" if path.suffix == ".json" else "YAML"
    return f"{path}{f':{line}' if line else ''}: not valid {kind}: {error.problem}"


def _refuse_slashes(node: yaml.Node, path: Path) -> None:
    """YAML reads `// text` as a part of the key or the value next to it."""
    if isinstance(node, yaml.ScalarNode) and node.style is None and "//" in node.value:
        offset = node.value.partition("//")[0].count("\n")
        raise ConfigError(f"{path}:{node.start_mark.line + 1 + offset}: {SLASHES}")
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    for part in parts if isinstance(node, yaml.CollectionNode) else []:
        _refuse_slashes(part, path)


def _key_lines(node: yaml.Node, path: Path, prefix: str = "") -> dict[str, str]:
    lines: dict[str, str] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            lines[dotted] = f"{path}:{key.start_mark.line + 1}"
            lines |= _key_lines(value, path, f"{dotted}.")
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            lines[f"{prefix}{number}"] = f"{path}:{value.start_mark.line + 1}"
            lines |= _key_lines(value, path, f"{prefix}{number}.")
    return lines
