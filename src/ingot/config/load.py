"""Files and `key=value` overrides to one validated config.

OmegaConf reads, merges and interpolates; pydantic validates. What neither gives is *where* a wrong value came from:
the line of each key is kept from the YAML parser, so that an error names file, line, key, value and the closest key.

Files of other stacks are recognised by their keys and translated (`dialects`); overrides are then in their vocabulary.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from ingot.config.base import closest_key, known_keys
from ingot.config.names import plain_name_from
from ingot.config.recipes import find_recipe, recipe_names
from ingot.config.secrets import strings_in
from ingot.errors import ConfigError
from ingot.migrate import DIALECTS
from ingot.migrate.script import read_script
from ingot.migrate.shell_arguments import read_words
from ingot.migrate.translation import Dialect, Translation, ancestors, flatten

SchemaT = TypeVar("SchemaT", bound=BaseModel)
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
# what a member of a union takes, by pydantic's names of the members and of their errors
MEMBERS = ("bool", "int", "float", "str")
EXPECTED = {
    "bool_parsing": "true or false", "bool_type": "true or false", "int_parsing": "a whole number",
    "int_type": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number",
    "float_type": "a number", "string_type": "text", "literal_error": "", "none_required": "null",
}  # fmt: skip
PLAIN = re.compile(r"(?<!\\)\$\{[^${}:\\]*\}")  # a colon makes a resolver of it
SLASHES = "// does not start a comment in JSON or YAML; use #"
MICROBATCH = "device_train_microbatch_size="  # native in every vocabulary: out-of-memory errors name it


class Origins(dict[str, str]):
    """Which file and line, or which override, last set each dotted key."""

    def of(self, key: str) -> str:
        """The place of a key, or of the nearest section around it."""
        return next((self[k] for k in (key, *ancestors(key)) if k in self), "")


def load_config(
    schema: type[SchemaT], arguments: Sequence[str], base: dict[str, Any] | None = None, dialect: str | None = None
) -> SchemaT:
    """Build a config from what stands on the command line: recipes, files and `key=value` overrides, in order.

    `base` is what they are merged onto, such as the config of an earlier run; `dialect` says whose vocabulary the files
    have, which is otherwise seen from their keys.
    """
    command = _read_command(schema, arguments, dialect)
    if command.dialect is not None:
        translation = _translate(command)
        translation.check()
        origins, values = Origins(translation.origins), translation.values
    else:
        origins, merged = Origins(), OmegaConf.create(base or {})
        for source in command.sources:
            origins |= source.places
            merged = _merge(merged, _expand(source.content, schema), str(source.path))
        for override in command.overrides:
            merged = _merge(merged, _expand(_read_override(override, origins), schema), f"command line: {override}")
        values = _resolve(merged, origins)
    if "name" in schema.model_fields and command.sources:
        values.setdefault("name", plain_name_from(command.sources[0].path.stem))
    return validate(schema, values, origins)


def check_recipe(arguments: Sequence[str]) -> None:
    """Refuse overrides alone: without a recipe, a file or a key of the model, the defaults are a model of 1.3 billion
    parameters that nobody asked for."""
    for argument in arguments:
        if "=" not in argument or argument.startswith(("--", "model.", "model=")) or os.path.isfile(argument):
            return
    names = ", ".join(recipe_names())
    raise ConfigError(
        "the command names no recipe, so the model is unknown; add a recipe, a config file or model.* keys, for "
        f"example `ingot train mpt-125m {' '.join(arguments[:1])}`; the recipes are {names}"
    )


def translate(schema: type[BaseModel], arguments: Sequence[str], dialect: str | None = None) -> Translation:
    """A run description in another stack's vocabulary as ours, with what became of each of its keys."""
    command = _read_command(schema, arguments, dialect)
    if command.dialect is None:
        raise ConfigError("this is a native config already; `ingot config show` prints it with every default")
    return _translate(command)


def validate(schema: type[SchemaT], values: dict[str, Any], origins: Origins | None = None) -> SchemaT:
    """Check plain values against a schema; problems become one `ConfigError` of one sentence each."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        problems = [_describe(e, schema, origins or Origins()) for e in _join_members(error.errors())]
        shown = list(dict.fromkeys(problems))[:8]
        raise ConfigError("\n".join(shown)) from None


def to_yaml(config: BaseModel, header: str = "") -> str:
    """A config as YAML text that `load_config` reads back to the same config."""
    values = json.loads(config.model_dump_json())
    return header + yaml.safe_dump(values, sort_keys=False)


@dataclass
class Source:
    """One file: its keys and values, and where each key stands."""

    path: Path
    content: DictConfig
    places: dict[str, str]


@dataclass
class Command:
    """A command line, sorted: files, overrides, Megatron's own arguments, and whose vocabulary all of them have."""

    sources: list[Source]
    overrides: list[str]
    words: list[str]
    dialect: Dialect | None


