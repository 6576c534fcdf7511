"""Every config key with its type, default and meaning: `ingot config keys` and the reference page."""

import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ingot.config.base import closest_key, known_keys
from ingot.config.run import RunConfig
from ingot.errors import ConfigError

WIDEST = 100  # columns of wrapped text


@dataclass(frozen=True)
class ConfigKey:
    """A key as `ingot config keys --json` prints it."""

    key: str
    type: str
    default: Any
    required: bool
    meaning: str

    @staticmethod
    def of(key: str, field: FieldInfo) -> "ConfigKey":
        required, default = field.is_required(), field.get_default(call_default_factory=True)
        meaning = " ".join((field.description or "").split())
        return ConfigKey(
            key, type_name(field.annotation), None if default is PydanticUndefined else default, required, meaning
        )

    def lines(self, width: int) -> list[str]:
        """The key with its default, and below it type and meaning."""
        default = "..." if self.required else default_text(self.default)
        about = f"{self.type}, required. {self.meaning}" if self.required else f"{self.type}. {self.meaning}"
        return [f"{self.key}={default}", *textwrap.wrap(about, width - 4, initial_indent=" " * 4,
                                                        subsequent_indent=" " * 4)]  # fmt: skip


def find_keys(section: str = "") -> list[ConfigKey]:
    """All keys, those of a section, or one key."""
    keys = [ConfigKey.of(key, field) for key, field, _ in config_fields()]
    found = [key for key in keys if not section or key.key == section or key.key.startswith(f"{section}.")]
    if not found:
        close = closest_key(section, RunConfig)
        sections = sorted({key for key in known_keys(RunConfig) if any(k.key.startswith(f"{key}.") for k in keys)})
        hint = f"did you mean {close}?" if close else f"the sections are {', '.join(sections)}"
        raise ConfigError(f"there is no config key or section {section}; {hint}")
    return found


def print_keys(section: str, as_json: bool) -> None:
    found = find_keys(section)
    if as_json:
        print(json.dumps([vars(key) for key in found], indent=1, default=str))
        return
    width = max(40, min(shutil.get_terminal_size().columns, WIDEST))
    for key in found:
        print("\n".join(key.lines(width)))


def config_fields(schema: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Every dotted key that takes a value, with its field and the section that it is in."""
    for name, field in schema.model_fields.items():
        key = f"{prefix}{name}"
        sections = [kind for kind in _types(field.annotation) if inspect.isclass(kind) and issubclass(kind, BaseModel)]
        if not sections:
            yield key, field, schema
        for section in sections:
            yield from config_fields(section, f"{key}.NAME." if get_origin(field.annotation) is dict else f"{key}.")


def type_name(annotation: Any) -> str:
    """A type in words, such as `integer or text`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin is Annotated:
        return type_name(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(type_name(kind) for kind in inner if kind is not type(None))
    if origin is tuple:
        return f"{len(inner)} {type_name(inner[0])}s"
    plain = {int: "integer", float: "number", str: "text", bool: "true or false", list: "list"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())


def default_text(default: Any) -> str:
    """A default as it is written in YAML and in overrides."""
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    return str(list(default) if isinstance(default, tuple) else default)


def _types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of."""
    if get_origin(annotation) in (Union, UnionType, dict, Annotated):
        for inner in get_args(annotation):
            yield from _types(inner)
    else:
        yield annotation
