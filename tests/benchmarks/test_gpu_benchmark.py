"""The GPU benchmark in its tiny form, on whatever device is here: every system learns the same."""

import importlib
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
Run = Callable[..., object]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script of the benchmarks in this process, which has torch already; gives what it exits with."""

    def script(name: str, *arguments: object) -> object:
        path = ROOT / "benchmarks" / name
        monkeypatch.syspath_prepend(path.parent)
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return end.code or 0
        return 0

    return script


def test_every_system_trains_to_the_reference_loss_and_leaves_a_row(data: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "gpu.json"
    assert run("gpu.py", data, "--models", "tiny", "--steps", 1, "--out", out) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {(row["system"], row["positions"]) for row in rows} == {
        ("ingot", "learned"), ("ingot", "alibi"), ("nanogpt", "learned"), ("hf", "learned"), ("torch", "learned")
    }  # fmt: skip
    for row in rows:
        assert abs(row["loss"] / row["reference_loss"] - 1) < 0.01
        assert row["tokens_per_second"] > 0 and row["mfu_full"] > row["mfu_causal"] > 0 and row["product_flops"] > 0


def test_a_peer_that_does_not_fit_has_no_row_and_the_others_continue(
    data: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu_peers = importlib.import_module("gpu_peers")
    monkeypatch.setattr(gpu_peers.NanoGPT, "forward", full)
    out = tmp_path / "gpu.json"
    arguments = ["--positions", "learned", "--systems", "nanogpt", "ingot", "--steps", 1, "--out", out]
    assert run("gpu.py", data, "--models", "tiny", *arguments) == 0
    assert [row["system"] for row in json.loads(out.read_text())["rows"]] == ["ingot"]
    assert "nanogpt does not fit at tiny with a microbatch of 2: no row" in capsys.readouterr().out


def test_a_reference_is_trained_once_and_a_row_that_misses_it_is_refused(
    data: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    arguments = ["gpu.py", data, "--models", "tiny", "--steps", 1, "--positions", "learned", "--systems", "ingot",
                 "--out", out]  # fmt: skip
    assert run(*arguments) == 0
    found = json.loads(out.read_text())
    assert len(found["references"]) == 1
    found["references"][0]["fp32_loss"] *= 1.02
    out.write_text(json.dumps(found))
    assert run(*arguments) == 1 and "the loss of ingot is wrong" in capsys.readouterr().err
    found["references"][0]["batches"] = "of other data"
    out.write_text(json.dumps(found))
    assert run(*arguments) == 0


def test_results_are_printed_as_tables() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "benchmarks/results/gpu.json"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True).stdout
    assert printed.count("| 7b | learned | fp8 | ingot | 20,793 |") == 1 and "| matrix products | " in printed


def test_profile_budgets_and_optimizers_are_added_to_the_same_results(
    data: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    tiny = ["gpu.py", data, "--models", "tiny", "--out", out, "--positions", "learned", "--systems", "ingot"]
    for more in (["--profile"], ["--budgets", 1, 0.5], ["--optimizers", "muon"], ["--train"]):
        assert run(*tiny, "--steps", 1, *more) == 0
    found = json.loads(out.read_text())
    assert [row.get("optimizer") for row in found["rows"]] == [None, "muon"] and found["command"].count("gpu.py") == 4
    assert found["train"][0]["tokens_per_second"] > 0 and found["train"][0]["seconds_to_first_step"] > 0
    assert [row["budget"] for row in found["budget"]] == [0.5, 1.0] and "idle" in found["profile"][0]["milliseconds"]
    capsys.readouterr()
    assert run("gpu.py", out) == 0
    text = capsys.readouterr().out
    assert "| matrix products | " in text and "| tiny | 2 | 0.5 | " in text


def test_losses_at_the_highest_rate_are_compared_with_fp32_and_a_peer(
    data: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "losses.json"
    for seed in (17, 18):
        assert run("gpu_losses.py", data, "--models", "tiny", "--seeds", seed, "--out", out) == 0
    found = json.loads(out.read_text())
    assert found["command"].count("gpu_losses.py") == 2  # rows of both are kept
    rows = found["rows"]
    assert [(row["seed"], row["system"]) for row in rows] == [
        (seed, system) for seed in (17, 18) for system in ("reference", "ingot", "nanogpt", "nanogpt-bf16")
    ]
    for reference, ours, peer, narrow in (rows[:4], rows[4:]):
        assert len(reference["losses"]) == 20 and reference["losses"][-1] < reference["losses"][0] - 0.5
        assert ours["losses"] == pytest.approx(reference["losses"], rel=0.01)
        assert peer["losses"] == pytest.approx(reference["losses"], rel=0.01)
        assert narrow["losses"] == pytest.approx(reference["losses"], rel=0.01) and narrow["losses"] != peer["losses"]
    assert rows[0]["losses"] != rows[4]["losses"]
    capsys.readouterr()
    assert run("gpu_losses.py", out) == 0
    assert capsys.readouterr().out.count("| tiny | 1") == 6


def test_launches_are_measured_and_printed(
    data: Path, tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "graphs.json"
    tiny = ["model.d_model=64", "model.n_heads=2", "model.n_layers=2", "model.vocab_size=512", "max_seq_len=32"]
    assert run("cuda_graphs.py", data, "pythia-14m:2", *tiny, "--steps", 1, "--out", out) == 0
    found = json.loads(out.read_text())
    row = found["rows"][0]
    assert row["launched"] > 0 and ("graph" in row) == torch.cuda.is_available()
    out.write_text(
        json.dumps(found | {"rows": [row | {"launched": 1000, "graph": 2500, "chosen": "CUDA graphs: on (...)"}]})
    )
    assert run("cuda_graphs.py", out) == 0
    assert "| pythia-14m | 2 | 1,000 | 2,500 | 2.50 x | CUDA graph |" in capsys.readouterr().out


def test_times_of_kernels_are_printed_and_need_a_gpu(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    row = {"model": "1b", "kernel": "norm", "ms": 1.234, "peer_ms": 2.0, "of_limit": 0.9}
    out.write_text(json.dumps({"rows": [row, row | {"kernel": "attention", "peer_ms": None}]}))
    assert run("gpu_kernels.py", out) == 0
    assert "| 1b | norm | 1.23 | 2.00 | 90% |\n| 1b | attention | 1.23 |  | 90% |\n" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert "need a GPU" in str(run("gpu_kernels.py"))


@pytest.mark.slow
def test_the_check_of_a_card_runs_through_on_a_cpu_and_its_rows_become_results(tmp_path: Path) -> None:
    """With one section whose variants are timed in turn, one of them a rank of two, and one whose variants are alone."""
    command = [sys.executable, "benchmarks/gpu_check.py"]
    check = partial(subprocess.run, capture_output=True, text=True, timeout=300, cwd=ROOT, check=True)
    check([*command, "--tiny", "--out", tmp_path, "--only", "repeatable", "llama-8b", "1b-two-ranks"])
    results = tmp_path / "gpu.json"
    results.write_text('{"rows": []}')
    printed = check([*command, "--print", tmp_path, "--into", results]).stdout
    rows = json.loads(results.read_text())["executions"]
    repeated = [row for row in rows if row["section"] == "repeatable"]
    assert len(repeated) == 2 and all(row["equal"] and row["equal_resumed"] for row in repeated)
    timed = [(row["section"], row["variant"], row["execution"]) for row in rows if "tokens_per_second" in row]
    assert timed == [
        ("llama-8b", "plain", "plain"), ("llama-8b", "wrapped", "fsdp"),
        ("1b-two-ranks", "plain", "plain"), ("1b-two-ranks", "one of two ranks", "fsdp"),
    ]  # fmt: skip
    fields = {"family", "precision", "deterministic", "causal_rate", "matmul_tflops", "memory_gib", "microbatch",
              "full_rate", "reserved_gib", "allocation_retries"}  # fmt: skip
    assert all(fields <= row.keys() for row in rows if "tokens_per_second" in row) and "ratio" in rows[-1]
    assert "one of two ranks" in printed and "llama-8b: wrapped is " in printed


def test_a_script_that_wraps_a_model_names_its_card_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to join a world with a device that has no index."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu_fp8 = importlib.import_module("gpu_fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_fp8.Runs(tiny=False).device == torch.device("cuda", 0)
    assert gpu_fp8.Runs(tiny=True).device == torch.device("cpu")


@pytest.mark.slow
def test_trees_import_while_they_wait_and_end_if_nobody_wants_them(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        "benchmarks/compare_steps.py",
        "--old",
        ROOT,
        "--rows",
        rows,
        "--cases",
        "125m",
        "--tiny",
    ]
    check = partial(subprocess.run, capture_output=True, text=True, timeout=200, cwd=ROOT, check=True)
    check([*command, "--wait"], input="")
    assert not rows.exists()
    check([*command, "--wait"], input="go\n")
    assert json.loads(rows.read_text())["ratio"] > 0


@pytest.mark.slow
def test_scripts_of_the_check_of_a_card_leave_their_rows(tmp_path: Path) -> None:
    """A peer, fp8 next to bf16, checkpoints, a profile, and two trees, here this one twice."""
    rows = tmp_path / "rows.jsonl"
    check = partial(subprocess.run, capture_output=True, text=True, timeout=400, cwd=ROOT, check=True)
    sections = ["peers-pythia-1b", "fp8-300", "checkpoint", "7b"]
    check([sys.executable, "benchmarks/gpu_check.py", "--tiny", "--out", tmp_path, "--only", *sections])
    trees = ["--old", ROOT, "--rows", rows, "--cases", "125m", "7b", "--tiny"]
    check([sys.executable, "benchmarks/compare_steps.py", *trees])
    found = {(r["section"], r["variant"]): r for r in map(json.loads, rows.read_text().splitlines())}
    assert not [row for row in found.values() if "error" in row]
    assert found["peers-pythia-1b", "hf"]["ratio"] > 0 and found["peers-pythia-1b", "hf"]["base"] == "ingot"
    equal = found["fp8-300", "gradients, wrapped and plain"]
    assert equal["matrices_equal_to_the_bit"] == equal["matrices"] == 8
    assert 0 < found["fp8-300", "losses, fp8 and bf16"]["largest_difference"] < 0.02
    bf16 = found["fp8-300", "bf16 wrapped"]
    assert bf16["means_of_tenths"][-1] < bf16["means_of_tenths"][0] - 0.5  # there is something to learn
    assert len(found["checkpoint", "load, warm"]["all_seconds"]) == 2 and found["checkpoint", "save"]["ratio"] > 0
    assert "idle" in found["7b", "plain"]["milliseconds"]
    assert 0 < found["peers-pythia-1b", "ingot"]["causal_rate"] < found["peers-pythia-1b", "ingot"]["full_rate"]
    for name in ("125m", "7b"):
        assert found["trees", name]["old_losses"] == found["trees", name]["new_losses"]
    assert all("command" in row and "at" in row for row in found.values())
