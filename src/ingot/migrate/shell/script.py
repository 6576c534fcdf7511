"""The arguments of the one run of a script, checked word by word."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from ingot.errors import ConfigError
from ingot.migrate.megatron import MEGATRON
from ingot.migrate.shell.evaluator import Evaluator
from ingot.migrate.shell.parser import parse
from ingot.migrate.shell.processes import NAMED, Launch, read_text
from ingot.migrate.shell.values import Array, Fragment, State, Text, identity, shown, split
from ingot.migrate.shell.variables import INSTEAD

PROGRAM = re.compile(r"(?:^|[/`)])(pretrain\w*\.py)$")
OTHER_PROGRAM = re.compile(r"(?:^|/)(?!\w*tokenizer)(\w*train\w*\.py)$")
NOT_GPT = re.compile(r"pretrain_(bert|t5|ict|mamba|retro|vision|vlm|realm|multimodal|biencoder)")
LAUNCHERS = re.compile(
    r"(?:^|/)(?:torchrun|python[\d.]*|deepspeed|srun|mpirun|mpiexec|accelerate|pdsh|xargs|parallel|time|env|numactl|nsys)$"
    r"|torch\.distributed\.(?:run|launch)$"
)
COUNTS = {"nproc_per_node": "nproc_per_node", "nnodes": "nnodes", "num_gpus": "nproc_per_node", "num_nodes": "nnodes"}
VALUED = re.compile(
    r"(?!no_|use_|enable_|disable_|overlap_|log_)\w*_(?:dir|path|file|size|interval|iters|samples|layers|num|port|addr|rank"
    r"|id|minutes|mins|project|name|entity|length|algo|margin|recipe|impl|backend|type|format|method|start|end|level|option)$"
)


@dataclass(frozen=True)
class ScriptArguments:
    """What a script passes to the training program."""

    words: list[tuple[str, str]]
    """Each argument with its FILE:LINE, after the number of processes that the launcher is given."""
    unsettled: dict[str, str] = field(default_factory=dict)
    """Keys whose values the script takes from elsewhere, and from where."""
    defaults: list[str] = field(default_factory=list)
    """What the script fills in for variables of the environment."""


@dataclass(frozen=True)
class Run:
    """A command that starts the training program."""

    at: str
    program: str
    launcher: list[Text]
    arguments: list[Text]
    problem: str = ""

    @property
    def line(self) -> int:
        return int(self.at.rpartition(":")[2])


def read_script(path: Path, supplied: dict[str, str] | None = None, pick: int | None = None) -> ScriptArguments:
    """The arguments that a shell script passes to the training program. A file without a command is a list of
    arguments: its arrays, in order."""
    text = read_text(path)
    if path.suffix == ".j2" and (template := re.search(r"\{\{|\{%", text)):
        line = text.count("\n", 0, template.start()) + 1
        raise ConfigError(f"{path}:{line}: this is a template; render it first, or give the arguments after --")
    evaluator, state = Evaluator(path, supplied or {}, without_effect), State()
    evaluator.body(parse(text, str(path)), state)
    if _runs(evaluator.launches) or pick is not None:
        return arguments_of_run(evaluator, path, pick)
    found = _lists(text, path, state)
    _check_supplied(evaluator, path)
    return found


def arguments_of_run(evaluator: Evaluator, path: Path, pick: int | None) -> ScriptArguments:
    """The arguments of the one run that an evaluator found, or of the one in a line."""
    runs = _runs(evaluator.launches)
    if pick is not None:
        lines = sorted({run.line for run in runs})
        runs = [run for run in runs if run.line == pick]
        if not runs:
            known = ", ".join(map(str, lines)) or "none"
            raise ConfigError(f"{path}: --pick {pick}: no run begins in this line; lines of runs: {known}")
    if not runs:
        raise ConfigError(f"{path}: no command that trains is found; {INSTEAD}")
    run = _only(runs)
    checked = check(run.arguments, run.at)
    filled = [f"{name}={value} (line {at.rpartition(':')[2]})" for name, (at, value) in evaluator.defaults.items()]
    notes = [f"{path}: its own defaults stand for variables that are not set: {', '.join(filled)}; "
             f"--set {next(iter(evaluator.defaults))}=... changes one"] if filled else []  # fmt: skip
    _check_supplied(evaluator, path)
    processes = [(shown(word), run.at) for word in _processes(run)]
    return ScriptArguments(processes + checked.words, checked.unsettled, notes)


def _runs(launches: list[Launch]) -> list[Run]:
    """The commands that train; programs with `train` in their names only if there are no others."""
    runs = [run for launch in launches if (run := _run_of(launch, PROGRAM))]
    return runs or [run for launch in launches if (run := _run_of(launch, OTHER_PROGRAM)) and not run.problem]


def _run_of(launch: Launch, pattern: re.Pattern[str]) -> Run | None:
    words = launch.arguments
    texts = [shown(word) for word in words]
    starts = [i for i, word in enumerate(words) if _is_program(word, pattern)]
    if starts:
        i = starts[0]
        launcher, arguments = words[:i], words[i + 1 :]
        if i and not any(LAUNCHERS.search(shown(word)) or any(p.why for p in word) for word in launcher):
            return None
        problem = launch.problem
        if starts[1:] or ":" in texts[i:]:
            problem = "starts several programs"
        elif any(re.search(r"(?:^|/)(?:xargs|parallel|find)$", text) for text in texts[:i]):
            problem = "takes arguments from its input"
        return Run(launch.at, Path(texts[i]).name.strip("`)"), launcher, arguments, problem)
    if launch.problem:
        return Run(launch.at, "", [], [], launch.problem)
    if any(NAMED.search(text) and re.search(r"\s", text) for text in texts) and any(map(LAUNCHERS.search, texts)):
        return Run(launch.at, "", [], [], "has the program inside a string")
    if {"--num-layers", "--hidden-size"} & set(texts) and not any(re.search(r"\.(?:py|sh)$", text) for text in texts):
        names = [p.name for word in words for p in word if p.why and p.name]
        hint = f"; name it, for example with --set {names[0]}=pretrain_gpt.py" if names else ""
        return Run(launch.at, "", [], [], f"starts a program that is not known{hint}")
    return None


def _is_program(word: Text, pattern: re.Pattern[str]) -> bool:
    known = "".join(piece.text for piece in word if not piece.why)
    return bool(pattern.search(shown(word)) and pattern.search("/" + known.lstrip("/")) and not re.search(r"\s", known))


def _only(runs: list[Run]) -> Run:
    """The one run; several are one if they pass the same arguments."""
    different: list[Run] = []
    for run in runs:
        key = identity(Array((*_processes(run), *run.arguments))), run.problem
        if all(key != (identity(Array((*_processes(o), *o.arguments))), o.problem) for o in different):
            different.append(run)
    lines = sorted({run.line for run in different})
    if len(lines) > 1:
        first = min(different, key=lambda run: (bool(NOT_GPT.search(run.program)), run.line))
        raise ConfigError(
            f"{different[0].at}: the script trains more than once, in lines {', '.join(map(str, lines))}; choose "
            f"one with --pick {first.line} or another of these lines"
        )
    if len(different) > 1:
        raise ConfigError(f"{runs[0].at}: this command runs several times, with different arguments; {INSTEAD}")
    run = different[0]
    if run.problem:
        raise ConfigError(f"{run.at}: this command {run.problem}, so its arguments are not certain; {INSTEAD}")
    if NOT_GPT.search(run.program):
        raise ConfigError(f"{run.at}: {run.program} trains another kind of model; only pretrain_gpt.py's arguments are "
                          "read")  # fmt: skip
    return run


def _processes(run: Run) -> list[Text]:
    """The number of processes in the launcher's options, as arguments."""
    found: dict[str, str] = {}
    texts = [shown(word) for word in run.launcher]
    starts = [
        i for i, text in enumerate(texts) if re.search(r"torchrun$|torch\.distributed\.\w+$|deepspeed$|mpi\w+$", text)
    ]
    if not starts:
        return []
    options = run.launcher[starts[-1] + 1 :]
    option = ""
    for word, text in zip(options, texts[starts[-1] + 1 :], strict=True):
        if text.startswith("-"):
            name, mark, value = text.lstrip("-").replace("-", "_").partition("=")
            option = "" if mark else name
            if mark and name in COUNTS:
                found[COUNTS[name]] = value
        elif option in COUNTS:
            found[COUNTS[option]], option = text, ""
        elif option in ("np", "n") and "mpi" in texts[starts[-1]]:
            found["nproc_per_node"], option = text, ""
        elif not option and any(piece.why for piece in word):
            found["nnodes"] = text  # a list that may say anything
            break
        else:
            option = ""
    if texts[starts[-1]].endswith("deepspeed") and len(found) < 2:
        return []  # its default is what it finds
    at = run.at
    return [(Fragment(text, at),) for key, value in found.items() for text in (f"--{key}", value)]


