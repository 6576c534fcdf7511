"""What runs on each node of a job: `python -m ingot.launch.agent.node_agent --spec FILE`, started once per node by
Slurm or Kubernetes. It sets the profile's variables, checks the node, runs this node's ranks, and records why they
ended: the first node to fail writes the attempt's result, and the others see it and end their ranks at once.
"""

import argparse
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT, EXIT_FINISHED, ConfigError, DiskError, IngotError
from ingot.launch.agent.attempt import Outcome, run_attempt
from ingot.launch.agent.environment import enter_environment
from ingot.launch.agent.failure import OTHER_NODE_FAILED, Failure
from ingot.launch.agent.local_ranks import Node
from ingot.launch.profiles import find_profile
from ingot.launch.protocol import ATTEMPT_VARIABLE, NODE_RANK_VARIABLES, NODES_VARIABLE, LaunchFolder
from ingot.launch.spec import LaunchSpec, read_spec
from ingot.launch.supervisor.failure_log import node_name, read_failures, record
from ingot.launch.supervisor.restart_policy import decide_restart, newest_checkpoint
from ingot.training.runtime.run_files import FINISHED, LOGS, STOP

PATIENCE_SECONDS = 3.0  # for the node that failed first, or for the job script that forwards a stop, to write it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--share", help="K/N of a preparation; without it, the last part of the preparation")
    parser.add_argument("--check", action="store_true", help="check whether the nodes are fit, and run nothing")
    options = parser.parse_args()
    try:
        if not options.spec.exists() and "," in os.environ.get(NODES_VARIABLE, ""):
            reason = f"{options.spec} is not there: this node does not share the run folder"
            return _wait_as_unusable_node(reason, None)
        spec = read_spec(options.spec)
        if options.check:
            return NodeAgent(spec, os.environ).check()
        if spec.verb == "prepare":
            return NodeAgent(spec.model_copy(update={"nodes": 1}), os.environ).prepare(options.share, spec.nodes)
        return NodeAgent(spec, os.environ).run()
    except IngotError as error:
        print(f"{socket.gethostname()}: error: {error}", file=sys.stderr)
        return error.exit_code


