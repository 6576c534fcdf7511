"""What runs in each pod: `python -m ingot.launch.kubernetes.pod_agent --spec FILE`. The first pod runs the supervisor
and an agent, the others an agent that connects to it: the same two programs as on Slurm, a pod instead of a node, and
the replacement of all pods instead of a requeue.

The exit code tells Kubernetes what to do next: 0, the run has ended; 2 or 3, it would fail again; 138, replace the
pods. (138 because a PyTorchJob restarts pods for codes from 128 on, its older versions only for a few codes, of which
138 is reserved for the user.) All pods exit alike, by what the supervisor has written down.
"""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.errors import EXIT_FINISHED, EXIT_GIVEN_UP, EXIT_USER_ERROR, ConfigError, IngotError
from ingot.launch.kubernetes.pod_cluster import RESTART_VARIABLE, PodCluster, machines_folder
from ingot.launch.messages import ADDRESS_VARIABLE, START_VARIABLE, TOKEN_VARIABLE
from ingot.launch.protocol import ATTEMPT_VARIABLE, CLUSTER_AGENT, EXIT_NEW_PODS, NODE_RANK_VARIABLES, LaunchFolder
from ingot.launch.spec import LaunchSpec, read_spec
from ingot.launch.supervisor.cluster import agent_environment
from ingot.launch.supervisor.failure_log import mark_start, node_name
from ingot.launch.supervisor.history import LAUNCH_ENDING_STOPS, read_history
from ingot.launch.supervisor.records import FINAL_KINDS, Judged, Launched, Started
from ingot.launch.supervisor.state_file import STATE, StateFile, now, read_state
from ingot.launch.supervisor.supervise import Supervisor
from ingot.storage.atomic import write_whole
from ingot.training.runtime.run_files import FINISHED, STOP

CONNECT_SECONDS, POLL_SECONDS, REMINDER_SECONDS = 5.0, 1.0, 60.0
LOOK_SECONDS = 15.0  # between looks at the state file, while there is no supervisor
DECISION_SECONDS = 30.0  # for what the supervisor has decided to be seen from another pod
ENDS = ("finish", "stop", "halt", "requeue")


class Pod:
    """This pod's place in the run."""

    def __init__(self, spec_file: Path, env: Mapping[str, str]):
        self.spec_file, self.env, self.spec = spec_file, env, read_spec(spec_file)
        self.run_folder = Path(self.spec.run_folder)
        self.launch = LaunchFolder(self.run_folder)
        self.index = int(next((env[name] for name in NODE_RANK_VARIABLES if name in env), "0"))
        self.job, _, restart = env.get(ATTEMPT_VARIABLE, "").partition(".")
        if not self.job or not restart.isdigit():
            raise ConfigError(f"{ATTEMPT_VARIABLE}={env.get(ATTEMPT_VARIABLE)!r} is not LAUNCH.RESTART")
        self.restart = int(restart)
        self.since = 0 if RESTART_VARIABLE in env else len(self._records())
        self.host, self.port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", "0"))

    def run(self) -> int:
        """Returns the exit code of the pod."""
        folder = machines_folder(self.spec, self.job, self.restart)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / str(self.index), f"{node_name()}\n")
        if self.index == 0:
            begin_launch(self.launch, self.spec, self.job)
            asyncio.new_event_loop().run_until_complete(self._supervise())
        else:
            self._follow()
        return self._exit_code()

    def _records(self) -> list[Any]:
        return read_state(self.launch.path / STATE)

    async def _supervise(self) -> None:
        cluster = PodCluster(self.spec, self.spec_file, self.job, self.restart, node_name())
        await Supervisor(self.spec, cluster, token=self.env[TOKEN_VARIABLE], port=self.port).run()

    def _follow(self) -> None:
        """Run an agent for as long as there is a supervisor; one that is killed is started again."""
        signals = _Forwarding()
        env = agent_environment(self.env) | {ADDRESS_VARIABLE: f"{self.host}:{self.port}",
                                             START_VARIABLE: f"{self.job}.{self.restart}.0"}  # fmt: skip
        while self._wait_for_supervisor(signals):
            signals.process = subprocess.Popen(
                [sys.executable, "-m", CLUSTER_AGENT, "--spec", str(self.spec_file)], env=env
            )
            code = signals.process.wait()
            if code == 0 or signals.received:  # the supervisor has said so
                return
            print(f"the agent ended with exit code {code}", file=sys.stderr, flush=True)
            if self._decision() is not None:
                return
            time.sleep(POLL_SECONDS)

    def _wait_for_supervisor(self, signals: "_Forwarding") -> bool:
        """Until the first pod listens; not if this pod is told to end, or the run has ended meanwhile."""
        reminder = look = 0.0
        while not signals.received:
            with suppress(OSError), socket.create_connection((self.host, self.port), CONNECT_SECONDS):
                return True
            if time.monotonic() >= look:
                if self._decision() is not None:
                    return False
                look = time.monotonic() + LOOK_SECONDS
            if time.monotonic() >= reminder:
                print(f"waiting for the supervisor at {self.host}:{self.port}", file=sys.stderr, flush=True)
                reminder = time.monotonic() + REMINDER_SECONDS
            time.sleep(POLL_SECONDS)
        return False

    def _decision(self) -> Judged | None:
        """What has ended this start, once the supervisor has written it down."""
        return decision_of(self._records(), self.job, self.restart, self.since)

    def _exit_code(self) -> int:
        end = time.monotonic() + DECISION_SECONDS
        while (found := self._decision()) is None and time.monotonic() < end and self.index:
            time.sleep(POLL_SECONDS)
        if (self.run_folder / FINISHED).exists():
            return EXIT_FINISHED
        if found is None and (self.run_folder / STOP).exists():  # it was there before anything began
            return EXIT_FINISHED
        return exit_code_of(self._records(), found)


