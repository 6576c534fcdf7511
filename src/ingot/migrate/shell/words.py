"""The words of a shell script: quotes, `$NAME`, `$(...)`, `$((...))`, and what separates them."""

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import NoReturn

from ingot.errors import ConfigError
from ingot.migrate.shell.syntax import Command, HereDocument, Part, Word

PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
SPECIAL = re.compile(r"\\|['\"$`]|[<>]\(")
ANSI_C = re.compile(r"\$'((?:\\.|[^'\\])*)'", re.DOTALL)
SPACES = re.compile(r"(?:[ \t]+|\\\n)*(?:#[^\n]*)?")
OPERATIONS = (":-", ":=", ":+", ":?", "-", "=", "+", "?")
METACHARACTERS = " \t\n;&|<>()"
Body = tuple[Command, ...]


class WordReader(ABC):
    """A text with a position. `line` is the number of its first line in the file."""

    def __init__(self, text: str, path: str, line: int) -> None:
        self.text, self.path, self.i, self.first = text, path, 0, line
        self.starts = [match.end() for match in re.finditer("\n", text)]
        self.waiting: list[HereDocument] = []

    @abstractmethod
    def body(self) -> Body:
        """Commands up to a closing keyword, a closing bracket or the end."""

    def at(self, i: int | None = None) -> str:
        return f"{self.path}:{self.first + bisect_right(self.starts, self.i if i is None else i)}"

    def fail(self, why: str, i: int | None = None) -> NoReturn:
        raise ConfigError(
            f"{self.at(i)}: cannot be read as a shell script: {why}; give the arguments after -- instead of it"
        )

    def blanks(self) -> None:
        """Skip spaces and a comment."""
        if match := SPACES.match(self.text, self.i):
            self.i = match.end()

    def newlines(self) -> None:
        self.blanks()
        while self.text.startswith("\n", self.i):
            self.newline()
            self.blanks()

    def newline(self) -> None:
        """Here-documents follow the line that asks for them."""
        self.i += 1
        for here in self.waiting:
            start, here.at = self.i, self.at()
            while True:
                if self.i >= len(self.text):
                    self.fail(f"the here-document has no {here.mark} at its end", start - 1)
                begin, end = self.i, self.text.find("\n", self.i)
                end = len(self.text) if end < 0 else end
                line, self.i = self.text[begin:end], min(end + 1, len(self.text))
                if (line.lstrip("\t") if here.tabs else line) == here.mark:
                    here.text = self.text[start:begin]
                    break
        self.waiting = []

    def keyword(self, *words: str) -> str:
        """The keyword that comes next, if it is one of these."""
        self.blanks()
        for word in words:
            end = self.i + len(word)
            if self.text.startswith(word, self.i) and self.text[end : end + 1] in ("", *METACHARACTERS):
                return word
        return ""

    def take(self, *words: str) -> str:
        found = self.keyword(*words)
        self.i += len(found)
        return found

    def need(self, word: str, start: int) -> None:
        self.newlines()
        if not (self.take(word) if word.isalpha() else self.symbol(word)):
            self.fail(f"what begins here has no {word}", start)

    def symbol(self, *symbols: str) -> str:
        self.blanks()
        found = next((s for s in symbols if self.text.startswith(s, self.i)), "")
        self.i += len(found)
        return found

    def word(self, stop: str = METACHARACTERS) -> Word:
        at, start = self.at(), self.i
        parts = self.parts(stop)
        if self.i == start:
            self.fail(f"unexpected '{self.text[self.i : self.i + 1]}'")
        return Word(parts, at, self.text[start : self.i])

    def parts(self, stop: str = METACHARACTERS, quoted: bool = False) -> tuple[Part, ...]:
        """The parts of a word up to one of these characters. `quoted`: of `"${X:-here}"`."""
        found: list[Part] = []
        while self.i < len(self.text) and (
            self.text[self.i] not in stop or self.text[self.i : self.i + 2] in ("<(", ">(")
        ):
            char, at = self.text[self.i], self.at()
            if self.text.startswith("\\\n", self.i):
                self.i += 2
            elif char == "\\":
                escaped = self.text[self.i + 1 : self.i + 2]
                kept = "\\" if quoted and escaped not in '$`"\\}' else ""
                found.append(Part("text", kept + escaped, at, True))
                self.i += 2
            elif char == "'" and not quoted:
                end = self.find("'")
                found += [Part("text", "", at, True), *self.lines(self.text[self.i + 1 : end], self.i + 1, True)]
                self.i = end + 1
            elif char == '"':
                start = self.i
                self.i += 1
                found += [Part("text", "", at, True), *self.quoted_parts('"', start)]
                self.i += 1
            elif (ansi := ANSI_C.match(self.text, self.i)) and not quoted:
                kind = "command" if "\\" in ansi[1] else "text"  # escapes are not followed
                found.append(Part(kind, ansi[0] if "\\" in ansi[1] else ansi[1], at, True))
                self.i = ansi.end()
            elif char in "$`" or self.text[self.i : self.i + 2] in ("<(", ">("):
                found.append(self.substitution(quoted))
            else:
                start = self.i
                self.i += 1
                while (
                    self.i < len(self.text) and self.text[self.i] not in stop and not SPECIAL.match(self.text, self.i)
                ):
                    self.i += 1
                found += self.lines(self.text[start : self.i], start, quoted)
        return tuple(found)

    def quoted_parts(self, end: str, start: int = 0) -> tuple[Part, ...]:
        """The parts between double quotes, or of a here-document if `end` is empty."""
        found: list[Part] = []
        begin = self.i
        while True:
            stop = self.i >= len(self.text)
            if stop and end:
                self.fail(f"{end} is never closed", start)
            if stop or self.text[self.i] == end or self.text[self.i] in "$`\\":
                found += self.lines(self.text[begin : self.i], begin, True)
                if stop or self.text[self.i] == end:
                    return tuple(found)
                if self.text[self.i] == "\\":
                    escaped = self.text[self.i + 1 : self.i + 2]
                    if escaped != "\n":
                        kept = "" if escaped and escaped in "$`\\" + end else "\\"
                        found.append(Part("text", kept + escaped, self.at(), True))
                    self.i += 2
                else:
                    found.append(self.substitution(True))
                begin = self.i
            else:
                self.i += 1

    def substitution(self, quoted: bool) -> Part:
        """What begins with `$`, a backtick, `<(` or `>(`."""
        at, start = self.at(), self.i
        if self.text[self.i] == "`":
            end = self.i + 1
            while end < len(self.text) and self.text[end] != "`":
                end += 2 if self.text[end] == "\\" else 1
            if end >= len(self.text):
                self.fail("` is never closed", start)
            inner = re.sub(r"\\([`$\\])", r"\1", self.text[start + 1 : end])
            self.i = end + 1
            body = type(self)(inner, self.path, int(at.rpartition(":")[2])).body()
            return Part("command", self.text[start : self.i], at, quoted, body=body)
        if self.text.startswith("$((", self.i):
            return Part("arithmetic", self.double_brackets(self.i + 3), at, quoted)
        if self.text[self.i + 1 : self.i + 2] == "(":
            self.i += 2
            body = self.body()
            self.need(")", start)
            return Part("command", self.text[start : self.i], at, quoted, body=body)
        if self.text.startswith("$[", self.i):
            self.i = self.find("]") + 1
            return Part("arithmetic", self.text[start + 2 : self.i - 1], at, quoted)
        if self.text.startswith("${", self.i):
            return self.parameter(at, quoted)
        name = PARAMETER.match(self.text, self.i + 1)
        if name is None:
            self.i += 1
            return Part("text", "" if self.text[self.i : self.i + 1] == '"' and not quoted else "$", at, True)
        self.i = name.end()
        return Part("parameter", name[0], at, quoted, name[0])

    def parameter(self, at: str, quoted: bool) -> Part:
        start = self.i
        self.i += 2
        match = PARAMETER.match(self.text, self.i)
        name = match[0] if match else ""
        if name and name.isdigit():
            name = re.compile(r"\d+").match(self.text, self.i)[0]  # type: ignore[index]  # it begins with a digit
        after = self.i + len(name)
        if name in ("#", "!") and self.text[after : after + 1] != "}":
            name = ""  # a length or a name in a variable
        self.i = after if name else self.i
        index = re.compile(r"\[([^\]\s]*)\]").match(self.text, self.i)
        self.i = index.end() if index else self.i
        op = "" if self.text.startswith("}", self.i) else next(
            (op for op in OPERATIONS if self.text.startswith(op, self.i)), "other"
        )  # fmt: skip
        self.i += len(op) if op != "other" else 0
        default = self.parts("}", quoted)
        if self.i >= len(self.text):
            self.fail("${ is never closed", start)
        self.i += 1
        text = self.text[start : self.i]
        return Part("parameter", text, at, quoted, name, index[1] if index else "", op if name else "other", default)

    def double_brackets(self, i: int) -> str:
        """The text from here to the matching `))`."""
        start, depth = i, 0
        while i < len(self.text) and (depth or not self.text.startswith("))", i)):
            depth += {"(": 1, ")": -1}.get(self.text[i], 0)
            i += 1
        if i >= len(self.text) or depth < 0:
            self.fail("(( is never closed", self.i)
        self.i = i + 2
        return self.text[start:i]

    def find(self, char: str) -> int:
        if (end := self.text.find(char, self.i + 1)) < 0:
            self.fail(f"{char} is never closed")
        return end

    def lines(self, text: str, start: int, quoted: bool) -> list[Part]:
        """A text as a part per line, so that each option is found in its own line."""
        found = []
        for line in text.splitlines(keepends=True):
            found.append(Part("text", line, self.at(start), quoted))
            start += len(line)
        return found
