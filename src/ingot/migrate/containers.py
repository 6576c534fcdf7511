"""Files that hold a run description inside something else: job files of Mosaic's mcli, Megatron's own test cases, and
the sections of Megatron's --yaml-cfg. Each is turned into the flat description that the rest of the migration reads.
"""

import re
import shlex
from typing import Any

from omegaconf import OmegaConf

from ingot.config.error_messages import Origins
from ingot.config.files import ConfigFile
from ingot.config.load import merge, read_override
from ingot.errors import ConfigError
from ingot.migrate.megatron import MEGATRON


def unwrap(file: ConfigFile) -> ConfigFile:
    """The run description in a file, or the file itself."""
    content: Any = OmegaConf.to_container(file.content, resolve=False)
    if isinstance(arguments := content.get("MODEL_ARGS"), dict):
        rest = {key: value for key, value in content.items() if key != "MODEL_ARGS"}
        return _file(file, rest | arguments, "MODEL_ARGS")
    if isinstance(content.get("language_model"), dict):
        return _yaml_cfg(file, content)
    if isinstance(parameters := content.get("parameters"), dict) and "command" not in content and "model" in parameters:
        raise ConfigError(f"{file.lines['parameters']}: the run is under `parameters`, and no command trains with it; "
                          "save `parameters` as a file of its own and give that")  # fmt: skip
    if "image" in content and "command" in content:
        return _job(file, content)
    return file


def _file(file: ConfigFile, content: dict[str, Any], *sections: str) -> ConfigFile:
    """`content` in place of a file's, with the lines of the sections that moved to its top."""
    lines = dict(file.lines)
    for section in sections:
        inner = {key.removeprefix(f"{section}."): line for key, line in file.lines.items()}
        lines = inner | {key: line for key, line in lines.items() if key not in inner} | inner
    return ConfigFile(file.path, OmegaConf.create(content), lines)


def _job(file: ConfigFile, content: dict[str, Any]) -> ConfigFile:
    """mcli mounts `parameters` as parameters.yaml, which the command reads, with overrides of its own."""
    parameters, where = content.pop("parameters", None), file.lines["command"]
    if not isinstance(parameters, dict):
        raise ConfigError(f"{where}: this is a job without `parameters`; give the config that its command names, and "
                          "the command's overrides")  # fmt: skip
    job = {key: str(value).replace("${", "$") for key, value in content.items()}
    found = _file(file, {**parameters, "mcli": job}, "parameters")
    text = str(content["command"]).replace("\\\n", " ")
    uses = [line for line in text.splitlines() if "parameters.yaml" in line]
    if len(uses) != 1 or not re.search(r"\btrain\b|\bmain\.py\b", uses[0]):
        raise ConfigError(f"{where}: the run is under `parameters`, but the command does not train with "
                          "parameters.yaml exactly once; save `parameters` as a file and give that")  # fmt: skip
    after = re.split(r"[;|&>)]", uses[0].partition("parameters.yaml")[2])[0]
    for word in shlex.split(after.strip("\"' "), comments=True):
        if "$" in word or "=" not in word:
            raise ConfigError(f"{where}: the value of '{word}' in the command is not known here; remove it from the "
                              "command and give it after the file")  # fmt: skip
        origins = Origins()
        found.content = merge(found.content, read_override(word, origins), where)
        found.lines |= dict.fromkeys(origins, f"{where} (command)")
    return found


def _yaml_cfg(file: ConfigFile, content: dict[str, Any]) -> ConfigFile:
    """Fields of Megatron's dataclasses in sections; where they are the opposite of an argument, that argument."""
    sections = [name for name in ("language_model", "model_parallel") if isinstance(content.get(name), dict)]
    flat = {key: value for key, value in content.items() if key not in sections}
    found = _file(file, {}, *sections)
    for key, value in ((key, value) for name in sections for key, value in content[name].items()):
        flat[key] = value if value is not None else flat.get(key)
    kind = flat.pop("activation_func", None)
    gates = {"swiglu": kind == "swiglu", "squared_relu": kind == "squaredrelu"} if kind is not None else {}
    if any(key in flat and bool(flat[key]) != value for key, value in gates.items()) or kind not in (
        None, "gelu", "swiglu", "squaredrelu"
    ):  # fmt: skip
        raise ConfigError(f"{found.lines['activation_func']}: activation_func = {kind} contradicts swiglu or "
                          "squared_relu, or is not known to ingot; use gelu or swiglu")  # fmt: skip
    flat |= gates
    if flat.get("num_query_groups") is not None:
        flat["group_query_attention"] = True
    for field, argument in MEGATRON.table["opposites"].items():
        if flat.get(field) is not None and argument not in flat:
            flat[argument] = not flat.pop(field)
            found.lines[argument] = found.lines[field]
    return ConfigFile(file.path, OmegaConf.create(flat), found.lines)
