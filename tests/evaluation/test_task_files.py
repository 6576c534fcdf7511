"""Task lists, bare files, gauntlets and the verb: what is understood, and what is refused with one sentence."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from conftest import Ingot
from typer.testing import CliRunner
from warm_process import spawn_warm

from ingot.checkpoint.store import MODEL, save_checkpoint
from ingot.cli.main import app
from ingot.config.evaluation import GauntletConfig, TaskConfig
from ingot.config.model import ModelConfig
from ingot.data.tokenizer_training import train_tokenizer
from ingot.errors import ConfigError, DataError, IngotError
from ingot.evaluation.processes import joined_processes
from ingot.evaluation.tasks.answering import cut, is_right, normalize
from ingot.evaluation.tasks.gauntlet import composite_scores
from ingot.evaluation.tasks.records import read_records
from ingot.evaluation.tasks.run import TaskScore, prepare_tasks
from ingot.evaluation.tasks.tables import sparkline
from ingot.evaluation.tasks.task_files import load_gauntlet, load_tasks, shipped_tasks
from ingot.model.init import build_model

FOUNDRY = Path(__file__).parents[3] / "shared" / "data" / "icl" / "yamls"
LM = {"context": "the iron is", "continuation": "hot"}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def task(path: Path, kind: str = "language_modeling", **more: Any) -> TaskConfig:
    return TaskConfig.model_validate(
        {"label": "t", "dataset_uri": str(path), "icl_task_type": kind, "num_fewshot": [0]} | more
    )


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (LM, "language_modeling"),
        ({"query": "q", "choices": ["a", "b"], "gold": 1}, "multiple_choice"),
        ({"context_options": ["a", "b"], "continuation": "c", "gold": 0}, "schema"),
        ({"context": "q", "answer": "a"}, "generation_task_with_answers"),
    ],
)
def test_a_bare_file_is_a_task_by_its_fields(record: dict, kind: str, tmp_path: Path) -> None:
    (found,) = load_tasks([str(write(tmp_path / "my task.jsonl", record))])
    assert (found.icl_task_type, found.label, found.num_fewshot) == (kind, "my task", (0,))


def test_a_yaml_list_is_read_unchanged_and_paths_are_relative_to_it_or_to_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yamls").mkdir()
    write(tmp_path / "yamls" / "a.jsonl", LM)
    write(tmp_path / "b.jsonl", LM)
    item = {"icl_task_type": "question_answering", "num_fewshot": [0, 3], "question_prelimiter": "Q: "}
    tasks = [{"label": name, "dataset_uri": f"{name}.jsonl", **item} for name in "ab"]
    (tmp_path / "yamls" / "tasks.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    monkeypatch.chdir(tmp_path)
    found = load_tasks(["yamls/tasks.yaml"])
    assert [Path(t.dataset_uri) for t in found] == [Path("yamls/a.jsonl"), Path("b.jsonl")]
    assert found[0].prelimiter == "Q: " and found[0].num_fewshot == (0, 3)
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"yamls/b\.jsonl nor .*/b\.jsonl exists"):
        load_tasks(["yamls/tasks.yaml"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "a/b"}, "without slashes"),
        ({"icl_task_type": "code_evaluation"}, "icl_task_type"),
        ({"num_fewsho": [1]}, "num_fewshot"),
        ({"num_fewshot": [-1]}, "0 or more"),
        ({"generation_kwargs": {"do_sample": True}}, "greedily"),
    ],
)
def test_a_wrong_key_names_the_file_the_line_and_the_task(change: dict, message: str, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", LM)
    item = {"label": "a", "dataset_uri": "a.jsonl", "icl_task_type": "language_modeling", "num_fewshot": [0]} | change
    file = tmp_path / "tasks.yaml"
    file.write_text(yaml.safe_dump({"icl_tasks": [item]}))
    with pytest.raises(ConfigError, match=message) as found:
        load_tasks([str(file)])
    assert f"{file}:" in str(found.value) and "task 1" in str(found.value)


@pytest.mark.parametrize(
    ("records", "kind", "message"),
    [
        ([], "language_modeling", "holds no records"),
        (["{"], "language_modeling", r"t\.jsonl:1: not valid JSON"),
        ([LM, {"context": "x"}], "language_modeling", r"t\.jsonl:2: .* needs the field 'continuation'"),
        ([LM | {"context": 3}], "language_modeling", "must be text"),
        ([{"query": "q", "choices": ["a"], "gold": 1}], "multiple_choice", "numbered 0 to 0"),
        ([{"context": "q", "answer": "a", "aliases": "b"}], "question_answering", "aliases must be a list of texts"),
        ([{"query": "q", "choices": [], "gold": 0}], "multiple_choice", "list of texts"),
        (
            [{"query": "q", "choices": ["a", "b"], "gold": 0}, {"query": "q", "choices": ["a"], "gold": 0}],
            "multiple_choice", r"t\.jsonl:2: has 1 choices",
        ),
    ],
)  # fmt: skip
def test_a_bad_record_names_its_line(records: list, kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_records(task(write(tmp_path / "t.jsonl", *records), kind))


def test_a_missing_file_an_unknown_name_and_a_hub_dataset_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_records(task(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match=r"neither a file .* arithmetic"):
        load_tasks(["arithmetics"])
    with pytest.raises(DataError, match="hub datasets"):
        read_records(TaskConfig(label="t", dataset_uri="hf://a/b", icl_task_type="schema", num_fewshot=(0,)))


def test_an_answer_without_tokens_names_its_line(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the iron is hot"], 300, tmp_path / "tokenizer")  # a space is not part of its tokens
    empty = write(tmp_path / "t.jsonl", LM, LM | {"continuation": ""})
    with pytest.raises(DataError, match=r"t\.jsonl:2: the answer '' has no tokens in this tokenizer"):
        prepare_tasks([task(empty)], tokenizer, 50, None)


def test_an_answer_longer_than_a_row_and_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["the iron is hot"], 300, tmp_path / "tokenizer")
    long = write(tmp_path / "t.jsonl", {"context": "a", "continuation": "b c d e f g h"})
    with pytest.raises(DataError, match=r"t\.jsonl:1: the answer has \d+ tokens"):
        prepare_tasks([task(long)], tokenizer, 5, None)
    with pytest.raises(ConfigError, match="two tasks are called t"):
        prepare_tasks([task(long), task(long)], tokenizer, 100, None)
    with pytest.raises(ConfigError, match="positions of this model end at 50"):
        prepare_tasks([task(long, max_seq_len=51)], tokenizer, 50, 50)
    with pytest.raises(DataError, match="has no field 'category'"):
        prepare_tasks([task(long, has_categories=True)], tokenizer, 100, None)


def score(label: str, accuracy: float, questions: int = 10, shots: int = 0, category: str = "") -> TaskScore:
    metrics = {"InContextLearningLMAccuracy": accuracy, "GoldBitsPerByte": 9.0}
    return TaskScore(label, shots, category, metrics, questions, 0, 0.0, accuracy, "", {})


def gauntlet(**more: Any) -> GauntletConfig:
    benchmarks = [{"name": "a", "num_fewshot": 0, "random_baseline": 0.5}, {"name": "b", "num_fewshot": 0}]
    categories = [{"name": "one", "benchmarks": benchmarks}, {"name": "two", "benchmarks": benchmarks[1:]}]
    return GauntletConfig.model_validate({"categories": categories} | more)


def test_composites_subtract_the_baseline_rescale_and_weigh() -> None:
    scores = [score("a", 0.75, 2), score("b", 0.2, 6, category="x"), score("b", 0.4, 2, category="y")]
    warned: list[str] = []
    assert composite_scores(gauntlet(), scores, warned.append) == pytest.approx(
        {"one": (0.5 + 0.3) / 2, "two": 0.3, "default_average": (0.4 + 0.3) / 2}
    )
    weighed = composite_scores(gauntlet(weighting="SAMPLE_SZ"), scores, warned.append)
    assert weighed["one"] == pytest.approx((2 * 0.5 + 8 * 0.3) / 10)
    weighed = composite_scores(gauntlet(weighting="LOG_SAMPLE_SZ"), scores, warned.append)
    assert weighed["one"] == pytest.approx((1 * 0.5 + 3 * 0.3) / 4)
    plain = composite_scores(gauntlet(rescale_accuracy=False), scores, warned.append)
    assert plain["one"] == pytest.approx((0.25 + 0.3) / 2)
    assert not warned


def test_a_category_without_all_its_results_is_left_out_with_a_warning() -> None:
    warned: list[str] = []
    found = composite_scores(gauntlet(), [score("b", 0.2)], warned.append)
    assert found == pytest.approx({"two": 0.2, "default_average": 0.2})
    assert any("one is left out: a (0-shot)" in line for line in warned)


def test_llm_foundrys_own_files_are_read() -> None:
    if not FOUNDRY.is_dir():
        pytest.skip("LLM Foundry's files are not on this machine")
    assert len(load_gauntlet(str(FOUNDRY / "eval_gauntlet_v0.3.yaml"))[0].categories) == 5
    for name in ("tasks_v0.3.yaml", "tasks_light.yaml"):
        for values in yaml.safe_load((FOUNDRY / name).read_text())["icl_tasks"]:
            TaskConfig.model_validate(values)


def test_answers_are_compared_as_triviaqa_does() -> None:
    assert normalize("  The_Chip-munks, (a) band! ") == "chip munks band"
    generation = {"label": "t", "dataset_uri": "x", "icl_task_type": "question_answering", "num_fewshot": 0}
    config = TaskConfig.model_validate(generation | {"cot_delimiter": "The answer is "})
    assert is_right(config, "5 - 4. The answer is 1 apple", ["1"]) and is_right(config, "18", ["1"])
    assert not is_right(config, "The answer is 2", ["1"])
    exact = TaskConfig.model_validate(generation | {"do_normalization": False})
    assert not is_right(exact, "the Cat", ["cat"]) and is_right(exact, " cat food", ["cat "])
    assert cut("one? two. three", ["?", "."]) == "one" and cut("", ["\n"]) == "" and cut("one", []) == "one"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small"
    tokenizer = train_tokenizer(["the iron is hot " * 9], 300, folder / "tokenizer")
    config = ModelConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=tokenizer.vocab_size, max_seq_len=128)
    for step in (1, 2):
        model = build_model(config, step, torch.device("cpu"))
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        state = {"config": {"name": "small", "model": json.loads(config.model_dump_json())}}
        save_checkpoint(folder, step, {MODEL: weights}, state)
    return folder


def ingot_eval(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)


def test_the_verb_scores_a_run_and_keeps_the_scores_in_it(run: Path, tmp_path: Path) -> None:
    text = tmp_path / "plain.txt"
    text.write_text("the iron is hot " * 40)
    own = write(tmp_path / "own.jsonl", LM, LM)
    categories = {"categories": [{"name": "all", "benchmarks": [{"name": "own", "num_fewshot": 1}]}]}
    (tmp_path / "gauntlet.yaml").write_text(yaml.safe_dump({"eval_gauntlet": categories}))
    found = ingot_eval(
        run, "--tasks", "arithmetic", own, text, "--num-fewshot", 1, "--limit", 5, "--questions", "--device", "cpu",
        "--gauntlet", tmp_path / "gauntlet.yaml",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    assert "metrics/own/1-shot/InContextLearningLMAccuracy: " in found.output
    assert "icl/metrics/eval_gauntlet/all: " in found.output and "metrics/eval/plain/BitsPerByte: " in found.output
    assert max(map(len, found.stdout.splitlines())) <= 110
    assert found.stderr.splitlines()[-1] == f"scores are in {run / 'evaluations' / '2.json'}"
    written = json.loads((run / "evaluations" / "2.json").read_text())
    assert [t["questions"] for t in written["tasks"]] == [5, 2] and len(written["tasks"][0]["judged"]) == 5
    assert written["tasks"][0]["judged"][0]["prompt"].endswith("=")


def test_several_checkpoints_make_one_table(run: Path) -> None:
    checkpoints = [run / "checkpoints" / "1", run / "checkpoints" / "2"]
    found = ingot_eval(*checkpoints, "--tasks", "brackets", "--limit", 4, "--device", "cpu")
    assert found.exit_code == 0, found.output
    header = next(line for line in found.output.splitlines() if line.startswith("metric "))
    assert header.split() == ["metric", "1", "2", "curve"]
    backwards = ingot_eval(*checkpoints[::-1], "--tasks", "brackets", "--limit", 4, "--device", "cpu", "--plot",
                           run / "curves.png")  # fmt: skip
    assert header in backwards.output  # in order of steps
    assert (run / "curves.png").read_bytes()[:4] == b"\x89PNG"


def leave_together(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    with joined_processes():
        if rank == 0:
            time.sleep(0.5)
            Path(folder, "late").touch()
    assert not dist.is_initialized() and Path(folder, "late").exists()


def test_processes_that_share_questions_leave_together(tmp_path: Path) -> None:
    """One that left early ended another at its exit, once in many times: the scores were printed, and the code was 6."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn_warm(leave_together, args=(store.port, str(tmp_path)), nprocs=2)


