"""This node's part in the checks before an attempt, as answers to the supervisor, which compares the nodes and decides.

The processes that measure devices and network stay until the supervisor ends them: a spare that waits has imported
torch and talked to the other nodes, and is measured again before it takes a node's place.
"""

import contextlib
from collections.abc import Mapping

from ingot.launch.agent.rank_group import own_folder
from ingot.launch.messages import AllReduce, ProbeReady, Reduced
from ingot.launch.preflight.allreduce_probe import Probe
from ingot.launch.preflight.node_checks import Report, check_node
from ingot.launch.preflight.transport import fallback
from ingot.launch.profiles import Profile, find_profile
from ingot.launch.spec import LaunchSpec

RECHECK_SECONDS = 15.0  # for processes that have waited to measure the devices again


class NodePreflight:
    """Checks of one node. `start` must be called in the main thread, which the processes end with; the rest waits."""

    def __init__(self, spec: LaunchSpec, env: Mapping[str, str]):
        self.spec, self.env = spec, env
        self.profile: Profile = find_profile(spec.profile)
        self._probe: Probe | None = None
        self._closing = contextlib.ExitStack()
        self._is_used = False

    def check(self) -> Report:
        """What this node finds out about itself."""
        return check_node(self.spec, self.profile, self.env)

    def start(self) -> None:
        """Start the processes, unless good ones still wait."""
        if self._probe is not None and not self._probe.is_well:
            self.end()
        if self._probe is None:
            folder = self._closing.enter_context(own_folder())
            self._probe, self._is_used = Probe(self.spec.gpus_per_node, folder / "nccl.log", self.env), False

    def ready(self, seconds: float) -> ProbeReady:
        """Wait for the processes to import torch and to measure the devices, or to measure them again."""
        probe = self._probe
        if probe is None:
            return ProbeReady(0, error="the processes that measure were not started")
        if self._is_used:
            probe.measure_again()
            seconds = min(seconds, RECHECK_SECONDS)
        self._is_used = True
        answers, error = probe.listen(seconds)
        speeds = tuple(answer["tflops"] for answer in answers if "tflops" in answer)
        return ProbeReady(probe.port, speeds, error)

    def all_reduce(self, order: AllReduce) -> Reduced:
        """Take part in an all-reduce."""
        probe = self._probe
        if probe is None:
            return Reduced(error="the processes that measure were not started")
        count = len(probe.processes)
        probe.go(order.address, order.port, order.first_rank, order.world, order.seconds)
        answers, error = probe.listen(order.seconds + 1)
        speed = min((answer["gb_s"] for answer in answers if "gb_s" in answer), default=0.0)
        nodes = order.world // count
        wrong = fallback(self.profile.transport, probe.transport()) if nodes > 1 and not error else ""
        return Reduced(speed, error, wrong)

    def end(self) -> None:
        """End the processes."""
        if self._probe is not None:
            self._probe.end()
            self._probe = None
        with contextlib.suppress(OSError):
            self._closing.close()
