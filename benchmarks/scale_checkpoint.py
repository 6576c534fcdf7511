"""What a checkpoint costs with thousands of ranks, by the real code, on one machine.

    python benchmarks/scale_checkpoint.py --before b91f1f5 --out benchmarks/results/scale_checkpoint.json

plan        `plan_save` of one rank, whose other ranks exist as a mesh of torch's fake process group only: seconds,
            memory, and bytes that the rank sends. Rank 0 compares as many hashes as there are ranks.
manifest    `write_manifest` and `parse_manifest` of the plan with the report of every rank: bytes and seconds.
operations  on the file system, counted in this process for saves and resumes of 2 to 16 ranks (each a thread). They
            grow linearly, which is checked, so that a line through two of them gives those of thousands.

`--before` measures the same for the code of a commit before format version 3. Its plan needs the pieces of all ranks
in the memory of rank 0, and is run only as far as that fits.

Half of the parameters are matrices and half are vectors shorter than the number of ranks; each has a weight, two
moments and a step counter. Seconds are those of a machine that may do other things at the same time.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import ingot.checkpoint.manifest as manifest_module
from ingot.checkpoint.async_writer import AsyncWriter
from ingot.checkpoint.manifest import File, Manifest, parse_manifest, write_manifest
from ingot.checkpoint.remote_copy import newest_good
from ingot.checkpoint.save_plan import plan_save
from ingot.errors import CheckpointError
from ingot.parallel.coordinator import Coordinator

ROOT = Path(__file__).parents[1]
SIZES = [(1024, 900), (2048, 1740), (8192, 1740)]
LAYOUTS = ["shard", "replicate-shard-tensor"]
FEW = (2, 4, 8, 16)  # ranks whose operations are counted
PIECES_AT_ONCE = 1_000_000  # of the plan before: 12 kB of memory for each ten
BY_RULE = manifest_module.VERSION >= 3


class OneOfMany(Coordinator):
    """Rank 0. The other ranks send what `others` makes of its own text."""

    def __init__(self, world: int, others: Callable[[str, int], str]):
        self.rank, self.world_size, self._others = 0, world, others
        self.sent_bytes, self.received_bytes, self.others_seconds = 0, 0, 0.0

    def for_topic(self, topic: str) -> Coordinator:
        return self

    def gather_and_decide(self, text: str, decide: Callable[[list[str]], list[str]]) -> str:
        began = time.perf_counter()
        texts = [text, *(self._others(text, rank) for rank in range(1, self.world_size))]
        self.others_seconds += time.perf_counter() - began  # which the other ranks would spend
        self.sent_bytes += len(text)
        self.received_bytes += sum(map(len, texts))
        return decide(texts)[0]


def make_state(ranks: int, tensors: int, layout: str) -> dict[str, dict[str, Any]]:
    """Tensors without memory, sharded by FSDP2's placements."""
    if layout == "shard":
        mesh = init_device_mesh("cpu", (ranks,))
        wide, narrow = [Shard(0)], [Shard(0)]
    else:
        mesh = init_device_mesh("cpu", (2, ranks // 16, 8), mesh_dim_names=("replicate", "shard", "tensor"))
        wide = [Replicate(), _StridedShard(0, split_factor=8), Shard(0)]
        narrow = [Replicate(), Shard(0), Replicate()]

    def sharded(shape: tuple[int, ...], placements: list[Any]) -> DTensor:
        part, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
        strides = torch.empty(shape, device="meta").stride()
        local = torch.empty(part, device="meta")
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)

    model: dict[str, Any] = {}
    for number in range(tensors // 4):
        matrix = number % 2 == 0
        name = f"blocks.{number // 8}.mlp.weight_{number % 8}"
        model[name] = sharded((8192, 7168) if matrix else (7168,), wide if matrix else narrow)
    optimizer = {f"{key}/{name}": tensor for key in ("exp_avg", "exp_avg_sq") for name, tensor in model.items()}
    return {"model": model, "optimizer": optimizer | {f"step/{name}": torch.zeros(()) for name in model}}


def measure_plan(ranks: int, tensors: int, layout: str) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    state = make_state(ranks, tensors, layout)
    coordinator = OneOfMany(ranks, same if BY_RULE else pieces_of_another)
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory from now on
    before, began = memory("VmRSS"), time.perf_counter()
    plan = plan_save(state, coordinator)
    row: dict[str, Any] = {
        "plan_seconds": time.perf_counter() - began - coordinator.others_seconds,
        "plan_memory_mib": (memory("VmHWM") - before) / 2**20,
        "bytes_from_each_rank": coordinator.sent_bytes, "bytes_at_rank_0": coordinator.received_bytes,
    }  # fmt: skip
    kinds = [("rank", True)] if BY_RULE else [("model", False), ("optimizer", False)]
    files = {f"{kind}-{r:05d}-of-{ranks:05d}.safetensors": report(joint) for kind, joint in kinds for r in range(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            began = time.perf_counter()
            write_manifest(Manifest(1, ranks, files, plan.entries, {"progress": {}}, Path(folder)))
            row["manifest_write_seconds"] = time.perf_counter() - began
            text = (Path(folder) / "manifest.json").read_bytes()
            row |= {"manifest_bytes": len(text), "manifest_files_bytes": len(msgspec.json.encode(files))}
            began = time.perf_counter()
            parse_manifest(text, Path(folder), "it")
            row["manifest_read_seconds"] = time.perf_counter() - began
        except CheckpointError as error:
            row["manifest"] = str(error)
    return row | {"ranks": ranks, "tensors": tensors, "layout": layout}


def report(joint: bool) -> File:
    return File(123_456_789, "0123456789abcdef" * 2, *([(41_234_567, "0123456789abcdef" * 2)] if joint else []))


def same(text: str, rank: int) -> str:
    return text


def pieces_of_another(text: str, rank: int) -> str:
    """What another rank sends in the plan before: as many pieces, elsewhere."""
    if not hasattr(pieces_of_another, "decoded"):
        pieces_of_another.decoded = json.loads(text)  # type: ignore[attr-defined]
    return json.dumps([[kind, name, dtype, full, [rank * part[0], *at[1:]] if full else at, part]
                       for kind, name, dtype, full, at, part in pieces_of_another.decoded],  # type: ignore[attr-defined]
                      separators=(",", ":"))  # fmt: skip


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


# --- operations of the file system


class Together(Coordinator):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, world: int, shared: dict[str, Any]):
        self.rank, self.world_size, self._shared = rank, world, shared

    def for_topic(self, topic: str) -> Coordinator:
        return self

    def gather_and_decide(self, text: str, decide: Callable[[list[str]], list[str]]) -> str:
        texts, meet = self._shared["texts"], self._shared["meet"]
        texts[self.rank] = text
        meet.wait()
        if self.rank == 0:
            self._shared["answers"] = decide(list(texts))
        meet.wait()
        answer: str = self._shared["answers"][self.rank]
        meet.wait()
        return answer

    def broadcast(self, make: Callable[[], bytes]) -> bytes:
        text = make().decode() if self.rank == 0 else ""
        return self.gather_and_decide(text, lambda texts: texts[:1] * len(texts)).encode()


def on_all_ranks(ranks: int, work: Callable[[Together], object]) -> None:
    shared = {"texts": [""] * ranks, "answers": [""] * ranks, "meet": threading.Barrier(ranks)}
    threads = [threading.Thread(target=work, args=(Together(rank, ranks, shared),)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def counting(below: Path, counts: Counter[str]) -> Iterator[None]:
    """Count operations on files below a folder. Python reports all of them but stat to its audit hooks."""
    active = [True]
    known: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if active and arguments and isinstance(arguments[0], str | os.PathLike) and inside(arguments[0]):
            if event == "open":
                creates = isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
                new = bool(creates) and str(arguments[0]) not in known
                known.add(str(arguments[0]))
                counts["create" if new else "open"] += 1
            elif event in ("os.mkdir", "os.rename", "os.listdir", "os.scandir", "os.remove", "os.rmdir"):
                counts["readdir" if event in ("os.listdir", "os.scandir") else event.removeprefix("os.")] += 1

    def inside(path: Any) -> bool:
        return str(path).startswith(str(below))

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and inside(path):
                counts["stat"] += 1
            return plain(path, *arguments, **options)

        return call

    sys.addaudithook(hook)
    plain = os.stat, os.lstat
    os.stat, os.lstat = counted(os.stat), counted(os.lstat)  # type: ignore[assignment]
    try:
        yield
    finally:
        os.stat, os.lstat = plain
        active.clear()


def count_operations(ranks: int) -> dict[str, Counter[str]]:
    """Operations of a save, and of a resume until each rank has verified its files."""
    found = {"save": Counter[str](), "resume": Counter[str]()}
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        tensors = {
            "model": {f"w{n}": torch.full((64,), float(n)) for n in range(4 * ranks)},
            "optimizer": {f"exp_avg/w{n}": torch.full((64,), float(n)) for n in range(4 * ranks)},
        }

        def save(coordinator: Together) -> None:
            writer = AsyncWriter(run, coordinator)
            writer.save(1, tensors, {})
            writer.wait()
            assert writer.problem is None, writer.problem

        (run / "checkpoints").mkdir()
        with counting(run, found["save"]):
            on_all_ranks(ranks, save)
        with counting(run, found["resume"]):
            on_all_ranks(ranks, lambda coordinator: newest_good(run, coordinator))
    return found


def operations() -> list[dict[str, Any]]:
    """Operations at each of SIZES."""
    measured = {ranks: count_operations(ranks) for ranks in FEW}
    rows = []
    for ranks, _ in SIZES:
        row: dict[str, Any] = {"ranks": ranks}
        for phase in ("save", "resume"):
            kinds = sorted({kind for found in measured.values() for kind in found[phase]})
            for kind in kinds:
                points = [(few, found[phase][kind]) for few, found in measured.items()]
                slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
                start = points[0][1] - slope * points[0][0]
                assert all(abs(start + slope * few - count) < 0.01 for few, count in points), (phase, kind, points)
                row.setdefault(phase, {})[kind] = round(start + slope * ranks)
        rows.append(row)
    return rows


# --- the command


def of_tree(source: Path, *arguments: object) -> Any:
    """Run a part of this script in a process of its own, with ingot from a source tree."""
    command = [sys.executable, __file__, "--part", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def measure(source: Path, by_rule: bool) -> dict[str, Any]:
    plans = [
        of_tree(source, "plan", ranks, tensors, layout)
        for ranks, tensors in SIZES
        for layout in (LAYOUTS if by_rule else LAYOUTS[:1])
        if by_rule or ranks * tensors <= PIECES_AT_ONCE
    ]
    return {"plans": plans, "operations": of_tree(source, "operations")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="a commit with format version 2, to compare with")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, *rest = options.part
        print(json.dumps(operations() if part == "operations" else measure_plan(int(rest[0]), int(rest[1]), rest[2])))
        return
    result = {"now": measure(ROOT / "src", by_rule=True)}
    if options.before:
        archive = subprocess.run(
            ["git", "archive", options.before, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
                tar.extractall(folder, filter="data")
            result["before"] = {"commit": options.before} | measure(Path(folder) / "src", by_rule=False)
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
