"""A shell script as a list of commands, each with the condition, loop or function around it. Nothing is expanded here,
and nothing is run."""

import re
from dataclasses import dataclass, field

OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()\n]")
REDIRECTION = re.compile(r"&>>?|\d*(?:<<<|>>|>\||>&|<&|<>|[<>])")
HEREDOC = re.compile(r"\d*<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([^\s'\";|&<>()]+))")
ARRAY = re.compile(r"[A-Za-z_]\w*(\[[^\]]*\])?\+?=")
OPENING = ("if", "while", "until", "for", "select", "case")
WITHIN = ("then", "elif", "else", "do", "!", "time")
TESTS = ("[", "[[", "test", "((", "if", "false")


class Unclosed(Exception):
    """A quote or a parenthesis that never ends."""

    def __init__(self, mark: str, line: int) -> None:
        super().__init__(mark)
        self.mark, self.line = mark, line


@dataclass(frozen=True)
class Token:
    """A word as it is written, an operator, or the text of a heredoc."""

    kind: str
    text: str
    line: int


@dataclass
class Statement:
    """One simple command."""

    words: list[Token] = field(default_factory=list)
    heredocs: list[Token] = field(default_factory=list)
    line: int = 0
    block: int = 0
    """The line of the outermost condition, loop, function or subshell around it; 0 if there is none."""
    function: bool = False
    chained: int = 0
    """After `&&`: 1; after `||`, or after a test: 2."""
    piped: bool = False


def end_of(text: str, i: int, quoted: bool = False) -> int:
    """Where the character, the escape, the quoted part or the substitution that starts at `i` ends."""
    pair = text[i : i + 2]
    if text[i] == "\\":
        return min(i + 2, len(text))
    if text[i] == "'" and not quoted:
        return _find(text, "'", i, i + 1)
    if text[i] == "`":
        return _closed(text, i, i + 1, "`")
    if text[i] == '"' and not quoted:
        return _closed(text, i, i + 1, '"')
    if pair == "${":
        return _closed(text, i, i + 2, "}")
    if pair == "$(":
        return _closed(text, i, i + 2, ")")
    if text[i] == "$" and (name := re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(text, i)):
        return name.end()
    return i + 1


def _find(text: str, mark: str, start: int, i: int) -> int:
    end = text.find(mark, i)
    if end < 0:
        raise Unclosed(text[start], text.count("\n", 0, start) + 1)
    return end + 1


def _closed(text: str, start: int, i: int, mark: str) -> int:
    depth = 0
    while i < len(text):
        if text[i] == mark and not depth:
            return i + 1
        if mark == ")" and text[i] in "()":
            depth += 1 if text[i] == "(" else -1
        if mark == ")" and text[i] == "#" and text[i - 1].isspace():  # a comment in an array
            i = text.find("\n", i) if "\n" in text[i:] else len(text)
            continue
        i = end_of(text, i, quoted=mark == '"') if mark != "`" or text[i] == "\\" else i + 1
    raise Unclosed(text[start], text.count("\n", 0, start) + 1)


def lex(text: str) -> list[Token]:
    """Words and operators, without comments; a heredoc is one token after the line that asks for it."""
    tokens: list[Token] = []
    waiting: list[tuple[str, bool]] = []
    i = 0
    while i < len(text):
        line = text.count("\n", 0, i) + 1
        if text[i] in " \t\r":
            i += 1
        elif text.startswith("\\\n", i):
            i += 2
        elif text[i] == "#":
            i = text.find("\n", i) if "\n" in text[i:] else len(text)
        elif match := HEREDOC.match(text, i):
            waiting.append((match[2] or match[3] or match[4], bool(match[1])))
            i = match.end()
        elif text[i] == "\n" and waiting:
            i, found = _heredocs(text, i + 1, waiting)
            tokens += [*found, Token("operator", "\n", line)]
            waiting = []
        elif text.startswith("((", i):
            end = _closed(text, i, i + 1, ")")
            tokens.append(Token("word", text[i:end], line))
            i = end
        elif match := REDIRECTION.match(text, i):
            tokens.append(Token("redirection", match[0], line))
            i = match.end()
        elif match := OPERATOR.match(text, i):
            tokens.append(Token("operator", match[0], line))
            i = match.end()
        else:
            end = _end_of_word(text, i)
            tokens.append(Token("word", text[i:end], line))
            i = end
    return tokens


