"""What a checkpoint costs: our save and load against torch.save and plain DCP, on the same state in the same run.

    python benchmarks/checkpoint.py                       # one process, about 500 MB of state on a CPU; 1b on a GPU
    python benchmarks/checkpoint.py --processes 2         # FSDP2 over gloo
    python benchmarks/checkpoint.py --out benchmarks/results/checkpoint.json --processes 1 2
    python benchmarks/checkpoint.py --card --rows rows.jsonl      what `gpu_check.py` measures, in under two minutes

For each: the stall of the training loop, the time until the checkpoint is on the disk, its bytes, the time to load it,
and the time of a training step while it is being written against other steps. Medians of several repetitions, taken in
turn, with the least and the greatest. `torch.save` writes no fsync and no hash; ours does both.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from gpu_table import add_row, wait_for_turn

from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.manifest import MODEL, OPTIMIZER
from ingot.checkpoint.remote_copy import newest_good
from ingot.checkpoint.store import CHECKPOINTS, CheckpointTensors
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.parallel.coordinator import LocalCoordinator, StoreCoordinator
from ingot.parallel.dtensor import local, local_offsets
from ingot.parallel.loss_model import BuildOptions, build_loss_model
from ingot.parallel.rank_env import find_rank_env
from ingot.parallel.rendezvous import join_world, leave_world
from ingot.training.optimizer import Optimizer


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class Bench:
    """A model with its optimizer state, one or several processes, and a folder for each way of saving."""

    def __init__(self, folder: Path, processes: int):
        self.folder = folder
        place = find_rank_env()
        self.device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        cuda = self.device.type == "cuda"
        size = "pythia-1b" if cuda else "gpt3-125m"
        width = [] if cuda else ["model.d_model=512", "model.n_heads=8", "model.n_layers=8"]
        config = load_config(RunConfig, [size, *width, "max_seq_len=256"])
        self.world = join_world(place, self.device, 60) if processes > 1 else None
        self.first = place.rank == 0
        self.coordinator = StoreCoordinator(self.world) if self.world is not None else LocalCoordinator()
        self.before_update: Callable[[], None] = lambda: None
        options = BuildOptions(self.device, "fp32", 256)
        if self.world is None:
            self.model: Any = build_loss_model(config.model, 0, options)[0]
            names = {p: name for name, p in self.model.gpt.named_parameters()}
        else:
            from ingot.config.parallel import ParallelConfig
            from ingot.parallel.executors.distributed import Distributed
            from ingot.parallel.layout import Layout
            from ingot.parallel.parallelize import parallelize

            parts = parallelize(config.model, ParallelConfig(shard=processes), Layout(shard=processes), options)
            run = load_config(RunConfig, [size, *width, "max_seq_len=256", "data=x"])
            executor = Distributed(parts, run, self.world)
            executor.init_weights(0)
            self.model, names = parts.roots[0], {p.tensor: p.name for p in executor.parameters}
        self.optimizer = Optimizer(config.optimizer, names)
        self.names = names
        batch = 8 if cuda else 1
        self.tokens = torch.randint(0, config.model.vocab_size, (batch, 256), device=self.device)
        self.step()

    def step(self) -> None:
        self.model(self.tokens, self.tokens).backward()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync()

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def meet(self) -> None:
        self.sync()
        if self.world is not None:
            dist.barrier()

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return {MODEL: {n: p for p, n in self.names.items()}, OPTIMIZER: self.optimizer.state_tensors()}

    def flat(self) -> dict[str, torch.Tensor]:
        return {f"{kind}/{name}": t.detach() for kind, content in self.tensors().items() for name, t in content.items()}

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds until all processes are through."""
        self.meet()
        began = time.perf_counter()
        action()
        self.meet()
        return time.perf_counter() - began

    # --- ways to save

    def ours(self) -> AsyncWriter:
        saver = AsyncWriter(self.folder / "ours", self.coordinator)
        self.before_update = saver.before_update
        saver.prepare(self.tensors())
        saver.wait()
        return saver

    def torch_save(self) -> None:
        """The full state, gathered to the first process where there are several."""
        whole = self.flat()
        if self.world is not None:
            from ingot.parallel.dtensor import gather

            whole = {name: gather(tensor) for name, tensor in whole.items()}
        if self.first:
            torch.save(whole, self.folder / "full.pt")

    def dcp_save(self) -> None:
        dcp.save(self.flat(), checkpoint_id=str(self.folder / "dcp"), no_dist=self.world is None)

    def load_ours(self) -> None:
        manifest, problems = newest_good(self.folder / "ours", self.coordinator)
        assert manifest is not None and not problems
        for section, content in self.tensors().items():
            stored = CheckpointTensors(manifest, section)
            with torch.no_grad():
                for name, tensor in content.items():
                    stored.read(name, local(tensor), local_offsets(tensor))

    def load_dcp(self) -> None:
        dcp.load(self.flat(), checkpoint_id=self.folder / "dcp", no_dist=self.world is None)


