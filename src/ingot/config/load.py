"""Files and `key=value` overrides to one validated config.

OmegaConf merges and interpolates; pydantic validates. Files of other stacks are translated in `ingot.migrate`.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from ingot.config.error_messages import Origins, error_messages, first_problems
from ingot.config.files import ConfigFile, check_interpolation, check_key, read_config_file
from ingot.config.recipes import find_recipe
from ingot.config.secrets import why_secret
from ingot.errors import ConfigError
from ingot.storage.names import plain_name_from

SchemaT = TypeVar("SchemaT", bound=BaseModel)


def load_config(schema: type[SchemaT], arguments: Sequence[str], base: dict[str, Any] | None = None) -> SchemaT:
    """Build a config from native recipes, files and `key=value` overrides, in order.

    `base` is what they are merged onto, such as the config of an earlier run.
    """
    overrides = [argument for argument in arguments if is_override(argument)]
    files = [read_config_file(find_recipe(argument)) for argument in arguments if argument not in overrides]
    return build_config(schema, files, overrides, base)


def is_override(argument: str) -> bool:
    return "=" in argument and not os.path.isfile(argument)


def build_config(
    schema: type[SchemaT], files: Sequence[ConfigFile], overrides: Iterable[str], base: dict[str, Any] | None = None
) -> SchemaT:
    """Merge files and overrides onto `base`, in order, and validate the result. The first file names the config."""
    origins, merged = Origins(), OmegaConf.create(base or {})
    for file in files:
        origins |= file.lines
        merged = merge(merged, _expand(file.content, schema, file.path), str(file.path))
    for override in overrides:
        merged = merge(merged, _expand(read_override(override, origins), schema), f"command line: {override}")
    values = resolve(merged, origins)
    if "name" in schema.model_fields and files:
        values.setdefault("name", plain_name_from(files[0].path.stem))
    return validate(schema, values, origins)


def validate(schema: type[SchemaT], values: dict[str, Any], origins: Origins | None = None) -> SchemaT:
    """Check plain values against a schema; problems become one `ConfigError` of one sentence each."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(first_problems(error_messages(error, schema, origins or Origins()))) from None


def to_yaml(config: BaseModel, header: str = "") -> str:
    """A config as YAML text that `load_config` reads back to the same config."""
    values = json.loads(config.model_dump_json())
    return header + yaml.safe_dump(values, sort_keys=False)


def refuse_secret(override: str) -> None:
    """Raise, without the value in the message, if `key=value` gives away a secret."""
    key, _, value = override.partition("=")
    if why := why_secret(key, value):
        raise ConfigError(
            f"command line: {key}: {why}, which would be written into checkpoints and seen in process lists; pass "
            "credentials in the environment (AWS_..., AZURE_..., GOOGLE_..., HF_TOKEN, WANDB_API_KEY)"
        )


def read_override(override: str, origins: Origins) -> DictConfig:
    """The value of one `key=value`, whose key is noted in `origins`."""
    refuse_secret(override)
    key, _, _ = override.partition("=")
    if not key or any(not part for part in key.split(".")):
        raise ConfigError(f"command line: '{override}' is not of the form key=value")
    check_key(key, "command line")
    try:
        content = OmegaConf.from_dotlist([override])
        check_interpolation(content, Origins({key: "command line"}))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"command line: cannot read '{override}': {str(error).splitlines()[0]}") from None
    origins[key] = "command line"
    return content


def merge(base: DictConfig, layer: DictConfig, origin: str) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, layer)
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError(f"{origin}: {str(error).splitlines()[0]}") from None
    assert isinstance(merged, DictConfig)
    return merged


def resolve(merged: DictConfig, origins: Origins) -> dict[str, Any]:
    """Plain values, with every `${other.key}` replaced."""
    check_interpolation(merged, origins)
    try:
        values: Any = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        where = f"{origins.of(key)}: " if origins.of(key) else ""
        raise ConfigError(f"{where}{key}: {str(error).splitlines()[0]}") from None
    # The result is written into files that are loaded again: nothing in it may become an interpolation there.
    check_interpolation(values, origins, allowed=None)
    return {str(key): value for key, value in values.items()}


def _expand(layer: DictConfig, schema: type[BaseModel], file: Path | None = None) -> DictConfig:
    """Let the schema write out its shorthands (such as `data=FOLDER`), so that later layers can merge into them."""
    expand = getattr(schema, "expand_shorthands", None)
    if expand is None:
        return layer
    return OmegaConf.create(expand(OmegaConf.to_container(layer, resolve=False), file))
