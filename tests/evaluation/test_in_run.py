"""Evaluation inside a run: when, under which names, after a restart, and what a broken task costs."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import TINY
from small_models import write_tasks

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
from harness import train_all

from ingot.api import train
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import ConfigError, DataError, IngotError
from ingot.report.metrics_file import read_rows
from ingot.training.listener import RunListener
from ingot.training.trainer import train as train_run

ALIBI = [*TINY, "model.positions=alibi", "icl_seq_len=192"]
KINDS = {"lm": "language_modeling", "mc": "multiple_choice", "schema": "schema", "gen": "question_answering"}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A task list of every type, and a gauntlet, in a folder of their own."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    write_tasks(folder)
    listed = [
        {"label": name, "dataset_uri": f"{name}.jsonl", "icl_task_type": kind, "num_fewshot": [1]}
        for name, kind in KINDS.items()
    ]
    listed[0] |= {"has_categories": True}
    (folder / "tasks.yaml").write_text(yaml.safe_dump({"icl_tasks": listed}))
    benchmarks = [{"name": "mc", "num_fewshot": 1, "random_baseline": 0.33}, {"name": "lm", "num_fewshot": 1}]
    gauntlet = {"categories": [{"name": "all", "benchmarks": benchmarks}]}
    (folder / "gauntlet.yaml").write_text(yaml.safe_dump({"eval_gauntlet": gauntlet}))
    return folder


def run(data: Path, folder: Path, *more: str) -> list[dict[str, Any]]:
    train(load_config(RunConfig, [*ALIBI, f"data={data}", f"save_folder={folder}", *more]))
    return read_rows(folder)


def scores(row: dict[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in row.items() if name.startswith(("metrics/", "icl/")) and "/train/" not in name
    }


def test_tasks_and_their_composites_are_logged_under_the_names_of_llm_foundry(
    data: Path, tasks: Path, tmp_path: Path
) -> None:
    given = [f"eval.tasks={tasks}/tasks.yaml", f"eval.gauntlet={tasks}/gauntlet.yaml", "eval_interval=8ba",
             "eval.intervals.mc=3ba", "eval_first=true", "loggers.tensorboard={}"]  # fmt: skip
    rows = run(data, tmp_path / "run", *given)
    found = {row["time/batch"]: scores(row) for row in rows if scores(row)}
    assert list(found) == [0, 3, 6, 8, 9, 12]
    mc = "metrics/mc/1-shot/InContextLearningMultipleChoiceAccuracy"
    whole = {
        "metrics/eval/LanguageCrossEntropy", mc, "metrics/mc/1-shot/GoldBitsPerByte", "metrics/mc/1-shot/GoldProbability",
        "metrics/lm/1-shot/a/InContextLearningLMAccuracy", "metrics/lm/1-shot/b/InContextLearningLMAccuracy",
        "metrics/schema/1-shot/InContextLearningMultipleChoiceAccuracy",
        "metrics/gen/1-shot/InContextLearningGenerationExactMatchAccuracy",
        "icl/metrics/eval_gauntlet/all", "icl/metrics/eval_gauntlet/default_average",
    }  # fmt: skip
    assert whole <= set(found[0]) and whole <= set(found[12])
    assert all(name.startswith("metrics/mc/") for name in found[3]) and mc in found[3]
    assert not any(name.startswith(("metrics/mc/", "icl/")) for name in found[8])
    assert found[0]["metrics/mc/1-shot/GoldBitsPerByte"] != found[12]["metrics/mc/1-shot/GoldBitsPerByte"]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars(mc)] == [0, 3, 6, 9, 12]


def test_a_resumed_run_evaluates_at_the_same_steps_with_the_same_numbers(
    data: Path, tasks: Path, tmp_path: Path
) -> None:
    given = [f"eval.tasks={tasks}/tasks.yaml", "eval_interval=5ba", "save_interval=4ba", "eval_first=true"]
    whole = run(data, tmp_path / "whole", *given)
    run(data, tmp_path / "parts", *given)
    for step in ("8", "12"):
        shutil.rmtree(tmp_path / "parts" / "checkpoints" / step)
    (tmp_path / "parts" / "FINISHED").unlink()
    again = run(data, tmp_path / "parts", *given)
    assert [scores(row) for row in again] == [scores(row) for row in whole]
    assert [row["time/batch"] for row in again if scores(row)] == [0, 5, 10, 12]


def test_several_validation_sets_are_named_by_their_labels(data: Path, tmp_path: Path) -> None:
    sets = [f"data.eval.{label}={{path: {data}, split: {split}, shuffle: false}}" for label, split in
            (("seen", "train"), ("unseen", "val"))]  # fmt: skip
    rows = run(data, tmp_path / "run", "data.eval=null", *sets, "eval_interval=6ba", "eval.intervals.seen=4ba")
    steps = {label: [r["time/batch"] for r in rows if f"metrics/eval/{label}/LanguageCrossEntropy" in r] for label in
             ("seen", "unseen")}  # fmt: skip
    assert steps == {"seen": [4, 8, 12], "unseen": [6, 12]}
    assert rows[-1]["metrics/eval/seen/LanguageCrossEntropy"] != rows[-1]["metrics/eval/unseen/LanguageCrossEntropy"]
    single = run(data, tmp_path / "single", "eval_interval=6ba")
    last = single[-1]["metrics/eval/LanguageCrossEntropy"]
    assert last == rows[-1]["metrics/eval/unseen/LanguageCrossEntropy"]


def test_the_progress_of_an_evaluation_goes_on_through_all_that_is_evaluated(
    data: Path, tasks: Path, tmp_path: Path
) -> None:
    sets = [f"data.eval.{label}={{path: {data}, split: val, shuffle: false}}" for label in ("one", "two")]
    reports: list[tuple[str, int, int]] = []

    class Recorder(RunListener):
        def evaluating(self, what: str, done: int, total: int) -> None:
            reports.append((what, done, total))

    given = ["data.eval=null", *sets, f"eval.tasks={tasks}/tasks.yaml", "max_duration=1ba"]
    train_run(load_config(RunConfig, [*ALIBI, f"data={data}", f"save_folder={tmp_path}/run", *given]), Recorder())
    names = list(dict.fromkeys(name for name, _, _ in reports))
    assert names[:2] == ["one", "two"] and len(names) == 2 + len(KINDS) + 1  # two categories of lm
    done, (total,) = [done for _, done, _ in reports], {total for _, _, total in reports}
    assert done == sorted(done) and 0 == done[0] < done[-1] == total
    one, two = ([done for name, done, _ in reports if name == label] for label in ("one", "two"))
    assert one[-1] < two[0] and two == [done + two[0] for done in one]


def test_prompts_that_are_cut_are_warned_of_before_the_first_step(data: Path, tasks: Path, tmp_path: Path) -> None:
    warnings: list[str] = []

    class Recorder(RunListener):
        def warn(self, text: str) -> None:
            warnings.append(text)

    for length, cut in ((192, False), (40, True)):
        given = [f"eval.tasks={tasks}/tasks.yaml", f"icl_seq_len={length}", "max_duration=1ba", "eval_interval=9ba"]
        folder = f"save_folder={tmp_path}/{length}"
        train_run(load_config(RunConfig, [*ALIBI, f"data={data}", folder, *given]), Recorder())
        assert any("prompts are too long for a row and lose their beginning" in text for text in warnings) == cut


@pytest.mark.slow
def test_a_subset_is_the_first_questions_whatever_the_number_of_processes(
    data: Path, tasks: Path, tmp_path: Path
) -> None:
    given = [*ALIBI, f"data={data}", f"eval.tasks={tasks}/tasks.yaml", "icl_subset_num_batches=1", "max_duration=2ba",
             "device_eval_batch_size=6", "eval_first=true", "optimizer.eps=1e-5"]  # fmt: skip
    train(load_config(RunConfig, [*given, f"save_folder={tmp_path}/1"]))
    layouts = ["shard=2", "tensor=2", "pipeline=2"]
    runs = [[*given, f"save_folder={tmp_path}/{layout}", f"parallel.{layout}"] for layout in layouts]
    assert train_all(runs, 2, tmp_path / "notes") == [""] * len(runs)
    one = [scores(row) for row in read_rows(tmp_path / "1")]
    accuracy = one[0]["metrics/schema/1-shot/InContextLearningMultipleChoiceAccuracy"]
    assert accuracy * 3 == pytest.approx(round(accuracy * 3))  # 6 rows are 3 questions of two rows each
    for layout in layouts:
        for alone, shared in zip(one, [scores(row) for row in read_rows(tmp_path / layout)], strict=True):
            assert shared == pytest.approx(alone, rel=1e-4, abs=1e-6), layout


def test_a_task_that_breaks_later_costs_only_its_own_score(
    data: Path, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [f"{tasks}/{name}.jsonl" for name in ("mc", "schema")]
    given = [f"eval.tasks=[{','.join(names)}]", "eval_interval=4ba", "save_interval=4ba"]
    run(data, tmp_path / "run", *given, "max_duration=4ba", "scheduler.t_max=12ba")
    (tasks / "mc.jsonl").unlink()
    rows = run(data, tmp_path / "run", *given, "max_duration=8ba", "scheduler.t_max=12ba")
    assert rows[-1]["time/batch"] == 8
    assert "metrics/schema/0-shot/InContextLearningMultipleChoiceAccuracy" in rows[-1]
    assert not any(name.startswith("metrics/mc/") for name in rows[-1])
    assert "evaluation without" in capfd.readouterr().out
    (failed,) = [json.loads(line) for line in (tmp_path / "run/evaluations/failed.jsonl").read_text().splitlines()]
    assert failed["batch"] == 4 and "mc.jsonl" in failed["reason"]


LM = {"context": "the iron is", "continuation": "hot"}
ITEM = {"label": "t", "dataset_uri": "t.jsonl", "icl_task_type": "language_modeling", "num_fewshot": [0]}


@pytest.mark.parametrize(
    ("records", "change", "more", "message"),
    [
        ([LM, {"context": "x"}], {}, [], r"t\.jsonl:2: a language_modeling record needs the field 'continuation'"),
        ([], {}, [], r"t\.jsonl: holds no records"),
        ([LM], {"dataset_uri": "other.jsonl"}, [], r"tasks\.yaml:\d: task t: neither .*/other\.jsonl nor .* exists"),
        ([LM], {"icl_task_type": "multiple_choise"}, [], r"tasks\.yaml:\d: icl_task_type .* did you mean multiple_choice"),
        ([LM], {"metric_names": ["Nonsense"]}, [], "no metric of language_modeling is called Nonsense"),
        ([LM], {}, ["eval.intervals.u=3ba"], r"eval\.intervals\.u: is neither a task nor a validation set: t"),
        ([LM], {}, ["eval.intervals.t=3min"], "wall-clock"),
        ([LM], {}, ["eval.gauntlet=gauntlet.yaml"], r"gauntlet\.yaml:\d+: absent \(0-shot\) is not among the tasks"),
        ([LM], {"max_seq_len": 3}, [], r"t\.jsonl:1: the answer has \d tokens, but rows hold 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_task_is_one_sentence_before_training(
    records: list,
    change: dict,
    more: list[str],
    message: str,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "t.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "lists" / "tasks.yaml").write_text(yaml.safe_dump({"icl_tasks": [ITEM | change]}))
    benchmarks = [{"name": "absent", "num_fewshot": 0}]
    (tmp_path / "gauntlet.yaml").write_text(
        yaml.safe_dump({"eval_gauntlet": {"categories": [{"name": "all", "benchmarks": benchmarks}]}})
    )
    with pytest.raises(IngotError, match=message) as found:
        run(data, tmp_path / "run", "eval.tasks=lists/tasks.yaml", *more)
    assert isinstance(found.value, ConfigError | DataError) and "\n" not in str(found.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tasks_may_be_written_out_in_a_recipe_next_to_their_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "t.jsonl").write_text((json.dumps(LM) + "\n") * 3)
    (recipes / "own.yaml").write_text(yaml.safe_dump({"max_seq_len": 32, "eval": {"tasks": [ITEM]}}))
    monkeypatch.chdir(tmp_path)
    config = load_config(RunConfig, ["recipes/own.yaml", *ALIBI, f"data={data}", "save_folder=run"])
    result = train(config)
    assert result.metrics["metrics/t/0-shot/GoldBitsPerByte"] > 0
    kept = load_config(RunConfig, ["run/config.yaml"])
    assert kept.eval == config.eval
    (recipes / "own.yaml").write_text(
        yaml.safe_dump({"max_seq_len": 32, "eval": {"tasks": [ITEM | {"promt_string": ""}]}})
    )
    with pytest.raises(ConfigError, match=r"own\.yaml:\d: unknown key eval\.tasks\.0\.promt_string"):
        load_config(RunConfig, ["recipes/own.yaml", f"data={data}"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data.eval.c4={path: x}"], r"data\.eval is one source, whose \w+ is set, or a mapping"),
        (["data.eval=null", "data.eval.c4={pth: x}"], r"data\.eval\.c4\.pth"),
        (["data.eval=null", "data.eval.a/b={path: x}"], "without slashes"),
        (["eval.gauntlet=x.yaml"], "there are none; name them with eval.tasks"),
    ],
)  # fmt: skip
def test_a_mapping_of_validation_sets_is_checked(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(RunConfig, ["data=x", *given])


def test_an_evaluation_batch_is_never_larger_than_the_validation_set(data: Path, tmp_path: Path) -> None:
    few, huge = (
        run(data, tmp_path / f"{size}", "max_duration=2ba", f"device_eval_batch_size={size}") for size in (4, 10**12)
    )
    key = "metrics/eval/LanguageCrossEntropy"
    assert huge[-1][key] == pytest.approx(few[-1][key], rel=1e-5)
