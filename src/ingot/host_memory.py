"""How much memory this machine has left."""

from collections.abc import Iterator
from pathlib import Path

LIMITS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}
"""Folder and file of a cgroup's limit, by controller; version 2 has a single hierarchy without a name."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Free memory and swap in bytes, within the limits of the container; None if unknown."""
    lines = (line.partition(":") for line in _read(root / "proc/meminfo").splitlines())
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in lines if rest}
    if "MemAvailable" not in sizes:
        return None
    return min([sizes["MemAvailable"] + sizes.get("SwapFree", 0), *_container_limits(root)])


def _container_limits(root: Path) -> Iterator[int]:
    """The limits of this process's cgroup and of all its parents."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in set(controllers.split(",")) & LIMITS.keys():
            top, name = LIMITS[controller]
            group = Path(path.lstrip("/"))
            for folder in (group, *group.parents):  # the last is the top, the only one visible inside a container
                if (text := _read(root / top / folder / name).strip()).isdecimal():  # otherwise "max"
                    yield int(text)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