class NodeAgent:
    """This node's part of one attempt."""

    def __init__(self, spec: LaunchSpec, env: Mapping[str, str]):
        self.spec, self.env, self.run_folder = spec, env, Path(spec.run_folder)
        self.launch = LaunchFolder(self.run_folder)
        self.attempt = env.get(ATTEMPT_VARIABLE, "1")
        if not re.fullmatch(r"[A-Za-z0-9.-]+", self.attempt):
            raise ConfigError(f"{ATTEMPT_VARIABLE}={self.attempt!r} is not a valid attempt name")
        self.rank = int(next((env[name] for name in NODE_RANK_VARIABLES if name in env), "0"))
        self.logged_rank = self.rank  # in the failure log, for failures before ranks start
        self.on_slurm = "SLURM_JOB_ID" in env

    def run(self) -> int:
        """The exit code for srun or the pod: 0 unless something failed, so that no node is killed while it saves."""
        if self.launch.stop_requested(self.attempt):  # the signal came before this process handled signals
            return self._end(EXIT_CONTINUE)
        if (code := self._start(read_failures(self.run_folder))) is not None:
            return code
        spec = self.spec
        node = Node(spec.processes, spec.processes * spec.nodes)
        if spec.nodes > 1:
            address, port = self.env["MASTER_ADDR"], int(self.env["MASTER_PORT"])
            node = Node(node.processes, node.world, self.rank, address, port)
        before = newest_checkpoint(self.run_folder)
        transport = find_profile(spec.profile).transport if spec.nodes > 1 else ""
        outcome = run_attempt([spec.verb, *spec.arguments], node, self.run_folder / LOGS / self.attempt, self.attempt,
                              self._others_failed, transport, self._is_stop_request, self.env)  # fmt: skip
        if outcome.failure is None:
            # All ranks have agreed on a step to stop after, so none had failed. A signal that the job script did not
            # send (a preemption, say) is recorded for it; without one the run stopped by itself (max_wall_time).
            if outcome.code == EXIT_CONTINUE and outcome.stop_requested and self.on_slurm:
                self.launch.request_stop(self.attempt)
            return self._end(outcome.code)
        if outcome.failure.is_consequence and spec.nodes > 1:  # another node will record why, if it still can
            self._wait_until(self._others_failed)
        if not self._others_failed():
            self._record(outcome, newest_checkpoint(self.run_folder) > before)
            if outcome.failure.kind in ("transport", "device"):
                self.launch.exclude_nodes(self.attempt, [node_name()])
        return self._end(outcome.failure.exit_code or EXIT_FAULT, outcome.failure.message)

    def prepare(self, share: str | None, shares: int) -> int:
        """One share of a preparation, or, as one more, what comes after all of them."""
        self.logged_rank = int(share.partition("/")[0]) if share else shares
        failures = [failure for failure in read_failures(self.run_folder) if failure["rank"] == self.logged_rank]
        if (code := self._start(failures)) is not None:
            return code
        command = [self.spec.verb, *self.spec.arguments, *(["--share", share] if share else [])]
        node = Node(1, shares + 1, self.logged_rank, port=1)  # no rendezvous; the log is named after the share
        logs = self.run_folder / LOGS / self.attempt
        outcome = run_attempt(command, node, logs, self.attempt, env=self.env)
        if outcome.code == EXIT_CONTINUE:  # scancel, or a node that is needed elsewhere
            return EXIT_FAULT
        if outcome.failure is None:
            if share is None:
                (self.run_folder / FINISHED).touch()
            return self._end(EXIT_FINISHED)
        self._record(outcome, progress=False)
        return self._end(outcome.failure.exit_code or EXIT_FAULT, outcome.failure.message)

    def check(self) -> int:
        """Check whether the nodes are fit; the first to know prints the result."""
        from ingot.launch.preflight.preflight import Preflight, PreflightResult

        def print_result(result: PreflightResult) -> None:
            print("\n".join([*(f"FAIL  {problem.message}" for problem in result.problems), *result.notes]), flush=True)

        self._enter_workdir()
        result = Preflight(self.spec, self.attempt, self.rank, self.env).run(print_result)
        return result.exit_code if result.problems else 0

    def _start(self, failures: list[dict]) -> int | None:
        """What comes before the ranks; the exit code if they must not start."""
        decision = decide_restart(failures)
        if not decision.restart:
            return self._end(decision.exit_code, decision.reason)
        self._enter_workdir()
        return self._preflight() if self.spec.preflight else None

    def _enter_workdir(self) -> None:
        self.env = enter_environment(self.spec, self.env)

    def _preflight(self) -> int | None:
        """Check whether the nodes are fit; the exit code if they are not, or if a stop was requested meanwhile."""
        from ingot.launch.preflight.preflight import Preflight, PreflightResult, StopSignal  # not loaded by `run` alone

        def record_result(result: PreflightResult) -> None:
            # An attempt without a bad node is a different attempt; the spares bound how many there can be.
            swapped = self.on_slurm and bool(result.bad_nodes)
            for problem in result.problems[:1]:  # one line per attempt: the restart policy counts them
                more = f" (and {len(result.problems) - 1} more)" if len(result.problems) > 1 else ""
                record(self.run_folder, attempt=self.attempt, rank=self.logged_rank, batch=-1, kind=problem.kind,
                       message=problem.message + more, progress=swapped, host=problem.host)  # fmt: skip
            self.launch.exclude_nodes(self.attempt, result.bad_nodes)

        try:
            result = Preflight(self.spec, self.attempt, self.rank, self.env).run(record_result)
        except StopSignal as signals:
            if self._is_stop_request(signals.args):
                return self._end(EXIT_CONTINUE)
            if not self._others_failed():
                failure = Failure(OTHER_NODE_FAILED, "machine", EXIT_FAULT, 0.0)
                self._record(Outcome(EXIT_FAULT, True, self.logged_rank, failure), progress=False)
            return self._end(EXIT_FAULT, OTHER_NODE_FAILED)
        except (OSError, DiskError) as error:
            return _wait_as_unusable_node(f"cannot use {self.launch.path} on this node: {error}", self.spec)
        if self.rank == 0 or result.problems:
            lines = [*(problem.message for problem in result.problems), *result.notes]
            print("\n".join(f"preflight: {line}" for line in lines), file=sys.stderr)
        return self._end(result.exit_code, result.problems[0].message) if result.problems else None

    def _record(self, outcome: Outcome, progress: bool) -> None:
        assert outcome.failure is not None
        record(self.run_folder, attempt=self.attempt, rank=outcome.rank, batch=outcome.batch,
               kind=outcome.failure.kind, message=outcome.failure.message, progress=progress,
               host="" if outcome.failure.is_consequence else None)  # fmt: skip
        print(f"{socket.gethostname()}: rank {outcome.rank} failed: {outcome.failure.message}", file=sys.stderr)

    def _others_failed(self) -> bool:
        return self.launch.result(self.attempt) not in (None, EXIT_FINISHED, EXIT_CONTINUE)

    def _is_stop_request(self, signals: Sequence[int]) -> bool:
        """Whether signals to this process mean that somebody asked the run to stop.

        srun sends TERM to all tasks of a step when one of them has failed. So TERM alone proves nothing where there
        are other tasks: it counts if the job script has recorded a request, or the file STOP is there.
        """
        if not self.on_slurm or self.spec.nodes == 1 or any(number != signal.SIGTERM for number in signals):
            return True
        # scancel sends TERM to this process and to the job script at the same moment
        self._wait_until(lambda: self._stop_recorded() or self._others_failed())
        return self._stop_recorded()

    def _stop_recorded(self) -> bool:
        return self.launch.stop_requested(self.attempt) or (self.run_folder / STOP).exists()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    def _end(self, code: int, reason: str = "") -> int:
        """Record the attempt's result; returns this process's exit code."""
        if code in (EXIT_FINISHED, EXIT_CONTINUE) and self.rank:
            return 0  # node 0 records success for all
        self.launch.record_result(self.attempt, code, self.rank)
        final = code not in (EXIT_FINISHED, EXIT_CONTINUE, EXIT_FAULT)
        if final and not (self.run_folder / FINISHED).exists():
            self.launch.halt(reason)
        return 0 if code in (EXIT_FINISHED, EXIT_CONTINUE) else code


def _wait_as_unusable_node(reason: str, spec: LaunchSpec | None) -> int:
    """This node cannot tell the others that it is unusable. It stays until they have found out: its exit would end
    them first."""
    from ingot.launch.preflight.preflight import report_limit

    print(f"{socket.gethostname()}: error: {reason}", file=sys.stderr, flush=True)
    time.sleep(2 * report_limit(spec))  # the others may start that much later; their exit ends this node's process
    return EXIT_FAULT


if __name__ == "__main__":
    sys.exit(main())
