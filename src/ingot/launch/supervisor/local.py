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
from typing import Any

from ingot.checkpoint.copy_memory import CopyKeeper
from ingot.errors import EXIT_CONTINUE, EXIT_FAULT, EXIT_GIVEN_UP, EXIT_USER_ERROR, disk_error
from ingot.launch.agent.attempt import Outcome, StopNow, run_attempt
from ingot.launch.agent.failure import Failure
from ingot.launch.agent.local_ranks import Node
from ingot.launch.supervisor.failure_log import mark_start, node_name, record
from ingot.launch.supervisor.judge import judge
from ingot.launch.supervisor.progress import newest_checkpoint
from ingot.launch.supervisor.records import FINAL_KINDS, Cause, Closed, Launched, Opened, Started
from ingot.launch.supervisor.state_file import now
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
    step = newest_checkpoint(run)
    here = (node_name(),)
    records: list[Any] = [
        Launched(time=now(), launch="local", back_end="local", nodes=1),
        Started(time=now(), launch="local", job="local", restart=0, host=here[0], nodes=here, step=step),
    ]
    for number in range(1, sys.maxsize):
        before = newest_checkpoint(run)
        records.append(Opened(time=now(), epoch=number, attempt=f"local.0.{number}", nodes=here, step=before))
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
        records.append(Closed(time=now(), epoch=number, cause=_cause(outcome, here[0]), step=newest))
        arguments = [a for a in arguments if a != "--fresh"]
        where = f"rank {outcome.rank} of {node.world} failed first"
        where += f", in batch {outcome.batch}" if outcome.batch > 0 else ""
        if outcome.stop_requested or not node.is_alone:  # several machines are restarted by their job
            return _give_up(failure, where, "", failure.exit_code or EXIT_FAULT, run)
        judged = judge(records, now(), str(run)).judged
        if judged.action != "restart":
            final = failure.kind in FINAL_KINDS
            code = EXIT_USER_ERROR if final else EXIT_GIVEN_UP
            return _give_up(failure, where, "" if final else judged.reason, code, run)
        if (run / STOP).exists():
            reason = f"not restarting: {run / STOP} asks the run to stop"
            return _give_up(failure, where, reason, EXIT_CONTINUE, run)
        records.append(judged)
        smaller = failure.kind == "memory" and failure.fits is not None
        copied = copies.newest()
        what = f"attempt {number + 1} starts from "
        what += f"the copy of batch {copied} in host memory" if copied > newest else f"batch {newest}"
        what = "starting again with smaller microbatches" if smaller else what
        print(f"{failure.message}; {where}; {what}", file=sys.stderr)
        time.sleep(judged.wait_seconds)
    return EXIT_FAULT


def _cause(outcome: Outcome, host: str) -> Cause:
    """As the judge sees it. A full disk of one machine is its own trouble: nobody else will free it."""
    assert outcome.failure is not None
    kind = "machine" if outcome.failure.kind == "site" else outcome.failure.kind
    return Cause(kind, outcome.failure.message, host, outcome.rank, outcome.batch, fits=outcome.failure.fits)  # type: ignore[arg-type]


def _give_up(failure: Failure, where: str, reason: str, code: int, run: Path) -> int:
    print(f"error: {failure.message}", file=sys.stderr)
    print(f"{where}; the log of every rank is in {run / LOGS}", file=sys.stderr)
    if reason:
        print(reason, file=sys.stderr)
    return code
