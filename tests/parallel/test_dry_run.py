"""A step of a 256-GPU run, gone through on this machine without its memory."""

import subprocess
import sys

import pytest

# In a process of its own: the fake process group is the whole process's.
PROGRAM = """
import json, sys, torch
from ingot.config.load import load_config
from ingot.model.gpt import parameter_count
from ingot.parallel.config import choose_layout
from ingot.parallel.dry_run import dry_run
from ingot.train.config import RunConfig

config = load_config(RunConfig, [sys.argv[1], "data=x", *sys.argv[2:]])
layout, _ = choose_layout(config.parallel, 256, config.model, config.max_seq_len, config.global_train_batch_size)
peak = dry_run(
    config.model, config.parallel, layout, seq_len=config.max_seq_len, micro=1, precision=config.precision,
    recompute=config.recompute, make_optimizer=lambda spread: torch.optim.AdamW(list(spread.names), foreach=False),
)
print(json.dumps({"parameters": parameter_count(config.model), "peak": peak, "ranks": layout.size / layout.replicate}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("mpt-30b", ["parallel.replicate=4"]), ("mpt-70b", ["parallel.tensor=8"])],
)
def test_a_step_on_256_ranks_fits_its_gpus(recipe: str, layout: list[str]) -> None:
    import json

    done = subprocess.run([sys.executable, "-c", PROGRAM, recipe, *layout], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    peak, share = result["peak"], result["parameters"] * 4 / result["ranks"]
    print(recipe, *layout, {name: f"{size / 2**30:.2f} GiB" for name, size in peak.items()})
    assert peak["SHARDED_PARAM"] == pytest.approx(share, rel=0.01)  # fp32 weights, sharded over all but the replicas
    assert peak["Total"] < 80 * 2**30
