"""The ranks of one attempt on this machine, as an object: start them, look at them, have them stop, kill them.

Nothing here waits for a rank or trusts one. Exit codes, the times in heartbeat files and process states come from
outside, and even SIGKILL has a limit: a process in state D (it waits for a device or a file system) dies only when that
answers, so it is reported as left and the others go on without it.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from msgspec.structs import replace

from ingot.checkpoint.copy_memory import inherited
from ingot.errors import EXIT_CONTINUE
from ingot.launch.agent.evidence import NodeEvidence, RankEvidence
from ingot.launch.agent.failure import FAILURE_VARIABLE, Failure, read_failure, read_written
from ingot.launch.agent.hang_diagnosis import dump_stacks, innermost, process_state
from ingot.launch.agent.local_ranks import Node
from ingot.launch.agent.node_state import FOLDER_SECONDS, NodeWatch
from ingot.launch.child_process import end_with_parent
from ingot.launch.preflight.transport import TransportWatch, log_to
from ingot.launch.protocol import ATTEMPT_VARIABLE
from ingot.launch.supervisor.records import Phase
from ingot.parallel.rank_env import ATTEMPT, EPOCH, STORE_FD
from ingot.storage.small_files import open_to_append
from ingot.training.runtime.fence import VARIABLE as AGENT_VARIABLE
from ingot.training.runtime.fence import AgentClock
from ingot.training.runtime.heartbeat import (
    EVALUATION,
    FORMAT,
    SAVE,
    STACKS_VARIABLE,
    START,
    START_SECONDS,
    STEP,
    Beat,
    make_file,
    parse_beat,
)
from ingot.training.runtime.heartbeat import VARIABLE as HEARTBEAT_VARIABLE
from ingot.training.runtime.run_files import attempt_mark

NO_FAILURE = (0, EXIT_CONTINUE)
PHASES: dict[str, Phase] = {START: "starting", STEP: "running", EVALUATION: "evaluating", SAVE: "saving"}
TEMPORARY, LOCK = "ingot-launch-", "lock"
KILL_SECONDS = 10.0  # for killed ranks to disappear
KILL_POLL_SECONDS = 0.02
KEEP_SECONDS = 2.0  # for the shared disk to take a few stacks


@dataclass(frozen=True)
class RankPlan:
    """What to start."""

    arguments: Sequence[str]
    """Of `ingot`."""
    node: Node
    logs: Path
    attempt: str
    env: Mapping[str, str]
    """Of the ranks, apart from the variables that make them ranks."""
    epoch: int = 0
    """Of the attempt; 0 where nobody counts them."""
    transport: str = ""
    """What NCCL must use between nodes; empty if it does not matter."""


class RankGroup:
    """This machine's ranks, from `start` to `close`."""

    def __init__(self, plan: RankPlan):
        self.plan, node = plan, plan.node
        self.processes: dict[int, subprocess.Popen] = {}
        self.forgiven: int | None = None
        """The exit code of a rank that was asked to stop before it could listen."""
        plan.logs.mkdir(parents=True, exist_ok=True)
        self._beats: dict[int, int] = {}
        self.watch = NodeWatch()
        self._closing = contextlib.ExitStack()
        self.folder = self._closing.enter_context(own_folder())
        self.clock = AgentClock(self.folder / "agent")
        ranks = range(node.first_rank, node.first_rank + node.processes)
        self.transport = TransportWatch(plan.transport, {rank: self.folder / f"nccl-{rank}.log" for rank in ranks})

    def start(self, listener: socket.socket | None = None) -> None:
        """Start the ranks, each added to `processes` at once: if one cannot be started, `close` ends the others.

        listener: the socket on which rank 0 meets the others, if it is this machine's
        """
        node = self.plan.node
        own = _listen() if listener is None and node.port is None else None
        listener = listener or own
        if own is not None:
            node = dataclasses.replace(node, port=own.getsockname()[1])
        try:
            for local_rank in range(node.processes):
                self._start_rank(node, local_rank, listener)
        finally:
            if own is not None:
                own.close()

    def _start_rank(self, node: Node, local_rank: int, listener: socket.socket | None) -> None:
        plan, rank = self.plan, node.first_rank + local_rank
        make_file(self._beat_file(rank), START_SECONDS if plan.arguments[0] == "train" else None)
        # open from now on: it does not matter if somebody cleans the temporary folder of a run of weeks
        self._beats[rank] = os.open(self._beat_file(rank), os.O_RDONLY | os.O_CLOEXEC)
        env = {
            **plan.env, ATTEMPT: plan.attempt, "RANK": str(rank), "WORLD_SIZE": str(node.world),
            "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(node.processes), "NODE_RANK": str(node.node_rank),
            "MASTER_ADDR": node.address, "MASTER_PORT": str(node.port),
            FAILURE_VARIABLE: str(self.folder / str(rank)), HEARTBEAT_VARIABLE: str(self._beat_file(rank)),
            STACKS_VARIABLE: str(self.folder / f"stacks-{rank}.txt"),
        }  # fmt: skip
        if plan.epoch:
            env |= {EPOCH: str(plan.epoch), AGENT_VARIABLE: str(self.folder / "agent")}
        if nccl_log := self.transport.unknown.get(rank):
            env |= log_to(nccl_log)
        if ATTEMPT_VARIABLE in plan.env or plan.epoch:
            # in a job, the home folder is a shared one: kernels are cached on the node's disk
            env.setdefault("TRITON_CACHE_DIR", str(self.folder / "triton"))
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // node.processes)))
        descriptors = inherited(plan.env, local_rank)
        if listener is not None and rank == 0:  # it inherits the open port, which nobody else can take
            descriptors += (listener.fileno(),)
            env[STORE_FD] = str(listener.fileno())
        with open_to_append(plan.logs / f"rank-{rank}.log") as log:
            if not plan.epoch:  # otherwise each attempt has a folder of its own
                self._mark(log)
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", _entry(plan.arguments[0]), *plan.arguments], env=env, stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log, stderr=log, pass_fds=descriptors, preexec_fn=end_with_parent,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the launcher, which forwards it once
            )  # fmt: skip

    def _mark(self, log: IO[bytes]) -> None:
        now = datetime.now().isoformat(timespec="seconds")
        with contextlib.suppress(OSError):  # a full disk
            log.write(f"{now} {attempt_mark(self.plan.attempt)}\n".encode())
            log.flush()

    # --- looking

    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended."""
        codes = {rank: code for rank, process in self.processes.items() if (code := process.poll()) is not None}
        return {rank: EXIT_CONTINUE if code == self.forgiven else code for rank, code in codes.items()}

    def failed(self) -> bool:
        return any(code not in NO_FAILURE for code in self.codes().values())

    def living(self) -> dict[int, subprocess.Popen]:
        return {rank: process for rank, process in self.processes.items() if process.poll() is None}

    def beats(self) -> dict[int, Beat]:
        """The last heartbeats of ranks that have sent one."""
        found = {rank: parse_beat(os.pread(file, FORMAT.size, 0)) for rank, file in self._beats.items()}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    def phase(self) -> Phase:
        """What the rank does that has made no progress for longest."""
        beats = self.beats().values()
        return PHASES[min(beats, key=lambda beat: beat.at).phase] if beats else "starting"

    def late(self) -> dict[int, Beat]:
        """Living ranks that have made no progress for longer than they may."""
        now, living = time.monotonic(), self.living()
        return {rank: beat for rank, beat in self.beats().items() if rank in living and beat.late(now) > 0}

    def failure(self, rank: int, code: int) -> Failure:
        """What a rank that has failed wrote, or what its exit code says."""
        return read_failure(self.folder / str(rank), code)

    def evidence(self, is_hang: bool = False, folder_seconds: float = FOLDER_SECONDS) -> NodeEvidence:
        """All that is known of the ranks; of a hang, with the place where each is, which takes a second.

        folder_seconds: for the run folder's file system to answer
        """
        node = self.watch.look(self.plan.logs, folder_seconds)
        living = self.living()
        states = {rank: process_state(process.pid) for rank, process in living.items()}
        stacks = dump_stacks(living, self.folder) if is_hang else {}
        beats, codes, now = self.beats(), self.codes(), time.monotonic()  # one that has moved on is late no more
        wrong = self.transport.wrong()
        ranks = []
        for rank in self.processes:
            code, beat = codes.get(rank), beats.get(rank)
            where = innermost(stacks[rank]) if stacks.get(rank) else ""
            found = RankEvidence(rank, code, process_state=states.get(rank, ""), where=where, in_torch="torch" in where)
            if beat is not None:
                late = max(0.0, beat.late(now)) if rank in living else 0.0
                found = replace(found, batch=beat.batch + 1, late_seconds=late, phase=beat.phase,
                                own_seconds=beat.own_seconds, world_collectives=beat.world_collectives,
                                collectives=beat.collectives)  # fmt: skip
            if code is not None and (failure := read_written(self.folder / str(rank))) is not None:
                found = replace(found, message=failure.message, kind=failure.kind, time=failure.time,
                                fits=failure.fits)  # fmt: skip
            ranks.append(found)
        return replace(node, ranks=tuple(ranks), transport=wrong[1] if wrong else "")

    # --- ending

    def signal(self, number: int) -> None:
        """Send a signal to all ranks."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def keep_stacks(self) -> None:
        """Copy what ranks wrote about their stacks, or NCCL about its choice, next to their logs."""
        for name in (text for rank in self.processes for text in (f"stacks-{rank}.txt", f"nccl-{rank}.log")):
            with contextlib.suppress(OSError):
                (self.plan.logs / name).unlink(missing_ok=True)  # of an earlier attempt
                if (self.folder / name).stat().st_size:
                    shutil.copyfile(self.folder / name, self.plan.logs / name)

    def kill(self, seconds: float = KILL_SECONDS) -> tuple[int, ...]:
        """Kill what still runs: without its peers it cannot finish a step. Returns the ranks that did not die in time:
        they wait for a device or a file system."""
        self.signal(signal.SIGKILL)
        end = time.monotonic() + seconds
        while (left := tuple(self.living())) and time.monotonic() < end:
            time.sleep(KILL_POLL_SECONDS)
        return left

    def close(self, seconds: float = KILL_SECONDS) -> None:
        """Kill what still runs, and remove what the ranks left on this machine; the logs of a failure are kept."""
        self.kill(seconds)
        if any(code not in NO_FAILURE for code in self.codes().values()):
            keeping = threading.Thread(target=self.keep_stacks, daemon=True)
            keeping.start()
            keeping.join(KEEP_SECONDS)
        self.watch.close()
        self.clock.close()
        for file in self._beats.values():
            os.close(file)
        self._beats.clear()
        self._closing.close()

    def _beat_file(self, rank: int) -> Path:
        return self.folder / f"beat-{rank}"


@contextlib.contextmanager
def own_folder() -> Iterator[Path]:
    """A temporary folder; those of killed launchers are removed first. A lock shows which launchers are alive: process
    ids mean nothing where containers share the folder."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError), (path / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    while True:
        with (
            tempfile.TemporaryDirectory(prefix=TEMPORARY, ignore_cleanup_errors=True) as name,
            open(f"{name}/{LOCK}", "w") as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.exists(lock.name):  # otherwise a launcher that started now took it for a leftover
                yield Path(name)
                return


def _entry(verb: str) -> str:
    """The module that runs a verb in a process of its own."""
    return "ingot.launch.agent.rank_main" if verb == "train" else "ingot.cli.main"


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    return listener
