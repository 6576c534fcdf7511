"""Several real processes over gloo, started once for many runs: importing torch costs more than a small run."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from warm_process import spawn_warm

from ingot.checkpoint.manifest import read_manifest
from ingot.checkpoint.store import CheckpointTensors
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.report.metrics_file import MetricsFile, read_rows

Run = tuple[list[str], Path]  # arguments of `ingot train`, and where it writes its notes


class Quiet(MetricsFile):
    """metrics.jsonl on the first rank, nothing elsewhere."""

    def __init__(self, folder: str, writes: bool):
        super().__init__(folder)
        self.writes = writes

    def begin(self, batch, total, state):  # type: ignore[no-untyped-def]
        if self.writes:
            super().begin(batch, total, state)

    def row(self, row, batch):  # type: ignore[no-untyped-def]
        if self.writes:
            super().row(row, batch)


def train_here(arguments: list[str]) -> None:
    from ingot.training.trainer import train

    config = load_config(RunConfig, arguments)
    train(config, Quiet(config.run_folder, os.environ.get("RANK", "0") == "0"))


def train_all(runs: list[list[str]], processes: int, folder: Path) -> list[str]:
    """Train each run with that many processes; gives each run's error, empty where it went well."""
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn_warm(_worker, args=(runs, processes, store.port, str(folder)), nprocs=processes)
    return [
        next((text for r in range(processes) if (text := (folder / f"{number}-{r}").read_text())), "")
        for number in range(len(runs))
    ]


def _worker(rank: int, runs: list[list[str]], processes: int, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    for number, arguments in enumerate(runs):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # each run has its own keys in the store
        try:
            train_here(arguments)
            text = ""
        except Exception:
            text = f"rank {rank}: {traceback.format_exc()}"
            print(text, file=sys.stderr, flush=True)
        Path(folder, f"{number}-{rank}").write_text(text)
        if text:
            os._exit(1)


def losses(folder: Path) -> list[float]:
    return [row["loss/train/total"] for row in read_rows(folder)]


def norms(folder: Path) -> list[float]:
    return [row["l2_norm/grad/global"] for row in read_rows(folder)]


def evaluations(folder: Path) -> list[float]:
    name = "metrics/eval/LanguageCrossEntropy"
    return [row[name] for row in read_rows(folder) if name in row]


def final_step(folder: Path) -> Path:
    return max((folder / "checkpoints").iterdir(), key=lambda p: int(p.name))


def tensors(folder: Path, section: str) -> dict[str, torch.Tensor]:
    """What a finished run has saved, put together from the files of all its processes."""
    stored = CheckpointTensors(read_manifest(final_step(folder)), section)
    return {name: stored.get(name) for name in stored.names() if not name.startswith("rng/")}


def manifest(folder: Path) -> dict:
    return json.loads((final_step(folder) / "manifest.json").read_text())
