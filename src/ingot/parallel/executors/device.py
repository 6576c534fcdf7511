"""The device of this process: which one, its memory, its peak FLOP/s, and whether kernels are compiled and
deterministic there."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.model.kernels.conditions import LEAST_CAPABILITY, why_no_triton
from ingot.model.precision import compute_dtype
from ingot.parallel.layout import Layout

USABLE = 0.94  # of the memory, by measured peaks: the rest is for communication and fragmentation
# Dense bf16 peak FLOP/s from the vendors' data sheets, by part of the device name; the first match counts.
PEAKS = {
    "H200": 989.5e12, "H100 PCIe": 756.5e12, "H100": 989.5e12, "H800": 989.5e12, "B200": 2250e12, "B100": 1750e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12,
}  # fmt: skip


def choose_device(config: RunConfig, local_rank: int = 0) -> tuple[torch.device, str]:
    """The device to run on, and why. Each process of a machine takes the GPU with its local rank."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; `ingot doctor` shows what is missing")
    if config.device == "auto":
        found = torch.cuda.is_available()
        kind, why = ("cuda", "a GPU was found") if found else ("cpu", "no GPU was found")
    else:
        kind, why = config.device, "as configured"
    if kind == "cpu":
        return torch.device(kind), why
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"process {local_rank} of this machine finds only {torch.cuda.device_count()} GPUs; start at most that many"
        )
    torch.cuda.set_device(local_rank)
    return torch.device(kind, local_rank), why


def check_precision(config: RunConfig, device: torch.device) -> None:
    """Refuse matrix products that the GPU does not have. (Without 8-bit products, fp8 falls back to bf16.)"""
    if device.type == "cuda" and config.precision in ("bf16", "fp8"):
        found = torch.cuda.get_device_capability(device)
        if found < LEAST_CAPABILITY:
            raise ConfigError(
                f"precision={config.precision} needs a GPU with compute capability 8.0 (Ampere) or later; "
                f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; use precision=fp16 or fp32"
            )


def describe_capability(device: torch.device) -> str:
    """What decides which kernels and matrix products a rank has: it must be the same on all."""
    if device.type != "cuda":
        return device.type
    return "cuda {}.{}".format(*torch.cuda.get_device_capability(device))


def choose_compile(config: RunConfig, device: torch.device, layout: Layout) -> tuple[bool, str]:
    """Whether to compile, and why."""
    if layout.pipeline > 1 and config.parallel.pipeline_schedule == "zero_bubble":
        if config.compile is True:
            raise ConfigError("compile=true does not work with pipeline_schedule=zero_bubble (torch cannot split it)")
        return False, "off (torch cannot split a compiled backward pass as zero_bubble does)"
    if config.compile != "auto":
        return config.compile, "on" if config.compile else "off"
    if device.type == "cuda":
        why = why_no_triton(device)
        return why is None, "on" if why is None else f"off ({why})"
    return False, "off (compiling takes longer than it saves on a CPU)"


def set_memory_budget(part: float, compiled: bool) -> None:
    """Let the compiler keep only this part of the activations' memory and recompute the rest."""
    if not compiled:
        raise ConfigError(f"activation_checkpointing={part} is a budget for the compiler, and compile is off here")
    import torch._functorch.config as functorch  # not imported by torch itself

    functorch.activation_memory_budget = part


def make_deterministic(config: RunConfig, device: torch.device, compiled: bool) -> bool:
    """Ask torch for deterministic kernels if the run wants them. Return whether it does.

    With `deterministic=true`, an operation without a deterministic kernel is an error (`explaining_nondeterminism`).
    """
    wanted = config.deterministic is True or (config.deterministic == "auto" and device.type == "cpu")
    strict = config.deterministic is True
    if wanted and device.type == "cuda":  # before the first matrix product; as large as torch's own on Hopper
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "^NVLS")  # switches that add up do not promise an order
    if compiled:
        torch.use_deterministic_algorithms(wanted, warn_only=not strict)
    else:  # the same, without importing the compiler, which takes a second
        torch.set_deterministic_debug_mode("error" if strict else "warn" if wanted else "default")
    if wanted:  # by default torch also fills each new tensor, which costs time and changes no result here
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return wanted


@contextmanager
def explaining_nondeterminism() -> Iterator[None]:
    """Tell the user which operation torch refuses under `deterministic=true`."""
    try:
        yield
    except RuntimeError as error:
        if "CUBLAS_WORKSPACE_CONFIG" in str(error):  # torch looks once, at the first product of a process
            raise ConfigError(
                "deterministic=true: this process multiplied matrices before CUBLAS_WORKSPACE_CONFIG was set; set the "
                "environment variable to :4096:8 and start it again"
            ) from error
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise ConfigError(
            f"deterministic=true is not possible here: torch has no deterministic kernel for {operation.split()[-1]} "
            "on this device; set deterministic=false, or change the option of the model that needs this operation"
        ) from error


@cache
def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """The device's peak FLOP/s and its source: a data sheet, or a matrix product timed here."""
    if device.type == "cuda" and precision != "fp32":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak, f"data sheet of {part}"
    size = 8192 if device.type == "cuda" else 1024 if precision != "fp16" else 256  # slow on CPUs
    dtype = compute_dtype(precision)
    own = torch.Generator(device).manual_seed(0)  # leaves the global one alone
    a = torch.randn(size, size, device=device, dtype=dtype, generator=own)
    a @ a
    best = float("inf")
    for _ in range(10):
        _wait(device)
        start = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best, f"matrix product of {size} timed here"


def device_memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None for a CPU, whose memory is shared by processes."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def usable_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory that this process may fill; None for a CPU."""
    if device.type != "cuda":
        return None
    return int(USABLE * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Memory in GB, under the names that dashboards use."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "memory/current_allocated_mem": stats["allocated_bytes.all.current"] / 1e9,
            "memory/peak_allocated_mem": stats["allocated_bytes.all.peak"] / 1e9,
            "memory/peak_reserved_mem": stats["reserved_bytes.all.peak"] / 1e9,
            "memory/alloc_retries": stats["num_alloc_retries"],
        }
    import resource

    return {"memory/peak_resident_mem": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