def test_processes_share_the_questions_and_find_the_same(run: Path, tmp_path: Path, ingot: Ingot) -> None:
    text = tmp_path / "plain.txt"
    text.write_text("the iron is hot " * 40)
    generation = write(tmp_path / "gen.jsonl", *({"context": f"the iron {n}", "answer": "is hot"} for n in range(3)))
    given = [
        "eval",
        str(run),
        "--tasks",
        "brackets",
        str(generation),
        str(text),
        "--limit",
        "9",
        "--json",
        "--questions",
    ]
    (alone,) = json.loads(ingot_eval(*given[1:]).stdout)
    (shared,) = json.loads(ingot(*given, "--nproc", "2").stdout)
    assert shared["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)
    for one, two in zip(alone["tasks"], shared["tasks"], strict=True):
        assert [judged["prediction"] for judged in one["judged"]] == [judged["prediction"] for judged in two["judged"]]
    failed = ingot(*given, "--nproc", "2", "--tasks", "absent.jsonl", check=False)
    assert failed.returncode == 2 and failed.stderr.count("absent.jsonl") == 1


def test_bars_of_a_curve_go_from_the_lowest_value_to_the_highest() -> None:
    assert (
        sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([2.0, 2.0]) == "▁▁" and sparkline([float("nan"), 1.0]) == ""
    )


def test_every_shipped_task_is_listed_and_complete() -> None:
    listed = ingot_eval("--list").output
    for name in shipped_tasks():
        assert name in listed
        (found,) = load_tasks([name])
        assert len(read_records(found).records) >= 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to evaluate"),
        (["RUN", "data.eval.path=x", "--tasks", "copy"], "with --tasks"),
        (["RUN", "--limit", "3"], "add --tasks"),
        (["RUN", "RUN"], "add --tasks"),
        (["RUN", "--tasks", "copy", "--limit", "0"], "limit"),
    ],
)
def test_options_that_cannot_go_together_are_one_sentence(arguments: list[str], message: str, run: Path) -> None:
    with pytest.raises(IngotError, match=message):
        ingot_eval(*(run if a == "RUN" else a for a in arguments))
