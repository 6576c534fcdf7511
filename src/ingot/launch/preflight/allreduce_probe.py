"""The speed of this node's devices and of the network between nodes, measured in separate processes: one that crashes
or hangs can be killed, and the launcher itself does not load torch.

A process (`python -m ingot.launch.preflight.allreduce_probe`) imports torch, multiplies matrices and reports the speed;
then it waits for orders, a line each: one names a group, with which it does an all-reduce, and reports how fast that
was; an empty one has it multiply matrices again.
"""

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from ingot.launch.child_process import end_with_parent
from ingot.launch.preflight.transport import chosen_transport, log_to

CPU_BYTES, GPU_BYTES = 4 << 20, 256 << 20  # what is reduced
REPEATS = 4


class Probe:
    """This node's processes: one per GPU, or one."""

    def __init__(self, gpus: int, log: Path, env: Mapping[str, str]):
        self.port = 0
        """Where the first process can lead an all-reduce: a new port after each measurement."""
        self.log, self.processes, self.is_well = log, [], True
        """is_well: all answers so far were good ones; otherwise a process may be stuck."""
        for local_rank in range(gpus or 1):
            options = [str(local_rank), str(gpus)]
            self.processes.append(subprocess.Popen(
                [sys.executable, "-m", "ingot.launch.preflight.allreduce_probe", *options], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env={**env, **(log_to(log) if local_rank == 0 else {}), "OMP_NUM_THREADS": "1"},
                preexec_fn=end_with_parent, start_new_session=True,
            ))  # fmt: skip

    def listen(self, seconds: float) -> tuple[list[dict[str, Any]], str]:
        """The next line of each process, or why there is none."""
        found, error = self._listen(seconds)
        self.is_well = self.is_well and not error
        return found, error

    def _listen(self, seconds: float) -> tuple[list[dict[str, Any]], str]:
        end = time.monotonic() + seconds
        found: list[dict[str, Any]] = []
        with selectors.DefaultSelector() as selector:
            for process in self.processes:
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ)
                if not selector.select(max(0.0, end - time.monotonic())):
                    return found, f"no answer within {seconds:g} s"
                selector.unregister(process.stdout)
                line = process.stdout.readline()
                if not line:
                    return found, f"the process ended with exit code {process.wait()}"
                found.append(json.loads(line))
                self.port = found[-1].get("port", self.port)
                if "error" in found[-1]:
                    return found, found[-1]["error"]
        return found, ""

    def go(self, address: str, port: int, first_rank: int, world: int, seconds: float) -> None:
        """Start the all-reduce."""
        for local_rank, process in enumerate(self.processes):
            order = {"address": address, "port": port, "rank": first_rank + local_rank, "world": world}
            self._tell(process, json.dumps(order | {"seconds": seconds}))

    def measure_again(self) -> None:
        """Have the processes multiply matrices once more."""
        for process in self.processes:
            self._tell(process, "{}")

    def _tell(self, process: subprocess.Popen[str], order: str) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `listen` returns why
            process.stdin.write(order + "\n")
            process.stdin.flush()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def transport(self) -> str:
        return chosen_transport(self.log.read_text(errors="replace")) if self.log.is_file() else ""


def main(local_rank: int, gpus: int) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    listener = _measure(device, local_rank)
    for line in sys.stdin:  # until killed: leaving early may break the others' connections, and closing them may hang
        order = json.loads(line)
        if not order:
            listener = _measure(device, local_rank)
            continue
        if dist.is_initialized():  # all have answered the last order, so nobody needs these connections any more
            dist.destroy_process_group()
        leads = order["rank"] == 0
        print(json.dumps({"gb_s": _all_reduce(device, order, listener if leads else None)}), flush=True)


def _measure(device: Any, local_rank: int) -> socket.socket | None:
    """Report the speed of the device and, for the node, a port; returns the socket that listens there."""
    listener = socket.create_server(("", 0), backlog=4096) if local_rank == 0 else None
    port = {"port": listener.getsockname()[1]} if listener is not None else {}
    print(json.dumps({"tflops": _multiply(device)} | port), flush=True)
    return listener


def _all_reduce(device: Any, order: dict[str, Any], listener: socket.socket | None) -> float:
    """Join a group and reduce with it; returns the speed in GB/s."""
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=order["seconds"])
    store = dist.TCPStore(order["address"], order["port"], is_master=listener is not None, timeout=timeout,
                          wait_for_workers=False,
                          master_listen_fd=listener.detach() if listener is not None else None)  # fmt: skip
    is_gpu = device.type == "cuda"
    dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=order["rank"], world_size=order["world"],
                            timeout=timeout, device_id=device if is_gpu else None)  # fmt: skip
    values = torch.ones((GPU_BYTES if is_gpu else CPU_BYTES) // 4, device=device)
    dist.all_reduce(values)
    if not bool((values == order["world"]).all()):
        raise RuntimeError("the sum is wrong")
    _finish(device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(values)
    _finish(device)
    seconds = (time.perf_counter() - begin) / REPEATS
    moved = 2 * (order["world"] - 1) / order["world"] * values.nbytes  # bytes through each link: "bus bandwidth"
    return moved / seconds / 1e9


def _multiply(device: Any) -> float:
    """Speed of a matrix product, in TFLOP/s: the best of several."""
    import torch

    side = 8192 if device.type == "cuda" else 512
    a = torch.ones(side, side, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    best, end = float("inf"), time.perf_counter() + (0.5 if device.type == "cuda" else 0.1)  # clocks take time to rise
    while time.perf_counter() < end:
        begin = time.perf_counter()
        a @ a
        _finish(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best / 1e12


def _finish(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    try:
        main(*(int(text) for text in sys.argv[1:]))
    except Exception as error:
        print(json.dumps({"error": " ".join(str(error).split())[:300] or type(error).__name__}), flush=True)
        sys.stdin.read()
