"""Refuses a model that does not fit into the memory of a machine without GPUs, before anything is built: the operating
system would kill the process without a message."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, estimate_memory

GIB = 2**30
LIMITS = {"": ("sys/fs/cgroup", "memory.max"), "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes")}
"""Folder and file of a cgroup's limit, by controller; version 2 has a single hierarchy without a name."""


def check_host_memory(config: RunConfig, layout: Layout, processes: int, available: int | None = None) -> None:
    """Raise if `processes` on this machine cannot hold weights, gradients, optimizer state and the activations of one
    sequence each. This is a lower bound without buffers, so a model that fits is never refused."""
    available = available_memory() if available is None else available
    recompute = "full" if isinstance(config.activation_checkpointing, float) else StepShape.of(config).recompute
    step = replace(StepShape.of(config), micro=1, recompute=recompute)
    whole = estimate_memory(config.model, Layout(), config.parallel, step)  # of the unsharded model
    state, activations = processes * layout.replicate / layout.size, processes * layout.data / layout.size
    parts = {"weights": whole.weights * state, "gradients": whole.gradients * state,
             "optimizer": whole.optimizer * state, "activations": whole.activations * activations}  # fmt: skip
    least = sum(parts.values())
    if available is None or least <= available:
        return
    listed = ", ".join(f"{name} {count / GIB:.1f}" for name, count in parts.items())
    holders = "one process" if processes == 1 else f"{processes} processes"
    raise ConfigError(
        f"the model has {config.model.parameters:,} parameters; training it takes at least {least / GIB:.1f} GiB for "
        f"{holders} here ({listed}), and {available / GIB:.1f} GiB are available; choose a smaller recipe, or more "
        "machines, whose processes share the weights (parallel.shard)"
    )


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
