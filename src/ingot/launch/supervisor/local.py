"""A run on this machine: start its ranks, and restart them after a failure that may pass.

This is our own supervisor, not torchrun's agent: the launcher does not load torch, hangs are found from outside, logs
are appended to, the first failure is known to the microsecond, exit codes are kept. (The agent's restarts do not work
in torch 2.13 unless its store is switched off.) Ranks that torchrun, srun or Composer start are used as they are.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from ingot.checkpoint.copy_memory import CopyKeeper
from ingot.errors import EXIT_CONTINUE, EXIT_FAULT, disk_error
from ingot.launch.agent.attempt import Outcome, StopNow, run_attempt
from ingot.launch.agent.local_ranks import Node
from ingot.launch.supervisor.failure_log import mark_start, read_failures, record
from ingot.launch.supervisor.restart_policy import RestartDecision, decide_restart, newest_checkpoint
from ingot.training.runtime.lease import clear_stop_request
from ingot.training.runtime.run_files import LOGS, STOP


def run_processes(arguments: Sequence[str], node: Node, run: Path, env: Mapping[str, str] = os.environ) -> int:
    """Run `ingot ARGUMENTS` in every rank of this machine, to the end of the run; returns the exit code."""
    arguments = list(arguments)
    try:
        clear_stop_request(run)
        mark_start(run)
    except OSError as error:
        raise disk_error("write the run folder", run, error) from None
    with closing(CopyKeeper(node.processes if arguments[0] == "train" else 0)) as copies:
        return _run_attempts(arguments, node, run, copies.environment(env), copies)


def _run_attempts(arguments: list[str], node: Node, run: Path, env: Mapping[str, str], copies: CopyKeeper) -> int:
    for number in range(1, sys.maxsize):
        before = newest_checkpoint(run)
        try:
            outcome = run_attempt(arguments, node, run / LOGS, str(number), env=env)
        except StopNow:
            print("stopped at once; the same command continues from the last checkpoint", file=sys.stderr)
            return 130
        if (failure := outcome.failure) is None:
            return outcome.code
        newest = newest_checkpoint(run)
        record(run, attempt=str(number), rank=outcome.rank, batch=outcome.batch, kind=failure.kind,
               message=failure.message, progress=newest > before)  # fmt: skip
        arguments = [a for a in arguments if a != "--fresh"]
        where = f"rank {outcome.rank} of {node.world} failed first"
        where += f", in batch {outcome.batch}" if outcome.batch > 0 else ""
        decision = _decide(outcome, node, run)
        if decision.restart:
            copied = copies.newest()
            where_from = f"the copy of batch {copied} in host memory" if copied > newest else f"batch {newest}"
            what = decision.reason or f"attempt {number + 1} starts from {where_from}"
            print(f"{failure.message}; {where}; {what}", file=sys.stderr)
            time.sleep(decision.wait_seconds)
            continue
        print(f"error: {failure.message}", file=sys.stderr)
        print(f"{where}; the log of every rank is in {run / LOGS}", file=sys.stderr)
        if decision.reason:
            print(decision.reason, file=sys.stderr)
        return decision.exit_code
    return EXIT_FAULT


def _decide(outcome: Outcome, node: Node, run: Path) -> RestartDecision:
    """The restart policy, and what only this machine knows: several machines are restarted by their job."""
    assert outcome.failure is not None
    if outcome.stop_requested or not node.is_alone:
        return RestartDecision(False, "", outcome.failure.exit_code or EXIT_FAULT)
    if outcome.failure.kind == "memory" and outcome.failure.fits is not None:
        # the run folder holds the size that was too large, and the ranks choose a smaller one
        return RestartDecision(True, "starting again with smaller microbatches")
    decision = decide_restart(read_failures(run))
    if decision.restart and (run / STOP).exists():
        return RestartDecision(False, f"not restarting: {run / STOP} asks the run to stop", EXIT_CONTINUE)
    return decision
