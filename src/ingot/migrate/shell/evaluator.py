"""Follow a script from top to bottom without running it, and record each command that starts a training program.

What is not certain is forgotten, with the reason: a value from the caller, the environment or a command, and what a
condition or a loop decides. Both sides of an unknown condition are followed, and what differs afterwards is unknown.
"""

import re
from collections.abc import Callable
from pathlib import Path

from ingot.errors import ConfigError
from ingot.migrate.shell import arithmetic
from ingot.migrate.shell.conditions import double_holds, holds, matching_clauses
from ingot.migrate.shell.parser import DECLARE
from ingot.migrate.shell.processes import NAMED, SHELLS, Launch, Processes
from ingot.migrate.shell.syntax import (
    Arithmetic,
    Case,
    Chain,
    Command,
    Function,
    Group,
    If,
    Loop,
    Part,
    Pipe,
    Simple,
)  # fmt: skip
from ingot.migrate.shell.values import Array, State, Text, merge, plain, shown, unknown
from ingot.migrate.shell.variables import INSTEAD

PREFIXES = ("exec", "command", "builtin", "nohup")
TESTS = ("[", "test")
ALWAYS = {"true": True, ":": True, "echo": True, "false": False}
SETTERS = ("read", "mapfile", "readarray", "getopts", "let", "unset", "printf")


