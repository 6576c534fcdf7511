"""Watches a job's supervisor from another node, outside any image: `python -m ingot.launch.slurm.deputy JOB HOST:PORT`.

The job keeps its other nodes when one dies (`--no-kill`), so that a spare can take its place. If the node that dies is
the one of the job script, Slurm 22 and later leave the job as it is, running and doing nothing. The deputy then puts it
back into the queue, where the next supervisor finds what was going on. Cut off from the network itself, it reaches
neither the supervisor nor Slurm, and can do no harm.
"""

import socket
import subprocess
import sys
import time

LOOK_SECONDS = 5.0
PATIENCE_SECONDS = 45.0  # more than the agents', which have ended their ranks by then
CONNECT_SECONDS = 5.0


def main(job: str, address: str) -> int:
    host, _, port = address.rpartition(":")
    answered = time.monotonic()
    while time.monotonic() - answered < PATIENCE_SECONDS:
        if is_there(host, int(port)):
            answered = time.monotonic()
        time.sleep(LOOK_SECONDS)
    print(
        f"the supervisor at {address} has not answered for {PATIENCE_SECONDS:g} s: the job is queued again", flush=True
    )
    return subprocess.run(["scontrol", "requeue", job], timeout=120).returncode


def is_there(host: str, port: int) -> bool:
    """Whether a supervisor greets us there."""
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
            connection.settimeout(CONNECT_SECONDS)
            return bool(connection.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
