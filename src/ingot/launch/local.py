"""The processes of a run on this machine: start them, watch them, and say why the first one failed.

A hundred lines instead of torchrun's agent: no second copy of torch in the launcher, logs that are appended to, the
first failure found by its time to the microsecond rather than the second, and exit codes kept. (The agent's restarts
do not work in torch 2.13 without switching off its store, and a restart here is a new start anyway.) What torchrun,
srun or Composer start instead is joined as it is found.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import ConfigError
from ingot.launch.failure import VARIABLE, Failure, read_failure
from ingot.parallel.place import DEFAULT_PORT, STORE_FD

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # between asking a process to end and ending it
MAX_SHRINKS = 10


@dataclass(frozen=True)
class Node:
    """This machine's share of a run's processes."""

    processes: int
    world: int
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    """None on a single machine: any free port."""

    @property
    def first_rank(self) -> int:
        return self.node_rank * self.processes


def find_node(
    nproc: int | None,
    world_size: int | None,
    node_rank: int | None,
    address: str | None,
    port: int | None,
    devices: Callable[[], int],
    env: Mapping[str, str] = os.environ,
) -> Node:
    """How many processes to start here, from the options or the variables of Composer's launcher."""
    if "RANK" not in env:  # with RANK, a launcher has started this very process
        nproc = nproc if nproc is not None else _number(env, "LOCAL_WORLD_SIZE")
        world_size = world_size if world_size is not None else _number(env, "WORLD_SIZE")
        node_rank = node_rank if node_rank is not None else _number(env, "NODE_RANK")
        address = address or env.get("MASTER_ADDR")
        port = port or _number(env, "MASTER_PORT")
    processes = nproc if nproc is not None else devices()
    world = world_size if world_size is not None else processes
    if processes < 1 or world < 1:
        raise ConfigError(f"--nproc {processes}, --world_size {world}: there must be at least one process")
    if world % processes:
        raise ConfigError(f"--world_size {world} is no multiple of --nproc {processes}: every machine starts as many")
    node = node_rank or 0
    if not 0 <= node < world // processes:
        raise ConfigError(
            f"--node_rank {node}: {world} processes, {processes} on each machine, make machines 0 to "
            f"{world // processes - 1}"
        )
    if world == processes:
        return Node(processes, world)
    if address is None or node_rank is None:
        raise ConfigError("several machines need --master_addr (the first machine's) and --node_rank (this one's)")
    return Node(processes, world, node, address, port or DEFAULT_PORT)


def run_processes(arguments: Sequence[str], node: Node, logs: Path, shrink: Callable[[int], int]) -> int:
    """Run `ingot ARGUMENTS` in every process; gives the exit code, after the first failure has been printed.

    After an out-of-memory error the processes start again, from the last checkpoint, with the microbatch size that
    `shrink` makes of the one that failed.
    """
    arguments = list(arguments)
    for _ in range(MAX_SHRINKS):
        failed = _run_once(arguments, node, logs)
        if failed is None:
            return 0
        rank, failure = failed
        if failure.fits is not None and node.world == node.processes:
            size = shrink(failure.fits)
            print(f"rank {rank}: {failure.message}; starting again with microbatches of {size}", file=sys.stderr)
            arguments = [a for a in arguments if a != "--fresh"] + [f"device_train_microbatch_size={size}"]
            continue
        break
    print(f"error: {failure.message}", file=sys.stderr)
    print(f"rank {rank} of {node.world} failed first; the log of every rank is in {logs}", file=sys.stderr)
    return failure.exit_code or 1


def _run_once(arguments: Sequence[str], node: Node, logs: Path) -> tuple[int, Failure] | None:
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        listener = _listen() if node.port is None else None
        port = listener.getsockname()[1] if listener is not None else node.port
        processes: dict[int, subprocess.Popen] = {}
        try:
            with _signals_as_interrupts():
                for local_rank in range(node.processes):
                    rank = node.first_rank + local_rank
                    env = os.environ | {
                        "RANK": str(rank), "WORLD_SIZE": str(node.world), "LOCAL_RANK": str(local_rank),
                        "LOCAL_WORLD_SIZE": str(node.processes), "NODE_RANK": str(node.node_rank),
                        "MASTER_ADDR": node.address, "MASTER_PORT": str(port), VARIABLE: f"{folder}/{rank}",
                    }  # fmt: skip
                    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // node.processes)))
                    descriptors: tuple[int, ...] = ()
                    if listener is not None and rank == 0:  # the port is ours from the start: nobody can take it
                        descriptors = (listener.fileno(),)
                        env[STORE_FD] = str(listener.fileno())
                    with (logs / f"rank-{rank}.log").open("ab") as log:
                        processes[rank] = subprocess.Popen(
                            [sys.executable, "-m", "ingot.cli.main", *arguments], env=env, stdin=subprocess.DEVNULL,
                            stdout=None if rank == 0 else log, stderr=log, pass_fds=descriptors,
                            preexec_fn=_end_with_parent,
                        )  # fmt: skip
                if listener is not None:
                    listener.close()
                codes = _watch(processes)
        finally:
            _end(processes)
        failures = {rank: read_failure(Path(folder, str(rank)), code) for rank, code in codes.items() if code}
    if not failures:
        return None
    # a process that was killed could write no time; one that lost its peer failed because another did
    return min(failures.items(), key=lambda item: (item[1].is_consequence, item[1].time))


def _watch(processes: Mapping[int, subprocess.Popen]) -> dict[int, int]:
    """Wait for all to end, or for the first to fail; gives the exit codes of those that ended by themselves."""
    while True:
        codes = {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}
        if any(codes.values()) or len(codes) == len(processes):
            time.sleep(POLL_SECONDS)  # whoever failed at the same moment
            return {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}
        time.sleep(POLL_SECONDS)


def _end(processes: Mapping[int, subprocess.Popen]) -> None:
    """End what still runs, kindly at first."""
    for process in processes.values():
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _signals_as_interrupts:
    """SIGTERM ends the launcher as Ctrl-C does, so that its processes end too."""

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGTERM, self._interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    @staticmethod
    def _interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener


def _end_with_parent() -> None:
    """In a new process, before it runs: if the launcher is killed, it goes too (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={value!r} is not a number") from None
