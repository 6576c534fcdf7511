"""What runs on each node of a job: `python -m ingot.launch.supervisor.node_agent --spec FILE`, started once per node by
Slurm or Kubernetes. It sets the profile's variables, checks the node, runs this node's processes, and tells the job why
they ended.

The reason goes into files of the run folder, since exit codes get lost on the way: srun reports those that it killed
itself. The first node to fail writes `code.ATTEMPT`; the others see it and end their processes at once.
"""

import argparse
import os
import re
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ingot.errors import EXIT_CONTINUE, EXIT_FAULT, EXIT_FINISHED, ConfigError, IngotError
from ingot.launch.profiles import find_profile
from ingot.launch.spec import LaunchSpec, read_spec
from ingot.launch.supervisor.attempt import Outcome, run_attempt
from ingot.launch.supervisor.failure import LEFT_ALONE, Failure
from ingot.launch.supervisor.local_ranks import NODES_VARIABLE, Node
from ingot.launch.supervisor.restart_policy import judge, newest_checkpoint, node_name, read_failures, record
from ingot.training.runtime.run_files import FINISHED, LOGS, STOP

ATTEMPT_VARIABLE = "INGOT_JOB_ATTEMPT"  # names an attempt of a job, the same on all its nodes
PATIENCE = 3.0  # seconds for the node that failed first, or for who asked to stop, to say so
HALT = "HALT"  # in the launch folder: no job of the chain need try again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--pod", action="store_true", help="count attempts here: Kubernetes has no job script to do so")
    parser.add_argument("--share", help="K/N of a preparation; without it, what ends the preparation")
    parser.add_argument("--check", action="store_true", help="look whether the nodes are fit, and run nothing")
    options = parser.parse_args()
    try:
        if not options.spec.exists() and "," in os.environ.get(NODES_VARIABLE, ""):
            return _left_out(f"{options.spec} is not there: this node does not share the run folder", None)
        spec = read_spec(options.spec)
        if options.check:
            return NodeAgent(spec, os.environ).check()
        if options.pod:
            from ingot.launch.kubernetes.pod_agent import run_pod

            return run_pod(spec, os.environ)
        if spec.verb == "prepare":
            return NodeAgent(spec.model_copy(update={"nodes": 1}), os.environ).prepare(options.share, spec.nodes)
        return NodeAgent(spec, os.environ).run()
    except IngotError as error:
        print(f"{socket.gethostname()}: error: {error}", file=sys.stderr)
        return error.exit_code


