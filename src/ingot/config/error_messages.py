"""Validation errors as sentences: file and line (or override), key, value, what was expected, the closest key."""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ingot.config.base import closest_key
from ingot.config.dotted_keys import ancestors

# what a member of a union takes, by pydantic's names of the members and of their errors
MEMBERS = ("bool", "int", "float", "str")
EXPECTED = {
    "bool_parsing": "true or false", "bool_type": "true or false", "int_parsing": "a whole number",
    "int_type": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number",
    "float_type": "a number", "string_type": "text", "literal_error": "", "none_required": "null",
}  # fmt: skip


BOUNDS = {
    "greater_than_equal": ("at least", "ge"), "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"), "less_than": ("less than", "lt"),
}  # fmt: skip

MOST_PROBLEMS = 20  # shown at once


class Origins(dict[str, str]):
    """Which file and line, or which override, last set each dotted key."""

    def of(self, key: str) -> str:
        """Where a key was set, or the nearest section around it; empty for a default."""
        return next((self[k] for k in (key, *ancestors(key)) if k in self), "")


def first_problems(problems: Sequence[str]) -> str:
    """A line for each of the first problems, and how many more there are."""
    more = len(problems) - MOST_PROBLEMS
    return "\n".join([*problems[:MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])])


def error_messages(error: ValidationError, schema: type[BaseModel], origins: Origins) -> list[str]:
    """One sentence for each problem, without repetitions."""
    return list(dict.fromkeys(_sentence(e, schema, origins) for e in _join_members(error.errors())))


def _join_members(errors: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """pydantic's errors, with those of all members of a union as one: the value fits none of them."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for error in errors:
        *above, last = error["loc"] or ("",)
        is_member_name = isinstance(last, str) and (last in MEMBERS or not last.isidentifier())
        member = bool(above) and is_member_name and error["type"] in EXPECTED
        loc = tuple(above) if member else error["loc"]
        found.setdefault(loc if member else (len(found), "alone"), []).append({**error, "loc": loc})
    for group in found.values():
        if len(group) > 1:
            expected = [error.get("ctx", {}).get("expected") or EXPECTED[error["type"]] for error in group]
            text = ", or ".join(dict.fromkeys(expected))
            joined = {"type": "literal_error", "ctx": {"expected": text}, "msg": f"Input should be {text}"}
            yield {**group[0], **joined}
        else:
            yield group[0]


def _sentence(error: Any, schema: type[BaseModel], origins: Origins) -> str:
    # pydantic adds the names of union members to the location; only what the user wrote is shown
    key = ".".join(str(part) for part in error["loc"] if isinstance(part, int) or str(part).isidentifier())
    context = error.get("ctx", {})
    if "key" in context:  # a rule over several keys names the one to change
        key = f"{key}.{context['key']}" if key else context["key"]
    where = f"{origins.of(key)}: " if origins.of(key) else ""
    if error["type"] == "extra_forbidden":
        close = closest_key(key, schema)
        hint = f"did you mean {close}?" if close else "see `ingot config keys`"
        return f"{where}unknown key {key}; {hint}"
    if error["type"] == "missing":
        return f"{where}{key} is missing; set it in the file or with {key}=..."
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "literal_error":
        words = [word.strip("'") for word in re.findall(r"'[\w-]+'|true|false", context["expected"])]
        likely = difflib.get_close_matches(str(error["input"]).lower(), words, 1)
        message += f"; did you mean {likely[0]}?" if likely else ""
    if error["type"] in BOUNDS:
        word, bound = BOUNDS[error["type"]]
        message = f"must be {word} {context[bound]}"
    elif expected := EXPECTED.get(error["type"], ""):
        message = f"must be {expected}"
    if error["type"] == "impossible":
        return f"{where}{key}: {message}"
    return f"{where}{key} = {error['input']!r}: {message[0].lower() + message[1:]}"
