"""Several processes of one command on this machine, without a run folder and without restarts: `ingot eval --nproc`."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from ingot.parallel.rank_env import STORE_FD

_ENDING_SECONDS = 2.0  # that processes get to end by themselves once one has failed: they may fail alike


def run_processes(arguments: Sequence[str], count: int) -> int:
    """Run `ingot ARGUMENTS` in several processes, of which the first prints; returns the exit code. If one fails, the
    others are ended."""
    listening = socket.create_server(("127.0.0.1", 0))
    environment = os.environ | {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listening.getsockname()[1]),
    }  # fmt: skip
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))
    processes: list[subprocess.Popen[bytes]] = []
    errors: list[IO[bytes]] = []
    try:
        for rank in range(count):
            own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {STORE_FD: str(listening.fileno())} if rank == 0 else {}
            errors.append(tempfile.TemporaryFile())  # noqa: SIM115  (read below)
            processes.append(subprocess.Popen(
                [sys.executable, "-m", "ingot.cli.main", *arguments], env=own,
                pass_fds=[listening.fileno()] if rank == 0 else [],
                stdout=None if rank == 0 else subprocess.DEVNULL, stderr=None if rank == 0 else errors[rank],
            ))  # fmt: skip
        return _wait(processes, errors)
    finally:
        listening.close()
        for process in processes:
            process.kill()
            process.wait()
        for file in errors:
            file.close()


def _wait(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[IO[bytes]]) -> int:
    """Until all have ended, or one has failed. What only a later process says is shown."""
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            time.sleep(_ENDING_SECONDS)
            break
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return 0
    if not codes[0]:  # the first one has said nothing
        errors[failed].seek(0)
        print(errors[failed].read().decode(errors="replace"), end="", file=sys.stderr)
        print(f"process {failed} of {len(processes)} failed first", file=sys.stderr)
    return abs(codes[failed] or 1)