class Evaluator(Processes):
    """`droppable` says whether an option, with its values, changes nothing."""

    def __init__(self, path: Path, supplied: dict[str, str], droppable: Callable[[list[Text]], bool]) -> None:
        super().__init__(path, supplied)
        self.droppable = droppable
        self.loop_exits: list[list[State]] = []
        self.returns: list[list[State]] = []

    # Commands: each returns whether it succeeds, or None if that is not certain

    def body(self, commands: tuple[Command, ...], state: State) -> bool | None:
        status: bool | None = True
        for command in commands:
            if not state.dead:
                status = self.run(command, state)
        return status

    def run(self, command: Command, state: State) -> bool | None:
        match command:
            case Simple():
                return self._simple(command, state)
            case Chain(first=first, rest=rest):
                return self._chain(first, rest, command.at, state)
            case Pipe(commands=parts, negated=negated):
                return self._pipeline(parts, negated, state)
            case Group(body=body, subshell=subshell):
                return self.body(body, state.copy() if subshell else state)
            case If():
                return self._if(command, state)
            case Loop():
                return self._loop(command, state)
            case Case():
                return self._case(command, state)
            case Function(name=name):
                state.functions[name] = command
                return True
            case Arithmetic(text=text, at=at):
                for name in arithmetic.assigned_names(text):
                    self.forget(name, f"is computed in {self.line(at)}", state)
        return None

    def _merge(self, states: list[State], why: str, into: State) -> None:
        into.become(merge(states, why, self.unsettled, self.droppable))

    def _chain(self, first: Command, rest: tuple[tuple[str, Command, str], ...], at: str, state: State) -> bool | None:
        status = self.run(first, state)
        for op, command, before in rest:
            if state.dead:
                break
            if status is None:
                other = state.copy()
                self._branch(lambda command=command, other=other: self.run(command, other))  # type: ignore[misc]
                self._merge([state, other], f"depends on `{before}` in {self.line(at)}", state)
            elif status == (op == "&&"):
                status = self.run(command, state)
        return status

    def _branch(self, run: Callable[[], object]) -> None:
        self.branch += 1
        run()
        self.branch -= 1

    def _pipeline(self, parts: tuple[Command, ...], negated: bool, state: State) -> bool | None:
        if len(parts) == 1:
            status = self.run(parts[0], state)
            return None if status is None else status != negated
        for part in parts:
            self.run(part, state.copy())
        last, first = parts[-1], parts[0]
        if (
            isinstance(last, Simple)
            and isinstance(first, Simple)
            and SHELLS.search(last.words[0].text if last.words else "")
        ):
            words = self.arguments(first.words, state.copy())
            if any(NAMED.search(text) for text in [*map(shown, words), *(here.text for here in first.here)]):
                self.launches.append(Launch(last.at, [], "runs it in a text that is piped into a shell"))
        return None

    def _if(self, command: If, state: State) -> bool | None:
        ends, why = list[State](), ""
        for condition, text, body in command.branches:
            status = self.body(condition, state) if condition else True
            if status is False:
                continue
            if status:
                if ends:
                    self._branch(lambda body=body: self.body(body, state))  # type: ignore[misc]
                else:
                    self.body(body, state)
                break
            why = why or f"depends on the condition `{text}` in {self.line(command.at)}"
            ends.append(state.copy())
            self._branch(lambda body=body, end=ends[-1]: self.body(body, end))  # type: ignore[misc]
        self._merge([*ends, state], why, state)
        return None

    def _case(self, command: Case, state: State) -> bool | None:
        clauses = matching_clauses(command, plain(self.joined(command.word, state)))
        if len(clauses) == 1 and clauses[0][1]:
            return self.body(clauses[0][0], state)
        why = f"depends on the case of `{command.word.text}` in {self.line(command.at)}"
        if command.falls_through:
            self._uncertain([body for body, _ in clauses], why, state)
            return None
        ends = []
        for body, _ in clauses:
            ends.append(state.copy())
            self._branch(lambda body=body, end=ends[-1]: self.body(body, end))  # type: ignore[misc]
        certain = any(always for _, always in clauses)
        self._merge([*ends, *([] if certain else [state])], why, state) if ends else None
        return None

    def _loop(self, command: Loop, state: State) -> bool | None:
        items = self.arguments(command.items, state) if command.items is not None else None
        if items is not None and len(items) <= 64 and all(plain(item) is not None for item in items):
            trial, launches = state.copy(), len(self.launches)
            self.loop_exits.append([])
            for item in items:
                self.assign(command.name, item, trial, command.at)
                self.body(command.body, trial)
            if not self.loop_exits.pop():
                state.become(trial)
                return None
            del self.launches[launches:]
        why = f"changes in the loop of {self.line(command.at)}"
        if command.name:
            self.forget(command.name, why, state)
        self._uncertain([command.condition, command.body], why, state)
        return None

    def _uncertain(self, bodies: list[tuple[Command, ...]], why: str, state: State) -> None:
        """Commands that run any number of times: forget all that they set, until nothing else changes."""
        launches, forgotten = len(self.launches), set[str]()
        for _ in range(8):
            del self.launches[launches:]
            self.loop_exits.append([])
            ends = []
            for body in bodies:
                ends.append(state.copy())
                self._branch(lambda body=body, end=ends[-1]: self.body(body, end))  # type: ignore[misc]
            ends = [end for end in ends if not end.dead] + self.loop_exits.pop()
            changed = {name for end in ends for name in state.changed(end)} - forgotten
            for end in ends:
                state.wild, state.fixed = state.wild or end.wild, state.fixed | end.fixed
                for name in {*state.functions, *end.functions}:
                    if state.functions.get(name) != end.functions.get(name):
                        state.functions[name] = None
            for name in changed:
                self.forget(name, why, state)
            forgotten |= changed
            if not changed:
                return
        state.forget_all(why)

    def _simple(self, command: Simple, state: State) -> bool | None:
        if not command.words:
            for change in command.assignments:
                self.set(change, self.value(change, state), state)
            words = [a.value for a in command.assignments if a.value]
            return None if any(part.kind == "command" for word in words for part in word.parts) else True
        if command.words[0].text in DECLARE:
            self.declare(command, state)
            return True
        if command.words[0].text == "[[":
            return self._double_square(command, state)
        arguments = self.arguments(command.words, state)
        while arguments and plain(arguments[0]) in PREFIXES and len(arguments) > 1:
            state = state if plain(arguments[0]) != "exec" else self._ending(state)
            arguments = arguments[1:]
        first = plain(arguments[0]) if arguments else ""
        if first in TESTS:
            return holds(arguments)
        prefixed = state.copy() if command.assignments else state
        for change in command.assignments:
            if change.name != "IFS":
                self.set(change, self.value(change, state), prefixed)
                prefixed.exported.add(change.name)
        if first is not None and not self._builtin(first, arguments, command, state, prefixed):
            if first in state.functions:
                self._call(state.functions[first], arguments, prefixed, command.at)
                for change in command.assignments:
                    self.forget(change.name, f"is set for a function in {self.line(command.at)}", prefixed)
                state.become(prefixed)
            else:
                self.launch(first, arguments, command, prefixed)
        elif first is None:
            self.launch("", arguments, command, prefixed)
        return ALWAYS.get(first or "")

    def _double_square(self, command: Simple, state: State) -> bool | None:
        """`[[ ... ]]`, where what follows `&&` or `||` may not be expanded."""
        reached, fields = state, list[Text]()
        for word in command.words:
            reached = state.copy() if word.text in ("&&", "||") and reached is state else reached
            fields.append(self.joined(word, reached))
        for name in state.changed(reached):
            self.forget(name, f"may be set by the test in {self.line(command.at)}", state)
        return double_holds(fields, command.words)

    def _ending(self, state: State) -> State:
        """`exec COMMAND`: what follows in the script is not reached."""
        before = state.copy()
        state.dead = True
        return before

    def _builtin(self, first: str, words: list[Text], command: Simple, state: State, prefixed: State) -> bool:
        """Follow a command that changes variables or the order of commands; False if it is not one."""
        line, texts = self.line(command.at), [plain(word) for word in words]
        if first in SETTERS:
            if first == "printf" and "-v" not in texts:
                return True
            if None in texts[1:] and first in ("read", "mapfile", "readarray", "unset", "getopts"):
                state.forget_all(f"may be set by {first} in {line}")
            for name in {n for text in texts[1:] if text for n in re.findall(r"[A-Za-z_]\w*", text)}:
                self.forget(name, f"is set by {first} in {line}", state)
        elif first in ("exit", "return", "break", "continue"):
            exits = self.returns if first == "return" else self.loop_exits
            if first != "exit" and exits:
                if first != "return" and len(texts) > 1:
                    raise ConfigError(f"{command.at}: {first} with a number is not supported; {INSTEAD}")
                exits[-1].append(state.copy())
            state.dead = True
        elif first == "eval":
            self.eval(words[1:], command.at, prefixed)
            state.become(prefixed)
        elif first in ("source", ".") and len(words) > 1:
            self.source(words[1], words[2:], command.at, state)
        elif first == "set":
            self.options(words[1:], command.at, state)
        elif first == "shift":
            before, count = state.values.get("@"), texts[1] if len(texts) > 1 else "1"
            state.values["@"] = unknown("@", f"is shifted in {line}", command.at)
            if isinstance(before, Array) and count is not None and count.isdigit() and int(count) <= len(before.items):
                state.values["@"] = Array(before.items[int(count) :])
        elif first == "shopt" and not {"extglob", "nullglob", "globstar"}.issuperset(
            t or "?" for t in texts[1:] if t not in ("-s", "-u")
        ):
            raise ConfigError(f"{command.at}: shopt may change how words are read; {INSTEAD}")
        elif first == "trap" and {"DEBUG", "ERR", "RETURN"} & {(text or "").upper() for text in texts}:
            raise ConfigError(f"{command.at}: a trap may change variables at any time; {INSTEAD}")
        else:
            return first in ("shopt", "trap")
        return True

    def substitute(self, part: Part, state: State) -> None:
        self.body(part.body, state.copy())

    def _call(self, function: Function | None, arguments: list[Text], state: State, at: str) -> None:
        if function is None or self.depth > 20:
            state.forget_all(f"may be set by {shown(arguments[0])} in {self.line(at)}, one of several functions")
            return
        before, self.depth = state.values.get("@"), self.depth + 1
        state.values["@"] = Array(tuple(arguments[1:]))
        self.locals.append({})
        self.branches.append(self.branch)
        self.until_return(lambda: self.run(function.body, state), f"depends on a return of {function.name}", state)
        self.branches.pop()
        for name, value in {**self.locals.pop(), "@": before}.items():
            if value is None:
                state.values.pop(name, None)
            else:
                state.values[name] = value
        self.depth -= 1

    def until_return(self, run: Callable[[], object], why: str, state: State) -> None:
        self.returns.append([])
        loops, self.loop_exits = self.loop_exits, []
        run()
        self.loop_exits = loops
        if ends := self.returns.pop():
            self._merge([state.copy(), *ends], why, state)
