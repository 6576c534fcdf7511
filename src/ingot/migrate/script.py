"""The arguments of the one command of a shell script that trains with Megatron.

A script is read as data and never run. Its assignments are followed from top to bottom, and the words of the command
that starts the training program are expanded from them. Whatever is not certain is forgotten or refused: a value from
the caller, the environment, another file or a command, and anything that a condition, a loop or a function decides.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from ingot.errors import ConfigError
from ingot.migrate.megatron import MEGATRON
from ingot.migrate.shell_lexer import Statement, Token, Unclosed, array_words, end_of, lex, statements

PROGRAM = re.compile(r"(?:^|/)(pretrain\w*\.py)$")
OTHER_PROGRAM = re.compile(r"(?:^|/)(?!\w*tokenizer)(\w*train\w*\.py)$")
NAMED = re.compile(r"pretrain\w*\.py")  # anywhere in a text
NOT_GPT = re.compile(r"pretrain_(bert|t5|ict|mamba|retro|vision|vlm|realm|multimodal|biencoder)")
HARMLESS = ("echo", "printf", "cat", "cp", "mv", "ls", "rm", "ln", "cd", "grep", "sed", "awk", "tee", "mkdir", "chmod",
            "touch", "git", "test", "[", "[[", "set", "for", "select", "case", "exit", "module", ":")  # fmt: skip
DECLARE = ("export", "declare", "typeset", "readonly", "local")
SETTERS = ("read", "mapfile", "readarray", "getopts", "let", "unset", "for", "select", "printf")
ENVIRONMENTS = re.compile(r"(?:activate|conda\.sh|\.bashrc|\.bash_profile|\.profile|modules?\.sh|/etc/profile)$")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
PARAMETER = re.compile(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*|[0-9@*#?$!-]))")
DEFAULTED = re.compile(r"\$\{(\w+):?[-=?].*\}", re.DOTALL)
ARRAY = re.compile(r"(\"?)\$\{(\w+)\[([@*])\]\}\1")
GLOB = re.compile(r"[*?\[]|\{[^}]*,|^~")
INSTEAD = "give the arguments after -- instead of the script"


@dataclass(frozen=True)
class Piece:
    """A part of a word: a text, the line it is written in, and whether the shell leaves its spaces alone."""

    text: str
    line: int
    quoted: bool = False
    unknown: bool = False  # stands for a value that this file does not say, such as `$NAME`


Text = list[Piece]


class Array(list[Text]):
    """The value of an array: words."""


@dataclass
class Run:
    """A command that starts a training program."""

    program: str
    statement: Statement
    launcher: list[Text]
    arguments: list[Text]


def read_script(path: Path) -> list[tuple[str, str]]:
    """The words that the training program of a shell script is given, each with its place, after what its launcher says
    about the number of processes. A file without any command is a list of arguments: its arrays, in order."""
    try:
        found = statements(lex(path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")))
        script = Script(path)
        for statement in found:
            script.execute(statement)
    except Unclosed as error:
        raise ConfigError(
            f"{path}:{error.line}: cannot be read as shell words: {error.mark} is never closed, so the file holds no "
            "complete list of arguments, such as ARGS=( --num-layers 24 )"
        ) from None
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return script.words()


@dataclass
class Script:
    """What is known after the commands so far."""

    path: Path
    known: dict[str, Text | Array] = field(default_factory=dict)
    """Variables whose value is certain."""
    reasons: dict[str, str] = field(default_factory=dict)  # why others are not
    fixed: set[str] = field(default_factory=set)
    """Names that functions or references set at any time, or that cannot be set again."""
    over: bool = False  # whether the script has ended
    conditional: dict[str, int] = field(default_factory=dict)
    """Lists of arguments that depend on a condition, and the line of each."""
    runs: list[Run] = field(default_factory=list)
    others: list[Run] = field(default_factory=list)  # of other programs with `train` in their names
    hidden: list[int] = field(default_factory=list)
    """Lines that run the program inside a string, a substitution or another script."""
    mentioned: list[int] = field(default_factory=list)
    """Lines that name the program, or use a list of arguments, without a command that is known to run it."""

    def execute(self, statement: Statement) -> None:
        """Follow one command: what it sets, and whether it is the one that trains."""
        words, why = statement.words, ""
        if self.over:
            return
        for name in re.findall(r"\(\(.*?([A-Za-z_]\w*)\s*(?:[-+*/%&|^]|<<|>>)?=(?!=)", " ".join(w.text for w in words)):
            self._forget(name, f"is computed in line {statement.line}")
        if statement.block:
            why = f"depends on the condition, loop or function of line {statement.block}"
        elif statement.chained or statement.piped:
            why = f"depends on the rest of line {statement.line}"
        settings = [word for word in words if ASSIGNMENT.match(word.text)]
        self._find_hidden_programs(statement)
        if words[0].text in DECLARE:
            if statement.function and words[0].text != "export":
                return  # local to the function
            if any("$" in word.text or "`" in word.text or word.text == "-n" for word in words if word not in settings):
                self._forget_all(f"may be set in line {statement.line}")
        elif len(settings) < len(words):
            before = next(i for i, word in enumerate(words) if word not in settings)
            self._command(statement, words[before:])
            return
        changed = [word.text for word in words[1:] if re.match(r"[-+]\w*[^-+axrg]$", word.text)]
        why = why or (f"is changed by {changed[0]} in line {statement.line}" if changed else "")
        for word in settings:
            self._assign(word, why, statement.function)
            if words[0].text == "readonly" or any(re.match(r"-\w*r", option.text) for option in words[1:]):
                self.fixed.add(word.text.partition("=")[0])

    def _find_hidden_programs(self, statement: Statement) -> None:
        for word in statement.words:
            if re.search(r"(\$\(|`)[^)`]*pretrain\w*\.py[^)`]", word.text):
                self.hidden.append(word.line)
            elif NAMED.search(word.text) and statement.words[0].text not in HARMLESS:
                self.mentioned.append(word.line)
        for body in statement.heredocs:
            if NAMED.search(body.text):
                written = statement.words[0].text in ("cat", "tee")
                (self.mentioned if written else self.hidden).append(body.line)

    def _assign(self, word: Token, why: str, function: bool) -> None:
        match = ASSIGNMENT.match(word.text)
        assert match is not None
        name, index, more, raw = match.groups()
        place = f"{self.path}:{word.line}"
        if name == "IFS":
            raise ConfigError(f"{place}: IFS changes how words are split, so they are not certain; {INSTEAD}")
        if function:
            self.fixed.add(name)
        before = self.known.get(name)
        if name in self.fixed:
            why = why or "is set by a function, or is read-only"
        if why or index or (more and before is None):
            if why and re.match(r"\(|[\"']?\s*--", raw):
                self.conditional[name] = word.line
            self._forget(name, why or f"is not set as a whole in line {word.line}")
        elif raw.startswith("("):
            start = word.line + word.text.count("\n", 0, match.start(4))
            added = [part for item in array_words(raw, start) for part in self._expand(item)]
            earlier = before if isinstance(before, Array) else [before] if before is not None else []
            self.known[name] = Array([*earlier, *added] if more else added)
        elif more and isinstance(before, Array):
            self._forget(name, f"is an array and a string in line {word.line}")
        else:
            text = [*(before or [] if more else []), *self._pieces(raw, word.line, joined=True)]
            spaced = any(re.search(r"\s", piece.text) for piece in text if not piece.unknown)
            if any(piece.unknown for piece in text) and not spaced:
                self._forget(name, f"comes from elsewhere in line {word.line}")
            else:
                self.known[name] = text

    def _forget(self, name: str, why: str) -> None:
        self.known.pop(name, None)
        self.reasons[name] = why

    def _forget_all(self, why: str) -> None:
        for name in list(self.known):
            self._forget(name, why)

    def _command(self, statement: Statement, words: list[Token]) -> None:
        used = re.findall(r"\$\{?(\w+)", " ".join(word.text for word in words))
        lists = any(_is_list(self.known.get(name)) or name in self.conditional for name in used)
        fields = [part for word in words for part in self._expand(word)]
        texts = [_plain(part) for part in fields]
        first = texts[0] if texts else ""
        self._set_by_command(statement, first, texts)
        if first in HARMLESS:
            return
        for pattern, runs in ((PROGRAM, self.runs), (OTHER_PROGRAM, self.others)):
            place = next(
                (i for i, text in enumerate(texts) if pattern.search(text) and not re.search(r"\s", text)), None
            )
            if place is not None:
                runs.append(Run(Path(texts[place]).name, statement, fields[:place], fields[place + 1 :]))
                if first == "eval" and any(re.search(r"[\\\"'`;|&<>()]", text) for text in texts):
                    self.hidden.append(statement.line)
                return
        if any(NAMED.search(text) for text in texts):
            self.hidden.append(statement.line)
        elif lists:
            self.mentioned.append(statement.line)

    def _set_by_command(self, statement: Statement, first: str, texts: list[str]) -> None:
        """Forget the variables that a command may set."""
        line, names = statement.line, list[str]()
        self.over = first in ("exit", "exec") and len(texts) < 3 and not (statement.block or statement.chained)
        if first in SETTERS:
            names = [name for text in texts[1:] for name in re.findall(r"[A-Za-z_]\w*", text)]
        elif first.startswith("(("):
            names = re.findall(r"[A-Za-z_]\w*", statement.words[0].text)
        elif first in ("trap", "alias"):
            self._forget_all(f"may be set by the {first} of line {line}")
        elif first == "eval" and not any(map(PROGRAM.search, texts)):
            self._forget_all(f"may be set by the eval of line {line}")
        elif first in ("source", ".") and not ENVIRONMENTS.search(texts[-1]):
            self._forget_all(f"may be set by the file of line {line}")
        for name in names:
            self._forget(name, f"is set by {first} in line {line}")
            if statement.function:
                self.fixed.add(name)

    def _expand(self, word: Token) -> list[Text]:
        """A word of a command or an array as the words that it becomes."""
        if (whole := ARRAY.fullmatch(word.text)) is None:
            return _split(self._pieces(word.text, word.line))
        value = self.known.get(whole[2])
        if isinstance(value, Array) and not whole[1]:
            return [part for item in value for part in _split(_unquoted(item))]
        if isinstance(value, Array) and whole[3] == "@":
            return list(value)
        return [[Piece(f"${whole[2]}[{whole[3]}]", word.line, True, True)]]

    def _pieces(self, raw: str, line: int, quoted: bool = False, joined: bool = False) -> Text:
        """A word taken apart, with the values of the variables in it. `joined`: arrays become one string."""
        found: Text = []
        i = 0
        while i < len(raw):
            here, end = line + raw.count("\n", 0, i), end_of(raw, i, quoted)
            part = raw[i:end]
            if part == "\\\n":
                # joins two lines; where a space is next to it, a line end does the same and keeps the lines apart
                spaced = raw[i - 1 : i].isspace() or raw[end : end + 1].isspace() or not i
                found += [Piece("\n", here, quoted)] if spaced else []
            elif part[0] == "\\":
                kept = quoted and part[1:] not in ("$", "`", '"', "\\")
                found.append(Piece(part if kept else part[1:], here, True))
            elif part[0] == "'" and not quoted:
                found += [Piece("", here, True), *_lines(part[1:-1], here, True)]
            elif part[0] == '"' and not quoted:
                found += [Piece("", here, True), *self._pieces(part[1:-1], here, True, joined)]
            elif part[0] in "$`" and len(part) > 1:
                found += self._substituted(part, here, quoted, joined)
            else:
                end = next((j for j in range(i + 1, len(raw)) if raw[j] in "\\'\"$`"), len(raw))
                found += _lines(raw[i:end], here, quoted)
            i = end
        return found

    def _substituted(self, part: str, line: int, quoted: bool, joined: bool) -> Text:
        """The value of `$NAME`, or a mark that stands for what is not known."""
        array = ARRAY.fullmatch(part)
        if array and joined and isinstance(items := self.known.get(array[2]), Array):
            return [p for item in items for p in (Piece(" ", line, quoted), *(replace(p, quoted=quoted) for p in item))]
        plain, defaulted = PARAMETER.fullmatch(part), DEFAULTED.fullmatch(part)
        name = (plain[1] or plain[2]) if plain else defaulted[1] if defaulted else ""
        value = self.known.get(name)
        if value is None or isinstance(value, Array) or (defaulted and not _plain(value)):
            # `${X}` would be an interpolation to the YAML layer
            return [Piece((f"${name}" if name else part).replace("${", "$"), line, True, True)]
        several = re.search(r"\s", _plain(value))
        return [replace(p, quoted=quoted or p.unknown, line=p.line if several else line) for p in value]

    def words(self) -> list[tuple[str, str]]:
        """The arguments of the one run, or of a file that has none."""
        runs = self.runs or self.others
        lines = sorted([*(run.statement.line for run in runs), *self.hidden])
        if len(lines) > 1:
            raise ConfigError(
                f"{self.path}:{lines[0]}: the script trains more than once, in lines {', '.join(map(str, lines))}; "
                "give the arguments of one run after -- instead of the script"
            )
        if self.hidden:
            raise ConfigError(f"{self.path}:{lines[0]}: the training program runs in a string, a substitution or "
                              f"another script; {INSTEAD}")  # fmt: skip
        return self._words_of_run(runs[0]) if runs else self._words_of_lists()

    def _words_of_run(self, run: Run) -> list[tuple[str, str]]:
        line, block = run.statement.line, run.statement.block
        if NOT_GPT.search(run.program):
            raise ConfigError(f"{self.path}:{line}: {run.program} trains another kind of model; only pretrain_gpt.py's "
                              "arguments are read")  # fmt: skip
        if block or run.statement.chained > 1:
            raise ConfigError(
                f"{self.path}:{line}: this command depends on the condition, loop or function of line {block or line}, "
                f"so the script holds no complete list of arguments; {INSTEAD}"
            )
        return self._check([*_processes(run.launcher, line), *run.arguments])

    def _words_of_lists(self) -> list[tuple[str, str]]:
        if self.mentioned:
            raise ConfigError(f"{self.path}:{min(self.mentioned)}: which command trains cannot be read here; "
                              f"{INSTEAD}")  # fmt: skip
        if self.conditional:
            raise ConfigError(f"{self.path}:{min(self.conditional.values())}: these arguments depend on a condition; "
                              f"{INSTEAD}")  # fmt: skip
        lists = {name: value for name, value in self.known.items() if _is_list(value)}
        words: list[Text] = []
        seen: dict[str, str] = {}
        for name, value in lists.items():
            fields = list(value) if isinstance(value, Array) else _split(_unquoted(value))
            for option in {text.partition("=")[0] for text in map(_plain, fields) if text.startswith("--")}:
                if seen.setdefault(option, name) != name:
                    raise ConfigError(f"{self.path}:{fields[0][0].line}: {option} is both in {seen[option]} and in "
                                      f"{name}, and no command says which is used; {INSTEAD}")  # fmt: skip
            words += fields
        if not words:
            raise ConfigError(f"{self.path}: holds no complete list of arguments, such as ARGS=( --num-layers 24 )")
        return self._check(words)

    def _check(self, fields: list[Text]) -> list[tuple[str, str]]:
        """The words with their places. What is not known may stand for a value, which the dialect refuses by its key,
        but not for arguments."""
        words: list[tuple[str, str]] = []
        option, values = "", 0
        for pieces in fields:
            text, place = _plain(pieces), f"{self.path}:{pieces[0].line}"
            if text.startswith("--"):
                option, values = text.partition("=")[0], int("=" in text)
            else:
                key = option[2:].replace("-", "_")
                none = not option or key in MEGATRON.table["flags"]
                if _is_unknown(pieces) and (none or (values and key not in MEGATRON.table["lists"])):
                    self._refuse_unknown(text, place)
                if option and none:
                    raise ConfigError(f"{place}: {option} takes no value, not '{text}'; leave it out")
                values += 1
            words.append((text, place))
        return words

    def _refuse_unknown(self, text: str, place: str) -> None:
        name = re.sub(r"^\$|\[[@*]\]$", "", text)
        why = self.reasons.get(name, "is not set in the script")
        raise ConfigError(
            f"{place}: the command takes arguments from {text}, and {name} {why}; write them into the script, or give "
            "all arguments after -- instead of it"
        )


def _processes(launcher: list[Text], line: int) -> list[Text]:
    """The number of processes that torchrun is told, as arguments."""
    found: dict[str, str] = {}
    texts = [_plain(pieces) for pieces in launcher]
    for text, value in zip(texts, [*texts[1:], ""], strict=True):
        key, mark, given = text.lstrip("-").replace("-", "_").partition("=")
        if text.startswith("--") and key in ("nproc_per_node", "nnodes"):
            found[key] = given if mark else value
    if "nproc_per_node" in found and "nnodes" not in found and any(text.startswith("$") for text in texts):
        found["nnodes"] = "$NNODES"  # one of them may say it
    return [[Piece(text, line)] for key, value in found.items() for text in (f"--{key}", value)]


def _is_list(value: Text | Array | None) -> bool:
    """Whether a variable holds options."""
    if isinstance(value, Array):
        return any(_plain(item).startswith("--") for item in value)
    return value is not None and _plain(value).lstrip().startswith("--")


def _plain(pieces: Text) -> str:
    return "".join(piece.text for piece in pieces)


def _lines(text: str, line: int, quoted: bool) -> Text:
    """A text as pieces of one line each."""
    return [Piece(part, line + i, quoted) for i, part in enumerate(text.splitlines(keepends=True))]


def _split(pieces: Text) -> list[Text]:
    """The words that the shell makes of an expanded word: what is not quoted falls apart at spaces."""
    words: list[Text] = []
    going_on = False
    for piece in pieces:
        for part in [piece.text] if piece.quoted else re.split(r"(\s+)", piece.text):
            if not piece.quoted and not part.strip():
                going_on = going_on and not part
                continue
            if not going_on:
                words.append([])
            unknown = piece.unknown or (not piece.quoted and bool(GLOB.search(part)))
            text = f"$({part})" if unknown and not piece.unknown else part  # names of files, which the shell fills in
            words[-1].append(replace(piece, text=text, unknown=unknown))
            going_on = True
    return [[replace(piece, quoted=True) for piece in word] for word in words]


def _unquoted(pieces: Text) -> Text:
    return [replace(piece, quoted=piece.unknown) for piece in pieces]


def _is_unknown(word: Text) -> bool:
    """Whether a word begins with what is not known, so that it may be several words or an option."""
    return next((piece.unknown for piece in word if piece.text), False)
