"""Words as the arguments that bash would make of them: parameters, arithmetic, quotes, word splitting."""

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from ingot.migrate.shell import arithmetic
from ingot.migrate.shell.syntax import Part, Word
from ingot.migrate.shell.values import Array, Fragment, State, Text, Value, plain, shown, split, unknown

SUPPLIED = "--set"  # where such a value is from
OPEN = "_open_"  # begins the names of variables that stand for what is not known of a text
SPECIAL = re.compile(
    r"[#?$!0_-]|RANDOM|SRANDOM|SECONDS|LINENO|EPOCH\w+|BASH\w*|PWD|OLDPWD|FUNCNAME|PIPESTATUS|PPID|E?UID"
)
LAUNCHER = re.compile(  # a job's environment says these
    r"SLURM_\w+|OMPI_\w+|PMI\w*|PBS_\w+|LSB_\w+|PET_\w+|(?:LOCAL_|NODE_|GROUP_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)"
    r"|HOSTNAME|HOME|USER|CUDA_VISIBLE_DEVICES"
)
Fragments = list[Fragment | None]
"""None ends an argument."""


class Expander(ABC):
    """`supplied` holds the values of --set, `used` those that were asked for, `defaults` what the script fills in."""

    def __init__(self, supplied: dict[str, str]) -> None:
        self.supplied, self.used = supplied, set[str]()
        self.defaults: dict[str, tuple[str, str]] = {}

    @abstractmethod
    def assign(self, name: str, value: Value, state: State, at: str) -> None: ...

    @abstractmethod
    def substitute(self, part: Part, state: State) -> None:
        """Look for the training command in `$(...)`."""

    def unsettled(self, name: str, why: str, at: str = "") -> Value:
        """The value that is given for a name which the script does not settle."""
        if name not in self.supplied:
            return unknown(name, why, at)
        self.used.add(name)
        if name == "@":
            return Array(tuple((Fragment(word, SUPPLIED, True),) for word in shlex.split(self.supplied[name])))
        return (Fragment(self.supplied[name], SUPPLIED),)

    def find(self, name: str, state: State, at: str) -> Value | None:
        """A variable's value; None if the script does not set it."""
        if name in ("@", "*") or name.isdigit():
            return self._positional(name, state, at)
        if SPECIAL.fullmatch(name):
            return self.unsettled(name, "is not known before the script runs", at)
        value = state.find(name)
        if value is None and (name in self.supplied or LAUNCHER.fullmatch(name)):
            return self.unsettled(name, "comes from the environment of the job", at)
        if isinstance(value, tuple) and any(piece.why for piece in value) and name in self.supplied:
            return self.unsettled(name, "", at)
        return value

    def _positional(self, name: str, state: State, at: str) -> Value | None:
        value = state.values.get("@")
        if name == "0":
            return unknown(name, "is the name that the script is called by", at)
        if value is None:
            return self.unsettled("@" if name == "*" else name, "comes from the caller of the script", at)
        if not isinstance(value, Array):  # no longer what the caller gave, so --set 1=... does not say what $1 is here
            why = next((piece.why for piece in value if piece.why), "is not certain")
            return self.unsettled("@", why, at) if name in ("@", "*") else (Fragment(f"${name}", at, why=why),)
        if name in ("@", "*"):
            return value
        return value.items[int(name) - 1] if 0 < int(name) <= len(value.items) else ()

    def arguments(self, words: Iterable[Word], state: State) -> list[Text]:
        return [field for word in words for field in self.fields(word, state)]

    def fields(self, word: Word, state: State) -> list[Text]:
        """The arguments that a word becomes."""
        pieces = self._pieces(word.parts, state, False)
        several = [
            part for part in word.parts if part.quoted and part.kind == "parameter" and "@" in (part.index, part.name)
        ]
        quotes = sum(part.kind == "text" for part in word.parts)
        if several and len(pieces) == quotes and not any(piece is None or piece.text for piece in pieces):
            return [] if quotes <= 1 else [unknown(several[0].name, "may be nothing at all", word.at)]
        return split(pieces)

    def joined(self, word: Word, state: State) -> Text:
        """The string that a word becomes in an assignment."""
        found = self._pieces(word.parts, state, True)
        first = word.parts[0] if word.parts else None
        if first and first.kind == "text" and not first.quoted and re.match(r"~|[^'\"]*:~", first.text):
            return (Fragment(shown(tuple(p for p in found if p)), word.at, why="begins with a home folder"),)
        return tuple(piece for piece in found if piece is not None)

    def _pieces(self, parts: Iterable[Part], state: State, joined: bool) -> Fragments:
        found: Fragments = []
        for part in parts:
            if part.kind == "text":
                found.append(Fragment(part.text, part.at, part.quoted))
            elif part.kind == "parameter":
                found += self._parameter(part, state, joined)
            elif part.kind == "arithmetic":
                found.append(self._arithmetic(part, state))
            else:
                self.substitute(part, state)
                text = re.sub(r"\$\{(\w+)\}", r"$\1", part.text).replace("${", "$")
                found.append(Fragment(text, part.at, part.quoted, "is the output of a command, and none is run"))
        return found

    def _arithmetic(self, part: Part, state: State) -> Fragment:
        for name in arithmetic.assigned_names(part.text):
            self.assign(name, unknown(name, f"is computed at {part.at}", part.at), state, part.at)
        written = f"$(({part.text.replace('{', '').replace('}', '')}))"
        if re.search(r"\$\((?!\()|`", part.text):
            return Fragment(written, part.at, part.quoted, "needs the output of a command, and none is run")
        value, missing = arithmetic.evaluate(part.text, lambda name: plain(self.find(name, state, part.at)))
        if value is not None:
            return Fragment(str(value), part.at, part.quoted)
        missed = self.find(missing, state, part.at) if missing else None
        why = next((piece.why for piece in missed if piece.why), "") if isinstance(missed, tuple) else ""
        reason = (
            f"needs {missing}, which {why or 'is not a number that the script sets'}" if missing else "is not evaluated"
        )
        return Fragment(written, part.at, part.quoted, reason, missing)

    def _parameter(self, part: Part, state: State, joined: bool) -> Fragments:
        every = part.name in ("@", "*") or part.index in ("@", "*")
        if part.op == "other":
            text = part.text.replace("${", "$").rstrip("}")
            return [
                Fragment(text, part.at, part.quoted and not every, f"is changed by {part.text.strip('${}')}", part.name)
            ]
        value = self.find(part.name, state, part.at)
        if part.index and not every:
            value = self._item(value, part, state)
        elif isinstance(value, Array) and not every:
            value = value.items[0] if value.items else ()
        if part.op:
            chosen = self._defaulted(value, part, state)
            if chosen is not None:
                return chosen
        if value is None:
            value = self.unsettled(part.name, "is not set in the script", part.at)
        if every and not isinstance(value, Array) and value and value[0].at == SUPPLIED:
            value = Array(tuple((Fragment(word, SUPPLIED, True),) for word in shlex.split(value[0].text)))
        if isinstance(value, Array):
            return self._items(value, part, joined)
        if every:  # an unknown list may be several words even between quotes
            return [replace(p, at=p.at or part.at, quoted=part.quoted and not p.why) for p in value]
        several = part.name.startswith(OPEN) or any(re.search(r"\s", piece.text) for piece in value)
        value = tuple(_between_quotes(p, part, joined) for p in value)
        return [
            replace(p, quoted=part.quoted or p.optional, at=p.at if several and p.at not in ("", SUPPLIED) else part.at)
            for p in value
        ]

    def _item(self, value: Value | None, part: Part, state: State) -> Value:
        number = part.index if part.index.isdigit() else plain(self.find(part.index.lstrip("$"), state, part.at)) or ""
        if (
            isinstance(value, Array)
            and number.isdigit()
            and not any(p.why or p.optional for i in value.items for p in i)
        ):
            return value.items[int(number)] if int(number) < len(value.items) else ()
        return (Fragment(f"${part.name}[{part.index}]", part.at, why="is not certain", name=part.name),)

    def _items(self, value: Array, part: Part, joined: bool) -> Fragments:
        apart = not joined and not (part.quoted and "*" in (part.name, part.index))
        found: Fragments = []
        for i, item in enumerate(value.items):
            if i:
                found.append(None if apart else Fragment(" ", part.at, part.quoted or joined))
            kept = part.quoted and apart
            item = tuple(_between_quotes(p, part, joined) for p in item)
            found += [
                replace(p, at=p.at or part.at, quoted=p.quoted if kept else part.quoted or p.optional) for p in item
            ]
            if kept and not item:
                found.append(Fragment("", part.at, True))
        return found

    def _defaulted(self, value: Value | None, part: Part, state: State) -> Fragments | None:
        """What `${NAME:-default}` and its like become; None for the value itself."""
        empty = part.op.startswith(":")
        if value is None:
            if part.op[-1] not in "-=":
                return None if part.op[-1] == "?" else self._open(part)
            filled = tuple(p for p in self._pieces(part.default, state, True) if p)
            self.defaults.setdefault(part.name, (part.at, shown(filled)))
            usable = False
        elif isinstance(value, Array):
            usable = bool(value.items)
            if usable and all(p.optional for item in value.items for p in item):
                return self._open(part)
        elif (text := plain(value)) is not None:
            usable = bool(text) or not empty
            if not text and value == () and part.name.isdigit():
                usable = False
        elif any(piece.text for piece in value if not (piece.why or piece.optional)):
            usable = True
        else:
            return self._open(part, next((piece.why for piece in value if piece.why), ""))
        if part.op[-1] == "+":
            return self._pieces(part.default, state, False) if usable else []
        if usable or part.op[-1] == "?":
            return None
        if part.op[-1] == "=":
            default = tuple(p for p in self._pieces(part.default, state, True) if p)
            self.assign(part.name, default, state, part.at)
        return self._pieces(part.default, state, False)

    def _open(self, part: Part, why: str = "") -> Fragments:
        value = self.unsettled(part.name, why or "is not set in the script", part.at)
        return [replace(p, quoted=part.quoted, at=part.at) for p in value] if isinstance(value, tuple) else []


def _between_quotes(piece: Fragment, part: Part, joined: bool) -> Fragment:
    """Options without effect that may be missing: between quotes they are one argument, which may be empty."""
    if not piece.optional:
        return piece
    one = part.quoted and not joined and "@" not in (part.name, part.index)
    return replace(piece, why="may be an empty argument" if one else "")