def _read_command(schema: type[BaseModel], arguments: Sequence[str], dialect: str | None) -> Command:
    if dialect is not None and dialect not in DIALECTS:
        raise ConfigError(f"there is no dialect {dialect}; there are {', '.join(DIALECTS)}")
    restart = [a for a in arguments if a.startswith(MICROBATCH)]
    arguments = [a for a in arguments if a not in restart]
    start = next((i for i, word in enumerate(arguments) if word.startswith("--")), len(arguments))
    words = list(arguments[start:])
    overrides = [a for a in arguments[:start] if "=" in a and not Path(a).is_file()] + restart
    sources = [_read_source(find_recipe(a)) for a in arguments[:start] if a not in overrides]
    spoken = dialect or ("megatron" if words else _detect(sources, frozenset(known_keys(schema))))
    return Command(sources, overrides, words, DIALECTS.get(spoken))


def _detect(sources: list[Source], native: frozenset[str]) -> str:
    """Whose vocabulary the files have: that with the most known keys in each; native where it does not matter."""
    possible: dict[str, list[str]] = {}
    for source in sources:
        content: Any = OmegaConf.to_container(source.content)
        keys = [key.removeprefix("--").replace("-", "_") for key in flatten(content)]
        scores = {"native": sum(key in native or key.split(".")[0] == "data" for key in keys)}
        scores |= {name: sum(dialect.knows(key) for key in keys) for name, dialect in DIALECTS.items()}
        if source.path.suffix in SCRIPTS:
            scores = {"megatron": 1}
        if keys and not any(scores.values()):
            raise ConfigError(
                f"{source.path}: none of its keys ({', '.join(keys[:4])}) is known; it is no run description of ingot, "
                f"{', '.join(d.title for d in DIALECTS.values())}"
            )
        best = max(scores.values())
        possible[str(source.path)] = [name for name, score in scores.items() if score == best]
    common = [name for name in ("native", *DIALECTS) if all(name in names for names in possible.values())]
    if not common:
        named = "; ".join(f"{path} is {' or '.join(names)}" for path, names in possible.items())
        raise ConfigError(f"the files are of different vocabularies: {named}; give files of one")
    return common[0]


def _translate(command: Command) -> Translation:
    dialect = command.dialect
    assert dialect is not None
    merged, places = OmegaConf.create({}), dict[str, str]()
    for source in command.sources:
        content, lines = source.content, source.places
        if dialect.name != "foundry":
            content, lines = _underscored(source)
        if dialect.name == "neox":
            for key in (str(key) for key in content if key in merged):
                raise ConfigError(f"{lines[key]}: {key} is already set at {places[key]}; NeoX files may not overlap")
        merged = _merge(merged, content, str(source.path))
        places |= lines
    if command.words:
        given, lines = read_words([(word, "command line") for word in command.words])
        _check_interpolation(given, Origins(lines))
        merged, places = _merge(merged, OmegaConf.create(given), "command line"), places | lines
    origins = Origins(places)
    for override in (o for o in command.overrides if not o.startswith(MICROBATCH)):
        key, _, value = override.partition("=")
        key = key.lstrip("-").replace("-", "_") if dialect.name != "foundry" else key
        if key in ("data_local", "data_remote") and f"${{{key}}}" not in OmegaConf.to_yaml(merged):
            raise ConfigError(f"command line: no key of the files refers to ${{{key}}}; set train_loader.dataset.local")
        merged = _merge(merged, _read_override(f"{key}={value}", origins), f"command line: {override}")
    given = flatten(_resolve(merged, origins))
    others = tuple(other for other in DIALECTS.values() if other is not dialect)
    where = {key: origins.of(key) for key in given}
    translation = Translation(dialect, given, where, others).run()
    for override in (o for o in command.overrides if o.startswith(MICROBATCH)):
        translation.put(MICROBATCH[:-1], _read_override(override, origins)[MICROBATCH[:-1]])
    return translation


def _underscored(source: Source) -> tuple[DictConfig, dict[str, str]]:
    """NeoX and Megatron take hyphens for underscores."""
    lines: dict[str, str] = {}
    content: dict[str, Any] = {}
    raw: Any = OmegaConf.to_container(source.content, resolve=False)
    for key, value in raw.items():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in content:
            raise ConfigError(f"{source.places[str(key)]}: {name} is already set at {lines[name]}")
        content[name] = value
        lines |= {k.replace(str(key), name, 1): v for k, v in source.places.items() if k.split(".")[0] == key}
    return OmegaConf.create(content), lines