def check(fields: list[Text], at: str) -> ScriptArguments:
    """The words of a run. One that is not known may be a value, which is refused by its key, but not an argument."""
    words: list[tuple[str, str]] = []
    unsettled: dict[str, str] = {}
    option, values, after_optional = "", 0, False
    for word in fields:
        text, origin = shown(word), _origin(word, at)
        pieces = tuple(piece for piece in word if piece.text or piece.why)
        if any(piece.optional for piece in pieces):
            if not all(piece.optional for piece in pieces):
                raise ConfigError(f"{origin}: '{text}' depends on a condition in part; {INSTEAD}")
            if any(piece.why for piece in pieces):
                _refuse_argument(pieces, origin)
            after_optional = True
            continue
        missing = next((piece for piece in pieces if piece.why), None)
        begins_known = bool(pieces) and not pieces[0].why and bool(pieces[0].text)
        if text.startswith("--") and begins_known:
            option, values = text.partition("=")[0], int("=" in text)
        else:
            if after_optional:
                _refuse_argument(pieces, origin) if missing else _refuse_position(text, origin)
            kind = _kind(option)
            allowed = kind == "many" if values else kind in ("one", "many")
            if missing and not begins_known and not (allowed and (not values or len(pieces) > 1)):
                _refuse_argument(pieces, origin)
            if option and kind == "none":
                raise ConfigError(f"{origin}: {option} takes no value; remove '{text}'")
            values += 1
        after_optional = False
        if missing:
            remedy = f"; pass --set {missing.name}=... or" if missing.name else ";"
            unsettled[_key(option)] = f"{missing.name or missing.text} {missing.why}{remedy}"
        words.append((text, origin))
    return ScriptArguments(words, unsettled)


