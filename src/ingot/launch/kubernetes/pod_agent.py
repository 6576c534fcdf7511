"""A node's part of a run on Kubernetes: attempts inside the pod, for as long as new processes are all that it takes.

Slurm has a job script that counts attempts; here all pods count alike, without talking: an attempt is over when its
`code` file is in the run folder, so a pod that comes late joins where the others are. The exit code tells Kubernetes
the rest: 0, the run has ended; 2 or 3, it would fail again; 138, make the pods anew. (That one since a PyTorchJob
restarts for codes from 128 on, and its older versions for a few of them, of which 138 is the user's own.)
"""

import itertools
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.node_agent import ATTEMPT_VARIABLE, HALT, NodeAgent
from ingot.launch.supervisor.restart_policy import (
    NO_PROGRESS_LIMIT,
    judge,
    mark_start,
    newest_checkpoint,
    read_failures,
)
from ingot.training.runtime.run_files import STOP

EXIT_AGAIN = 138
WORD_SECONDS = 60.0  # for node 0 to say how an attempt ended
POLL_SECONDS = 0.2


def run_pod(spec: LaunchSpec, env: Mapping[str, str]) -> int:
    """Attempts until the run has ended, or until only new pods can help; the exit code says which."""
    signal.signal(signal.SIGTERM, _leave)  # between attempts; the first process of a container has no default
    launch = env[ATTEMPT_VARIABLE]
    spec.folder.mkdir(parents=True, exist_ok=True)
    _start(spec, launch, NodeAgent(spec, env).rank)
    idle, newest = 0, newest_checkpoint(Path(spec.run_folder))
    for number in itertools.count(1):
        worker = NodeAgent(spec, {**env, ATTEMPT_VARIABLE: f"{launch}.{number}"})
        if worker.code_file.exists():
            continue
        code = worker.run()
        code = _word(worker.code_file, code)
        if code == EXIT_CONTINUE:
            return 0 if (Path(spec.run_folder) / STOP).exists() else EXIT_AGAIN
        if code != EXIT_FAULT:
            return code
        failures, before = read_failures(Path(spec.run_folder)), newest
        newest = newest_checkpoint(Path(spec.run_folder))
        idle = idle + 1 if newest == before else 0  # some attempts end before a failure can be recorded
        if [failure["progress"] for failure in failures[-2:]] == [False, False] or idle == NO_PROGRESS_LIMIT:
            return EXIT_AGAIN  # new processes did not help; perhaps other machines do
        time.sleep(judge(failures).wait)
    raise AssertionError("counting has an end")


def _start(spec: LaunchSpec, launch: str, rank: int) -> None:
    """Once per launch node 0 clears what an earlier one left behind; the others wait for that."""
    run = Path(spec.run_folder)
    started = spec.folder / f"started.{launch.partition('.')[0]}"
    if rank == 0 and not started.exists():
        for leftover in (run / STOP, spec.folder / HALT):
            leftover.unlink(missing_ok=True)
        mark_start(run)
        started.touch()
    for number in itertools.count():
        if started.exists():
            return
        if number % round(60 / POLL_SECONDS) == 0:
            print("waiting for the pod of node 0", file=sys.stderr)
        time.sleep(POLL_SECONDS)


def _word(file: Path, code: int) -> int:
    """How the attempt ended, by the first node that failed or by node 0."""
    end = time.monotonic() + WORD_SECONDS
    while time.monotonic() < end:
        if file.exists():
            return int(file.read_text())
        time.sleep(POLL_SECONDS)
    return code


def _leave(number: int, frame: object) -> None:
    raise SystemExit(EXIT_AGAIN)
