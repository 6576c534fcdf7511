"""A step of a 256-GPU run, gone through on this machine without its memory, compared with the memory estimate."""

import json
import sys
from pathlib import Path

import pytest
from warm_process import run_warm

# In a process of its own: the fake process group is the whole process's.
PROGRAM = """
import json, sys, torch
from ingot.config.load import load_config
from dry_run import dry_run
from ingot.parallel.memory_estimate import StepShape, choose_layout, estimate_memory
from ingot.config.run import RunConfig

config = load_config(RunConfig, [*sys.argv[2:], "data=x"])
batch, world = config.global_train_batch_size, int(sys.argv[1])
layout, _ = choose_layout(config.parallel, world, config.model, batch, StepShape.of(config))
bytes = dry_run(
    config.model, config.parallel, layout, seq_len=config.max_seq_len, micro=StepShape.of(config).micro,
    precision=config.precision, recompute=StepShape.of(config).recompute,
    make_optimizer=lambda spread: torch.optim.AdamW(list(spread.roots[0].parameters()), foreach=False),
)
estimate = estimate_memory(config.model, layout, config.parallel, StepShape.of(config)).total
share = config.model.parameters * 4 * layout.replicate / layout.size
print(json.dumps(bytes | {"share": share, "estimate": estimate}))
"""


def run(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = run_warm(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    print(*arguments, {name: f"{size / 2**30:.2f} GiB" for name, size in sizes.items()})
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "layout"), [("mpt-30b", "parallel.replicate=4"), ("mpt-70b", "parallel.tensor=8")])
def test_a_step_on_256_ranks_fits_its_gpus(recipe: str, layout: str) -> None:
    sizes = run("256", recipe, layout, "device_train_microbatch_size=1")
    # fp32 weights, sharded over all but the replicas; gradients and two moments likewise
    assert sizes["weights"] == pytest.approx(sizes["share"], rel=0.01)
    assert sizes["gradients"] == pytest.approx(sizes["share"], rel=0.01)
    assert sizes["optimizer"] == pytest.approx(2 * sizes["share"], rel=0.01)
    assert 4 * sizes["share"] < sizes["peak"] < 80 * 2**30
    assert sizes["estimate"] == pytest.approx(sizes["peak"], rel=0.15)


@pytest.mark.parametrize(
    "arguments",
    [
        "8 gpt3-125m device_train_microbatch_size=4 activation_checkpointing=selective",
        "8 mpt-1b model.n_layers=4 parallel.tensor=2 activation_checkpointing=none",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "8 gpt3-125m device_train_microbatch_size=4 activation_checkpointing=none",
                "8 gpt3-125m device_train_microbatch_size=4 activation_checkpointing=full",
                "8 gpt3-1.3b device_train_microbatch_size=4 parallel.tensor=8 activation_checkpointing=none",
                "16 llama-1b device_train_microbatch_size=2 activation_checkpointing=none",
                "8 pythia-1b device_train_microbatch_size=2 activation_checkpointing=none",
                "8 mpt-1b parallel.context=2 device_train_microbatch_size=2 activation_checkpointing=none",
                "8 mpt-1b precision=fp32 activation_checkpointing=none",
                "64 mpt-7b parallel.tensor=4 parallel.reshard_after_forward=false",
                "8 mpt-7b activation_checkpointing=none",
            )
        ),
    ],
)
def test_the_estimate_of_memory_is_near_the_dry_run(arguments: str) -> None:
    words = arguments.split()
    if not any(word.startswith("device_train") for word in words):
        words.append("device_train_microbatch_size=1")
    sizes = run(*words)
    assert sizes["estimate"] == pytest.approx(sizes["peak"], rel=0.15)


H200 = 0.94 * 139.0 * 2**30  # bytes of one H200 that a run may fill


@pytest.mark.slow
def test_llama_8b_with_2048_tokens_fits_one_h200_if_bf16_copies_are_dropped() -> None:
    """fp32 weights, gradients and AdamW's moments are 119.7 GiB, bf16 copies 13 more."""
    from dry_run import peak_of_one_process

    from ingot.config.load import load_config
    from ingot.config.run import RunConfig

    config = load_config(RunConfig, ["llama-8b", "max_seq_len=2048", "data=x"])
    dropped, held = (peak_of_one_process(config, "full", hold) for hold in (False, True))
    assert 119 * 2**30 < dropped < H200 < held
    assert held - dropped == pytest.approx(13 * 2**30, rel=0.01)
    wrapped = run("1", "llama-8b", "max_seq_len=2048", "activation_checkpointing=full", "parallel.shard=1",
                  "device_train_microbatch_size=1")  # fmt: skip
    assert dropped < wrapped["peak"] < H200
