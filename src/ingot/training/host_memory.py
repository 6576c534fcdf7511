"""Whether a model fits into the memory of a machine without GPUs. The system kills a process that asks for too much
without a word, so this is checked by arithmetic before anything is built."""

from dataclasses import replace
from pathlib import Path

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, estimate_memory

GIB = 2**30


def check_host_memory(config: RunConfig, layout: Layout, processes: int, available: int | None = None) -> None:
    """Refuse what `processes` of this machine cannot hold together: at the least weights, gradients, the optimizer's
    state, and the activations of one sequence each. Nothing is added for buffers, so what fits is never refused."""
    available = available_memory() if available is None else available
    recompute = "full" if isinstance(config.activation_checkpointing, float) else StepShape.of(config).recompute
    work = replace(StepShape.of(config), micro=1, recompute=recompute)
    whole = estimate_memory(config.model, Layout(), config.parallel, work)  # of the model in one piece
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
    """Bytes that new processes may take: free memory and swap, within the limit of the container. None if unknown."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    if "MemAvailable" not in sizes:
        return None
    return min([sizes["MemAvailable"] + sizes.get("SwapFree", 0), *_container_limits(root)])


def _container_limits(root: Path) -> list[int]:
    """The limits of this process's cgroup and all above it, as version 2 and version 1 name them."""
    limits = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):  # the last is the top, which is all that a container may see
            try:
                text = (top / folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdecimal():  # else "max"
                limits.append(int(text))
    return limits
