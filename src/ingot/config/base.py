"""The base of every config section: unknown keys are errors, field docstrings are the documentation."""

import difflib
from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """A typed part of a run's config. Frozen: what was validated is what runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(),
                              allow_inf_nan=False)  # fmt: skip


def rule_error(key: str, reason: str) -> PydanticCustomError:
    """The error of a rule over several keys: the key to change, and what is wrong with its value."""
    return PydanticCustomError("impossible", "{reason}", {"reason": reason, "key": key})


def flat_choices(schema: dict[str, Any]) -> None:
    """Write the choices of a field as one list in its JSON Schema: pydantic puts those with tags into a list of their
    own, which editors do not look into."""
    schema["anyOf"] = [inner for option in schema["anyOf"] for inner in option.get("oneOf", [option])]


def known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, sections included."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        if inner := _section_of(field.annotation):
            yield from known_keys(inner, f"{prefix}{name}.")


def closest_key(key: str, schema: type[BaseModel]) -> str | None:
    """The known dotted key that a misspelled one most likely meant."""
    keys = list(known_keys(schema))
    section, _, leaf = key.rpartition(".")
    listed = [name for part in _sections_at(schema, section.split(".")) for name in part.model_fields]
    if match := difflib.get_close_matches(leaf, listed, n=1, cutoff=0.6):  # also in the entry of a list
        return f"{section}.{match[0]}"
    siblings = [k for k in keys if k.rpartition(".")[0] == section]
    by_leaf = {k.rpartition(".")[2]: k for k in siblings}
    if match := difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6):
        return by_leaf[match[0]]
    if homes := [k for k in keys if k.rpartition(".")[2] == leaf]:  # the right name in the wrong section
        return homes[0]
    match = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return match[0] if match else None


def _sections_at(annotation: Any, path: Sequence[str]) -> Iterator[type[BaseModel]]:
    """The section classes that a value may have at a path below a value of this type, through lists and tables."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and origin is None and issubclass(annotation, BaseModel):
        if not path:
            yield annotation
        elif path[0] in annotation.model_fields:
            yield from _sections_at(annotation.model_fields[path[0]].annotation, path[1:])
    elif origin in (Union, UnionType, Annotated):
        for option in inner:
            yield from _sections_at(option, path)
    elif path and (origin is dict or (origin in (list, tuple) and path[0].isdigit())):
        yield from _sections_at(inner[-1] if origin is dict else inner[0], path[1:])


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class behind a field's annotation (`Section`, or `Section | None`), if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return next(filter(None, map(_section_of, get_args(annotation))), None)
    return None
