"""One life of a run's processes on this machine: started, watched from outside, told to stop, ended together.

The watcher trusts no process: it sees exit codes, the times in heartbeat files, and the states that the system keeps.
A process that fails or hangs ends the others at once; a collective's timeout would take ten minutes.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT
from ingot.launch.preflight.transport import TransportWatch, log_to
from ingot.launch.supervisor.failure import LEFT_ALONE, VARIABLE, Failure, read_failure
from ingot.launch.supervisor.hang_diagnosis import explain_hang
from ingot.launch.supervisor.local_ranks import Node
from ingot.launch.supervisor.restart_policy import node_name
from ingot.parallel.rank_env import ATTEMPT, STORE_FD
from ingot.training.runtime.hangup import ignores_hangup, leave_terminal
from ingot.training.runtime.heartbeat import STACKS_VARIABLE, make_file, read_beat
from ingot.training.runtime.heartbeat import VARIABLE as HEARTBEAT_VARIABLE

POLL_SECONDS = 0.02
LOOK_SECONDS = 0.25  # between looks at the heartbeats
WELL = (0, EXIT_CONTINUE)
TEMPORARY, LOCK = "ingot-launch-", "lock"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
KILLED_BY_REQUEST = tuple(-number for number in STOP_SIGNALS)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    code: int
    """The exit code of the processes if all is well: finished or continue me."""
    asked: bool
    """Whether somebody asked it to stop."""
    rank: int = 0
    failure: Failure | None = None
    """The first failure."""
    batch: int = -1
    """The batch that the failing process was at."""


class StopNow(Exception):
    """A second Ctrl-C."""


def run_attempt(
    arguments: Sequence[str],
    node: Node,
    logs: Path,
    number: str,
    lost: Callable[[], bool] = lambda: False,
    transport: str = "",
    stop_requested: Callable[[Sequence[int]], bool] = lambda signals: True,
) -> Outcome:
    """Run `ingot ARGUMENTS` in every process of this machine until all have ended or one has failed.

    lost: whether another machine's processes have failed, without which these cannot go on
    transport: what NCCL must be seen to talk through; empty if it does not matter
    stop_requested: whether these signals asked the run to stop; srun sends TERM to end what is left of a failed step
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks = range(node.first_rank, node.first_rank + node.processes)
    watch = TransportWatch(transport, {rank: logs / f"nccl-{rank}.log" for rank in ranks})
    with _own_folder() as folder:
        processes: dict[int, subprocess.Popen] = {}
        try:
            with _forward_signals(processes) as asked:
                _start(arguments, node, logs, number, folder, processes, watch.unknown)
                for process in processes.values() if asked else ():  # meanwhile: some were not there to be told
                    process.send_signal(asked[0])
                found = _watch(processes, folder, logs, lost, watch)
                codes = {rank: code for rank, p in processes.items() if (code := p.poll()) is not None}
        finally:
            _kill(processes)
        beats = {rank: read_beat(folder / f"beat-{rank}") for rank in processes}
        failures = {rank: read_failure(folder / str(rank), code) for rank, code in codes.items() if code not in WELL}
    if found is not None:
        failures[found[0]] = found[1]
    if not failures:
        return Outcome(max(codes.values()), bool(asked))
    # a process that was killed could write no time; one that lost its peer failed because another did
    rank, failure = min(failures.items(), key=lambda item: (item[1].is_consequence, item[1].time))
    if asked and (codes.get(rank) in KILLED_BY_REQUEST or failure.is_consequence):
        if stop_requested(asked):
            return Outcome(EXIT_CONTINUE, True)  # asked before it could listen, while it started: nobody's fault
        if not failure.is_consequence:
            failure = Failure(LEFT_ALONE, "machine", EXIT_FAULT, sys.float_info.max)
    beat = beats[rank]
    return Outcome(EXIT_FAULT, bool(asked), rank, failure, beat.batch + 1 if beat is not None else -1)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A temporary folder, once those of killed launchers are cleared. A lock says who is alive: process ids mean
    nothing where containers share the folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), (path / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name, open(f"{name}/{LOCK}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _start(
    arguments: Sequence[str],
    node: Node,
    logs: Path,
    number: str,
    folder: Path,
    processes: dict[int, subprocess.Popen],
    nccl_logs: Mapping[int, Path],
) -> None:
    listener = _listen() if node.port is None else None
    port = listener.getsockname()[1] if listener is not None else node.port
    for local_rank in range(node.processes):
        rank = node.first_rank + local_rank
        make_file(folder / f"beat-{rank}")
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(node.world), "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(node.processes), "NODE_RANK": str(node.node_rank),
            "MASTER_ADDR": node.address, "MASTER_PORT": str(port), VARIABLE: str(folder / str(rank)),
            HEARTBEAT_VARIABLE: str(folder / f"beat-{rank}"), STACKS_VARIABLE: str(logs / f"stacks-{rank}.txt"),
            ATTEMPT: number,
        }  # fmt: skip
        if rank in nccl_logs:
            nccl_logs[rank].unlink(missing_ok=True)  # of an earlier attempt
            env |= log_to(nccl_logs[rank])
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // node.processes)))
        descriptors: tuple[int, ...] = ()
        if listener is not None and rank == 0:  # the port is ours from the start: nobody can take it
            descriptors = (listener.fileno(),)
            env[STORE_FD] = str(listener.fileno())
        with (logs / f"rank-{rank}.log").open("ab") as log:
            processes[rank] = subprocess.Popen(
                [sys.executable, "-m", _entry(arguments[0]), *arguments], env=env, stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log, stderr=log, pass_fds=descriptors, preexec_fn=end_with_parent,
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone, which passes it on once
            )  # fmt: skip
    if listener is not None:
        listener.close()


