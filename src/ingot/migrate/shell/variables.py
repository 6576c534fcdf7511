"""Assignments: `NAME=`, `+=`, lists, `export`, `declare`, `local`, `set --`."""

import re
from dataclasses import replace
from pathlib import Path

from ingot.errors import ConfigError
from ingot.migrate.shell.expand import Expander
from ingot.migrate.shell.syntax import Assignment, Simple
from ingot.migrate.shell.values import Array, State, Text, Value, plain, shown, unknown

AS_SET = re.compile(r"[-+][eEuxvhmbBCHPTo]+|pipefail|errexit|nounset|xtrace|verbose|noclobber|monitor")
INSTEAD = "give the arguments after -- instead of the script"


class Variables(Expander):
    """Changes the variables of a state, and forgets those whose value is not certain."""

    def __init__(self, path: Path, supplied: dict[str, str]) -> None:
        super().__init__(supplied)
        self.path = str(path)
        self.locals: list[dict[str, Value | None]] = []
        """For each function that is being followed, the values of its local names before it."""
        self.branch, self.branches = 0, list[int]()  # unknown conditions around this command, and around each function

    def assign(self, name: str, value: Value, state: State, at: str) -> None:
        if name == "IFS":
            raise ConfigError(f"{at}: IFS changes how words are split, so they are not certain; {INSTEAD}")
        if name in state.readonly:
            raise ConfigError(f"{at}: {name} is read-only and set again, where bash stops with an error; remove one of "
                              "the two assignments")  # fmt: skip
        if isinstance(value, tuple) and any(p.why for p in value) and name in self.supplied:
            value = self.unsettled(name, "", at)
        elif isinstance(value, tuple) and len(value) == 1 and value[0].why:
            # the script's own name for it says more than `$2`
            piece = value[0]
            source = "" if piece.text == f"${name}" else f"is {piece.text} in {self.line(at)}, which "
            value = unknown(name, f"{source}{piece.why}", at)
        state.values[name] = value

    def forget(self, name: str, why: str, state: State) -> None:
        state.values[name] = self.unsettled(name, why)

    def line(self, at: str) -> str:
        path, _, number = at.rpartition(":")
        return f"line {number}" if path == self.path else at

    def set(self, change: Assignment, value: Value, state: State) -> None:
        before, at = state.find(change.name), change.at
        if isinstance(value, Array) or isinstance(before, Array):
            self.assign(change.name, (), state, at)  # its checks
        if change.index or state.fixed.get(change.name):
            self.forget(change.name, f"is set in part in {self.line(at)}", state)
        elif isinstance(value, Array):
            if not change.append:
                state.values[change.name] = value
            elif isinstance(before, Array) or before is None:
                state.values[change.name] = Array((*(before.items if before else ()), *value.items))
            else:
                state.values[change.name] = Array((before, *value.items))
        elif isinstance(before, Array):
            if change.append or not before.items:
                self.forget(change.name, f"is a list and a string in {self.line(at)}", state)
            else:
                state.values[change.name] = Array((value, *before.items[1:]))
        elif change.append:
            if before is None:
                found = self.find(change.name, state, at)
                before = found if isinstance(found, tuple) else unknown(change.name, "is not set in the script", at)
            self.assign(change.name, (*before, *value), state, at)
        else:
            self.assign(change.name, value, state, at)

    def value(self, change: Assignment, state: State) -> Value:
        if change.items is not None:
            if any(re.match(r"\[[^\]]*\]\+?=", word.text) for word in change.items):
                return unknown(change.name, "is an array with indexes", change.at)
            return Array(tuple(self.arguments(change.items, state)))
        assert change.value is not None
        return self.joined(change.value, state)

    def declare(self, command: Simple, state: State) -> None:
        """`export`, `declare`, `typeset`, `readonly` and `local`, which expand all values before they set any."""
        words, at = self.arguments(command.words, state), command.at
        keyword = plain(words[0]) or ""
        options = "".join(shown(word) for word in words[1:] if re.fullmatch(r"[-+]\w+", shown(word)))
        if "f" in options or "p" in options:
            return
        if "n" in options and keyword != "export":
            raise ConfigError(f"{at}: {keyword} {options} makes one name stand for another; {INSTEAD}")
        values = {change: self.value(change, state) for change in command.assignments}
        names = [change.name for change in command.assignments]
        for word in words[1:]:
            match = re.match(r"([A-Za-z_]\w*)(=?)", word[0].text) if word and not word[0].why else None
            if re.fullmatch(r"[-+]\w+", shown(word)):
                continue
            if match is None or (not match[2] and plain(word) is None):
                state.forget_all(f"may be set by {keyword} in {self.line(at)}")
                continue
            names.append(match[1])
            if match[2]:
                rest = (replace(word[0], text=word[0].text[match.end() :]), *word[1:])
                values[Assignment(match[1], at)] = rest
        if keyword == "local" and not self.locals:
            for name in names:
                self.forget(name, f"is local outside a function in {self.line(at)}", state)
            return
        if keyword == "local" or (self.locals and keyword in ("declare", "typeset") and "g" not in options):
            self._make_local(names, [change.name for change in values], state, at)
        for change, value in values.items():
            self.set(change, value, state)
        if keyword == "export" or "x" in options:
            state.exported |= set(names)
        if keyword == "readonly" or "r" in options:
            state.readonly |= set(names)
        if re.search(r"[iAluc]", options):
            state.fixed |= {name: f"is declared with {options} in {self.line(at)}" for name in names}

    def _make_local(self, names: list[str], given: list[str], state: State, at: str) -> None:
        for name in names:
            certain = self.branch == self.branches[-1] if self.branches else True
            kept = state.find(name) if certain else unknown(name, "may be local to a function", at)
            if self.locals:
                self.locals[-1].setdefault(name, kept)
            if name not in given:
                state.values[name] = unknown(name, f"has no value in {self.line(at)}", at)

    def options(self, words: list[Text], at: str, state: State) -> None:
        """`set`: its options, and the positional parameters after them."""
        texts = [plain(word) for word in words]
        count = 0
        while count < len(texts) and re.match(r"[-+]", texts[count] or "") and texts[count] != "--":
            count += 2 if (texts[count] or "").endswith("o") and count + 1 < len(texts) else 1
        for text in texts[:count]:
            if text in ("-a", "allexport"):
                state.exported.add("*")
            elif not AS_SET.fullmatch(text or ""):
                raise ConfigError(f"{at}: set {text} may change how words are read; {INSTEAD}")
        rest = words[count + 1 :] if texts[count : count + 1] == ["--"] else words[count:]
        if rest or count < len(texts):
            certain = all(plain(word) is not None for word in rest)
            state.values["@"] = Array(tuple(rest)) if certain else unknown("@", f"is set in {self.line(at)}", at)
