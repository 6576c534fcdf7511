"""One attempt: the ranks on this machine are started, watched from outside, told to stop, and ended together.

The watcher does not rely on the ranks: it reads exit codes, the times in heartbeat files, and process states from the
system. A rank that fails or hangs ends the others at once; a collective's timeout would take ten minutes.
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
from ingot.launch.agent.failure import FAILURE_VARIABLE, OTHER_NODE_FAILED, Failure, read_failure
from ingot.launch.agent.hang_diagnosis import explain_hang
from ingot.launch.agent.local_ranks import Node
from ingot.launch.preflight.transport import TransportWatch, log_to
from ingot.launch.protocol import ATTEMPT_VARIABLE
from ingot.launch.supervisor.failure_log import node_name
from ingot.parallel.rank_env import ATTEMPT, STORE_FD
from ingot.training.runtime.hangup import ignores_hangup, leave_terminal
from ingot.training.runtime.heartbeat import STACKS_VARIABLE, make_file, read_beat
from ingot.training.runtime.heartbeat import VARIABLE as HEARTBEAT_VARIABLE

POLL_SECONDS = 0.02
CHECK_SECONDS = 0.25  # between checks of the heartbeats
NO_FAILURE = (0, EXIT_CONTINUE)
TEMPORARY, LOCK = "ingot-launch-", "lock"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
KILLED_BY_REQUEST = tuple(-number for number in STOP_SIGNALS)


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    code: int
    """The exit code of the ranks if none failed: finished, or stopped as requested."""
    stop_requested: bool
    """Whether this process received a signal to stop."""
    rank: int = 0
    """The rank that failed first."""
    failure: Failure | None = None
    batch: int = -1
    """The batch that the failing rank was working on."""


class StopNow(Exception):
    """A second Ctrl-C."""


def run_attempt(
    arguments: Sequence[str],
    node: Node,
    logs: Path,
    attempt: str,
    others_failed: Callable[[], bool] = lambda: False,
    transport: str = "",
    is_stop_request: Callable[[Sequence[int]], bool] = lambda signals: True,
    env: Mapping[str, str] = os.environ,
) -> Outcome:
    """Run `ingot ARGUMENTS` in every rank of this machine until all have ended or one has failed.

    others_failed: whether ranks on another machine have failed, without which these cannot continue
    transport: what NCCL must use between nodes; empty if it does not matter
    is_stop_request: whether these signals asked the run to stop; srun sends TERM to end the rest of a failed step
    env: the environment of the ranks, apart from the variables that make them ranks
    """
    logs.mkdir(parents=True, exist_ok=True)
    ranks = range(node.first_rank, node.first_rank + node.processes)
    watch = TransportWatch(transport, {rank: logs / f"nccl-{rank}.log" for rank in ranks})
    with _own_folder() as folder:
        processes: dict[int, subprocess.Popen] = {}
        try:
            with _forward_signals(processes) as signals:
                base = {**env, ATTEMPT: attempt}
                _start(arguments, node, folder, logs, base, processes, watch.unknown)
                for process in processes.values() if signals else ():  # that came before all had started
                    process.send_signal(signals[0])
                found = _watch(processes, folder, logs, others_failed, watch)
                codes = {rank: code for rank, p in processes.items() if (code := p.poll()) is not None}
        finally:
            _kill(processes)
        beats = {rank: read_beat(folder / f"beat-{rank}") for rank in processes}
        failures = {
            rank: read_failure(folder / str(rank), code) for rank, code in codes.items() if code not in NO_FAILURE
        }
    if found is not None:
        failures[found[0]] = found[1]
    if not failures:
        return Outcome(max(codes.values()), bool(signals))
    # a rank that was killed could not write a time; one that lost its peer failed because another did
    rank, failure = min(failures.items(), key=lambda item: (item[1].is_consequence, item[1].time))
    if signals and (codes.get(rank) in KILLED_BY_REQUEST or failure.is_consequence):
        if is_stop_request(signals):
            return Outcome(EXIT_CONTINUE, True)  # the signal came before the rank handled signals: not a failure
        if not failure.is_consequence:
            failure = Failure(OTHER_NODE_FAILED, "machine", EXIT_FAULT, sys.float_info.max)
    beat = beats[rank]
    return Outcome(EXIT_FAULT, bool(signals), rank, failure, beat.batch + 1 if beat is not None else -1)


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A temporary folder; those of killed launchers are removed first. A lock shows which launchers are alive: process
    ids mean nothing where containers share the folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), (path / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    while True:
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name, open(f"{name}/{LOCK}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(lock.name):  # otherwise a launcher that started now took it for a leftover
                yield Path(name)
                return


def _start(
    arguments: Sequence[str],
    node: Node,
    folder: Path,
    logs: Path,
    base: Mapping[str, str],
    processes: dict[int, subprocess.Popen],
    nccl_logs: Mapping[int, Path],
) -> None:
    """Start the ranks, adding each to `processes` at once: if one cannot be started, the others are ended."""
    listener = _listen() if node.port is None else None
    port = listener.getsockname()[1] if listener is not None else node.port
    for local_rank in range(node.processes):
        rank = node.first_rank + local_rank
        make_file(folder / f"beat-{rank}")
        env = {
            **base, "RANK": str(rank), "WORLD_SIZE": str(node.world), "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(node.processes), "NODE_RANK": str(node.node_rank),
            "MASTER_ADDR": node.address, "MASTER_PORT": str(port),
            FAILURE_VARIABLE: str(folder / str(rank)), HEARTBEAT_VARIABLE: str(folder / f"beat-{rank}"),
            STACKS_VARIABLE: str(logs / f"stacks-{rank}.txt"),
        }  # fmt: skip
        if rank in nccl_logs:
            nccl_logs[rank].unlink(missing_ok=True)  # of an earlier attempt
            env |= log_to(nccl_logs[rank])
        if ATTEMPT_VARIABLE in base:  # in a job, the home folder is a shared one: kernels are cached on the node's disk
            env.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // node.processes)))
        descriptors: tuple[int, ...] = ()
        if listener is not None and rank == 0:  # it inherits the open port, which nobody else can take
            descriptors = (listener.fileno(),)
            env[STORE_FD] = str(listener.fileno())
        with (logs / f"rank-{rank}.log").open("ab") as log:
            processes[rank] = subprocess.Popen(
                [sys.executable, "-m", _entry(arguments[0]), *arguments], env=env, stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log, stderr=log, pass_fds=descriptors, preexec_fn=end_with_parent,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the launcher, which forwards it once
            )  # fmt: skip
    if listener is not None:
        listener.close()


def _entry(verb: str) -> str:
    """The module that runs a verb in a process of its own."""
    return "ingot.launch.agent.rank_main" if verb == "train" else "ingot.cli.main"


def _watch(
    processes: Mapping[int, subprocess.Popen],
    folder: Path,
    logs: Path,
    others_failed: Callable[[], bool],
    transport: TransportWatch,
) -> tuple[int, Failure] | None:
    """Wait until all have ended or the first has failed. Returns a failure that exit codes do not show: a hang, a slow
    transport, or ranks that failed on another machine."""
    checked = time.monotonic()
    while True:
        codes = [process.poll() for process in processes.values()]
        if None not in codes:
            return None
        if any(code not in (None, *NO_FAILURE) for code in codes):
            time.sleep(2 * POLL_SECONDS)  # for others that fail at the same moment
            return None
        now = time.monotonic()
        if now - checked >= CHECK_SECONDS:
            was_asleep = now - checked > 4 * CHECK_SECONDS  # this machine or process: the ranks get another chance
            if not was_asleep and (found := _find_hang(processes, folder, logs, now)):
                return found
            if wrong := transport.wrong():
                return wrong[0], Failure(f"{node_name()}: {wrong[1]}", "transport", EXIT_FAULT, time.time())
            if others_failed():
                return min(processes), Failure(OTHER_NODE_FAILED, "machine", EXIT_FAULT, sys.float_info.max)
            checked = time.monotonic()
        time.sleep(POLL_SECONDS)


def _find_hang(
    processes: Mapping[int, subprocess.Popen], folder: Path, logs: Path, now: float
) -> tuple[int, Failure] | None:
    """The rank that the others wait for, if a heartbeat is late and stays late during the diagnosis."""
    living = {rank: process for rank, process in processes.items() if process.poll() is None}
    beats = {rank: beat for rank in living if (beat := read_beat(folder / f"beat-{rank}")) is not None}
    if all(beat.late(now) <= 0 for beat in beats.values()):
        return None
    found = explain_hang(living, beats, logs)
    if all(read_beat(folder / f"beat-{rank}") == beat for rank, beat in beats.items()):
        return found
    print(f"warning: {found[1].message}; it has continued since", file=sys.stderr)
    return None


def _kill(processes: Mapping[int, subprocess.Popen]) -> None:
    """Kill what still runs: without its peers it cannot finish a step."""
    for process in processes.values():
        if process.poll() is None:
            process.kill()
    for process in processes.values():
        process.wait()


@contextlib.contextmanager
def _forward_signals(processes: Mapping[int, subprocess.Popen]) -> Iterator[list[int]]:
    """Signals to stop go to all ranks, which save and end; a second Ctrl-C ends them now."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        if number == signal.SIGINT and signal.SIGINT in received:
            raise StopNow
        if number == signal.SIGHUP:
            leave_terminal()
        received.append(number)
        more = "; press Ctrl-C again to end it now" if number == signal.SIGINT else ""
        print(f"{signal.Signals(number).name}: saving after this step, then stopping{more}", file=sys.stderr)
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS if not ignores_hangup(number)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def end_with_parent() -> None:
    """In a new process, before it runs: end it when the launcher is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
