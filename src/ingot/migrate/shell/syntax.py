"""The commands of a shell script, as the parser finds them. `at` is FILE:LINE everywhere."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of a word, by kind: `text`, `parameter` (`${name[index]op...}`), `arithmetic`, or `command`."""

    kind: str
    text: str  # as it is written; of kind `text`, without its quotes
    at: str
    quoted: bool = False
    name: str = ""
    index: str = ""
    op: str = ""
    default: tuple["Part", ...] = ()
    body: tuple["Command", ...] = ()


@dataclass(frozen=True)
class Word:
    parts: tuple[Part, ...]
    at: str
    text: str  # as it is written


@dataclass(frozen=True)
class Assignment:
    name: str
    at: str
    value: Word | None = None
    items: tuple[Word, ...] | None = None  # NAME=( ... )
    index: str = ""
    append: bool = False


@dataclass
class HereDocument:
    """`text` is filled in when the parser reaches the end of the line."""

    mark: str
    quoted: bool
    tabs: bool
    text: str = ""
    at: str = ""


@dataclass(frozen=True)
class Simple:
    at: str
    assignments: tuple[Assignment, ...] = ()
    words: tuple[Word, ...] = ()
    here: tuple[HereDocument, ...] = ()


@dataclass(frozen=True)
class Arithmetic:
    at: str
    text: str


@dataclass(frozen=True)
class Pipe:
    """Commands joined by `|`; each of several runs in a subshell."""

    at: str
    commands: tuple["Command", ...]
    negated: bool = False


@dataclass(frozen=True)
class Chain:
    """Commands joined by `&&` and `||`, with the text before each of them."""

    at: str
    first: "Command"
    rest: tuple[tuple[str, "Command", str], ...]


@dataclass(frozen=True)
class Group:
    at: str
    body: tuple["Command", ...]
    subshell: bool = False


@dataclass(frozen=True)
class If:
    """Each branch: condition, its text, body. The last one's condition is empty for `else`."""

    at: str
    branches: tuple[tuple[tuple["Command", ...], str, tuple["Command", ...]], ...]


@dataclass(frozen=True)
class Loop:
    """`for NAME in ITEMS`, or another loop, which has a condition in place of items."""

    at: str
    body: tuple["Command", ...]
    name: str = ""
    items: tuple[Word, ...] | None = None
    condition: tuple["Command", ...] = ()


@dataclass(frozen=True)
class Case:
    at: str
    word: Word
    clauses: tuple[tuple[tuple[Word, ...], tuple["Command", ...]], ...]
    falls_through: bool = False


@dataclass(frozen=True)
class Function:
    at: str
    name: str
    body: "Command"


Command = Simple | Arithmetic | Pipe | Chain | Group | If | Loop | Case | Function
