"""CORE against an independent computation: prompts by templates, one question at a time, all logits."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from jinja2 import Template
from small_models import WORDS, make_model, model_config, train_small_tokenizer
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models
from typer.testing import CliRunner

from ingot.checkpoint.store import MODEL, save_checkpoint
from ingot.cli.main import app
from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError, IngotError
from ingot.evaluation.core.prompts import core_questions
from ingot.evaluation.core.run import score_core
from ingot.evaluation.tasks.task_files import tasks_from_yaml

# label: file, type, examples, percent of a random guess, delimiter
TASKS = {
    "pick": ("mc.jsonl", "multiple_choice", 2, 25.0, "\nAnswer: "),
    "pick_zeroshot": ("mc.jsonl", "multiple_choice", 0, 25.0, " "),
    "beginnings": ("beginnings.jsonl", "multiple_choice", 0, 50.0, " "),
    "options": ("schema.jsonl", "schema", 3, 50.0, " "),
    "continue": ("lm.jsonl", "language_modeling", 3, 0.0, " "),
    "repeat": ("repeat.jsonl", "language_modeling", 9, 9.1, " "),
}
EXAMPLES = {
    "multiple_choice": "{{ e.query }}{{ d }}{{ e.choices[e.gold] }}",
    "schema": "{{ e.context_options[e.gold] }}{{ d }}{{ e.continuation }}",
    "language_modeling": "{{ e.context | trim }}{{ d }}{{ e.continuation }}",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and a bundle; spaces at the ends of fields count, as they do in the records of the real one."""
    folder, draw = tmp_path_factory.mktemp("core"), random.Random(3)

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    files = {
        "mc": lambda i: {"query": text(12) + " ", "choices": [text(5) for _ in range(4)], "gold": i % 4},
        # a choice may be the beginning of the other one, in either place
        "beginnings": lambda i: {"query": text(5), "choices": [c := text(3), f"{c} iron"][:: 1 - 2 * (i % 2)], "gold": i % 2},
        "schema": lambda i: {"context_options": [text(9), text(9)], "continuation": text(5), "gold": i % 2},
        "lm": lambda i: {"context": f" {text(12)}  ", "continuation": text(1)},
        "repeat": lambda i: {"context": "gold " * 40 + text(2), "continuation": text(1)},
    }  # fmt: skip
    (folder / "bundle" / "eval_data" / "some").mkdir(parents=True)
    for name, make in files.items():
        lines = [json.dumps(make(i)) + "\n" for i in range(16)]
        (folder / "bundle" / "eval_data" / "some" / f"{name}.jsonl").write_text("".join(lines))
    tasks: list[dict[str, Any]] = []
    rows = ["Eval Task,Task Category,Task Type,#shots,#datapoints,Random baseline,Centered Metric?,Description"]
    for label, (file, kind, shots, baseline, delimiter) in TASKS.items():
        tasks.append({"label": label, "dataset_uri": f"some/{file}", "num_fewshot": [shots], "icl_task_type": kind})
        tasks[-1] |= {} if delimiter == " " else {"continuation_delimiter": delimiter}
        rows.append(f'{label},some,{kind},{shots},16,{baseline},,"One, or two."')
    (folder / "bundle" / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    (folder / "bundle" / "eval_meta_data.csv").write_text("\n".join(rows) + "\n")
    tokenizer = train_small_tokenizer(folder / "run" / "tokenizer")
    weights = {name: tensor.detach() for name, tensor in make_model("llama", tokenizer).named_parameters()}
    values = json.loads(model_config("llama", tokenizer.vocab_size).model_dump_json())
    save_checkpoint(folder / "run", 4, {MODEL: weights}, {"config": {"name": "small", "model": values}})
    return folder


def slow_accuracy(work: Path, label: str, most: int | None) -> float:
    """The share of right answers, by plain loops."""
    from ingot.data.tokenizer import load_tokenizer

    file, kind, shots, _, delimiter = TASKS[label]
    tokenizer = load_tokenizer(work / "run" / "tokenizer")
    model = make_model("llama", tokenizer)
    data = [json.loads(line) for line in (work / "bundle" / "eval_data" / "some" / file).open()]
    random.Random(1337).shuffle(data)
    data = data[:most]
    example = Template(EXAMPLES[kind])
    right = 0
    for index, item in enumerate(data):
        rng = random.Random(1234 + index)
        drawn = rng.sample([i for i in range(len(data)) if i != index], shots)
        start = "".join(example.render(e=data[i], d=delimiter) + "\n\n" for i in drawn)
        if kind == "multiple_choice":
            texts = [start + item["query"] + delimiter + choice for choice in item["choices"]]
        elif kind == "schema":
            texts = [start + option + delimiter + item["continuation"] for option in item["context_options"]]
        else:
            texts = [start + item["context"].strip() + delimiter + item["continuation"]]
        rows = [[tokenizer.eos_id, *tokenizer.encode(text)] for text in texts]
        if kind == "language_modeling":
            without = (start + item["context"].strip() + delimiter).strip()
            firsts = [1 + len(tokenizer.encode(without))]
        elif kind == "multiple_choice":
            least = min(map(len, rows))
            firsts = [next((i for i in range(least) if len({row[i] for row in rows}) > 1), least)] * len(rows)
        else:
            least = min(map(len, rows))
            suffix = next((i for i in range(least) if len({row[-1 - i] for row in rows}) > 1), least)
            firsts = [len(row) - suffix for row in rows]
        losses, greedy = [], False
        for row, first in zip(rows, firsts, strict=True):
            cut = max(len(row) - 256, 0)
            tokens, at = torch.tensor(row[cut:]), first - cut
            logits = model(tokens[None])[0].detach()
            all_losses = F.cross_entropy(logits[:-1], tokens[1:], reduction="none")
            losses.append(all_losses[at - 1 :].mean().item())  # nan if nothing is left
            greedy = bool((logits[at - 1 : -1].argmax(-1) == tokens[at:]).all())
        right += greedy if kind == "language_modeling" else losses.index(min(losses)) == item["gold"]
    return right / len(data)


def ingot_core(work: Path, *arguments: object) -> Any:
    command = ["eval", str(work / "run"), "--core", str(work / "bundle"), "--device", "cpu", *map(str, arguments)]
    return CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize("most", [None, 12])
def test_core_is_the_mean_of_centered_accuracies_of_an_independent_computation(work: Path, most: int | None) -> None:
    limit = [] if most is None else ["--limit", most]
    (report,) = json.loads(ingot_core(work, "--json", *limit).stdout)
    expected = {label: slow_accuracy(work, label, most) for label in TASKS}
    assert {task["label"]: task["accuracy"] for task in report["tasks"]} == pytest.approx(expected)
    assert len(set(expected.values())) > 3  # so that a mixed-up task would show
    centered = {label: (expected[label] - t[3] * 0.01) / (1.0 - t[3] * 0.01) for label, t in TASKS.items()}
    assert report["metrics"]["core_metric"] == pytest.approx(sum(centered.values()) / len(centered))
    assert report["metrics"]["centered_results/repeat"] == pytest.approx(centered["repeat"])
    cut = {task["label"]: task["cut_rows"] for task in report["tasks"]}
    assert cut["repeat"] > 0 and cut["pick"] == 0


def test_the_table_ends_in_core_and_the_scores_are_kept(work: Path) -> None:
    done = ingot_core(work, "--questions")
    assert "pick/2-shot" in done.stdout and "CORE (nanochat prompts, 6 tasks): " in done.stdout
    stored = json.loads((work / "run" / "evaluations" / "4-core.json").read_text())
    assert f"{stored['metrics']['core_metric']:.4f}" in done.stdout.strip().splitlines()[-1]
    assert len(stored["tasks"][0]["judged"]) == 16 and "\n\n" in stored["tasks"][0]["judged"][0]["prompt"]


def test_the_progress_counts_prompts_with_their_examples_through_all_tasks(work: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    score_core(work / "run", work / "bundle", "nanochat", 12, "cpu", print, lambda *state: seen.append(state))
    labels, done, totals = zip(*seen, strict=True)
    assert list(dict.fromkeys(labels)) == list(TASKS)
    weights = [12 * (1 + examples) for _, _, examples, _, _ in TASKS.values()]
    assert set(totals) == {sum(weights)} and list(done) == sorted(done)
    for number, label in enumerate(TASKS):  # less than all of it where prompts share what is computed once
        before, after = sum(weights[:number]), sum(weights[: number + 1])
        assert all(before < at <= after for name, at, _ in seen if name == label)


def test_dclm_prompts_are_those_of_the_task_list(work: Path) -> None:
    (report,) = json.loads(ingot_core(work, "--core-prompts", "dclm", "--json", "--limit", 9).stdout)
    for name in TASKS:  # the list names files below eval_data, which --tasks cannot know
        assert (work / "bundle" / "eval_data" / "some" / TASKS[name][0]).is_file()
    task_list = [task.model_dump(mode="json", exclude_defaults=True) for task in
                 tasks_from_yaml(work / "bundle" / "core.yaml", work / "bundle" / "eval_data")]  # fmt: skip
    (work / "tasks.yaml").write_text(yaml.safe_dump({"icl_tasks": task_list}))
    command = ["eval", str(work / "run"), "--tasks", str(work / "tasks.yaml"), "--limit", "9", "--json"]
    (tasks,) = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    accuracies = [next(v for k, v in task["metrics"].items() if "Accuracy" in k) for task in tasks["tasks"]]
    assert [task["accuracy"] for task in report["tasks"]] == accuracies
    baselines = [t[3] / 100 for t in TASKS.values()]
    expected = [(a - b) / (1 - b) for a, b in zip(accuracies, baselines, strict=True)]
    assert math.isclose(report["metrics"]["core_metric"], sum(expected) / len(expected))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("core.yaml", "label: pick\n", "label: pack\n"), "no row for the task pack"),
        (("core.yaml", "some/mc.jsonl", "some/mx.jsonl"), "some/mx.jsonl"),
        (("core.yaml", "language_modeling", "question_answering"), "is a generation_task_with_answers task"),
        (("core.yaml", "- 9\n", "- 16\n"), "score at least 17"),
        (("eval_meta_data.csv", "Random baseline", "Baseline"), "no column 'Random baseline'"),
        (("eval_meta_data.csv", "25.0", "a quarter"), "eval_meta_data.csv:2: Random baseline is 'a quarter'"),
        (("eval_meta_data.csv", "50.0", "100"), "a percentage below 100"),
        (("eval_data/some/lm.jsonl", "continuation", "continuatio"), "lm.jsonl:1"),
    ],
)  # fmt: skip
def test_a_broken_bundle_is_refused_by_file(change: tuple[str, str, str], message: str, work: Path) -> None:
    name, old, new = change
    file = work / "bundle" / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    try:
        with pytest.raises(IngotError) as found:
            ingot_core(work)
    finally:
        file.write_text(text)
    assert message in str(found.value)


def test_a_folder_without_a_bundle_and_options_without_effect_are_refused(work: Path, tmp_path: Path) -> None:
    for arguments, message in [
        (["--core", str(tmp_path)], "core.yaml does not exist"),
        (["--core", str(tmp_path), "--num-fewshot", "2"], "--num-fewshot has no effect with --core"),
        (["--tasks", "copy", "--core-prompts", "dclm"], "it is an option of --core"),
        (["--core", str(tmp_path), "--tasks", "copy"], "separate evaluations"),
    ]:
        with pytest.raises(IngotError, match=message):
            CliRunner().invoke(app, ["eval", str(work / "run"), *arguments], catch_exceptions=False)


def test_a_tokenizer_without_bos_and_eos_cannot_start_a_row(work: Path) -> None:
    (task, *_) = tasks_from_yaml(work / "bundle" / "core.yaml", work / "bundle" / "eval_data")
    with pytest.raises(DataError, match="CORE starts every row with BOS, and this tokenizer has neither BOS nor EOS"):
        core_questions(task, 0, [], Tokenizer(HuggingFace(models.WordLevel({"a": 0}, unk_token="a"))), 64)