def measure_card(rows: Path, repeats: int) -> None:
    """The stall of a save, and loading from a warm disk: each once without counting, then in turn."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as name:
        folder = Path(name)
        bench = Bench(folder, 1)
        state = sum(t.nbytes for t in bench.flat().values())
        device = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "cpu"
        common = {"section": "checkpoint", "execution": "plain", "gb": round(state / 1e9, 2),
                  "torch": torch.__version__, "device": device}  # fmt: skip
        saver, stalls, totals = bench.ours(), [], []
        for number in (1, 2):
            bench.sync()
            began = time.perf_counter()
            saver.save(number, bench.tensors(), {})
            bench.step()  # which waits for the copy before it changes the weights
            stalls.append(saver.stall_seconds)
            saver.wait()
            totals.append(time.perf_counter() - began)
            assert saver.problem is None, saver.problem
        shutil.rmtree(folder / "ours" / CHECKPOINTS / "1")
        bench.sync()
        began = time.perf_counter()
        future: Any = dcp.async_save(bench.flat(), checkpoint_id=str(folder / "dcp"), no_dist=True)
        dcp_stall = time.perf_counter() - began
        future.result()
        dcp_total = time.perf_counter() - began
        add_row(rows, common | {"variant": "save", "stall_seconds": round(stalls[-1], 4),
                                "stall_seconds_first": round(stalls[0], 4), "until_on_disk": round(totals[-1], 2),
                                "dcp_async_stall_seconds": round(dcp_stall, 3),
                                "dcp_async_until_on_disk": round(dcp_total, 2),
                                "ratio": round(stalls[-1] / dcp_stall, 4)})  # fmt: skip
        times: dict[str, list[float]] = {"ours": [], "dcp": []}
        actions = {"ours": bench.load_ours, "dcp": bench.load_dcp}
        for number in range(repeats + 1):
            for who, action in actions.items():
                seconds = bench.timed(action)
                times[who] += [round(seconds, 3)] if number else []
        median = {who: statistics.median(found) for who, found in times.items()}
        add_row(rows, common | {"variant": "load, warm", "seconds": median["ours"], "dcp_seconds": median["dcp"],
                                "ratio": round(median["ours"] / median["dcp"], 4), "all_seconds": times["ours"],
                                "all_dcp_seconds": times["dcp"]})  # fmt: skip


def measure(folder: Path, processes: int, repeats: int) -> dict[str, Any]:
    bench = Bench(folder, processes)
    saver = bench.ours()
    rows: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        rows.setdefault(name, []).append(value)

    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for number in range(1, repeats + 1):
        note("torch.save, stall", bench.timed(bench.torch_save))
        full_bytes = _bytes(folder / "full.pt")
        bench.meet()
        note("dcp.save, stall", bench.timed(bench.dcp_save))
        if bench.first:
            shutil.rmtree(folder / "dcp")
        bench.meet()
        began = time.perf_counter()
        future: Any = dcp.async_save(
            bench.flat(), checkpoint_id=str(folder / "dcp"), no_dist=bench.world is None, planner=planner
        )
        note("dcp.async_save, stall", time.perf_counter() - began)
        future.result()
        note("dcp.async_save, total", time.perf_counter() - began)
        bench.meet()
        began = time.perf_counter()
        saver.save(number, bench.tensors(), {})
        returned = time.perf_counter() - began
        bench.step()  # which waits for the copy before it changes the weights
        note("ingot, stall", saver.stall_seconds)
        note("ingot, until the loop goes on", returned)
        saver.wait()
        note("ingot, total", time.perf_counter() - began)
        assert saver.problem is None, saver.problem
        if bench.first and number > 1:
            shutil.rmtree(folder / "ours" / CHECKPOINTS / str(number - 1))
        (folder / "full.pt").unlink(missing_ok=True)

    if bench.first:
        print(json.dumps({name: spread(values) for name, values in rows.items()}), file=sys.stderr, flush=True)

    # loading, on top of what is there: from the disk, then from the page cache
    for cached in ("cold", "cached"):
        if cached == "cached":  # what was forgotten last
            bench.load_ours(), bench.load_dcp()
        for _ in range(repeats):
            for name, action in (("ingot, load", bench.load_ours), ("dcp.load", bench.load_dcp)):
                if cached == "cold" and bench.first:
                    forget(folder)
                note(f"{name}, {cached}", bench.timed(action))

    # steps: as many during saves as there are, each followed by as many without
    step = repeats
    while len(rows.get("step, while saving", [])) < 4 * repeats:
        step += 1
        bench.meet()
        saver.save(step, bench.tensors(), {})
        during = 0
        while _alive(saver, bench):
            note("step, while saving", bench.timed(bench.step))
            during += 1
        if bench.first:
            shutil.rmtree(folder / "ours" / CHECKPOINTS / str(step - 1), ignore_errors=True)
        for _ in range(max(during, 3)):
            note("step, otherwise", bench.timed(bench.step))
    sizes = {
        "ingot": _bytes(folder / "ours" / CHECKPOINTS / str(step)),
        "torch.save": full_bytes,
        "dcp.save": _bytes(folder / "dcp"),
    }
    result = {
        "processes": processes,
        "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else platform.processor() or "cpu",
        "state_bytes": sum(t.nbytes for t in bench.flat().values()),
        "bytes": sizes,
        "seconds": {name: spread(values) for name, values in rows.items()},
        "ratios": _ratios(rows, sizes),
    }
    if bench.world is not None:
        leave_world()
    return result


def forget(folder: Path) -> None:
    """Let the page cache go of what was written."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _alive(saver: AsyncWriter, bench: Bench) -> bool:
    """Whether any process is still writing, the same on all."""
    alive = saver._thread is not None and saver._thread.is_alive()
    if bench.world is None:
        return alive
    flag = torch.tensor(float(alive))
    dist.all_reduce(flag)
    return bool(flag)


