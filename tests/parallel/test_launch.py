"""Processes that are started, fail, go missing or do not belong together: what the user sees, and how soon it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import TINY, Ingot
from warm_process import WarmProcess

from ingot.errors import ConfigError
from ingot.parallel.rank_env import RankEnv
from ingot.parallel.rendezvous import World


def start(*arguments: str, **env: str) -> WarmProcess:
    command = [sys.executable, "-m", "ingot.cli.main", "train", *arguments]
    return WarmProcess(command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rank(number: int, world: int, port: int) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number), "MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(seen: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not seen():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def children(process: subprocess.Popen[str]) -> dict[int, int]:
    """Ranks and process ids of a launcher's processes."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    env = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in found}
    return {int(v.split(b"=")[1]): pid for pid, values in env.items() for v in values if v.startswith(b"RANK=")}


def test_nproc_starts_processes_and_keeps_the_log_of_each(ingot: Ingot, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = ingot("train", *TINY, f"data={data}", f"save_folder={folder}", "--nproc", "2", "parallel.tensor=2")
    assert "2 processes, tensor=2 (as configured)" in done.stdout and f"run folder: {folder}" in done.stdout
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 12
    assert "2 processes, tensor=2" in (folder / "logs" / "rank-1.log").read_text()
    assert (folder / "checkpoints" / "12" / "manifest.json").is_file()
    ingot("train", *TINY, f"data={data}", f"save_folder={folder}", "--nproc", "2", "--fresh", "max_duration=2ba")
    assert "2 processes, shard=2" in (folder / "logs" / "rank-1.log").read_text()
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["2"]


def test_a_user_error_in_every_rank_is_one_sentence_with_its_exit_code(
    ingot: Ingot, data: Path, tmp_path: Path
) -> None:
    folder = f"save_folder={tmp_path / 'run'}"
    done = ingot("train", *TINY, f"data={data}", folder, "--nproc", "2", "cuda_graphs=true", check=False)
    assert done.returncode == 2
    first, second = done.stderr.strip().splitlines()
    assert (
        first.startswith("error: ")
        and "cuda_graphs" in first
        and "of 2 failed first; the log of every rank is in" in second
    )


def test_an_impossible_layout_starts_no_process(ingot: Ingot, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = ingot(
        "train", *TINY, f"data={data}", f"save_folder={folder}", "--nproc", "3", "parallel.tensor=3", check=False
    )
    assert done.returncode == 2 and "parallel.tensor=3 does not divide the model's n_heads, 4" in done.stderr
    assert not folder.exists()


def test_ranks_with_different_configs_find_out_at_the_start(data: Path, tmp_path: Path) -> None:
    port = free_port()
    common = [*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", "parallel.join_timeout=30"]
    ranks = [start(*common, f"seed={number}", **rank(number, 2, port)) for number in range(2)]
    for process in ranks:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2 and "rank 0 and rank 1 differ in config:" in errors


def test_ranks_on_gpus_of_different_capability_are_refused(data: Path, tmp_path: Path) -> None:
    """One would multiply in 8 bits and the other not, or attend by another kernel."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os\n"
        "if 'RANK' in os.environ:\n"
        "    from ingot.parallel.executors import device\n"
        "    device.describe_capability = lambda _: f\"cuda {8 + int(os.environ['RANK'])}.0\"\n"
    )
    port = free_port()
    common = [*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", "parallel.join_timeout=30"]
    for process in [start(*common, PYTHONPATH=str(hook), **rank(number, 2, port)) for number in range(2)]:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "rank 0 and rank 1 differ in compute capability: cuda 8.0 and cuda 9.0" in errors


@pytest.mark.parametrize("what", ["code", "data", "the number of processes"])
def test_whatever_ranks_must_share_is_compared_and_both_values_shown(what: str) -> None:
    store, errors = dist.HashStore(), {}

    def join(number: int) -> None:
        world = World(RankEnv(rank=number, world=3), store, timedelta(seconds=20))
        world.agree("one", {what: "same"})
        try:
            world.agree("two", {what: "this" if number < 2 else "that"})
        except ConfigError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == dict.fromkeys(range(3), f"rank 0 and rank 2 differ in {what}: this and that")


def test_a_rank_that_never_arrives_is_named(data: Path, tmp_path: Path) -> None:
    process = start(
        *TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", "parallel.join_timeout=2", **rank(0, 3, free_port())
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "after 2 s, 2 of 3 processes had not arrived" in errors and "rank 1, 2" in errors


def test_a_port_in_use_is_named(data: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", **rank(0, 2, port))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and f"port {port} is in use" in errors


def test_two_machines_join_with_the_options_of_composers_launcher(data: Path, tmp_path: Path) -> None:
    port, folder = str(free_port()), tmp_path / "run"
    common = [*TINY, f"data={data}", f"save_folder={folder}", "--nproc", "1", "--world_size", "2"]
    common += ["--master_addr", "127.0.0.1", "--master_port", port, "--node_rank"]
    nodes = [start(*common, number) for number in ("0", "1")]
    for node in nodes:
        out, errors = node.communicate(timeout=120)
        assert node.returncode == 0, (out, errors)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 12


@pytest.mark.slow
def test_torchrun_is_joined_and_restarts_a_killed_rank_from_the_last_checkpoint(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
               "-m", "ingot.cli.main", "train", *TINY, f"data={data}", f"save_folder={folder}", "max_duration=300ba",
               "save_interval=20ba", "data.eval=null"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (folder / "checkpoints" / "40").exists(), process)
    os.kill(children(process)[1], signal.SIGKILL)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors[-2000:]
    assert "resumed from" in out
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["time/batch"] for row in rows] == list(range(1, 301))


# A process that sets its own memory limit once training runs: the next large tensor is one that the system refuses.
LIMIT = """
import os, resource, sys, threading, time
ENTRY = "ingot.launch.agent.rank_main"
def limit():
    while not (os.path.exists(METRICS) and open(METRICS, "rb").read().count(b"\\n") >= 3):
        time.sleep(0.005)
    open(MARKER, "w").close()
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + MARGIN, resource.RLIM_INFINITY))
if os.environ.get("RANK", "0") == LIMITED_RANK and {"ingot.cli.main", ENTRY} & set(sys.orig_argv) and not os.path.exists(MARKER):
    if os.environ.get("RANK") or "--nproc" not in sys.orig_argv:
        threading.Thread(target=limit, daemon=True).start()
"""
WIDE = ["model.vocab_size=16384", "max_seq_len=64", "model.max_seq_len=64", "device_train_microbatch_size=8",
        "global_train_batch_size=16", "save_interval=2ba", "data.eval=null", "optimizer.eps=1e-5"]  # fmt: skip


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_running_out_of_memory_halves_the_microbatch_and_repeats_the_batch(
    ingot: Ingot, data: Path, tmp_path: Path, processes: int
) -> None:
    """A real limit, on one rank, in the middle of a run: logits of 8 x 64 x 16384 take 32 MiB, and several copies."""
    folder, hook = tmp_path / "run", tmp_path / "hook"
    hook.mkdir()
    values = f"METRICS, MARKER, MARGIN, LIMITED_RANK = {str(folder / 'metrics.jsonl')!r}, {str(tmp_path / 'marker')!r}, 50 << 20, {str(processes - 1)!r}\n"
    (hook / "sitecustomize.py").write_text(values + LIMIT)
    common = ["train", *TINY, *WIDE, f"data={data}"]
    if processes == 2:
        common += ["--nproc", "2"]
    plain = tmp_path / "plain"
    ingot(*common, f"save_folder={plain}")
    env = os.environ | {"PYTHONPATH": str(hook), "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = ingot(*common, f"save_folder={folder}", env=env)
    assert (tmp_path / "marker").exists()
    said = done.stdout + done.stderr
    again = "microbatches of 4" if processes == 1 else "starting again with smaller microbatches"
    assert "out of memory at batch" in said and again in said
    expected, got = ([json.loads(x) for x in (f / "metrics.jsonl").read_text().splitlines()] for f in (plain, folder))
    assert [row["time/batch"] for row in got] == list(range(1, 13))
    for a, b in zip(expected, got, strict=True):
        assert a["loss/train/total"] == pytest.approx(b["loss/train/total"], rel=1e-5)
    assert got[-1]["trainer/device_train_microbatch_size"] < 8
