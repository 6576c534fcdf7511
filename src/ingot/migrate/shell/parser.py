"""Bash as commands, strictly: what this grammar does not cover is an error with its line, never a guess.

Hand-written: bashlex 0.18 is GPL, and tree-sitter-bash 0.25 (MIT, 900 KB with its runtime) loses text without an error
node: the newline that begins a string, the spaces that begin a here-document. A pipe after `<<EOF` becomes part of the
redirection. Reading its tree would take about as many lines as this grammar.
"""

import re

from ingot.migrate.shell.syntax import (
    Arithmetic,
    Assignment,
    Case,
    Chain,
    Command,
    Function,
    Group,
    HereDocument,
    If,
    Loop,
    Part,
    Pipe,
    Simple,
    Word,
)  # fmt: skip
from ingot.migrate.shell.words import Body, WordReader

DECLARE = ("export", "declare", "typeset", "readonly", "local")
CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\s]*)\])?(\+?)=")
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n|;&]*>[\w./-]*(?=[ \t]*(?:#.*)?$)", re.MULTILINE)  # NAME=<your path>
REDIRECTION = re.compile(r"\d*(&>>?|<<<|<<-?|>>|>\||>&|<&|<>|[<>](?!\())")
FUNCTION = re.compile(r"[\w.:-]+[ \t]*\([ \t]*\)")
NAME = re.compile(r"[\w.:-]+")


def parse(text: str, path: str, line: int = 1) -> Body:
    """The commands of a text that begins in this line of the file."""
    parser = Parser(text, path, line)
    found = parser.body()
    if parser.i < len(text):
        parser.fail(f"unexpected '{text[parser.i]}'")
    return found


def parse_quoted(text: str, path: str, line: int) -> Word:
    """The text of a here-document, which expands as if between double quotes."""
    parser = Parser(text, path, line)
    return Word(parser.quoted_parts(""), f"{path}:{line}", text)


class Parser(WordReader):
    """The grammar of commands."""

    def body(self) -> Body:
        found: list[Command] = []
        self.newlines()
        while self.i < len(self.text) and not self.keyword(*CLOSING) and self.text[self.i] not in ")":
            if self.text.startswith(";;", self.i) or self.text.startswith(";&", self.i):
                break
            at = self.at()
            command = self.chain()
            background = not self.text.startswith("&&", self.i) and self.symbol("&")
            found.append(Group(at, (command,), True) if background else command)
            if not background and not self.text.startswith((";;", ";&"), self.i):
                self.symbol(";")
            self.newlines()
        return tuple(found)

    def chain(self) -> Command:
        at, start = self.at(), self.i
        first, rest = self.pipeline(), list[tuple[str, Command, str]]()
        while True:
            before = self.text[start : self.i].strip()
            if not (op := self.symbol("&&", "||")):
                return Chain(at, first, tuple(rest)) if rest else first
            self.newlines()
            rest.append((op, self.pipeline(), before))

    def pipeline(self) -> Command:
        at, negated = self.at(), False
        while word := self.take("!", "time"):
            negated ^= word == "!"
            self.take("-p")
        commands = [self.command()]
        while self.text[self.i : self.i + 2] != "||" and self.symbol("|&", "|"):
            self.newlines()
            commands.append(self.command())
        return Pipe(at, tuple(commands), negated) if negated or commands[1:] else commands[0]

    def command(self) -> Command:
        at, start = self.at(), self.i
        found: Command
        if self.text.startswith("((", self.i):
            found = Arithmetic(at, self.double_brackets(self.i + 2))
        elif self.symbol("("):
            found = Group(at, self.body(), subshell=True)
            self.need(")", start)
        elif self.take("{"):
            found = Group(at, self.body())
            self.need("}", start)
        elif self.take("if"):
            found = self.conditional(at, start)
        elif word := self.take("while", "until", "for", "select"):
            found = self.loop(word, at, start)
        elif self.take("case"):
            found = self.case(at, start)
        elif self.take("function") or FUNCTION.match(self.text, self.i):
            return self.function(at)
        elif self.keyword("coproc"):
            self.fail("coproc")
        else:
            return self.simple(at)
        self.redirections([])
        return found

    def function(self, at: str) -> Command:
        self.blanks()
        if not (name := NAME.match(self.text, self.i)):
            self.fail("a function needs a name")
        self.i = name.end()
        if self.symbol("("):
            self.need(")", self.i)
        self.newlines()
        return Function(at, name[0], self.command())

    def conditional(self, at: str, start: int) -> Command:
        branches = []
        word = "if"
        while word != "fi":
            begin = self.i
            condition = self.body() if word != "else" else ()
            text = self.text[begin : self.i].strip(" \t\n;")
            if word != "else":
                self.need("then", start)
            branches.append((condition, text, self.body()))
            if not (word := self.take("elif", "else", "fi")):
                self.fail("this if has no fi", start)
        return If(at, tuple(branches))

    def loop(self, word: str, at: str, start: int) -> Command:
        name, items, condition = "", None, Body()
        if word in ("while", "until"):
            condition = self.body()
        else:
            self.blanks()
            if self.text.startswith("((", self.i):
                condition = (Arithmetic(at, self.double_brackets(self.i + 2)),)
            elif match := NAME.match(self.text, self.i):
                name, self.i = match[0], match.end()
                self.newlines()
                found = list[Word]()
                if self.take("in"):
                    self.blanks()
                    while self.i < len(self.text) and self.text[self.i] not in ";\n":
                        found.append(self.word())
                        self.blanks()
                    items = tuple(found) if word == "for" else None
            self.symbol(";")
        self.newlines()
        if not name and word not in ("while", "until") and self.text.startswith("{", self.i):
            self.fail("a loop with braces")
        self.need("do", start)
        body = self.body()
        self.need("done", start)
        return Loop(at, body, name, items, condition)

    def case(self, at: str, start: int) -> Command:
        self.blanks()
        word, clauses, falls = self.word(), [], False
        self.need("in", start)
        self.newlines()
        while not self.take("esac"):
            if self.i >= len(self.text):
                self.fail("this case has no esac", start)
            self.symbol("(")
            patterns = list[Word]()
            while not patterns or self.symbol("|"):
                self.blanks()
                patterns.append(self.word())
            self.need(")", start)
            clauses.append((tuple(patterns), self.body()))
            falls |= self.symbol(";;&", ";;", ";&") in (";;&", ";&")
            self.newlines()
        return Case(at, word, tuple(clauses), falls)

    def simple(self, at: str) -> Command:
        assignments: list[Assignment] = []
        words: list[Word] = []
        here: list[HereDocument] = []
        start = self.i
        while True:
            self.redirections(here)
            if self.i >= len(self.text) or self.text[self.i] in ";&|\n)":
                break
            declares = bool(words) and words[0].text in DECLARE
            match = ASSIGNMENT.match(self.text, self.i)
            if match and (not words or declares):
                assignments.append(self.assignment(match))
            elif not words and self.keyword("[["):
                words += self.double_square()
            else:
                words.append(self.word())
        if self.i == start:
            self.fail("a command is missing")
        return Simple(at, tuple(assignments), tuple(words), tuple(here))

    def assignment(self, match: re.Match[str]) -> Assignment:
        at, self.i = self.at(), match.end()
        name, index, append = match[1], match[2] or "", bool(match[3])
        if self.text.startswith("(", self.i):
            start, items = self.i, list[Word]()
            self.i += 1
            self.newlines()
            while not self.text.startswith(")", self.i):
                if self.i >= len(self.text):
                    self.fail("( is never closed", start)
                items.append(self.word())
                self.newlines()
            self.i += 1
            return Assignment(name, at, None, tuple(items), index, append)
        if placeholder := PLACEHOLDER.match(self.text, self.i):
            self.i = placeholder.end()
            part = Part("command", placeholder[0], at)
            return Assignment(name, at, Word((part,), at, placeholder[0]), None, index, append)
        start = self.i
        return Assignment(name, at, Word(self.parts(), at, self.text[start : self.i]), None, index, append)

    def double_square(self) -> list[Word]:
        """`[[ ... ]]`, where words end at spaces only."""
        start, words = self.i, [self.word()]
        while True:
            self.newlines()
            if self.i >= len(self.text):
                self.fail("[[ is never closed", start)
            words.append(self.word(" \t\n;" if self.keyword("]]") else " \t\n"))
            if words[-1].text == "]]":
                return words

    def redirections(self, here: list[HereDocument]) -> None:
        self.blanks()
        while match := REDIRECTION.match(self.text, self.i):
            self.i = match.end()
            self.blanks()
            if match[1] in ("<<", "<<-"):
                begin = self.i
                mark = self.word()
                text = self.text[begin : self.i]
                plain = re.sub(r"[\\'\"]", "", text)
                here.append(HereDocument(plain, plain != text, match[1] == "<<-", at=mark.at))
                self.waiting.append(here[-1])
            elif self.i >= len(self.text) or self.text[self.i] in " \t\n;&|()":
                self.fail(f"{match[1]} names no file")
            else:
                self.word()
            self.blanks()
