"""Where and how arithmetic is done: device, precision, determinism, and the peak that utilisation is measured by."""

import time
from contextlib import AbstractContextManager, nullcontext

import torch

from ingot.errors import ConfigError
from ingot.train.config import RunConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Dense bf16 peaks in FLOP/s from the vendor's data sheets, by a part of the device name; the first match counts.
PEAKS = {
    "H200": 989.5e12, "H100 PCIe": 756.5e12, "H100": 989.5e12, "H800": 989.5e12, "B200": 2250e12, "B100": 1750e12,
    "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "V100": 125e12,
}  # fmt: skip


def choose_device(config: RunConfig) -> tuple[torch.device, str]:
    """The device to run on, and why."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no GPU here; `ingot doctor` says what is missing")
    if config.device == "auto":
        found = torch.cuda.is_available()
        return torch.device("cuda" if found else "cpu"), "a GPU was found" if found else "no GPU was found"
    return torch.device(config.device), "as configured"


def check_precision(config: RunConfig, device: torch.device) -> None:
    if config.precision == "fp16" and device.type != "cuda":
        raise ConfigError("precision=fp16 needs a GPU (its loss scaling does); use bf16 or fp32 on a CPU")


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Matrix products in the run's precision; weights stay fp32."""
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, dtype=DTYPES[precision])


def make_deterministic(config: RunConfig, device: torch.device) -> bool:
    """Ask torch for deterministic kernels if the run wants them."""
    wanted = config.deterministic is True or (config.deterministic == "auto" and device.type == "cpu")
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    return wanted


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """The device's peak rate and where the figure is from: a data sheet, or a matrix product timed here."""
    if device.type == "cuda" and precision != "fp32":
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak, f"data sheet of {part}"
    size = 1024 if device.type == "cpu" else 8192
    dtype = DTYPES.get(precision, torch.float32) if device.type == "cuda" else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    a @ a
    best = float("inf")
    for _ in range(3):
        _wait(device)
        start = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best, f"matrix product of {size} timed here"


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Memory in GB, under the names that dashboards have."""
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