def _origin(pieces: Text, at: str) -> str:
    return next((piece.at for piece in pieces if ":" in piece.at), at)


def _refuse_argument(pieces: Text, origin: str) -> None:
    missing = next(piece for piece in pieces if piece.why)
    given = f"--set {missing.name}='...' ('' for nothing)" if missing.name else "write them into the script"
    if missing.name and missing.why.startswith("depends on") and "$" in missing.why:
        given = f"--set for a variable of the condition, or {given}"
    given = f"pass {given}" if missing.name else given
    raise ConfigError(
        f"{origin}: the command takes arguments from {shown(pieces)}: {missing.name or 'it'} {missing.why}; {given}, "
        "or give all arguments after -- instead of the script"
    )


def _refuse_position(text: str, origin: str) -> None:
    raise ConfigError(f"{origin}: which option '{text}' belongs to depends on a condition; {INSTEAD}")


def _key(option: str) -> str:
    return option[2:].partition("=")[0].replace("-", "_")


def _kind(option: str) -> str:
    """How many values an option takes: `none`, `one`, `many`, or empty if that is not known."""
    key, table = _key(option), MEGATRON.table
    if not option or key in table["flags"]:
        return "none"
    if key in table["lists"]:
        return "many"
    known = any(key in table[part] for part in ("computed", "renamed", "choices", "trackers"))
    return "one" if known or VALUED.match(key) else ""


def without_effect(group: list[Text]) -> bool:
    """Whether an option with its values changes nothing, whatever the values are."""
    option, *values = group
    text = shown(option)
    if not text.startswith("--") or _key(text) not in MEGATRON.without_effect:
        return False
    unknown = [i for i, word in enumerate(values) if any(piece.why for piece in word)]
    if any(piece.why for piece in option) and "=" not in option[0].text:
        return False
    return not (_kind(text) == "none" and values) and (not unknown or (unknown == [0] and _kind(text) != ""))


def _lists(text: str, path: Path, state: State) -> ScriptArguments:
    """A file that runs nothing: its lists of options, in order."""
    for number, written in enumerate(text.split("\n"), 1):
        if NAMED.search(re.sub(r"(^|\s)#.*", "", written)):
            raise ConfigError(f"{path}:{number}: names the training program, but no command that is certain to be read "
                              f"runs it; {INSTEAD}")  # fmt: skip
    if state.dead or state.wild:
        raise ConfigError(f"{path}: has no command that trains and {state.wild or 'ends early'}; {INSTEAD}")
    words: list[Text] = []
    seen: dict[str, str] = {}
    for name, value in state.values.items():
        fields = list(value.items) if isinstance(value, Array) else split(value)
        options = {shown(word).partition("=")[0] for word in fields if shown(word).startswith("--")}
        doubtful = next((p for word in fields for p in word if p.why.startswith(("depends", "changes"))), None)
        if doubtful:
            raise ConfigError(f"{path}: {name} {doubtful.why}, and no command says whether it is used; {INSTEAD}")
        if not options:
            continue
        for option in options:
            if seen.setdefault(option, name) != name:
                raise ConfigError(f"{_origin(fields[0], str(path))}: {option} is both in {seen[option]} and in {name}, "
                                  f"and no command says which is used; {INSTEAD}")  # fmt: skip
        words += fields
    if not words:
        raise ConfigError(f"{path}: has no complete list of arguments, such as ARGS=( --num-layers 24 )")
    return check(words, f"{path}:1")


def _check_supplied(evaluator: Evaluator, path: Path) -> None:
    for name, value in evaluator.supplied.items():
        if name not in evaluator.used:
            raise ConfigError(
                f"{path}: --set {name}={value}: the script does not leave {name} open, so this would change nothing; "
                "remove it, or give the key=... to change"
            )
