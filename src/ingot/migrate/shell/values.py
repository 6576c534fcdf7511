"""What is known of the variables of a script at one point of it.

A value is a string or an array of pieces. A piece whose text is not certain says why, and which variable settles it.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

from ingot.migrate.shell.syntax import Function

FILE_PATTERN = re.compile(r"[*?\[]|\{[^}]*,|\{[^}]*\.\.|(?:^|[=:])~")


@dataclass(frozen=True)
class Fragment:
    """A part of a value, and whether the shell leaves its spaces alone."""

    text: str
    at: str
    quoted: bool = False
    why: str = ""
    """Why the text is not certain, as the end of `$NAME ...`; empty if it is."""
    name: str = ""
    """The variable that settles it."""
    optional: bool = False
    """Options without effect, in place of which there may be none."""


Text = tuple[Fragment, ...]


@dataclass(frozen=True)
class Array:
    items: tuple[Text, ...]


Value = Text | Array


@dataclass
class State:
    """The variables after the commands so far. A name without a value may come from the environment."""

    values: dict[str, Value] = field(default_factory=dict)
    functions: dict[str, Function | None] = field(default_factory=dict)  # None: may be one of several
    exported: set[str] = field(default_factory=set)
    fixed: dict[str, str] = field(default_factory=dict)  # names that are never certain again, and why
    readonly: set[str] = field(default_factory=set)
    wild: str = ""  # why any other name may have been set
    dead: bool = False  # whether the script has ended here

    def copy(self) -> "State":
        return State(dict(self.values), dict(self.functions), set(self.exported), dict(self.fixed), set(self.readonly),
                     self.wild, self.dead)  # fmt: skip

    def become(self, other: "State") -> None:
        self.__dict__.update(other.copy().__dict__)

    def find(self, name: str) -> Value | None:
        why = self.fixed.get(name) or ("" if name in self.values else self.wild)
        return unknown(name, why, "") if why else self.values.get(name)

    def forget_all(self, why: str) -> None:
        self.values, self.functions, self.wild = {}, {}, why

    def changed(self, other: "State") -> set[str]:
        """The names whose values differ."""
        names = {*self.values, *other.values, *self.fixed, *other.fixed}
        return {name for name in names if identity(self.find(name)) != identity(other.find(name))}


def unknown(name: str, why: str, at: str) -> Text:
    return (Fragment(f"${name}", at, why=why, name=name),)


def plain(value: Value | None) -> str | None:
    """The text of a string, or of an array's first item, if it is certain."""
    value = (value.items[0] if value.items else ()) if isinstance(value, Array) else value
    if value is None or any(piece.why or piece.optional for piece in value):
        return None
    return "".join(piece.text for piece in value)


def shown(text: Text) -> str:
    return "".join(piece.text for piece in text)


def identity(value: Value | None) -> object:
    """What two values that are the same have in common."""
    if isinstance(value, Array):
        return [identity(item) for item in value.items]
    if value is None:
        return None
    parts: list[tuple[str, str, bool]] = []
    for certain, pieces in groupby(value, lambda piece: not (piece.why or piece.optional)):
        if certain:  # however it was divided
            parts += [(text, "", False)] if (text := "".join(piece.text for piece in pieces)) else []
        else:
            parts += [(piece.text, piece.why, piece.optional) for piece in pieces]
    return tuple(parts)


def split(pieces: Iterable[Fragment | None]) -> list[Text]:
    """The words that the shell makes of an expanded word: all is cut at None, and what is not quoted at spaces."""
    words: list[list[Fragment]] = []
    going_on = False
    for piece in pieces:
        if piece is None:
            going_on = False
            continue
        whole = piece.quoted or bool(piece.why)
        for part in [piece.text] if whole else re.split(r"([ \t\n]+)", piece.text):
            if not piece.quoted and not part.strip(" \t\n"):
                going_on = going_on and not part
                continue
            if not going_on:
                words.append([])
            found = replace(piece, text=part, quoted=piece.quoted or not piece.why)
            if not whole and FILE_PATTERN.search(part) and part != "[":
                found = replace(found, text=f"$({part})", why="names files or patterns that the shell fills in")
            words[-1].append(found)
            going_on = True
    return [_with_pattern(tuple(word)) for word in words]


def _with_pattern(word: Text) -> Text:
    """`[` alone is a command, but begins a pattern in `[$X]`."""
    if len(word) > 1 and any(piece.text == "[" and not piece.why for piece in word):
        return (Fragment(shown(word), word[0].at, True, "names files or patterns that the shell fills in"),)
    return word


def merge(
    states: list[State], why: str, unsettled: Callable[[str, str], Value], droppable: Callable[[list[Text]], bool]
) -> State:
    """What is certain after one of several branches, of which `why` does not say which is taken.

    `droppable` says whether an option, with its values, changes nothing.
    """
    alive = [state for state in states if not state.dead] or states[:1]
    merged = alive[0].copy()
    for other in alive[1:]:
        for name in merged.changed(other):
            both = [merged.find(name), other.find(name)]
            common = _without_effect(both, droppable)
            decides = ", ".join(sorted(_options(both[0]) ^ _options(both[1]))[:4])
            reason = f"{why} ({decides})" if decides else why
            merged.values[name] = unsettled(name, reason) if common is None else common
        for name in {*merged.functions, *other.functions}:
            if merged.functions.get(name) != other.functions.get(name):
                merged.functions[name] = None
        merged.exported &= other.exported
        merged.fixed |= other.fixed
        merged.readonly |= other.readonly
        merged.wild = merged.wild or other.wild
    return merged


def _options(value: Value | None) -> set[str]:
    """The options among the words of a value."""
    items = value.items if isinstance(value, Array) else [value or ()]
    return {word for item in items for word in re.findall(r"(?<!\S)--[\w-]+", shown(item))}


def _without_effect(values: list[Value | None], droppable: Callable[[list[Text]], bool]) -> Value | None:
    """A value for all of these if they differ in options without effect only."""
    arrays = {isinstance(value, Array) for value in values if value is not None}
    if len(arrays) != 1 or (values.count(None) and arrays == {False}):
        return None
    kept = [_important(value, droppable) for value in values]
    if any(identity(Array(words)) != identity(Array(kept[0])) for words in kept[1:]):
        return None
    words = [*kept[0], (Fragment("(options)", "", True, optional=True),)]
    if arrays == {True}:
        return Array(tuple(words))
    return tuple(piece for word in words for piece in (*word, Fragment(" ", piece_at(word))))


def piece_at(word: Text) -> str:
    return word[0].at if word else ""


def _important(value: Value | None, droppable: Callable[[list[Text]], bool]) -> tuple[Text, ...]:
    """The words of a value without the options that change nothing."""
    if value is None:
        return ()
    loose = value if isinstance(value, Array) else Array(tuple(split(replace(p, quoted=False) for p in value)))
    groups: list[list[Text]] = [[]]
    for word in loose.items:
        if word and not word[0].why and word[0].text.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return tuple(word for group in groups for word in group if not (group and droppable(group)))
