"""The pods of a run, as their supervisor in the first pod sees them.

Kubernetes starts all pods by itself, and the pods have no access to its API: an agent cannot be started from here in
another pod, a pod that has gone is known by its agent's silence, and to be queued again means to exit with a code for
which Kubernetes replaces all pods. They may then be on other machines, which the names of machines in the records show.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ingot.launch.protocol import LaunchFolder
from ingot.launch.spec import LaunchSpec
from ingot.launch.supervisor.cluster import ThisMachine

RESTART_VARIABLE = "INGOT_RESTART"
"""How often Kubernetes has replaced the pods; a PyTorchJob does not say."""
PODS = "pods"
TERMINATION_LOG = Path("/dev/termination-log")  # what `kubectl describe pod` shows of a container that has ended
POLL_SECONDS, REMINDER_SECONDS = 1.0, 60.0


class PodCluster(ThisMachine):
    """One start of all pods. The agent of this pod is started here; those of the others connect by themselves."""

    def __init__(self, spec: LaunchSpec, spec_file: Path, job: str, restart: int, host: str):
        super().__init__(spec_file, job, restart, host)
        self.spec = spec

    async def nodes(self) -> list[str]:
        """The machines of the pods, by the number of the pod, once all pods have started."""
        folder = machines_folder(self.spec, self.job, self.restart)
        reminder = time.monotonic() + REMINDER_SECONDS
        while True:
            found = [_read(folder / str(index)) for index in range(self.spec.nodes)]
            if all(found):
                return found
            if time.monotonic() >= reminder:
                print(f"{sum(map(bool, found))} of {self.spec.nodes} pods have started", flush=True)
                reminder = time.monotonic() + REMINDER_SECONDS
            await asyncio.sleep(POLL_SECONDS)

    async def requeue(self, exclude: Sequence[str]) -> bool:
        return True  # by the exit code

    async def comment(self, text: str) -> None:
        with suppress(OSError):  # not in a pod
            TERMINATION_LOG.write_text(f"{text}\n", encoding="utf-8")


def machines_folder(spec: LaunchSpec, job: str, restart: int) -> Path:
    """Where each pod of a start writes the name of its machine."""
    return LaunchFolder(Path(spec.run_folder)).path / PODS / f"{job}.{restart}"


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""
