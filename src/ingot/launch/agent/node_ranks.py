"""This node's ranks of one epoch, as the supervisor knows them: what it asks for, and what it is told about them."""

import re
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ingot.launch.agent.evidence import NodeEvidence
from ingot.launch.agent.local_ranks import Node
from ingot.launch.agent.rank_group import KILL_SECONDS, NO_FAILURE, RankGroup, RankPlan
from ingot.launch.messages import RankProgress, RanksEnded, Report, RunRanks, Suspicion
from ingot.launch.profiles import find_profile
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.records import Phase
from ingot.parallel.rank_env import ENDED_EPOCH
from ingot.training.runtime.run_files import LOGS

PROGRESS_SECONDS = 10.0  # between two reports of progress
SHOW_SECONDS = 1.0  # between two signs of life to the ranks
ASLEEP_SECONDS = 2.0  # between two looks: this machine was suspended, so its ranks get another chance
KEPT_ATTEMPTS = 5  # whose logs are kept
TEARDOWN_KILL_SECONDS, TEARDOWN_FOLDER_SECONDS = 8.0, 1.0  # the supervisor waits 10 s for an answer


class NodeRanks:
    """Starts, observes and ends the ranks of one `RunRanks`."""

    def __init__(self, spec: LaunchSpec, order: RunRanks, env: Mapping[str, str]):
        self.epoch, self.spec, self.order = order.epoch, spec, order
        command, node, transport = [spec.verb, *spec.arguments], Node(spec.processes, spec.processes), ""
        if spec.verb == "prepare":  # one node for each share, and one more for what comes after all of them
            if order.node_rank < order.nodes:
                command += ["--share", f"{order.node_rank}/{order.nodes}"]
            node = Node(1, order.nodes + 1, order.node_rank, port=1)  # no rendezvous; logs are named after the share
        elif order.nodes > 1:
            world = spec.processes * order.nodes
            node = Node(spec.processes, world, order.node_rank, order.address, order.port)
            transport = find_profile(spec.profile).transport
        logs = Path(spec.run_folder) / LOGS
        if order.ended_epoch:
            env = {**env, ENDED_EPOCH: str(order.ended_epoch)}
        plan = RankPlan(command, node, logs / order.attempt, order.attempt, env, order.epoch, transport)
        self.group = RankGroup(plan)
        self._phase: Phase | None = None
        self._reported_at, self._shown_at, self._looked_at = 0.0, 0.0, time.monotonic()
        self._is_late = self._is_ending = False
        self._collected: NodeEvidence | None = None
        self._facts: list[Report] = []
        """What the supervisor must hear of, even if the connection was lost meanwhile."""

    def start(self, listener: socket.socket | None) -> None:
        self.group.start(listener)

    def stop(self) -> None:
        """Have the ranks save after the current step, and end. One that does not yet listen to signals ends at once,
        which is not a failure either."""
        self.group.forgiven = -signal.SIGUSR2
        self.group.signal(signal.SIGUSR2)

    def evidence(self, is_hang: bool = False) -> NodeEvidence:
        self._collected = self.group.evidence(is_hang)
        return self._collected

    def end(self) -> tuple[tuple[int, ...], NodeEvidence]:
        """Kill the ranks. Returns those that did not die, and what was known of all before."""
        self._is_ending = True
        evidence = self._collected or self.group.evidence(folder_seconds=TEARDOWN_FOLDER_SECONDS)
        left = self.group.kill(TEARDOWN_KILL_SECONDS)
        self.group.close(0.0)
        return left, evidence

    def close(self) -> None:
        self._is_ending = True
        self.group.close(KILL_SECONDS)

    def facts(self) -> list[Report]:
        """What a supervisor that has just been connected must know."""
        return [self._progress(time.monotonic()), *self._facts]

    def look(self) -> list[Report]:
        """What is new since the last look."""
        now = time.monotonic()
        was_asleep, self._looked_at = now - self._looked_at > ASLEEP_SECONDS, now
        if self._is_ending:
            return []
        if now - self._shown_at >= SHOW_SECONDS:
            self._shown_at = now
            self.group.clock.show()
        found: list[Report] = []
        if not self._facts:
            found += self._failures() or self._end_of_all()
            self._facts += found
        if not found and not was_asleep:
            found += self._hang()
        if self.group.living() and (now - self._reported_at >= PROGRESS_SECONDS or self.group.phase() != self._phase):
            found.append(self._progress(now))
        return found

    def _failures(self) -> list[Report]:
        for rank, code in self.group.codes().items():
            if code not in NO_FAILURE:
                return [Suspicion(self.epoch, rank, self.group.failure(rank, code).message)]
        if wrong := self.group.transport.wrong():
            return [Suspicion(self.epoch, *wrong)]
        return []

    def failed_to_look(self, error: Exception) -> list[Report]:
        """The agent itself has a fault; the supervisor hears of it once."""
        if self._facts:
            return []
        what = f"the agent cannot look at its ranks: {type(error).__name__}: {error}"
        self._facts.append(Suspicion(self.epoch, min(self.group.processes, default=-1), what))
        return list(self._facts)

    def _end_of_all(self) -> list[Report]:
        return [] if self.group.living() else [RanksEnded(self.epoch, self.group.codes())]

    def _hang(self) -> list[Report]:
        late = self.group.late()
        was_late, self._is_late = self._is_late, bool(late)
        if not late or was_late:
            return []
        rank, beat = min(late.items(), key=lambda item: item[1].at)
        seconds = time.monotonic() - beat.at
        what = f"rank {rank} has made no progress for {seconds:.0f} s in batch {beat.batch + 1} ({beat.phase})"
        return [Suspicion(self.epoch, rank, what, is_hang=True)]

    def _progress(self, now: float) -> RankProgress:
        self._reported_at, self._phase = now, self.group.phase()
        beats = self.group.beats().values()
        batch = max((beat.batch + 1 for beat in beats), default=0)
        return RankProgress(self.epoch, self._phase, batch, max((beat.own_seconds for beat in beats), default=0.0))


def prune_logs(logs: Path, keep: int = KEPT_ATTEMPTS) -> None:
    """Delete the logs of all but the newest attempts."""
    attempts = []
    with suppress(OSError):
        attempts = [path for path in logs.iterdir() if re.fullmatch(r"[A-Za-z0-9-]+\.\d+\.\d+", path.name)]
    times = {}
    for path in attempts:
        with suppress(OSError):
            times[path] = path.stat().st_mtime_ns
    for path in sorted(times, key=times.__getitem__, reverse=True)[keep:]:
        shutil.rmtree(path, ignore_errors=True)
