"""A run goes on on any other number of processes and any other layout: the same samples, the same losses."""

import os
from pathlib import Path

import pytest
import torch
from harness import final_step, losses, tensors, train_all, train_here
from test_parity import arguments, relative

CONSTANT = ["scheduler.t_max=12ba", "eval_interval=0ba", "loggers.samples=true", "data.eval=null"]


def stage(data: Path, folder: Path, steps: int, *layout: str) -> list[str]:
    return arguments("gpt3", data, folder, *CONSTANT, f"max_duration={steps}ba", *[f"parallel.{x}" for x in layout])


def samples(folder: Path) -> list[list[int]]:
    """The samples of each batch, from what every process noted down."""
    batches: dict[int, list[int]] = {}
    for path in sorted((folder / "samples").iterdir()):
        for line in path.read_text().splitlines():
            batch, *ids = map(int, line.replace(",", " ").replace(":", " ").split())
            batches.setdefault(batch, []).extend(ids)
    return [sorted(set(batches[batch])) for batch in sorted(batches)]


def check(data: Path, tmp_path: Path, stages: list[tuple[int, list[str]]]) -> None:
    train_here(stage(data, tmp_path / "whole", 12))
    folder = tmp_path / "moved"
    for number, (processes, layout) in enumerate(stages):
        command = stage(data, folder, 12 * (number + 1) // len(stages), *layout)
        if processes == 1:
            train_here(command)
        else:
            assert train_all([command], processes, tmp_path / f"notes-{number}") == [""]
        parts = [name for name in os.listdir(final_step(folder)) if name.endswith(".safetensors")]
        assert len(parts) == (processes if processes > 1 else 2)
    assert relative(losses(tmp_path / "whole"), losses(folder)) <= 1e-5
    assert samples(tmp_path / "whole") == samples(folder) and len(samples(folder)) == 12
    for section in ("model", "optimizer"):
        one, two = tensors(tmp_path / "whole", section), tensors(folder, section)
        assert one.keys() == two.keys()
        for name in one:
            assert (one[name] - two[name]).norm() <= 1e-4 * one[name].norm().clamp(min=1e-2), name


def test_three_processes_then_two_then_one(data: Path, tmp_path: Path) -> None:
    check(data, tmp_path, [(3, ["shard=3"]), (2, ["tensor=2"]), (1, [])])


@pytest.mark.slow
@pytest.mark.parametrize(
    "stages",
    [
        [(4, ["shard=4"]), (2, ["shard=2"]), (3, ["shard=3"]), (1, []), (4, ["replicate=2", "shard=2"])],
        [(4, ["shard=4"]), (4, ["tensor=2", "pipeline=2"]), (4, ["shard=2", "tensor=2"]), (2, ["pipeline=2"])],
    ],
)
def test_every_move_between_layouts(data: Path, tmp_path: Path, stages: list[tuple[int, list[str]]]) -> None:
    check(data, tmp_path, stages)


def test_on_the_same_processes_it_ends_with_the_same_bits_and_full_files_hold_the_same(
    data: Path, tmp_path: Path
) -> None:
    commands = [
        stage(data, tmp_path / "whole", 12, "shard=2"),
        stage(data, tmp_path / "cut", 5, "shard=2"),
        stage(data, tmp_path / "cut", 12, "shard=2"),
        [*stage(data, tmp_path / "full", 12, "shard=2"), "state_dict_type=full"],
    ]
    assert train_all(commands, 2, tmp_path / "notes") == [""] * 4
    assert sorted(os.listdir(final_step(tmp_path / "full"))) == [
        "manifest.json", "model.safetensors", "optimizer.safetensors"
    ]  # fmt: skip
    for section in ("model", "optimizer"):
        whole, *others = (tensors(tmp_path / name, section) for name in ("whole", "cut", "full"))
        for other in others:
            assert whole.keys() == other.keys()
            assert all(torch.equal(whole[name], other[name]) for name in whole)
