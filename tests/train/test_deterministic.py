"""`deterministic=true`: an operation that cannot be deterministic stops the run, and what changes bits is announced."""

import os
from pathlib import Path

import pytest
import torch
from conftest import TINY
from torch import Tensor

from ingot.api import train
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.model.gpt import CrossEntropy
from ingot.parallel.executors.device import explaining_nondeterminism, make_deterministic
from ingot.report.metrics_file import read_rows


def run(data: Path, folder: Path, *more: str) -> list[float]:
    short = ["max_duration=4ba", "scheduler.t_max=4ba", "deterministic=true", "eval_interval=0ba"]
    train(load_config(RunConfig, [*TINY, *short, f"data={data}", f"save_folder={folder}", *more]))
    return [row["loss/train/total"] for row in read_rows(folder)]


@pytest.fixture(autouse=True)
def default_mode():
    yield
    torch.set_deterministic_debug_mode("default")


def test_an_operation_without_a_deterministic_kernel_is_named_before_weights_change(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CrossEntropy.forward

    def scattering(self: CrossEntropy, hidden: Tensor, *others: Tensor) -> Tensor:
        hidden.detach().clone().put_(torch.tensor([1, 1]), torch.tensor([2.0, 3.0]))  # which wins is not defined
        return plain(self, hidden, *others)

    monkeypatch.setattr(CrossEntropy, "forward", scattering)
    with pytest.raises(ConfigError, match="torch has no deterministic kernel for put_ on this device; set determin"):
        run(data, tmp_path / "run")
    assert not read_rows(tmp_path / "run")
    run(data, tmp_path / "run", "deterministic=false")


def test_a_process_whose_matrix_products_are_set_up_otherwise_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch reads CUBLAS_WORKSPACE_CONFIG once; its words of 2.11 for a process that multiplied before it was set."""
    said = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or `at::Context::"
        "setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS and you have "
        "CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable before "
        "running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
    )
    wanted = pytest.raises(ConfigError, match="set the environment variable to :4096:8 and start it again")
    with wanted, explaining_nondeterminism():
        raise RuntimeError(said)
    monkeypatch.setattr(os, "environ", {})
    config = load_config(RunConfig, [*TINY, "deterministic=true", "data=x"])
    make_deterministic(config, torch.device("cuda", 0), compiled=False)
    assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS"}


def test_a_resumed_run_announces_another_microbatch_size(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run(data, tmp_path / "whole", "device_train_microbatch_size=4", "model.resid_pdrop=0.1")
    for name, size, said in (
        ("same", 4, ""),
        ("other", 2, "microbatch was 4 and is now 2: results will not be bitwise"),
    ):
        more = [f"device_train_microbatch_size={size}", "model.resid_pdrop=0.1"]
        run(data, tmp_path / name, "device_train_microbatch_size=4", "model.resid_pdrop=0.1", "max_duration=2ba")
        capfd.readouterr()
        losses = run(data, tmp_path / name, *more)
        out = capfd.readouterr()
        assert said in out.out + out.err and ("bitwise" in out.out + out.err) == bool(said)
        assert losses == pytest.approx(whole, rel=1e-6) and (losses == whole or said)
