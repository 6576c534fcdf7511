"""Copies of a run's state in host memory, made from a GPU: a killed run continues from them to the same bits."""

from pathlib import Path

import pytest
import torch
from runs import BATCHES, Run
from test_host_copies import COPIES, assert_the_same_to_the_last_bit, run_to_copy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_GPU = ["precision=bf16", "deterministic=true", "compile=false", "cuda_graphs=false"]


@pytest.mark.parametrize("layout", [[], ["parallel.shard=1"]], ids=["plain", "wrapped"])
def test_a_killed_process_on_a_gpu_continues_from_the_copy_to_the_same_bits(
    data: Path, tmp_path: Path, layout: list[str]
) -> None:
    Run(data, tmp_path / "whole", *COPIES, *ON_GPU, *layout, nproc=1).run()
    go = tmp_path / "go"
    run = Run(data, tmp_path / "run", *COPIES, *ON_GPU, *layout, nproc=1, kind="kill", rank=0, batch=15, after=str(go))
    said = run_to_copy(run, go)
    assert "attempt 2 starts from the copy of batch 14 in host memory" in said
    assert f"resumed from host memory at batch 14 of {BATCHES}" in said
    assert_the_same_to_the_last_bit(run.folder, tmp_path / "whole")
