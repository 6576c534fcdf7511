"""What the system of this node says about an attempt: kernel messages about devices, processes killed for memory, the
boot id, and whether the run folder still answers."""

import contextlib
import os
import re
import threading
from pathlib import Path

from ingot.launch.agent.evidence import NodeEvidence
from ingot.launch.supervisor.failure_log import node_name

KERNEL_LOG = Path("/dev/kmsg")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FOLDER_SECONDS = 3.0  # for a file system to answer; the supervisor waits 5 s for all that an agent knows
MAX_LINES = 20
# A GPU, its memory or its driver is at fault. Xid 13, 31, 43 and 45 also follow from errors of a program.
DEVICE_LINES = re.compile(
    r"NVRM: Xid \((?P<device>[^)]*)\): (?!(?:13|31|43|45),)\d+"
    r"|fallen off the bus|uncorrect\w* (?:ecc|error|memory)|Hardware Error|mlx5_core .*(?:fatal|assert|teardown)",
    re.IGNORECASE,
)


class NodeWatch:
    """Looks at the system from construction until `close`: what was there before does not count."""

    def __init__(self) -> None:
        self._kernel = _open_kernel_log()
        self._lines: list[str] = []
        self._oom_kills = count_oom_kills()

    def look(self, logs: Path, seconds: float = FOLDER_SECONDS) -> NodeEvidence:
        """What has happened since, and whether the folder of the logs can be used."""
        self._read_kernel_log()
        return NodeEvidence(node_name(), device_errors=tuple(self._lines), site=folder_problem(logs, seconds),
                            oom_kills=max(0, count_oom_kills() - self._oom_kills), boot_id=boot_id(),
                            logs=str(logs))  # fmt: skip

    def close(self) -> None:
        if self._kernel is not None:
            os.close(self._kernel)
            self._kernel = None

    def _read_kernel_log(self) -> None:
        while self._kernel is not None:
            try:
                record = os.read(self._kernel, 8192)
            except BrokenPipeError:  # the kernel has overwritten what was next
                continue
            except OSError:  # no more for now
                return
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                if DEVICE_LINES.search(line) and len(self._lines) < MAX_LINES:
                    self._lines.append(line.partition(";")[2] or line)


def _open_kernel_log() -> int | None:
    """The kernel's messages from now on; None if this user may not read them."""
    with contextlib.suppress(OSError):
        descriptor = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor
    return None


def boot_id() -> str:
    """Of the running system: another one after each boot."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""


def count_oom_kills() -> int:
    """Processes of this one's control group that the kernel has killed for memory; of the machine without one."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups[controllers] = path.strip("/")
    counters = [Path("/proc/vmstat")]
    if "memory" in groups:
        counters.insert(0, Path("/sys/fs/cgroup/memory") / groups["memory"] / "memory.oom_control")
    elif "" in groups:
        counters.insert(0, Path("/sys/fs/cgroup") / groups[""] / "memory.events")
    for counter in counters:
        with contextlib.suppress(OSError):
            if found := re.search(r"^oom_kill (\d+)", counter.read_text(), re.MULTILINE):
                return int(found[1])
    return 0


def folder_problem(folder: Path, seconds: float = FOLDER_SECONDS) -> str:
    """Why nothing can be written to a folder; empty if it can. A file system that hangs holds only a thread."""
    found: list[str] = []

    def write() -> None:
        path = folder / f".probe-{node_name()}-{os.getpid()}"
        try:
            with path.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            problem = ""
        except OSError as error:
            problem = f"cannot write to {folder}: {error.strerror or error}"
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        found.append(problem)

    thread = threading.Thread(target=write, name="ingot-folder", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else f"{folder} has not answered for {seconds:g} s"