def _ratios(rows: dict[str, list[float]], sizes: dict[str, int]) -> dict[str, float]:
    def of(name: str) -> float:
        return statistics.median(rows[name])

    return {
        "stall / torch.save (goal < 0.1)": of("ingot, stall") / of("torch.save, stall"),
        "stall / dcp.async_save": of("ingot, stall") / of("dcp.async_save, stall"),
        "bytes / torch.save (goal <= 1)": sizes["ingot"] / sizes["torch.save"],
        "load / dcp.load (goal <= 1)": of("ingot, load, cold") / of("dcp.load, cold"),
        "load / dcp.load, cached (goal <= 1)": of("ingot, load, cached") / of("dcp.load, cached"),
        "step while saving / otherwise (goal < 1.1)": of("step, while saving") / of("step, otherwise"),
    }


def _bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size


def _worker(rank: int, processes: int, port: int, folder: str, repeats: int) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    result = measure(Path(folder), processes, repeats)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="Where to write checkpoints. Default: a temporary folder here.")
    parser.add_argument("--card", action="store_true", help="only the stall, and loading from a warm disk")
    parser.add_argument("--rows", type=Path, help="with --card: a file that gains lines of JSON")
    parser.add_argument("--tiny", action="store_true", help="with --card: two repetitions")
    parser.add_argument("--wait", action="store_true", help="with --card: wait for a line of input")
    options = parser.parse_args()
    if options.card:
        if wait_for_turn():
            measure_card(options.rows, 2 if options.tiny else options.repeats)
        return
    results = []
    for processes in options.processes:
        with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix=".bench-") as folder:
            if processes == 1:
                result = measure(Path(folder), 1, options.repeats)
            else:
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                mp.spawn(_worker, args=(processes, store.port, folder, options.repeats), nprocs=processes)
                result = json.loads(Path(folder, "result.json").read_text())
        print(json.dumps(result, indent=1))
        results.append(result)
    content = {
        "command": f"python benchmarks/checkpoint.py --processes {' '.join(map(str, options.processes))}",
        "torch": torch.__version__, "cpus": os.cpu_count(), "system": platform.platform(), "results": results,
    }  # fmt: skip
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
