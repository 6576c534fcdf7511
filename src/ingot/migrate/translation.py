"""What became of each key of another stack's run description: a native value, "not needed, because ...", or a refusal.

A dialect is data (tables of keys) and one function for what takes arithmetic. `Translation` sees to it that no key is
lost: whatever none of them accounts for is unknown, and unknown is an error. Peers fill in defaults that differ from
ours, so a translation writes those out too; nothing of the math is left to what our own defaults happen to be.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ingot.config.dotted_keys import ancestors
from ingot.errors import ConfigError

BECAME, NOT_NEEDED, REFUSED = "became", "not needed", "refused"


@dataclass(frozen=True)
class Dialect:
    """The vocabulary of another stack. Keys are dotted; one in a table stands for all keys below it too. Tables hold
    keys in strings, separated by spaces; see `words`."""

    name: str
    title: str
    translate: Callable[["Translation"], None]
    """Sets what takes more than a table; the keys that it reads are `computed`."""
    same: str
    """KEY=NATIVE, or KEY where both are the same: the value is taken as it is."""
    defaults: dict[str, Any]
    """Values of keys in `same` that the peer fills in."""
    choices: dict[str, str]
    """KEY to NATIVE and the names that it may have, as NAME=MEANING or NAME; the first is the peer's default."""
    not_needed: dict[str, str]
    """Reason to the keys that it holds for."""
    refused: dict[str, str]
    """What to do instead to the keys; KEY=A|B lists values that change nothing, as empty, zero and false do."""
    computed: str

    @cached_property
    def natives(self) -> dict[str, str]:
        return {key: native or key for key, _, native in (entry.partition("=") for entry in self.same.split())}

    @cached_property
    def reasons(self) -> dict[str, str]:
        return {key: why for why, keys in self.not_needed.items() for key in words(keys)}

    @cached_property
    def refusals(self) -> dict[str, tuple[list[str], str]]:
        pairs = ((entry.partition("="), why) for why, keys in self.refused.items() for entry in words(keys))
        return {key: (allowed.lower().split("|"), why) for (key, _, allowed), why in pairs}

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset([*self.natives, *self.choices, *self.reasons, *self.refusals, *self.computed.split()])

    @cached_property
    def sections(self) -> frozenset[str]:
        return frozenset(above for key in self.keys for above in ancestors(key))

    def knows(self, key: str) -> bool:
        return key in self.sections or any(k in self.keys for k in (key, *ancestors(key)))

    def closest(self, key: str) -> str | None:
        homes = [k for k in sorted(self.keys) if k.rpartition(".")[2] == key.rpartition(".")[2]]
        near = difflib.get_close_matches(key, self.keys, n=1, cutoff=0.6)
        return homes[0] if homes else near[0] if near else None


@dataclass
class Row:
    """The fate of one foreign key."""

    key: str
    value: Any
    place: str
    fate: str
    text: str


