"""Commands inside other commands: `eval`, `source`, `bash -c`, `ssh`, here-documents, and the launch of a program."""

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ingot.errors import ConfigError
from ingot.migrate.shell.expand import OPEN
from ingot.migrate.shell.parser import parse, parse_quoted
from ingot.migrate.shell.syntax import Command, Simple
from ingot.migrate.shell.values import Array, Fragment, State, Text, plain, shown
from ingot.migrate.shell.variables import Variables

NAMED = re.compile(r"pretrain\w*\.py")  # anywhere in a text
SHELLS = re.compile(r"(?:^|/)(?:ba|da|z|k)?sh$")
APART = re.compile(r"^(?:ssh|docker|podman|singularity|apptainer|kubectl|pdsh|sudo|su|env|--export|--env.*)$")
ENVIRONMENTS = re.compile(
    r"(?:activate|conda\.sh|\.bashrc|\.bash_profile|\.profile|modules?\.sh|/etc/profile|\.env)\)?$"
)
HERE = re.compile(r"^\W*\$\(.*(?:dirname|pwd).*\)|^\$\(?BASH_SOURCE|^`.*(?:dirname|pwd).*`|^\$PWD")
QUIET = (
    "echo",
    "printf",
    "cat",
    "tee",
    "grep",
    "pgrep",
    "pkill",
    "which",
    "type",
    "logger",
    "git",
    "scp",
    "rsync",
    "cp",
    "mv",
    "ls",
)


@dataclass(frozen=True)
class Launch:
    """A command with its arguments, which may start the training program."""

    at: str
    arguments: list[Text]
    problem: str = ""  # why its arguments are not known


