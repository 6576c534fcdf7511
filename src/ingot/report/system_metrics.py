"""What the machine does while rank 0 trains: CPU and memory of the process, and load and power of its GPU where NVML is
installed. A thread samples, so that a slow driver does not hold up a step."""

import os
import threading
import time
from typing import Any

from ingot.training.listener import Row

SECONDS = 5.0  # between samples
PAGE = os.sysconf("SC_PAGE_SIZE")


class SystemMetrics:
    """The newest sample."""

    def __init__(self, gpu: int | None):
        self._gpu, self._latest, self._ended = gpu, Row(), threading.Event()
        self._cpu_seconds, self._at = sum(os.times()[:2]), time.monotonic()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def latest(self) -> Row:
        return self._latest

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        device = _open_gpu(self._gpu)
        while True:
            self._latest = self._process() | (device() if device else {})
            if self._ended.wait(SECONDS):
                return

    def _process(self) -> Row:
        """The CPU time of this process since the last sample, and its resident memory."""
        used, now = sum(os.times()[:2]), time.monotonic()
        cores = (used - self._cpu_seconds) / max(now - self._at, 1e-3)
        self._cpu_seconds, self._at = used, now
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * PAGE
        return {"system/cpu_cores": cores, "system/resident_mem": resident / 1e9}


def _open_gpu(index: int | None) -> Any:
    """A function that samples a GPU; None without a GPU or NVML."""
    if index is None:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        name = visible[index] if index < len(visible) and visible[index] else str(index)
        device = (pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit()
                  else pynvml.nvmlDeviceGetHandleByUUID(name))  # fmt: skip

        def sample() -> Row:
            memory = pynvml.nvmlDeviceGetMemoryInfo(device)
            return {
                "system/gpu_utilization": pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
                "system/gpu_mem": memory.used / 1e9,
                "system/gpu_power": pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
            }

        sample()
        return sample
    except Exception:  # no package, no driver, no permission: each raises its own
        return None