class NodeAgent:
    """This node's part of one attempt."""

    def __init__(self, spec: LaunchSpec, env: Mapping[str, str]):
        self.spec, self.run_folder = spec, Path(spec.run_folder)
        self.attempt = env.get(ATTEMPT_VARIABLE, "1")
        if not re.fullmatch(r"[A-Za-z0-9.-]+", self.attempt):
            raise ConfigError(f"{ATTEMPT_VARIABLE}={self.attempt!r} is no name of an attempt")
        # Slurm's, an indexed job's of Kubernetes, or a PyTorchJob's
        names = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "NODE_RANK", "PET_NODE_RANK", "RANK")
        self.rank = int(next((env[name] for name in names if name in env), "0"))
        self.place = self.rank  # under which failures are written down
        self.code_file = spec.folder / f"code.{self.attempt}"
        self.on_slurm = "SLURM_JOB_ID" in env
        # Of one start of the job, attempts JOB.RESTART.1 and on: somebody asked it to stop. The job script writes it
        # before it passes a signal on.
        self.stop_file = spec.folder / f"stop.{self.attempt.rpartition('.')[0]}"

    def run(self) -> int:
        """The exit code for srun or the pod: 0 unless something failed, so that nobody is killed while saving."""
        if self.stop_file.exists():  # the signal came before this process could hear it
            return self._end(EXIT_CONTINUE)
        verdict = judge(read_failures(self.run_folder))
        if not verdict.again:
            return self._end(verdict.exit_code, verdict.reason)
        self._prepare()
        spec = self.spec
        if spec.preflight and (code := self._preflight()) is not None:
            return code
        node = Node(spec.processes, spec.processes * spec.nodes)
        if spec.nodes > 1:
            node = Node(
                node.processes, node.world, self.rank, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            )
        logs = self.run_folder / LOGS / self.attempt
        before = newest_checkpoint(self.run_folder)
        transport = find_profile(spec.profile).transport if spec.nodes > 1 else ""
        outcome = run_attempt([spec.verb, *spec.arguments], node, logs, self.attempt, self._others_failed, transport,
                              self._stop_requested)  # fmt: skip
        if outcome.failure is None:
            # All ranks have agreed on a step to stop after, so none had failed. A signal that the job script did not
            # send (a preemption, say) is written down for it; without one the run itself had enough (max_wall_time).
            if outcome.code == EXIT_CONTINUE and outcome.asked and self.on_slurm:
                self.stop_file.touch()
            return self._end(outcome.code)
        if outcome.failure.is_consequence and spec.nodes > 1:  # another node will say why, if it still can
            self._wait_for(self._others_failed)
        if not self._others_failed():
            self._record(outcome, newest_checkpoint(self.run_folder) > before)
            if outcome.failure.kind == "transport":
                self._leave_out([node_name()])
        return self._end(outcome.failure.exit_code or EXIT_FAULT, outcome.failure.message)

    def prepare(self, share: str | None, shares: int) -> int:
        """One share of a preparation, or, as one more, what comes after all of them."""
        self.place = int(share.partition("/")[0]) if share else shares
        verdict = judge([failure for failure in read_failures(self.run_folder) if failure["rank"] == self.place])
        if not verdict.again:
            return self._end(verdict.exit_code, verdict.reason)
        self._prepare()
        if self.spec.preflight and (code := self._preflight()) is not None:
            return code
        command = [self.spec.verb, *self.spec.arguments, *(["--share", share] if share else [])]
        node = Node(1, shares + 1, self.place, port=1)  # nobody meets there; the log is called after the share
        outcome = run_attempt(command, node, self.run_folder / LOGS / self.attempt, self.attempt)
        if outcome.code == EXIT_CONTINUE:  # scancel, or a node that is needed elsewhere
            return EXIT_FAULT
        if outcome.failure is None:
            if share is None:
                (self.run_folder / FINISHED).touch()
            return self._end(EXIT_FINISHED)
        self._record(outcome, progress=False)
        return self._end(outcome.failure.exit_code or EXIT_FAULT, outcome.failure.message)

    def check(self) -> int:
        """Look whether the nodes are fit; the first to know prints it."""
        from ingot.launch.preflight.preflight import Preflight, Verdict

        def note(verdict: Verdict) -> None:
            print(
                "\n".join([*(f"FAIL  {problem.message}" for problem in verdict.problems), *verdict.notes]), flush=True
            )

        self._prepare()
        verdict = Preflight(self.spec, self.attempt, self.rank).run(note)
        return verdict.code if verdict.problems else 0

    def _preflight(self) -> int | None:
        """Look whether the nodes are fit; the exit code if they are not, or if somebody asked to stop meanwhile."""
        from ingot.launch.preflight.preflight import (  # what it imports is of no use elsewhere
            AskedToStop,
            Preflight,
            Verdict,
        )

        def note(verdict: Verdict) -> None:
            # Another attempt without a bad node is not the same attempt again. That ends when the spares are used up.
            swapped = self.on_slurm and bool(verdict.bad)
            for problem in verdict.problems[:1]:  # one line per attempt: the ladder counts them
                more = f" (and {len(verdict.problems) - 1} more)" if len(verdict.problems) > 1 else ""
                record(self.run_folder, attempt=self.attempt, rank=self.place, batch=-1, kind=problem.kind,
                       message=problem.message + more, progress=swapped, host=problem.host)  # fmt: skip
            self._leave_out(verdict.bad)

        try:
            verdict = Preflight(self.spec, self.attempt, self.rank).run(note)
        except AskedToStop as asked:
            if self._stop_requested(asked.args):
                return self._end(EXIT_CONTINUE)
            if not self._others_failed():
                self._record(
                    Outcome(EXIT_FAULT, True, self.place, Failure(LEFT_ALONE, "machine", EXIT_FAULT, 0.0)), False
                )
            return self._end(EXIT_FAULT, LEFT_ALONE)
        except OSError as error:
            return _left_out(f"cannot use {self.spec.folder} on this node: {error}", self.spec)
        if self.rank == 0 or verdict.problems:
            lines = [*(problem.message for problem in verdict.problems), *verdict.notes]
            print("\n".join(f"preflight: {line}" for line in lines), file=sys.stderr)
        return self._end(verdict.code, verdict.problems[0].message) if verdict.problems else None

    def _leave_out(self, hosts: Sequence[str]) -> None:
        """The next attempt of this job goes without these nodes."""
        if hosts:
            with (self.spec.folder / f"bad.{self.attempt.partition('.')[0]}").open("a") as file:
                file.write("".join(f"{host}\n" for host in hosts))

    def _prepare(self) -> None:
        os.environ.update(self.variables())
        os.chdir(self.spec.workdir)
        self._limits()

    def _record(self, outcome: Outcome, progress: bool) -> None:
        assert outcome.failure is not None
        record(self.run_folder, attempt=self.attempt, rank=outcome.rank, batch=outcome.batch,
               kind=outcome.failure.kind, message=outcome.failure.message, progress=progress,
               host="" if outcome.failure.is_consequence else None)  # fmt: skip
        print(f"{socket.gethostname()}: rank {outcome.rank} failed: {outcome.failure.message}", file=sys.stderr)

    def _others_failed(self) -> bool:
        with suppress(FileNotFoundError):
            return int(self.code_file.read_text()) not in (EXIT_FINISHED, EXIT_CONTINUE)
        return False

    def _stop_requested(self, signals: Sequence[int]) -> bool:
        """Whether signals to this process mean that somebody asked the run to stop.

        srun sends TERM to all tasks of a step when one of them has failed. So TERM alone proves nothing where there
        are other tasks: it counts if the job script has written a request down, or the file STOP is there.
        """
        if not self.on_slurm or self.spec.nodes == 1 or any(number != signal.SIGTERM for number in signals):
            return True
        # scancel sends TERM to this process and to the script at the same moment
        self._wait_for(lambda: self._stop_recorded() or self._others_failed())
        return self._stop_recorded()

    def _stop_recorded(self) -> bool:
        return self.stop_file.exists() or (self.run_folder / STOP).exists()

    def _wait_for(self, seen: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not seen() and time.monotonic() < end:
            time.sleep(0.05)

    def _end(self, code: int, reason: str = "") -> int:
        """Tell the job; the first word counts."""
        if code in (EXIT_FINISHED, EXIT_CONTINUE) and self.rank:
            return 0  # node 0 speaks for those that did well
        draft = self.code_file.with_name(f".{self.code_file.name}.{self.rank}")
        draft.write_text(f"{code}\n")
        with suppress(FileExistsError):
            os.link(draft, self.code_file)
        draft.unlink()
        final = code not in (EXIT_FINISHED, EXIT_CONTINUE, EXIT_FAULT)
        if final and not (self.run_folder / FINISHED).exists():
            (self.spec.folder / HALT).write_text(f"{reason}\n", encoding="utf-8")
        return 0 if code in (EXIT_FINISHED, EXIT_CONTINUE) else code

    def variables(self) -> dict[str, str]:
        """What the profile, the user and the secrets add to the environment."""
        values = find_profile(self.spec.profile).variables | self.spec.env
        values |= {"PYTHONUNBUFFERED": "1"}
        return values | {name: read_secret(name) for name in self.spec.secrets}

    def _limits(self) -> None:
        """As many open files and as much locked memory (for RDMA) as this user may have."""
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
            with suppress(ValueError, OSError):
                resource.setrlimit(limit, (resource.getrlimit(limit)[1],) * 2)


def _left_out(reason: str, spec: LaunchSpec | None) -> int:
    """This node cannot tell the others; it stays until they have named it, since its end would end them first."""
    from ingot.launch.preflight.preflight import report_limit

    print(f"{socket.gethostname()}: error: {reason}", file=sys.stderr, flush=True)
    time.sleep(2 * report_limit(spec))  # the others may start that much later; their end ends this one
    return EXIT_FAULT


def read_secret(name: str) -> str:
    """A secret, from the environment or a file that its owner alone can read."""
    if name in os.environ:
        return os.environ[name]
    path = Path.home() / ".config" / "ingot" / "secrets" / name
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ConfigError(f"{path} can be read by others; chmod 600 it")
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ConfigError(f"the secret {name} is neither in the environment nor in {path}") from None


if __name__ == "__main__":
    sys.exit(main())
