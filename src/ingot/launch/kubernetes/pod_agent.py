"""A node's part of a run on Kubernetes: attempts inside the pod, for as long as new ranks are all that it takes.

Slurm has a job script that counts attempts; here each pod counts for itself: an attempt is over when its result is in
the launch folder, so a pod that comes late joins where the others are. The exit code tells Kubernetes the rest: 0, the
run has ended; 2 or 3, it would fail again; 138, replace the pods. (138 because a PyTorchJob restarts for codes from 128
on, and its older versions for only a few of them, of which 138 is reserved for users.)
"""

import itertools
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT
from ingot.launch.protocol import ATTEMPT_VARIABLE, EXIT_NEW_PODS, LaunchFolder
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.failure_log import mark_start, read_failures
from ingot.launch.supervisor.node_agent import NodeAgent
from ingot.launch.supervisor.restart_policy import NO_PROGRESS_LIMIT, decide_restart, newest_checkpoint
from ingot.training.runtime.run_files import STOP

RESULT_SECONDS = 60.0  # for node 0 to record how an attempt ended
POLL_SECONDS = 0.2


def run_pod(spec: LaunchSpec, env: Mapping[str, str]) -> int:
    """Attempts until the run has ended, or until only new pods can help; the exit code says which."""
    signal.signal(signal.SIGTERM, _exit)  # between attempts; the first process of a container has no default
    launch_id, run = env[ATTEMPT_VARIABLE], Path(spec.run_folder)
    launch = LaunchFolder(run)
    launch.path.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(launch, launch_id, NodeAgent(spec, env).rank)
    idle, newest = 0, newest_checkpoint(run)
    for number in itertools.count(1):
        attempt = f"{launch_id}.{number}"
        if launch.result(attempt) is not None:
            continue
        code = NodeAgent(spec, {**env, ATTEMPT_VARIABLE: attempt}).run()
        code = _wait_for_result(launch, attempt, code)
        if code == EXIT_CONTINUE:
            return 0 if (run / STOP).exists() else EXIT_NEW_PODS
        if code != EXIT_FAULT:
            return code
        failures, before = read_failures(run), newest
        newest = newest_checkpoint(run)
        idle = idle + 1 if newest == before else 0  # some attempts end before a failure can be recorded
        if [failure["progress"] for failure in failures[-2:]] == [False, False] or idle == NO_PROGRESS_LIMIT:
            return EXIT_NEW_PODS  # new ranks did not help; perhaps other machines do
        time.sleep(decide_restart(failures).wait_seconds)
    raise AssertionError("counting has an end")


def _remove_leftovers(launch: LaunchFolder, launch_id: str, rank: int) -> None:
    """Once per launch, node 0 removes what an earlier one left; the other nodes wait for that."""
    if rank == 0 and not launch.started(launch_id):
        for leftover in launch.leftovers():
            leftover.unlink(missing_ok=True)
        mark_start(launch.run)
        launch.mark_started(launch_id)
    for number in itertools.count():
        if launch.started(launch_id):
            return
        if number % round(60 / POLL_SECONDS) == 0:
            print("waiting for the pod of node 0", file=sys.stderr)
        time.sleep(POLL_SECONDS)


def _wait_for_result(launch: LaunchFolder, attempt: str, code: int) -> int:
    """How the attempt ended, by the first node that failed or by node 0; this node's code if neither records it."""
    end = time.monotonic() + RESULT_SECONDS
    while time.monotonic() < end:
        if (result := launch.result(attempt)) is not None:
            return result
        time.sleep(POLL_SECONDS)
    return code


def _exit(number: int, frame: object) -> None:
    raise SystemExit(EXIT_NEW_PODS)