class _Forwarding:
    """TERM to this process, which is the first of its container, is meant for the agent."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.received = False
        signal.signal(signal.SIGTERM, self._forward)

    def _forward(self, number: int, frame: object) -> None:
        self.received = True
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


def begin_launch(launch: LaunchFolder, spec: LaunchSpec, job: str) -> None:
    """Note a launch that the launcher could not note, because it does not see the volume, and remove what an earlier
    one left; pods that replace others find it noted."""
    state = StateFile(launch.path)
    launched = read_history(state.records).launched
    if launched is not None and launched.launch == job:
        return
    for leftover in launch.leftovers():
        leftover.unlink(missing_ok=True)
    mark_start(launch.run)
    state.append(Launched(time=now(), launch=job, back_end="kubernetes", nodes=spec.nodes, run=spec.run_folder))


def decision_of(records: Sequence[Any], job: str, restart: int, since: int = 0) -> Judged | None:
    """The judgment that has ended a start of the pods, or the whole launch before it.

    since: how many records there were when the pods started, if `restart` does not tell one start from another
    """
    found, is_this = None, False
    for number, record in enumerate(records):
        if isinstance(record, Launched):
            found, is_this = None, False
        elif isinstance(record, Started):
            is_this = (record.job, record.restart) == (job, restart) and number >= since
            found = None
        elif isinstance(record, Judged) and record.action in ENDS and (is_this or record.action in ("finish", "halt")):
            found = record
    return found


def exit_code_of(records: Sequence[Any], decision: Judged | None) -> int:
    """The exit code of every pod, by what the supervisor has decided."""
    if decision is None or decision.action == "requeue":
        return EXIT_NEW_PODS
    history = read_history(records)
    if decision.action == "finish":
        return EXIT_FINISHED
    if decision.action == "halt":
        return EXIT_USER_ERROR if history.attempts and history.attempts[-1].cause.kind in FINAL_KINDS else EXIT_GIVEN_UP
    asked = history.stop is not None and history.stop.reason in LAUNCH_ENDING_STOPS
    return EXIT_FINISHED if asked else EXIT_NEW_PODS  # a node that is drained: the run goes on elsewhere


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    options = parser.parse_args()
    try:
        return Pod(options.spec, os.environ).run()
    except IngotError as error:
        print(f"{node_name()}: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may wait for a file system that does not answer
