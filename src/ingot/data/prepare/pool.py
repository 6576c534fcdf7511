"""Worker processes: a server process that loads the tokenizer once, then forks the workers.

The server starts early and imports while the caller is still busy. Forked workers share its memory, and unlike the
caller it has one thread, so forking it is safe. Each worker has a pipe to the caller and exits when the pipe closes:
no worker outlives a killed caller.

`ProcessPoolExecutor` on a forkserver context was built and measured instead (whole runs on 2 cores, GPT-NeoX's
tokenizer, median of five). Each of its workers loads the tokenizer for itself and imports the caller's main module:

                        2.4 MB, 2 workers   118 MB, 1 worker   118 MB, 2 workers   memory of 2, of 8 workers
    this pool                      0.88 s             1.60 s              1.57 s              331 MB, 684 MB
    ProcessPoolExecutor            1.18 s             1.58 s              1.85 s            411 MB, 1,025 MB
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ingot.errors import DataError

if TYPE_CHECKING:  # imported while the processes start
    from ingot.data.prepare.holdout import HashScan
    from ingot.data.prepare.worker import Task
    from ingot.data.tokenizer import Tokenizer

_ENV = {
    "TOKENIZERS_PARALLELISM": "false",  # one thread each: the workers are the parallelism, and forking stays safe
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # reuse memory between pieces instead of faulting it in again
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
_END_SECONDS = 10

Progress = Callable[[dict[str, int]], None]


class WorkerPool:
    """The worker processes, seen from the caller."""

    def __init__(self, count: int, tokenizes: bool):
        self.count, self.slots = count, count + 2  # tasks to submit at once: two that wait, so that no worker is idle
        pipes = [Pipe() for _ in range(count + 1)]
        (self._control, *self._pipes), theirs = ([pipe[side] for pipe in pipes] for side in (0, 1))
        self.server = subprocess.Popen(
            [sys.executable, "-m", "ingot.data.prepare.worker", *(str(pipe.fileno()) for pipe in theirs)],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a library prints is not part of our output
            env={**os.environ, **_ENV},
            pass_fds=[pipe.fileno() for pipe in theirs],
        )
        for pipe in theirs:
            pipe.close()
        self._control.send(tokenizes)
        self.pids: dict[Connection, int] = {}
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        self._threads = ThreadPoolExecutor(count, "prepare")

    def load(self, tokenizer: "Tokenizer | None", engine: str) -> tuple[str, str]:
        """Load the tokenizer and start the workers; returns which engine they use, and why."""
        from ingot.data.prepare.tokenize_engine import Rules

        rules = Rules.of(tokenizer) if tokenizer else None
        pids, name, reason = _ask(self._control, (rules, engine), self.server.pid)
        self.pids = dict(zip(self._pipes, pids, strict=True))
        for pipe in self._pipes:
            self._idle.put(pipe)
        return name, reason

    def submit(self, task: "Task | HashScan", progress: Progress) -> Future[dict[str, Any]]:
        """Have the next idle worker do a task."""
        return self._threads.submit(self._run, task, progress)

    def _run(self, task: "Task | HashScan", progress: Progress) -> dict[str, Any]:
        pipe = self._idle.get()
        try:
            return dict(_ask(pipe, task, self.pids[pipe], progress))
        finally:
            self._idle.put(pipe)

    def close(self) -> None:
        """End all processes; tasks that are running are finished first, if that does not take long."""
        for pipe in (self._control, *self._pipes):
            pipe.close()
        try:
            self.server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            for pid in (*self.pids.values(), self.server.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.server.wait()
        self._threads.shutdown()


class InProcess:
    """Does tasks in this process, with the interface of `WorkerPool`."""

    count = 0
    slots = 2  # one is read while the other runs

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "prepare")

    def load(self, tokenizer: "Tokenizer | None", engine: str) -> tuple[str, str]:
        from ingot.data.prepare.tokenize_engine import choose_engine

        self._engine = choose_engine(tokenizer, engine) if tokenizer else None
        return (self._engine.name, self._engine.reason) if self._engine else ("none", "")

    def submit(self, task: "Task | HashScan", progress: Progress) -> Future[dict[str, Any]]:
        from ingot.data.prepare.worker import run_task

        return self._threads.submit(run_task, task, self._engine, progress)

    def close(self) -> None:
        self._threads.shutdown()


def _ask(pipe: Connection, request: Any, pid: int, progress: Progress = lambda counts: None) -> Any:
    """Send a request to a process, pass on its progress, and return its answer."""
    try:
        pipe.send(request)
        while (answer := pipe.recv())[0] == "progress":
            progress(answer[1])
    except (EOFError, ConnectionError):
        raise DataError(
            f"worker process {pid} died, perhaps for lack of memory; run the same command again, with fewer "
            "num_workers if it happens again"
        ) from None
    if answer[0] == "error":
        raise answer[1]
    return answer[1]
