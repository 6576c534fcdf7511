"""What became of each key of another stack's run description: a native value, "not needed, because ...", or a refusal.

A dialect is a table of keys (`tables/NAME.yaml`) and one function for what takes arithmetic. `Translation` makes sure
that no key is lost: a key that neither accounts for is unknown, and unknown is an error. Defaults of the other stack
that differ from ours are written out too, so that none of the math depends on our own defaults; where its releases
differ, a warning names the value that was filled in.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Any

import yaml

from ingot.config.dotted_keys import ancestors
from ingot.config.error_messages import first_problems
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
    def without_effect(self) -> frozenset[str]:
        """Keys that change nothing of what a run computes, whatever their values are."""
        return frozenset([*self.reasons, *self.table["trackers"]])

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
        return frozenset([*(key for part in ("renamed", "choices", "computed", "trackers") for key in self.table[part]),
                          *self.reasons, *self.refusals])  # fmt: skip

    @cached_property
    def sections(self) -> frozenset[str]:
        return frozenset(above for key in self.keys for above in ancestors(key))

    def knows(self, key: str) -> bool:
        return key in self.sections or any(k in self.keys for k in (key, *ancestors(key)))

    def default_of(self, key: str, release: str) -> Any:
        """A default that differs between releases."""
        changed: dict[str, Any] = self.table["releases"]["changed"][key]
        first = next(iter(changed))
        return [value for since, value in changed.items() if since == first or order_of(since) <= order_of(release)][-1]

    def closest(self, key: str) -> str | None:
        owners = [k for k in self.keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
        near = difflib.get_close_matches(key, self.keys, n=1, cutoff=0.8)
        return owners[0] if len(owners) == 1 else near[0] if near else None


@dataclass
class Row:
    """What became of one foreign key."""

    key: str
    value: Any
    origin: str
    fate: str
    text: str


@dataclass
class Translation:
    """The translation of one run description."""

    dialect: Dialect
    given: dict[str, Any]
    """Dotted foreign keys and their values."""
    lines: Mapping[str, str]
    """FILE:LINE of each."""
    elsewhere: tuple[Dialect, ...] = ()
    """The other dialects, to tell which stack an unknown key belongs to."""
    peer_version: str | None = None
    """The release whose defaults to fill in; None: the latest one that the table knows."""
    warnings: list[str] = field(default_factory=list)
    """What the user should check: values that depend on the other stack's release, for example."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Where each native key came from."""
    rows: dict[str, Row] = field(default_factory=dict)
    unsettled: Mapping[str, str] = field(default_factory=dict)
    """Keys whose values a script takes from elsewhere, and from where."""

    def run(self) -> "Translation":
        """Account for every key."""
        d = self.dialect
        for key, value in self.given.items():
            if value is None:
                self.skip("empty, so the default applies" if d.knows(key) else "empty", key)
            elif not d.knows(key):
                self.refuse(key, self._unknown(key))
            elif (reason := _above(d.reasons, key)) is not None:
                self.skip(reason, key)
            elif (rule := _above(d.refusals, key)) is not None:
                if value and str(value).lower() not in rule[0]:
                    self.refuse(key, rule[1])
                self.skip("the same here", key)
        for key, native in d.table["renamed"].items():
            default = self.by_release(key) if key in d.table["releases"]["changed"] else d.table["defaults"].get(key)
            if (value := self.get(key, default)) is not None:
                self.put(native, value, key)
        for key, entry in d.table["choices"].items():
            if "native" in entry:
                self.put(entry["native"], self.choice(key), key)
        d.translate(self)
        self.skip("the same here, or without effect given the other settings", *self.given)
        return self

    def get(self, key: str, default: Any = None) -> Any:
        assert self.dialect.knows(key), key
        value = self.given.get(key)
        return default if value is None else value

    @property
    def release(self) -> str:
        """The release whose defaults are filled in."""
        return self.peer_version or str(self.dialect.table["releases"]["latest"])

    def by_release(self, key: str, what: str = "") -> Any:
        """The default of a key in the chosen release; a warning says if the user has not chosen one and needs it."""
        value = self.dialect.default_of(key, self.release)
        if self.peer_version is None and (what or self.get(key) is None):
            changed = self.dialect.table["releases"]["changed"][key]
            values = ", ".join(f"{show(value)} from {since} on" for since, value in changed.items())
            self.warnings.append(f"{what or f'{key} is not given, and its default'} depends on the release: {values}; "
                                 f"assuming {self.release}, {show(value)}; choose with --peer-version"
                                 + (f", or set {key}" if not what else ""))  # fmt: skip
        return value

    def number(self, key: str, default: float | None = None) -> Any:
        """A value for arithmetic."""
        value = self.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            self.refuse(key, "must be a number")
            return 1 if default is None else default
        return value

    def size(self, key: str, default: int | None = None) -> Any:
        """A whole number, at least 1."""
        value = self.number(key, default)
        if value is not None and (value < 1 or value != int(value)):
            self.refuse(key, "must be a whole number, at least 1")
            return 1
        return value

    def first_given(self, *keys: str) -> str:
        """The first key that is given, or the first one if none is."""
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
        """Set a native key and record the foreign keys behind it; if none is given, the first's default is."""
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
            self.origins[native] = f"{self.lines.get(given[0], self.dialect.title)} ({given[0]})"

    def note(self, key: str, text: str) -> None:
        """Add to what a key became."""
        if key in self.rows:
            self.rows[key].text += f" ({text})"

    def skip(self, why: str, *keys: str) -> None:
        for key in keys:
            if key in self.given and key not in self.rows:
                self._row(key, NOT_NEEDED, why)

    def refuse(self, key: str, why: str) -> None:
        if key in self.unsettled and "$" in str(self.given.get(key)):
            why = f"{self.unsettled[key]} give {key}=... after the file"
        if key not in self.rows or self.rows[key].fate != REFUSED:  # the first reason causes the others
            self._row(key, REFUSED, why)

    @property
    def problems(self) -> list[str]:
        """One sentence for each refused key, keys that the user wrote first."""
        found = []
        for row in sorted((r for r in self.rows.values() if r.fate == REFUSED), key=lambda row: not row.origin):
            what = row.text if row.text.startswith("unknown key") else f"{row.key} = {show(row.value)}: {row.text}"
            found.append(f"{row.origin}: {what}" if row.origin else what)
        return found

    def check(self) -> None:
        if self.problems:
            raise ConfigError(first_problems(self.problems))

    def comments(self) -> list[str]:
        """What became of each key, as YAML comments at the end of the recipe."""
        rows = sorted(self.rows.values(), key=lambda row: (BECAME, NOT_NEEDED, REFUSED).index(row.fate))
        left = [f"{row.key} = {show(row.value)}" for row in rows]
        width = min(60, max(map(len, left), default=0))
        marks = {BECAME: "->", NOT_NEEDED: "not needed:", REFUSED: "refused:"}
        return [f"# {key:{width}}  {marks[row.fate]} {row.text}" for key, row in zip(left, rows, strict=True)]

    def report(self) -> str:
        """What became of each key, as a Markdown document for a review."""
        rows = ["| key | value | became | why |", "|---|---|---|---|"]
        for row in sorted(self.rows.values(), key=lambda row: (REFUSED, BECAME, NOT_NEEDED).index(row.fate)):
            source = row.origin if row.key in self.given else f"default of {self.dialect.title} {self.release}"
            became, why = (row.text, source) if row.fate == BECAME else (row.fate, row.text)
            cells = [str(cell).replace("|", "\\|") for cell in (f"`{row.key}`", show(row.value), became, why)]
            rows.append(f"| {' | '.join(cells)} |")
        head = [f"# Migration from {self.dialect.title}", f"Defaults filled in: those of {self.release}."]
        lists = [f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines)
                 for title, lines in (("Refused", self.problems), ("To check", self.warnings)) if lines]  # fmt: skip
        return "\n\n".join([*head, *lists, "## Keys", "\n".join(rows)]) + "\n"

    def _row(self, key: str, fate: str, text: str) -> None:
        self.rows[key] = Row(key, self.given.get(key, "(default)"), self.lines.get(key, ""), fate, text)

    def _unknown(self, key: str) -> str:
        close = self.dialect.closest(key)
        owners = [other.title for other in self.elsewhere if other.knows(key)]
        hint = f"; did you mean {close}?" if close else (
            f": not known to ingot; if it does not affect training, leave it out with {key}=null"
        )  # fmt: skip
        if owners:
            hint = f"; it is a key of {' and '.join(owners)}, and a run is described in one vocabulary."
        return f"unknown key {key} of {self.dialect.title}{hint}"


def order_of(release: str) -> tuple[int, ...]:
    """Releases in order: v1.0, v3.0, core_v0.1, core_v0.18, main."""
    if release in ("main", "HEAD"):
        return (2,)
    if not re.fullmatch(r"(core_)?[vr]?\d+(\.\d+)+", release):
        raise ConfigError(f"--peer-version {release} is not a release; write it as the tag, such as v2.0 or core_v0.15")
    numbers = [int(number) for number in re.findall(r"\d+", release)]
    return ("core" in release or numbers[0] == 0, *numbers)  # Megatron-LM's v1 to v3 are older than core_v0.1


def show(value: Any) -> str:
    text = f"{value:.15g}" if isinstance(value, float) else str(value)
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _above(table: Mapping[str, Any], key: str) -> Any:
    """The entry for a key, or for the nearest section around it."""
    return next((table[k] for k in (key, *ancestors(key)) if k in table), None)