class Processes(Variables):
    """Follows commands that are given as text, in this process or in another one."""

    def __init__(self, path: Path, supplied: dict[str, str]) -> None:
        super().__init__(path, supplied)
        self.folder, self.depth = path.parent, 0
        self.opened = 0  # variables for what is not known of a text
        self.launches: list[Launch] = []

    @abstractmethod
    def body(self, commands: tuple[Command, ...], state: State) -> bool | None: ...

    @abstractmethod
    def until_return(self, run: Callable[[], object], why: str, state: State) -> None: ...

    def source(self, file: Text, arguments: list[Text], at: str, state: State) -> None:
        """A file that exists is followed; one that does not may set anything, but for those of environments."""
        path = self._local_file(file)
        if path is None:
            if not ENVIRONMENTS.search(shown(file)):
                missing = "which is not there (an empty file there says that it sets nothing)"
                state.forget_all(f"may be set by {shown(file)}, the file of {self.line(at)}, {missing}")
            return
        if self.depth > 20 or arguments:
            state.forget_all(f"may be set by {shown(file)} in {self.line(at)}")
            return
        self.depth += 1
        commands = parse(read_text(path), str(path))
        self.until_return(lambda: self.body(commands, state), f"depends on a return of {path.name}", state)
        self.depth -= 1

    def _local_file(self, file: Text) -> Path | None:
        """A file next to the script: `./NAME`, or `$(dirname "$0")/NAME`."""
        pieces = [piece for piece in file if piece.text]
        if pieces and pieces[0].why and HERE.search(pieces[0].text + pieces[0].why):
            pieces = [replace(piece, text=piece.text.lstrip("/")) for piece in pieces[1:]]
        path = self.folder / shown(tuple(pieces))
        return path if pieces and not any(piece.why for piece in pieces) and path.is_file() else None

    def eval(self, words: list[Text], at: str, state: State) -> None:
        text = " ".join(map(shown, words))
        if any(piece.why for word in words for piece in word) and not NAMED.search(text):
            if not re.search(r"conda|mamba|modulecmd|ssh-agent", text):
                state.forget_all(f"may be set by the eval of {self.line(at)}")
            return
        self.body(self._parsed(words, at, state), state)

    def _parsed(self, words: list[Text], at: str, state: State) -> tuple[Command, ...]:
        """The commands of a text; what is not known of it gets a variable of its own in the state."""
        found = ""
        for i, word in enumerate(words):
            found += " " if i else ""
            for piece in word:
                if piece.why or piece.optional:
                    self.opened += 1
                    name = f"{OPEN}{self.opened}"
                    state.values[name] = (piece,)
                    found += f"${{{name}}}"
                else:
                    found += piece.text
        path, _, line = (words[0][0].at if words and words[0] and ":" in words[0][0].at else at).rpartition(":")
        return parse(found, path, int(line))

    def _shell(self, words: list[Text], start: int, command: Simple, state: State) -> None:
        """`bash -c TEXT`, `bash FILE` or `bash <<EOF` with the variables that it inherits."""
        texts = [plain(word) for word in words]
        child = self._child(words[:start], state)
        i = start + 1
        while i < len(texts) and re.match(r"[-+]\w|--\w", texts[i] or ""):
            if re.fullmatch(r"-\w*c", texts[i] or "") and i + 1 < len(texts):
                child.values["@"] = Array(tuple(words[i + 3 :]))
                self.body(self._parsed([words[i + 1]], command.at, child), child)
                return
            i += 2 if texts[i] in ("-o", "+o") else 1
        self._run_file(words[i:], command, child, state)

    def _submit(self, words: list[Text], command: Simple, state: State) -> None:
        """`sbatch FILE`, or `sbatch <<EOF`."""
        start = next((i for i, word in enumerate(words) if i and self._local_file(word)), len(words))
        if start == len(words) and not command.here:
            self.launches.append(Launch(command.at, words))
        self._run_file(words[start:], command, self._child(words[:start], state), state)

    def _run_file(self, words: list[Text], command: Simple, child: State, state: State) -> None:
        """A script with its arguments, or without any, a here-document."""
        if words:
            path = self._local_file(words[0])
            if path and self.depth < 20:
                self.depth += 1
                child.values["@"] = Array(tuple(words[1:]))
                self.body(parse(read_text(path), str(path)), child)
                self.depth -= 1
            return
        for here in command.here:
            text = [Fragment(here.text, here.at, True)]
            if not here.quoted:
                path_of, _, line = here.at.rpartition(":")
                text = list(self.joined(parse_quoted(here.text, path_of, int(line)), state))
            self.body(self._parsed([tuple(text)], here.at, child), child)

    def _child(self, launcher: list[Text], state: State) -> State:
        """The variables of a process: those that are exported, unless its launcher has an environment of its own."""
        child = State(fixed={name: why for name, why in state.fixed.items() if name in state.exported})
        names = state.values if "*" in state.exported else state.exported & set(state.values)
        for name, value in state.values.items():
            if name in names and not isinstance(value, Array):
                child.values[name] = value
            elif not name.startswith("@"):
                child.fixed[name] = "is not exported"
        for word in launcher:
            if match := re.match(r"([A-Za-z_]\w*)=", shown(word)):
                child.fixed[match[1]] = "is set by the launcher"
            if (listed := re.fullmatch(r"--export=(.+)", shown(word))) and listed[1] != "ALL":
                self._keep_exports(listed[1].split(","), child)
            if APART.search(shown(word)):
                child.values, child.fixed, child.wild = {}, {}, f"comes from the environment of {shown(word)}"
        child.values["@"] = Array(())
        return child

    def _keep_exports(self, names: list[str], child: State) -> None:
        """`--export=A,B` of Slurm."""
        for name in child.values.keys() - set(names) if "ALL" not in names else ():
            child.fixed[name] = "is not exported to the job"
        for name, mark, value in (item.partition("=") for item in names):
            if mark:
                child.values[name], child.fixed = (
                    (Fragment(value, ""),),
                    {n: w for n, w in child.fixed.items() if n != name},
                )

    def launch(self, first: str, words: list[Text], command: Simple, state: State) -> None:
        """A command of another program: a shell, a remote shell, or one that may train."""
        shell = next((i for i, word in enumerate(words) if SHELLS.search(plain(word) or "")), None)
        if shell is not None and first not in QUIET:
            self._shell(words, shell, command, state)
        elif first == "sbatch":
            self._submit(words, command, state)
        elif first == "ssh" and len(words) > 2:
            child = self._child(words[:1], state)
            self.body(self._parsed(words[1:], command.at, child), child)
        elif first not in QUIET:
            self.launches.append(Launch(command.at, words))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
