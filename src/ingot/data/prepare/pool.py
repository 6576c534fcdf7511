"""Worker processes: one that loads everything, once, and then forks the others.

The caller starts one process early, which imports while the caller is still busy, loads the tokenizer, chooses
its engine, and forks: sixty-four workers are ready as soon as one, and share that memory. Forking the calling process
instead could copy locks that its threads hold. Each worker speaks to the caller over a socket of its own, in frames of
a JSON head and raw bytes, and ends when its socket does.

Why not `ProcessPoolExecutor` on a fork server: each of its workers would load the tokenizer for itself (GPT-NeoX's:
0.45 s of CPU and 80 MB, with Hugging Face's next to it 190 MB, of the 240 MB that a worker may use); it imports the
caller's main module again, so that a script which calls `ingot.prepare` outside `if __name__ == "__main__"` breaks; and
of a worker that dies it does not tell the process id.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from io import BufferedRWPair
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from ingot import errors
from ingot.errors import DataError, IngotError

if TYPE_CHECKING:  # imported while the processes start
    from ingot.data.prepare.packing import PackingPlan
    from ingot.data.tokenizer import Tokenizer

_ENV = {
    "TOKENIZERS_PARALLELISM": "false",  # one thread each: the workers are the parallelism, and only so a fork is safe
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # reuse memory between pieces instead of faulting it in again
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
_END_SECONDS = 10

Stream = IO[bytes] | BufferedRWPair
Progress = Callable[[dict[str, int]], None]
Run = Callable[[dict[str, Any], bytes, Progress], dict[str, Any]]


class Pool:
    """The worker processes, seen from the caller."""

    def __init__(self, count: int, tokenizes: bool):
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [str(pair[1].fileno()) for pair in pairs]
        self.server = subprocess.Popen(
            [sys.executable, "-m", "ingot.data.prepare.worker", *theirs, *(["tokenizes"] if tokenizes else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENV},
            pass_fds=[int(fd) for fd in theirs],
        )
        self.workers = [WorkerProcess(pair[0]) for pair in pairs]
        for pair in pairs:
            pair[1].close()

    def load(self, tokenizer: "Tokenizer", engine: str) -> tuple[str, str]:
        """Have the tokenizer loaded; which engine serves it, and why. Not to be called where text stays text."""
        from ingot.data.prepare.tokenize_engine import Rules

        assert self.server.stdin and self.server.stdout
        request = {"wanted": engine, "rules": asdict(Rules.of(tokenizer))}
        answer = _ask(self.server.stdin, self.server.stdout, self.server.pid, request)
        return answer["name"], answer["reason"]

    def close(self) -> None:
        """End them all; what they are at is finished first, if that does not take long."""
        for pipe in (self.server.stdin, *(worker.stream for worker in self.workers)):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self.server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            for worker in self.workers:
                if worker.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
            self.server.kill()
            self.server.wait()
        self.server.stdout.close()  # type: ignore[union-attr]


class WorkerProcess:
    """One worker process, seen from the caller."""

    def __init__(self, connection: socket.socket):
        self.stream = connection.makefile("rwb")
        connection.close()  # the stream keeps it open
        self.pid = 0

    def start(self, plan: "PackingPlan", folder: Path) -> Run:
        """Begin a job; its tasks are done by the function that comes back."""
        job = {"plan": plan.model_dump(mode="json"), "folder": str(folder)}
        self.pid = int(_ask(self.stream, self.stream, self.pid, job)["pid"])
        return self.run

    def run(self, head: dict[str, Any], blob: bytes, progress: Progress) -> dict[str, Any]:
        """Have one task done."""
        return dict(_ask(self.stream, self.stream, self.pid, head, blob, progress)["done"])


class TaskRunner:
    """Does tasks with several `Run`s, each of which does one at a time; a future for each task."""

    def __init__(self, runs: Sequence[Run]):
        self.threads = ThreadPoolExecutor(len(runs), "prepare")
        self.idle: SimpleQueue[Run] = SimpleQueue()
        for run in runs:
            self.idle.put(run)

    def submit(self, head: dict[str, Any], blob: bytes, progress: Progress) -> Future[dict[str, Any]]:
        """Have a task done by the next that is idle."""
        return self.threads.submit(self._run, head, blob, progress)

    def close(self) -> None:
        """Wait for what is running; begin nothing more."""
        self.threads.shutdown(cancel_futures=True)

    def _run(self, head: dict[str, Any], blob: bytes, progress: Progress) -> dict[str, Any]:
        run = self.idle.get()
        try:
            return run(head, blob, progress)
        finally:
            self.idle.put(run)


def _ask(
    stream: Stream,
    replies: Stream,
    pid: int,
    head: dict[str, Any],
    blob: bytes = b"",
    progress: Progress = lambda counts: None,
) -> dict[str, Any]:
    """Send a request, pass on what is said of progress, and return the answer."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        send(stream, head, blob)
        while (reply := receive(replies)) is not None:
            answer = reply[0]
            if "error" in answer:
                kind: type[IngotError] = getattr(errors, answer["kind"], DataError)
                raise kind(answer["error"])
            if "progress" not in answer:
                return answer
            progress(answer["progress"])
    raise DataError(
        f"worker process {pid or ''} died, perhaps for lack of memory; run the same command again, "
        "with fewer num_workers if it happens again"
    )


def send(stream: Stream, head: dict[str, Any], blob: bytes = b"") -> None:
    """Write one frame."""
    text = json.dumps(head).encode()
    stream.write(struct.pack("<IQ", len(text), len(blob)) + text)
    if blob:
        stream.write(blob)
    stream.flush()


def receive(stream: Stream) -> tuple[dict[str, Any], bytes] | None:
    """Read one frame; None at the end of the stream."""
    sizes = stream.read(12)
    if len(sizes) < 12:
        return None
    head_size, blob_size = struct.unpack("<IQ", sizes)
    head = json.loads(stream.read(head_size))
    return head, stream.read(blob_size) if blob_size else b""
