"""Files and `key=value` overrides to one validated config.

OmegaConf reads, merges and interpolates; pydantic validates. What neither gives is *where* a wrong value came from:
the line of each key is kept from the YAML parser, so that an error names file, line, key, value and the closest key.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from ingot.config.recipes import find_recipe
from ingot.config.schema import closest_key
from ingot.errors import ConfigError

SchemaT = TypeVar("SchemaT", bound=BaseModel)


@dataclass
class Origins:
    """Which file and line, or which override, last set each dotted key."""

    places: dict[str, str] = field(default_factory=dict)

    def record(self, keys: dict[str, str]) -> None:
        self.places.update(keys)

    def of(self, key: str) -> str:
        """The place of a key, or of the nearest section around it."""
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, "")


def load_config(schema: type[SchemaT], arguments: Sequence[str], base: dict[str, Any] | None = None) -> SchemaT:
    """Build a config from what stands on the command line: recipes, files and `key=value` overrides, in order.

    `base` is what they are merged onto, such as the config of an earlier run.
    """
    overrides = [a for a in arguments if "=" in a and not Path(a).is_file()]
    sources = [a for a in arguments if a not in overrides]
    origins = Origins()
    merged = OmegaConf.create(base or {})
    default_name = None
    for source in sources:
        path = find_recipe(source)
        default_name = default_name or path.stem
        merged = _merge(merged, _expand(_read_yaml(path, origins), schema), str(path))
    for override in overrides:
        merged = _merge(merged, _expand(_read_override(override, origins), schema), f"command line: {override}")
    values = _resolve(merged, origins)
    if "name" in schema.model_fields and default_name is not None:
        values.setdefault("name", default_name)
    return validate(schema, values, origins)


def validate(schema: type[SchemaT], values: dict[str, Any], origins: Origins | None = None) -> SchemaT:
    """Check plain values against a schema; problems become one `ConfigError` of one sentence each."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [_describe(e, schema, origins or Origins()) for e in error.errors()]
        shown = list(dict.fromkeys(problems))[:8]
        raise ConfigError("\n".join(shown)) from None


def to_yaml(config: BaseModel, header: str = "") -> str:
    """A config as YAML text that `load_config` reads back to the same config."""
    values = json.loads(config.model_dump_json())
    return header + yaml.safe_dump(values, sort_keys=False)


def _read_yaml(path: Path, origins: Origins) -> DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text)
        content = OmegaConf.create(text) if node is not None else OmegaConf.create({})
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (OmegaConfBaseException, UnicodeDecodeError, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, DictConfig) or (node is not None and not isinstance(node, yaml.MappingNode)):
        raise ConfigError(f"{path}: a config file must be a mapping of keys to values")
    if node is not None:
        origins.record(_key_lines(node, path))
    return content


def _key_lines(node: yaml.Node, path: Path, prefix: str = "") -> dict[str, str]:
    lines: dict[str, str] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{prefix}{key.value}"
            lines[dotted] = f"{path}:{key.start_mark.line + 1}"
            lines |= _key_lines(value, path, f"{dotted}.")
    return lines


def _read_override(override: str, origins: Origins) -> DictConfig:
    key, _, _ = override.partition("=")
    if not key or any(not part for part in key.split(".")):
        raise ConfigError(f"command line: '{override}' is not of the form key=value")
    try:
        content = OmegaConf.from_dotlist([override])
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"command line: cannot read '{override}': {str(error).splitlines()[0]}") from None
    origins.record({key: "command line"})
    return content


def _expand(layer: DictConfig, schema: type[BaseModel]) -> DictConfig:
    """Let the schema write out its shorthands (such as `data=FOLDER`), so that later layers can merge into them."""
    expand = getattr(schema, "expand_shorthands", None)
    if expand is None:
        return layer
    return OmegaConf.create(expand(OmegaConf.to_container(layer, resolve=False)))


def _merge(base: DictConfig, layer: DictConfig, place: str) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, layer)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{place}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _resolve(merged: DictConfig, origins: Origins) -> dict[str, Any]:
    raw = OmegaConf.to_container(merged, resolve=False)
    for key, value in _leaves(raw):
        # `${name:...}` runs code of a resolver, such as reading the environment; a config is data only.
        if isinstance(value, str) and "${" in value and ":" in value.split("${", 1)[1].split("}", 1)[0]:
            raise ConfigError(f"{origins.of(key)}: {key} = {value!r} calls a resolver; only ${{other.key}} is allowed")
    try:
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        place = f"{origins.of(key)}: " if origins.of(key) else ""
        raise ConfigError(f"{place}{key}: {str(error).splitlines()[0]}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _leaves(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in _leaves(v, f"{prefix}.{k}" if prefix else str(k))]
    if isinstance(value, list):
        return [leaf for v in value for leaf in _leaves(v, prefix)]
    return [(prefix, value)]


def _describe(error: Any, schema: type[BaseModel], origins: Origins) -> str:
    """One sentence for one validation error: place, key, value, what was expected."""
    # pydantic adds the names of union members to the location; only what the user wrote is shown
    key = ".".join(str(part) for part in error["loc"] if isinstance(part, int) or str(part).isidentifier())
    context = error.get("ctx", {})
    if "key" in context:  # a rule over several keys names the one to blame
        key = f"{key}.{context['key']}" if key else context["key"]
    place = origins.of(key)
    where = f"{place}: " if place else ""
    if error["type"] == "extra_forbidden":
        close = closest_key(key, schema)
        hint = f"did you mean {close}?" if close else "see `ingot config schema` for all keys."
        return f"{where}unknown key {key}; {hint}"
    if error["type"] == "missing":
        return f"{where}{key} is missing; set it in the file or with {key}=..."
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "impossible":
        return f"{where}{key}: {message}"
    return f"{where}{key} = {error['input']!r}: {message[0].lower() + message[1:]}"
