"""Dropout masks belong to steps and samples: every layout, microbatch size and restart trains alike."""

from pathlib import Path

import pytest
from harness import losses, norms, train_all, train_here

BASE = [
    "model.d_model=32", "model.n_heads=4", "model.n_layers=4", "model.vocab_size=321", "model.vocab_multiple=64",
    "model.init=normal", "max_seq_len=32", "global_train_batch_size=8", "precision=fp32", "scheduler.t_warmup=2ba",
    "optimizer.lr=0.01", "optimizer.eps=1e-5", "max_duration=5ba", "data.eval=null",
]  # fmt: skip
FAMILIES = {
    "gpt3": ["model.family=gpt3"],
    "mpt": ["model.family=mpt", "model.positions=alibi", "model.no_bias=true"],
    "neox": ["model.family=neox"],
    "llama": ["model.family=llama", "model.n_kv_heads=2", "model.ffn_hidden_size=96"],
}
EVERYWHERE = [f"model.{kind}_pdrop=0.1" for kind in ("resid", "emb", "attn")]
TP, CP, PP, FSDP = "parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2", "parallel.shard=2"
INTERLEAVED, ZERO_BUBBLE = (f"parallel.pipeline_schedule={name}" for name in ("interleaved_1f1b", "zero_bubble"))
FULL, SELECTIVE = "activation_checkpointing=true", "activation_checkpointing=selective"
TWO = [
    ("gpt3", "parallel.replicate=2"),
    ("gpt3", FSDP, "device_train_microbatch_size=1", FULL),
    ("mpt", TP, SELECTIVE),
    ("neox", TP),
    ("gpt3", CP, FULL),
    ("llama", CP),
    ("mpt", PP, "device_train_microbatch_size=1"),
    ("neox", PP, INTERLEAVED, FULL),
    ("llama", PP, ZERO_BUBBLE),
]
FOUR = [
    ("gpt3", TP, FSDP), ("mpt", TP, PP), ("llama", CP, TP), ("neox", CP, FSDP), ("gpt3", PP, FSDP, ZERO_BUBBLE),
    ("llama", "parallel.replicate=2", FSDP, SELECTIVE), ("mpt", CP, PP),
]  # fmt: skip


def check(layouts: list[tuple[str, ...]], processes: int, data: Path, tmp_path: Path) -> None:
    """Against one process with another microbatch size that recomputes nothing."""
    commands = []
    for number, (family, *layout) in enumerate(layouts):
        common = [*BASE, *FAMILIES[family], *EVERYWHERE, f"data={data}"]
        if not (tmp_path / family).exists():
            train_here([*common, f"save_folder={tmp_path / family}", "device_train_microbatch_size=4"])
        commands.append([*common, f"save_folder={tmp_path / str(number)}", *layout])
    assert train_all(commands, processes, tmp_path / "notes") == [""] * len(commands)
    for number, layout in enumerate(layouts):
        for read, rel in ((losses, 1e-5), (norms, 1e-4)):
            expected = read(tmp_path / layout[0])
            assert len(expected) == 5
            assert read(tmp_path / str(number)) == pytest.approx(expected, rel=rel), layout


def test_two_ranks_draw_the_same_masks_as_one_process(data: Path, tmp_path: Path) -> None:
    check(TWO, 2, data, tmp_path)
    train_here([*BASE, *FAMILIES["gpt3"], f"data={data}", f"save_folder={tmp_path / 'none'}"])
    assert losses(tmp_path / "gpt3") != pytest.approx(losses(tmp_path / "none"), rel=1e-3)


@pytest.mark.slow
def test_four_ranks_draw_the_same_masks_as_one_process(data: Path, tmp_path: Path) -> None:
    check(FOUR, 4, data, tmp_path)


def test_a_restart_with_another_microbatch_size_continues_with_the_same_masks(data: Path, tmp_path: Path) -> None:
    common = [*BASE, *FAMILIES["gpt3"], *EVERYWHERE, f"data={data}", "scheduler.t_max=5ba"]
    train_here([*common, f"save_folder={tmp_path / 'whole'}"])
    train_here([*common, f"save_folder={tmp_path / 'parts'}", "max_duration=2ba", "device_train_microbatch_size=2"])
    train_here([*common, f"save_folder={tmp_path / 'parts'}", "device_train_microbatch_size=1"])
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
