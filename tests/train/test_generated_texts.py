"""Texts that a run generates at its checkpoints: the same on every layout, once per batch, and harmless."""

import json
from pathlib import Path

import pytest
from runs import BATCHES, EVERY, Run, assert_as_if_nothing_happened, ranks, weights, whole

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.training.listener import RunListener
from ingot.training.trainer import train

__all__ = ["ranks", "whole"]
PROMPTS = ["generate.prompts=[The miller,'My aunt counted every']", "generate.max_new_tokens=6"]


def texts(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]


def run(arguments: list[str], folder: Path, *more: str) -> None:
    train(load_config(RunConfig, [*arguments, f"save_folder={folder}", *more]), RunListener())


def test_texts_come_with_each_checkpoint_and_change_nothing(tiny: list[str], tmp_path: Path) -> None:
    dropout = ["model.resid_pdrop=0.1", "save_interval=5ba"]  # random numbers that nobody else may draw
    run(tiny, tmp_path / "plain", *dropout)
    run(tiny, tmp_path / "with", *dropout, *PROMPTS)
    one, two = weights(tmp_path / "with"), weights(tmp_path / "plain")
    assert all((one[name] == two[name]).all() for name in two)
    found = texts(tmp_path / "with")
    assert [line["batch"] for line in found] == [5, 10, 12]
    assert [each["prompt"] for each in found[0]["texts"]] == ["The miller", "My aunt counted every"]
    assert len({str(line["texts"]) for line in found}) > 1  # the model learns
    assert not (tmp_path / "plain" / "generated.jsonl").exists()


def test_an_interval_of_their_own(tiny: list[str], tmp_path: Path) -> None:
    run(tiny, tmp_path / "run", *PROMPTS, "generate.interval=4ba", "save_interval=0ba", "max_duration=9ba")
    assert [line["batch"] for line in texts(tmp_path / "run")] == [4, 8, 9]


def test_a_crash_leaves_each_text_once(data: Path, tmp_path: Path, whole: Path) -> None:
    broken = Run(data, tmp_path / "run", *PROMPTS, kind="kill", rank=1, batch=10)
    broken.run()
    assert_as_if_nothing_happened(broken.folder, whole)
    assert [line["batch"] for line in texts(broken.folder)] == list(range(EVERY, BATCHES + 1, EVERY))


def test_texts_of_a_batch_after_the_checkpoint_are_written_again(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(tiny, folder, *PROMPTS, "save_interval=4ba", "max_duration=8ba")
    with (folder / "generated.jsonl").open("a") as file:  # a process that was killed between text and checkpoint
        file.write(json.dumps({"batch": 12, "texts": [{"prompt": "a", "text": "of a lost process"}]}) + "\n")
        file.write('{"batch": 13, "te')
    run(tiny, folder, *PROMPTS, "save_interval=4ba")
    assert [line["batch"] for line in texts(folder)] == [4, 8, 12] and "lost" not in str(texts(folder))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["shard=2", "tensor=2", "context=2", "pipeline=2"])
def test_every_layout_writes_the_same_texts(data: Path, tmp_path: Path, layout: str) -> None:
    more = [*PROMPTS, "global_train_batch_size=8", "max_duration=8ba"]
    Run(data, tmp_path / "one", *more, nproc=1).run()
    Run(data, tmp_path / "two", *more, f"parallel.{layout}", nproc=2).run()
    assert texts(tmp_path / "two") == texts(tmp_path / "one")


@pytest.mark.parametrize(
    ("prompt", "most", "problem"),
    [("The miller", 31, "is more than max_seq_len=32"), ("", 4, "at least 1 character")],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_step_1(
    tiny: list[str], tmp_path: Path, prompt: str, most: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(tiny, tmp_path / "run", f"generate.prompts=['{prompt}']", f"generate.max_new_tokens={most}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
