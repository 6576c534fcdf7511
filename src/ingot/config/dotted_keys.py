"""Dotted keys, such as `model.d_model`, of nested values."""

from collections.abc import Iterator, Mapping
from typing import Any


def ancestors(key: str) -> Iterator[str]:
    """The sections around a dotted key, nearest first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; a list of one section is that section, an empty section keeps its own key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        value = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) else value
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return flat


def all_keys(values: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of nested values, sections and mappings within lists included."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from all_keys(value, f"{prefix}{key}.")
    elif isinstance(values, list):
        for value in values:
            yield from all_keys(value, prefix)


def all_strings(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every string of nested values with its dotted key; an item of a list has the key of the list."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from all_strings(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from all_strings(value, prefix)
    elif isinstance(values, str):
        yield prefix, values