def _entry(verb: str) -> str:
    """The module that runs a verb in a process of its own."""
    return "ingot.launch.supervisor.rank_main" if verb == "train" else "ingot.cli.main"


def _watch(
    processes: Mapping[int, subprocess.Popen],
    folder: Path,
    logs: Path,
    lost: Callable[[], bool],
    transport: TransportWatch,
) -> tuple[int, Failure] | None:
    """Wait for all to end, or for the first to fail; gives who hangs, was left alone or talks through the wrong
    network, if that is how it ended."""
    looked = time.monotonic()
    while True:
        codes = [process.poll() for process in processes.values()]
        if None not in codes:
            return None
        if any(code not in (None, *WELL) for code in codes):
            time.sleep(2 * POLL_SECONDS)  # whoever failed at the same moment
            return None
        now = time.monotonic()
        if now - looked >= LOOK_SECONDS:
            if now - looked < 4 * LOOK_SECONDS:  # else this machine, or this process, was asleep: give all a chance
                living = {rank: p for rank, p in processes.items() if p.poll() is None}
                beats = {rank: beat for rank in living if (beat := read_beat(folder / f"beat-{rank}")) is not None}
                if any(beat.late(now) > 0 for beat in beats.values()):
                    found = explain_hang(living, beats, logs)
                    if all(read_beat(folder / f"beat-{rank}") == beat for rank, beat in beats.items()):
                        return found
                    print(f"warning: {found[1].message}; but it goes on now", file=sys.stderr)
                    now = time.monotonic()
            if wrong := transport.wrong():
                return wrong[0], Failure(f"{node_name()}: {wrong[1]}", "transport", EXIT_FAULT, time.time())
            if lost():
                return min(processes), Failure(LEFT_ALONE, "machine", EXIT_FAULT, sys.float_info.max)
            looked = now
        time.sleep(POLL_SECONDS)


def _kill(processes: Mapping[int, subprocess.Popen]) -> None:
    """End what still runs. Kindness is for those who can still finish a step; these cannot, their peer is gone."""
    for process in processes.values():
        if process.poll() is None:
            process.kill()
    for process in processes.values():
        process.wait()


@contextlib.contextmanager
def _forward_signals(processes: Mapping[int, subprocess.Popen]) -> Iterator[list[int]]:
    """Requests to stop go to all processes, which save and end; a second Ctrl-C ends them now."""
    asked: list[int] = []

    def forward(number: int, frame: object) -> None:
        if number == signal.SIGINT and signal.SIGINT in asked:
            raise StopNow
        if number == signal.SIGHUP:
            leave_terminal()
        asked.append(number)
        more = "; once more ends it now" if number == signal.SIGINT else ""
        print(f"{signal.Signals(number).name}: the run saves after this step and stops{more}", file=sys.stderr)
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS if not ignores_hangup(number)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def end_with_parent() -> None:
    """In a new process, before it runs: if the launcher is killed, it goes too (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
