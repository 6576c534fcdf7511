"""What became of each key of another stack's run description: a native value, "not needed, because ...", or a refusal.

A dialect is a table of keys (`tables/NAME.yaml`) and one function for what takes arithmetic. `Translation` makes sure
that no key is lost: a key that neither accounts for is unknown, and unknown is an error. Defaults of the other stack
that differ from ours are written out too, so that none of the math depends on our own defaults.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

import yaml

from ingot.config.dotted_keys import ancestors
from ingot.errors import ConfigError

BECAME, NOT_NEEDED, REFUSED = "became", "not needed", "refused"


@dataclass(frozen=True)
class Dialect:
    """The vocabulary of another stack. Keys are dotted; one in a table stands for all keys below it too."""

    name: str
    title: str
    translate: Callable[["Translation"], None]
    """Sets what takes more than a table."""

    @cached_property
    def table(self) -> dict[str, Any]:
        """The content of the data file, which is read when the first foreign key is."""
        text = (resources.files("ingot.migrate") / "tables" / f"{self.name}.yaml").read_text(encoding="utf-8")
        table: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both safe
        return table

    @cached_property
    def reasons(self) -> dict[str, str]:
        """Why a key is not needed."""
        return {key: entry["why"] for entry in self.table["not_needed"] for key in entry["keys"]}

    @cached_property
    def refusals(self) -> dict[str, tuple[list[str], str]]:
        """The values of a key that are accepted although it is refused, and why it is."""
        found: dict[str, tuple[list[str], str]] = {}
        for entry in self.table["refused"]:
            found |= {key: ([], entry["why"]) for key in entry.get("keys", [])}
            found |= {
                key: ([str(v).lower() for v in vs], entry["why"]) for key, vs in entry.get("accepted", {}).items()
            }
        return found

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset([*(key for part in ("renamed", "choices", "computed") for key in self.table[part]),
                          *self.reasons, *self.refusals])  # fmt: skip

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
        for key, native in d.table["renamed"].items():
            if (value := self.get(key, d.table["defaults"].get(key))) is not None:
                self.put(native, value, key)
        for key, entry in d.table["choices"].items():
            if "native" in entry:
                self.put(entry["native"], self.choice(key), key)
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

    def choice(self, key: str, default: str | None = None) -> Any:
        """What one of the other stack's names means here; a name that the table does not list is refused."""
        names = self.dialect.table["choices"][key]["names"]
        meanings = {name.lower(): meaning for name, meaning in names.items()}
        first = next(iter(names))
        value = str(self.get(key, default or first)).lower()
        if value not in meanings:
            self.refuse(key, f"not supported; possible here: {', '.join(names)}")
        return meanings.get(value, names[first])

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


def show(value: Any) -> str:
    text = f"{value:.15g}" if isinstance(value, float) else str(value)
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _above(table: Mapping[str, Any], key: str) -> Any:
    """The entry for a key, or for the nearest section around it."""
    return next((table[k] for k in (key, *ancestors(key)) if k in table), None)
