"""A node's part of a run on Kubernetes: attempts inside the pod, for as long as new processes are enough.

Slurm has a job script that counts attempts. Here every pod counts by itself, without communication: an attempt is over
when its result is in the launch folder, so a pod that starts late joins the attempt that the others are in. The exit
code tells Kubernetes what to do next: 0, the run has ended; 2 or 3, it would fail again; 138, replace the pods. (138
because a PyTorchJob restarts pods for codes from 128 on, its older versions only for a few codes, of which 138 is
reserved for the user.)
"""

import itertools
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT
from ingot.launch.agent.node_agent import NodeAgent
from ingot.launch.protocol import ATTEMPT_VARIABLE, EXIT_NEW_PODS, LaunchFolder
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.failure_log import mark_start, read_failures
from ingot.launch.supervisor.restart_policy import NO_PROGRESS_LIMIT, decide_restart, newest_checkpoint
from ingot.training.runtime.run_files import STOP

RESULT_SECONDS = 60.0  # for node 0 to record how an attempt ended
POLL_SECONDS = 0.2
REMINDER_SECONDS = 60.0


def run_pod(spec: LaunchSpec, env: Mapping[str, str]) -> int:
    """Attempts until the run has ended, or until only new pods can help; returns the pod's exit code."""
    signal.signal(signal.SIGTERM, _exit_for_new_pods)  # PID 1 of a container ignores TERM unless it has a handler
    launch_id, run = env[ATTEMPT_VARIABLE], Path(spec.run_folder)
    launch = LaunchFolder(run)
    launch.path.mkdir(parents=True, exist_ok=True)
    _wait_for_cleanup(launch, launch_id, NodeAgent(spec, env).rank)
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
            return EXIT_NEW_PODS  # new ranks did not help; other machines may
        time.sleep(decide_restart(failures).wait_seconds)
    raise AssertionError("itertools.count does not end")


def _wait_for_cleanup(launch: LaunchFolder, launch_id: str, rank: int) -> None:
    """Node 0 removes what an earlier launch left, once per launch; the other nodes wait until it has."""
    if rank == 0 and not launch.started(launch_id):
        for leftover in launch.leftovers():
            leftover.unlink(missing_ok=True)
        mark_start(launch.run)
        launch.mark_started(launch_id)
    reminder = 0.0
    while not launch.started(launch_id):
        if time.monotonic() >= reminder:
            print("waiting for the pod of node 0", file=sys.stderr)
            reminder = time.monotonic() + REMINDER_SECONDS
        time.sleep(POLL_SECONDS)


def _wait_for_result(launch: LaunchFolder, attempt: str, own_code: int) -> int:
    """The attempt's result, which the first node that failed records, or node 0; this node's own if none does."""
    end = time.monotonic() + RESULT_SECONDS
    while time.monotonic() < end:
        if (result := launch.result(attempt)) is not None:
            return result
        time.sleep(POLL_SECONDS)
    return own_code


def _exit_for_new_pods(number: int, frame: object) -> None:
    raise SystemExit(EXIT_NEW_PODS)