def _read_source(path: Path) -> Source:
    if path.suffix in SCRIPTS:
        given, lines = read_words(read_script(path))
        _check_interpolation(given, Origins(lines))
        return Source(path, OmegaConf.create(given), lines)
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".json":
            text = text.expandtabs(1)  # JSON may be indented with tabs, YAML may not
        node = yaml.compose(text) or yaml.MappingNode("", [])  # an empty file
        content = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_not_valid(path, text, error)) from None
    except (OmegaConfBaseException, UnicodeDecodeError, OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, DictConfig) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: a config file must be a mapping of keys to values")
    if path.suffix == ".json":
        _refuse_slashes(node, path)
    lines = _key_lines(node, path)
    _check_interpolation(content, Origins(lines))
    if isinstance(arguments := content.pop("MODEL_ARGS", None), DictConfig):  # a test case of Megatron's own
        lines = {key.removeprefix("MODEL_ARGS."): line for key, line in lines.items()}
        content = _merge(content, arguments, str(path))
    return Source(path, content, lines)


def _not_valid(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    line = error.problem_mark.line + 1 if error.problem_mark else 0
    if path.suffix == ".json":
        lines = enumerate(text.splitlines()[:line], 1)
        if comment := next((number for number, text_of in lines if text_of.lstrip().startswith("//")), 0):
            return f"{path}:{comment}: {SLASHES}"
        try:
            json.loads(text)
        except json.JSONDecodeError as strict:  # says it better, unless it is about what YAML allows
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
    return lines


def _read_override(override: str, origins: Origins) -> DictConfig:
    key, _, _ = override.partition("=")
    if not key or any(not part for part in key.split(".")):
        raise ConfigError(f"command line: '{override}' is not of the form key=value")
    _check_key(key, "command line")
    try:
        content = OmegaConf.from_dotlist([override])
        _check_interpolation(content, Origins({key: "command line"}))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"command line: cannot read '{override}': {str(error).splitlines()[0]}") from None
    origins[key] = "command line"
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
    _check_interpolation(merged, origins)
    try:
        values: Any = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        place = f"{origins.of(key)}: " if origins.of(key) else ""
        raise ConfigError(f"{place}{key}: {str(error).splitlines()[0]}") from None
    # The result is written into files that are loaded again: nothing in it may become an interpolation there.
    _check_interpolation(values, origins, allowed=None)
    return {str(key): value for key, value in values.items()}


def _check_interpolation(content: Any, origins: Origins, allowed: re.Pattern[str] | None = PLAIN) -> None:
    """Refuse all `${...}` but plain `${other.key}`: a resolver, `${name:...}`, runs code, such as reading the
    environment, and a config is data only. Checked before OmegaConf looks at a value, which may already resolve it."""
    if isinstance(content, DictConfig):
        content = OmegaConf.to_container(content, resolve=False)
    for key in _keys_in(content):
        _check_key(key, origins.of(key))
    for key, value in strings_in(content):
        if "${" in (allowed.sub("", value) if allowed else value):
            raise ConfigError(
                f"{origins.of(key)}: {key} = {value!r} calls a resolver, or nests or escapes ${{...}}; "
                "only ${other.key} is allowed"
            )


def _check_key(key: str, place: str) -> None:
    if "${" in key:
        raise ConfigError(f"{place}: a key may not contain ${{...}}: {key!r}; write the key out")


def _keys_in(content: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key, also of mappings within lists."""
    for key, value in content.items() if isinstance(content, dict) else ():
        yield f"{prefix}{key}"
        yield from _keys_in(value, f"{prefix}{key}.")
    for value in content if isinstance(content, list) else ():
        yield from _keys_in(value, prefix)


def _join_members(errors: Sequence[Any]) -> list[dict[str, Any]]:
    """pydantic's errors, with those of all members of a union as one: what was written is none of them."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for error in errors:
        *above, last = error["loc"] or ("",)
        named = isinstance(last, str) and (last in MEMBERS or not last.isidentifier())  # not by the user
        member = bool(above) and named and error["type"] in EXPECTED
        loc = tuple(above) if member else error["loc"]
        found.setdefault(loc if member else (len(found), "alone"), []).append({**error, "loc": loc})
    return [_none_of(group) if len(group) > 1 else group[0] for group in found.values()]


def _none_of(errors: list[dict[str, Any]]) -> dict[str, Any]:
    expected = [error.get("ctx", {}).get("expected") or EXPECTED[error["type"]] for error in errors]
    text = ", or ".join(dict.fromkeys(expected))
    return {**errors[0], "type": "literal_error", "ctx": {"expected": text}, "msg": f"Input should be {text}"}


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
    if error["type"] == "literal_error":
        words = [word.strip("'") for word in re.findall(r"'[\w-]+'|true|false", context["expected"])]
        likely = difflib.get_close_matches(str(error["input"]).lower(), words, 1)
        message += f"; did you mean {likely[0]}?" if likely else ""
    if error["type"] == "impossible":
        return f"{where}{key}: {message}"
    return f"{where}{key} = {error['input']!r}: {message[0].lower() + message[1:]}"
