"""A run on this machine, through every fault: start its processes, and start them again after a failure that may pass.

Our own supervisor instead of torchrun's agent: no second copy of torch in the launcher, hangs found from outside, logs
that are appended to, the first failure found by its time to the microsecond, exit codes kept. (The agent's restarts do
not work in torch 2.13 without switching off its store.) What torchrun, srun or Composer start is joined as it is found.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT, disk_error
from ingot.launch.supervisor.attempt import StopNow, run_attempt
from ingot.launch.supervisor.local_ranks import Node
from ingot.launch.supervisor.restart_policy import judge, mark_start, newest_checkpoint, read_failures, record
from ingot.training.runtime.lease import clear_stop_request
from ingot.training.runtime.run_files import LOGS, STOP


def run_processes(arguments: Sequence[str], node: Node, run: Path) -> int:
    """Run `ingot ARGUMENTS` in every process of this machine, to the end of the run; gives the exit code."""
    arguments = list(arguments)
    try:
        clear_stop_request(run)
        mark_start(run)
    except OSError as error:
        raise disk_error("write the run folder", run, error) from None
    for number in range(1, sys.maxsize):
        before = newest_checkpoint(run)
        try:
            outcome = run_attempt(arguments, node, run / LOGS, str(number))
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
        verdict = judge(read_failures(run))
        code, reason = verdict.exit_code, verdict.reason
        if outcome.asked or not node.is_alone:
            code, reason = failure.exit_code or EXIT_FAULT, ""
        elif failure.kind == "memory" and failure.fits is not None:
            # the run folder holds the size that was too much, and the processes choose a smaller one
            print(f"{failure.message}; {where}; starting again with smaller microbatches", file=sys.stderr)
            continue
        elif verdict.again and (run / STOP).exists():
            code, reason = EXIT_CONTINUE, f"{run / STOP} asks for no new attempt"
        elif verdict.again:
            print(f"{failure.message}; {where}; attempt {number + 1} starts from batch {newest}", file=sys.stderr)
            time.sleep(verdict.wait)
            continue
        print(f"error: {failure.message}", file=sys.stderr)
        print(f"{where}; the log of every rank is in {run / LOGS}", file=sys.stderr)
        if reason:
            print(reason, file=sys.stderr)
        return code
    return EXIT_FAULT