def _end_of_word(text: str, start: int) -> int:
    i = start
    while i < len(text) and text[i] not in " \t\r\n;&|<>()":
        i = end_of(text, i)
        if text[i : i + 1] == "(" and ARRAY.fullmatch(text[start:i]):
            i = _closed(text, i, i + 1, ")")
    return max(i, start + 1)


def _heredocs(text: str, i: int, waiting: list[tuple[str, bool]]) -> tuple[int, list[Token]]:
    found = []
    for mark, tabs in waiting:
        start = i
        while i < len(text):
            end = text.find("\n", i) + 1 or len(text)
            last, i = text[i:end].rstrip("\n"), end
            if (last.lstrip("\t") if tabs else last) == mark:
                break
        found.append(Token("heredoc", text[start:i], text.count("\n", 0, start) + 1))
    return i, found


def array_words(raw: str, line: int) -> list[Token]:
    """The words of `(A B C)`."""
    words = [token for token in lex(raw[1:-1]) if token.text != "\n"]
    return [Token("word", token.text, line + token.line - 1) for token in words]


def statements(tokens: list[Token]) -> list[Statement]:
    return _Parser(tokens).run()


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.found: list[Statement] = []
        self.blocks: list[Token] = []
        self.now = Statement()
        self.chained, self.piped, self.define = 0, False, False

    def run(self) -> list[Statement]:
        skip = False  # the word after a redirection is a file
        for i, token in enumerate(self.tokens):
            if token.kind == "heredoc":
                (self.now if self.now.words else self.found[-1] if self.found else self.now).heredocs.append(token)
            elif token.kind == "redirection":
                skip = True
            elif token.kind == "operator":
                skip = False
                self._operator(token, self.tokens[i + 1].text if i + 1 < len(self.tokens) else "")
            elif skip:
                skip = False
            elif token.text == "{" and self.define:  # function NAME {
                self._end()
                self._reserved(token)
            elif self.now.words or not self._reserved(token):
                self._word(token)
        self._end()
        return self.found

    def _word(self, token: Token) -> None:
        if not self.now.words:
            self.now.line = token.line
            self.now.block = self.blocks[0].line if self.blocks else 0
            self.now.function = any(block.text == "function" for block in self.blocks)
            self.now.chained, self.now.piped = self.chained, self.piped
        self.now.words.append(token)

    def _reserved(self, token: Token) -> bool:
        """Whether a word at the start of a command opens or closes a block."""
        if token.text in ("fi", "done", "esac", "}"):
            self.blocks = self.blocks[:-1]
            return True
        if token.text in ("function", "{"):
            if token.text == "function":
                self.define = True
                return False
            self.blocks.append(Token("word", "function" if self.define else "{", token.line))
            self.define = False
            return True
        if token.text in OPENING:
            self.blocks.append(token)
            return token.text in ("if", "while", "until")
        return token.text in WITHIN

    def _operator(self, token: Token, following: str) -> None:
        if token.text == "(" and len(self.now.words) == 1 and following == ")":
            self.define, self.now = True, Statement()
            return
        tested = bool(self.now.words) and self.now.words[0].text.startswith(TESTS)
        empty = not self.now.words
        if not empty:
            self.now.piped |= token.text in ("|", "|&", "&")
        self._end()
        if token.text == "(":
            self.blocks.append(token)
        elif token.text == ")" and self.blocks and self.blocks[-1].text == "(":
            self.blocks.pop()
        if token.text in ("&&", "||"):
            self.chained = 2 if token.text == "||" or tested else max(self.chained, 1)
        elif token.text in ("|", "|&"):
            self.piped = True
        elif not (token.text == "\n" and empty):
            self.chained, self.piped = 0, False

    def _end(self) -> None:
        if self.now.words:
            if self.now.words[0].text == "function":
                self.now.words = []
            else:
                self.found.append(self.now)
        self.now = Statement()
