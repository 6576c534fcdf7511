"""A run on this machine: start its ranks, and restart them after a failure that may pass.

This is our own supervisor, not torchrun's agent: the launcher does not load torch, hangs are found from outside, logs
are appended to, the first failure is known to the microsecond, exit codes are kept. (The agent's restarts do not work
in torch 2.13 unless its store is switched off.) Ranks that torchrun, srun or Composer start are used as they are.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

from ingot.checkpoint.copy_memory import CopyKeeper
from ingot.errors import (
    EXIT_CONTINUE,
    EXIT_FAULT,
    EXIT_FINISHED,
    EXIT_GIVEN_UP,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    disk_error,
)
from ingot.launch.agent.attempt import Outcome, StopNow, pause, run_attempt
from ingot.launch.agent.failure import Failure
from ingot.launch.agent.local_ranks import Node
from ingot.launch.local.state import LocalState
from ingot.launch.protocol import LaunchFolder
from ingot.launch.supervisor.failure_log import mark_start, record
from ingot.launch.supervisor.progress import (
    checkpoint_files,
    is_stop_there,
    newest_checkpoint,
    stop_reason_of,
    who_asked,
)
from ingot.launch.supervisor.records import FINAL_KINDS, Cause
from ingot.training.runtime.lease import clear_stop_request
from ingot.training.runtime.run_files import LOGS, STOP


def run_processes(
    arguments: Sequence[str], node: Node, run: Path, env: Mapping[str, str] = os.environ, command: str = ""
) -> int:
    """Run `ingot ARGUMENTS` in every rank of this machine, to the end of the run; returns the exit code.

    command: what the user types to continue the run, where it has no launch spec
    """
    state = LocalState(run, is_kept=node.is_alone)
    try:
        clear_stop_request(run)
        if node.is_alone:
            LaunchFolder(run).clear_halt()
        mark_start(run)
    except OSError as error:
        raise disk_error("write the run folder", run, error) from None
    with closing(CopyKeeper(node.processes if arguments[0] == "train" else 0)) as copies:
        state.begin(command, 0 if "--fresh" in arguments else newest_checkpoint(run))
        try:
            return _LocalRun(list(arguments), node, run, copies, state).to_the_end(copies.environment(env))
        except OSError as error:  # such as a full disk: the ranks' logs cannot be created
            raise disk_error("write", error.filename or run, error) from None
        finally:
            state.end()


class _LocalRun:
    """The attempts of one launch."""

    def __init__(self, arguments: list[str], node: Node, run: Path, copies: CopyKeeper, state: LocalState):
        self.arguments, self.node, self.run, self.copies, self.state = arguments, node, run, copies, state
        self.old_checkpoints = checkpoint_files(run) if "--fresh" in arguments else set()

    def to_the_end(self, env: Mapping[str, str]) -> int:
        for number in range(1, sys.maxsize):
            before = self._newest()
            attempt = self.state.open(number, before, self.copies.newest()).attempt
            try:
                outcome = run_attempt(self.arguments, self.node, self.run / LOGS, attempt, env, self.state.look)
            except StopNow:
                self.state.note_signal(signal.SIGINT)
                cause = Cause("stopped", "ended at once by a second Ctrl-C, without saving")
                self.state.act(self.state.close(cause, newest_checkpoint(self.run)))
                print("stopped at once; the same command continues from the last checkpoint", file=sys.stderr)
                return EXIT_INTERRUPTED
            if (failure := outcome.failure) is None:
                return self._ended_well(outcome)
            if not self.old_checkpoints & checkpoint_files(self.run):  # else its ranks died before they removed them
                self.arguments = [argument for argument in self.arguments if argument != "--fresh"]
            newest = self._newest()
            with suppress(OSError):  # a full disk
                record(self.run, attempt=attempt, rank=outcome.rank, batch=outcome.batch, kind=failure.kind,
                       message=failure.message, progress=newest > before)  # fmt: skip
            code = self._failed(outcome, failure, number, newest)
            if code is not None:
                return code
        return EXIT_FAULT

    def _newest(self) -> int:
        """The checkpoint that the next attempt continues from."""
        return 0 if "--fresh" in self.arguments else newest_checkpoint(self.run)

    def _ended_well(self, outcome: Outcome) -> int:
        """The run is complete, or has stopped as requested."""
        newest = newest_checkpoint(self.run)
        if outcome.code == EXIT_FINISHED:
            self.state.act(self.state.close(Cause("finished", ""), newest))
            return outcome.code
        self._note_stop(outcome)
        self.state.act(self.state.close(Cause("stopped", "saved and stopped"), newest))
        return outcome.code

    def _note_stop(self, outcome: Outcome) -> None:
        """Why the ranks have stopped, by whichever of us was asked."""
        if outcome.signal:
            self.state.note_signal(outcome.signal)
        reason, detail = stop_reason_of(self.run) or ("signal", "")
        self.state.note_stop(reason, detail)

    def _failed(self, outcome: Outcome, failure: Failure, number: int, newest: int) -> int | None:
        """Returns the exit code; None if the next attempt begins."""
        state, run = self.state, self.run
        where = f"rank {outcome.rank} of {self.node.world} failed first"
        where += f", in batch {outcome.batch}" if outcome.batch > 0 else ""
        if outcome.signal:
            state.note_signal(outcome.signal)
        judged = state.close(_cause(outcome, failure), newest)
        if outcome.signal or not self.node.is_alone:  # several machines are restarted by their job
            state.act(judged)
            return _give_up(failure, where, "", failure.exit_code or EXIT_FAULT, run)
        if judged.action == "restart" and is_stop_there(run):
            state.note_stop("user", who_asked(run))
            judged = state.judge()
        if judged.action == "stop":
            state.act(judged)
            return _give_up(failure, where, f"not restarting: {run / STOP} asks the run to stop", EXIT_CONTINUE, run)
        if judged.action != "restart":
            state.act(judged)
            final = failure.kind in FINAL_KINDS
            code = EXIT_USER_ERROR if final else EXIT_GIVEN_UP
            return _give_up(failure, where, "" if final else judged.reason, code, run)
        copied = self.copies.newest()
        start = f"the copy of batch {copied} in host memory" if copied > newest else f"batch {newest}"
        smaller = failure.kind == "memory" and failure.fits is not None
        state.act(judged, "" if smaller or copied <= newest else f"continuing from {start}")
        what = "starting again with smaller microbatches" if smaller else f"attempt {number + 1} starts from {start}"
        print(f"{failure.message}; {where}; {what}", file=sys.stderr)
        if asked := pause(judged.wait_seconds):
            state.note_signal(asked)
            state.stop()
            print("not restarting; the same command continues from the last checkpoint", file=sys.stderr)
            return EXIT_CONTINUE
        return None


def _cause(outcome: Outcome, failure: Failure) -> Cause:
    """As the judge sees it: the only machine is never at fault. A full disk is its own trouble: nobody else will free
    it."""
    kind = "machine" if failure.kind == "site" else failure.kind
    return Cause(kind, failure.message, rank=outcome.rank, batch=outcome.batch, fits=failure.fits)  # type: ignore[arg-type]


def _give_up(failure: Failure, where: str, reason: str, code: int, run: Path) -> int:
    print(f"error: {failure.message}", file=sys.stderr)
    print(f"{where}; the log of every rank is in {run / LOGS}", file=sys.stderr)
    if reason:
        print(reason, file=sys.stderr)
    return code
