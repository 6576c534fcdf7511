"""What quickstart decides follows from the text, the time and the measured speed, and says why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.data.prepare.options import check_options
from ingot.data.sources import pieces
from ingot.errors import DataError
from ingot.quickstart import data_plan
from ingot.quickstart.data_plan import plan_data
from ingot.quickstart.model_plan import SHAPES, Corpus, plan_model


def options(arguments: list[str]) -> dict[str, str]:
    return {n.removeprefix("--"): v for n, v in zip(arguments[::2], arguments[1::2], strict=True)}


def keys(arguments: list[str]) -> dict[str, str]:
    return dict(argument.split("=") for argument in arguments)


def plan(path: Path) -> tuple[dict[str, str], data_plan.DataPlan]:
    made = plan_data([str(path)], "text", 256, lambda line: None)
    return options(made.arguments), made


def test_a_book_is_divided_into_paragraphs_and_a_list_into_lines(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("\n\n".join(f"Paragraph {i}\nof two lines." for i in range(300)))
    chosen, made = plan(tmp_path)
    assert chosen["documents"] == "paragraph" and chosen["val-documents"] == "15"
    assert made.prompt == "Paragraph 0"
    (tmp_path / "book.txt").write_text("\n".join(f"Line {i}" for i in range(300)))
    assert plan(tmp_path)[0]["documents"] == "line"


def test_many_files_stay_documents_and_a_share_is_held_out(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"{number}.md").write_text(f"Note {number}\n\nwith two paragraphs")
    chosen, made = plan(tmp_path)
    assert chosen["documents"] == "file" and chosen["val-fraction"] == "0.05"
    assert any("1,000" in reason for reason in made.reasons)


def test_what_a_line_of_json_holds_is_never_divided(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"a\n\nb {i}"}) + "\n" for i in range(10)))
    chosen, _ = plan(tmp_path)
    assert chosen["documents"] == "file" and chosen["val-documents"] == "1"


def test_every_plan_is_what_prepare_accepts(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.md").write_text(f"Note {number}")
    chosen, _ = plan(tmp_path)
    check_options({"input": str(tmp_path), "out_root": "x", **{n.replace("-", "_"): v for n, v in chosen.items()}})


def test_vocabulary_and_validation_grow_with_the_text_and_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({"text": "word " * 400}) + "\n"
    found = []
    for lines in (5, 500, 5000):
        path.write_text("".join(json.dumps({"text": f"{n} " + "word " * 400}) + "\n" for n in range(lines)))
        found.append(plan(path)[0])
    assert [f["tokenizer"] for f in found] == ["train:512", "train:512", "train:4096"]
    assert float(found[2]["val-fraction"]) * 5000 * len(line) < 250_000
    monkeypatch.setattr(data_plan, "_LOOK_BYTES", 200_000)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 50_000)
    sampled = plan_data([str(path)], "text", 256, lambda line: None)  # a sample is counted, and the rest estimated
    count = next(reason for reason in sampled.reasons if reason.startswith("documents: about "))
    assert 4000 < int(count.split()[2].replace(",", "")[: -0 or None].rstrip(",")) < 6000


@pytest.mark.parametrize("text", ["", "one line", "\n\n  \n"])
def test_text_that_cannot_be_divided_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=r"no text in the input|one document without line breaks"):
        plan(tmp_path / "a.txt")


CORPUS = Corpus(tokens=3_000_000, vocabulary=4096, sequence=256, val_tokens=50_000)


def machine(flops: float) -> tuple[list[dict[str, str]], object]:
    """A machine of some speed, and the trials that were run on it."""
    trials: list[dict[str, str]] = []

    def measure(arguments: list[str]) -> float:
        trials.append(keys(arguments))
        shape = next(s for s in SHAPES if str(s.d_model) == trials[-1]["model.d_model"])
        return flops / (6 * shape.parameters(CORPUS.vocabulary))

    return trials, measure


def test_more_time_or_a_faster_machine_trains_a_larger_model_on_more_tokens() -> None:
    found = []
    for flops, seconds in ((2e10, 60), (1e11, 240), (1e11, 3600), (1e14, 3600)):
        trials, measure = machine(flops)
        chosen = keys(plan_model(CORPUS, seconds, measure).arguments)
        assert trials[-1]["model.d_model"] == chosen["model.d_model"]  # the speed of what is trained was measured
        assert len(trials) <= 2
        found.append(
            (int(chosen["model.d_model"]), int(chosen["max_duration"][:-2]) * int(chosen["global_train_batch_size"]))
        )
    assert found == sorted(found) and found[0][0] < found[-1][0]


def test_the_planned_training_takes_the_time_that_there_is() -> None:
    _, measure = machine(1e11)
    chosen = keys(plan_model(CORPUS, 240, measure).arguments)
    tokens = int(chosen["max_duration"][:-2]) * int(chosen["global_train_batch_size"]) * 256
    shape = next(s for s in SHAPES if str(s.d_model) == chosen["model.d_model"])
    assert 0.95 < tokens * 6 * shape.parameters(4096) / 1e11 / 240 <= 1


def test_little_text_is_not_repeated_without_end_and_little_time_is_not_measured() -> None:
    _, measure = machine(1e15)
    small = Corpus(tokens=20_000, vocabulary=512, sequence=64, val_tokens=1000)
    made = plan_model(small, 3600, measure)
    chosen = keys(made.arguments)
    assert int(chosen["max_duration"][:-2]) * int(chosen["global_train_batch_size"]) * 64 <= 8 * 20_000
    assert any("8 passes over the text" in reason for reason in made.reasons)
    trials, measure = machine(1e15)
    assert keys(plan_model(CORPUS, 1, measure).arguments)["max_duration"] == "20ba" and not trials


def test_warmup_checks_and_learning_rate_follow_from_steps_and_width() -> None:
    for flops in (2e10, 1e13):
        _, measure = machine(flops)
        chosen = keys(plan_model(CORPUS, 600, measure).arguments)
        steps, width = int(chosen["max_duration"][:-2]), int(chosen["model.d_model"])
        assert chosen["scheduler.t_warmup"] == f"{steps // 10}ba"
        assert chosen["eval_interval"] == chosen["save_interval"] == f"{steps // 4}ba"
        assert float(chosen["optimizer.lr"]) == pytest.approx(min(5e-3, 0.6 / width), rel=0.05)


@pytest.mark.parametrize(("val_tokens", "batches"), [(60_000, None), (60_001, "29")])
def test_an_evaluation_reads_at_most_60000_tokens(val_tokens: int, batches: str | None) -> None:
    corpus = replace(CORPUS, val_tokens=val_tokens)
    chosen = keys(plan_model(corpus, 60, machine(1e11)[1]).arguments)
    assert chosen.get("eval_subset_num_batches") == batches  # of 8 sequences of 256 tokens


def test_less_than_a_sequence_of_text_is_refused() -> None:
    with pytest.raises(DataError, match="do not fill one sequence of 256"):
        plan_model(Corpus(100, 512, 256, 10), 60, machine(1e11)[1])