@dataclass
class Translation:
    """A run description on its way from one vocabulary to the other."""

    dialect: Dialect
    given: dict[str, Any]
    """Dotted foreign keys and their values."""
    places: Mapping[str, str]
    """Where each stands, as FILE:LINE."""
    elsewhere: tuple[Dialect, ...] = ()
    """The other dialects, to name the home of a key that is not of this one."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Where each native key came from."""
    rows: dict[str, Row] = field(default_factory=dict)

    def run(self) -> "Translation":
        """Account for every key."""
        d = self.dialect
        for key, value in self.given.items():
            if value is None and d.knows(key):
                self.skip("empty, so the default holds", key)
            elif not d.knows(key):
                self.refuse(key, self._unknown(key))
            elif (reason := _above(d.reasons, key)) is not None:
                self.skip(reason, key)
            elif (rule := _above(d.refusals, key)) is not None:
                if value and str(value).lower() not in rule[0]:
                    self.refuse(key, rule[1])
                self.skip("the same here", key)
        for key, native in d.natives.items():
            if (value := self.get(key, d.defaults.get(key))) is not None:
                self.put(native, value, key)
        for key, entry in d.choices.items():
            self.put(entry.split()[0], self.choice(key), key)
        d.translate(self)
        self.skip("as it is here, or without effect beside the other settings", *self.given)
        return self

    def get(self, key: str, default: Any = None) -> Any:
        assert self.dialect.knows(key), key
        value = self.given.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> Any:
        """A value that arithmetic is done with."""
        value = self.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            self.refuse(key, "must be a number")
            return 1 if default is None else default
        return value

    def size(self, key: str, default: int | None = None) -> Any:
        """A whole number of things, at least one."""
        value = self.number(key, default)
        if value is not None and (value < 1 or value != int(value)):
            self.refuse(key, "must be a whole number, at least 1")
            return 1
        return value

    def said(self, *keys: str) -> str:
        """The first key that is given, or else the first."""
        return next((key for key in keys if self.get(key) is not None), keys[0])

    def choice(self, key: str, default: str | None = None, names: str = "") -> Any:
        """What one of a peer's names means here; the others are refused."""
        entries = [e.partition("=") for e in (names or self.dialect.choices[key].partition(" ")[2]).split()]
        meanings = {name.lower(): meaning or name for name, _, meaning in entries}
        value = str(self.get(key, default or entries[0][0]))
        if value.lower() not in meanings:
            self.refuse(key, f"not supported; possible here: {', '.join(entry[0] for entry in entries)}")
        return meanings.get(value.lower(), entries[0][2] or entries[0][0])

    def put(self, native: str, value: Any, *keys: str) -> None:
        """Set a native key, and say which foreign keys it follows from; if none is given, from the first's default."""
        section = self.values
        *sections, leaf = native.split(".")
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
        given = [key for key in keys if self.given.get(key) is not None]
        for key in given or keys[:1]:
            row = self.rows.get(key)
            if row is None or row.fate == NOT_NEEDED:
                self._row(key, BECAME, f"{native}: {show(value)}")
            elif row.fate == BECAME and f"{native}:" not in row.text:
                row.text += f", {native}: {show(value)}"
        if given:
            self.origins[native] = f"{self.places.get(given[0], self.dialect.title)} ({given[0]})"

    def note(self, key: str, text: str) -> None:
        """Say more about what a key became."""
        if key in self.rows:
            self.rows[key].text += f" ({text})"

    def skip(self, why: str, *keys: str) -> None:
        for key in keys:
            if key in self.given and key not in self.rows:
                self._row(key, NOT_NEEDED, why)

    def refuse(self, key: str, why: str) -> None:
        if key not in self.rows or self.rows[key].fate != REFUSED:  # the first reason is the root of the others
            self._row(key, REFUSED, why)

    @property
    def problems(self) -> list[str]:
        """One sentence for each key that was refused; those that someone wrote first."""
        found = []
        for row in sorted((r for r in self.rows.values() if r.fate == REFUSED), key=lambda row: not row.place):
            what = row.text if row.text.startswith("unknown key") else f"{row.key} = {show(row.value)}: {row.text}"
            found.append(f"{row.place}: {what}" if row.place else what)
        return found

    def check(self) -> None:
        if self.problems:
            raise ConfigError("\n".join(self.problems[:8]))

    def comments(self) -> list[str]:
        """The table, as YAML comments: it stays with the recipe that it explains."""
        rows = sorted(self.rows.values(), key=lambda row: (BECAME, NOT_NEEDED, REFUSED).index(row.fate))
        left = [f"{row.key} = {show(row.value)}" for row in rows]
        width = min(60, max(map(len, left), default=0))
        marks = {BECAME: "->", NOT_NEEDED: "not needed:", REFUSED: "refused:"}
        return [f"# {key:{width}}  {marks[row.fate]} {row.text}" for key, row in zip(left, rows, strict=True)]

    def _row(self, key: str, fate: str, text: str) -> None:
        self.rows[key] = Row(key, self.given.get(key, "(default)"), self.places.get(key, ""), fate, text)

    def _unknown(self, key: str) -> str:
        title, close = self.dialect.title, self.dialect.closest(key)
        homes = [other.title for other in self.elsewhere if other.knows(key)]
        hint = f"did you mean {close}?" if close else "the reference of that stack may not have it either."
        if homes:
            hint = f"it is a key of {' and '.join(homes)}, and a run is described in one vocabulary."
        return f"unknown key {key} of {title}; {hint}"


def words(text: str) -> Iterable[str]:
    """The words of a table; those behind `SECTION:` are keys of that section, behind `A,B:` of both."""
    sections = [""]
    for word in text.split():
        if word.endswith(":"):
            sections = [f"{section}." for section in word[:-1].split(",")]
        else:
            yield from (section + word for section in sections)


def show(value: Any) -> str:
    text = f"{value:.15g}" if isinstance(value, float) else str(value)
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _above(table: Mapping[str, Any], key: str) -> Any:
    """The entry for a key, or for the nearest section around it."""
    return next((table[k] for k in (key, *ancestors(key)) if k in table), None)
