"""Models whose scores are known: one without any preference, and one that has learned the answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import CPU, WORDS, model_config, train_small_tokenizer

from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.prompts import build_questions
from ingot.evaluation.tasks.records import read_records
from ingot.evaluation.tasks.run import prepare_tasks, score_task
from ingot.evaluation.tasks.scoring import Scorer
from ingot.evaluation.tasks.task_files import load_tasks
from ingot.model.init import build_model

DATA = Path(__file__).parents[3] / "shared" / "data" / "icl"
GOLD_IS_FIRST = {  # the share of questions whose right choice is the first
    "copa": 0.55, "openbook_qa": 0.276, "winograd_wsc": 0.5018, "winogrande": 0.4957, "arc_challenge": 0.2227,
    "arc_easy": 0.2378, "piqa": 0.4951,
}  # fmt: skip
SLOW = {"arc_challenge", "arc_easy", "piqa", "winogrande"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def scores_of(tasks: list[TaskConfig], model: Any, tokenizer: Tokenizer) -> dict[str, float]:
    scorer = Scorer(model, CPU, "fp32")
    return {
        p.task.label: score_task(p, scorer, tokenizer).accuracy for p in prepare_tasks(tasks, tokenizer, 4096, None)
    }


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in GOLD_IS_FIRST])
def test_a_model_without_a_preference_scores_at_chance(name: str, tokenizer: Tokenizer) -> None:
    if not DATA.is_dir():
        pytest.skip("the task files are not on this machine")
    model = build_model(model_config("mpt", tokenizer.vocab_size), 3, CPU)
    with torch.no_grad():
        model.wte.weight.zero_()  # all logits are equal
    (found,) = scores_of(load_tasks([str(DATA / f"{name}.jsonl")]), model, tokenizer).values()
    assert found == pytest.approx(GOLD_IS_FIRST[name], abs=5e-5)


def test_a_model_that_has_learned_the_answers_scores_100_percent(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def followed(by: int) -> list[tuple[str, str]]:
        return list(zip(WORDS[:8], WORDS[by:8], strict=False))

    files: dict[str, list[dict[str, Any]]] = {
        "lm": [{"context": f"{a} the heat is", "continuation": f"{b} a bar"} for a, b in followed(3)],
        "mc": [{"query": f"pour {a} into", "choices": [b, a, "gold"], "gold": 1} for a, b in followed(2)],
        "schema": [{"context_options": [f"cast {a}", f"cast {b}"], "continuation": f"was. {a}", "gold": 0}
                   for a, b in followed(1)],
        "gen": [{"context": f"Question: {a} 7", "answer": f"{b} 12"} for a, b in followed(4)],
    }  # fmt: skip
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tasks = load_tasks([str(tmp_path / f"{name}.jsonl") for name in files])
    model = build_model(model_config("mpt", tokenizer.vocab_size), 3, CPU)
    rows, labels = lesson(tasks, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    assert not all(scores_of(tasks, model, tokenizer).values())
    model.train()
    for _ in range(250):
        loss = F.cross_entropy(model(rows).flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert scores_of(tasks, model.eval(), tokenizer) == {"lm": 1.0, "mc": 1.0, "schema": 1.0, "gen": 1.0}


def lesson(tasks: list[TaskConfig], tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """The right row of each question, and its continuation as labels."""
    pairs = []
    for task in tasks:
        for question in build_questions(task, 0, read_records(task).records, tokenizer, 128):
            row = question.rows[question.record.gold if len(question.rows) > 1 else 0]
            answer = row.continuation or (*tokenizer.encode(f" {question.record.answer}"), tokenizer.eos_id)
            pairs.append((row.context, answer))
    length = max(len(context) + len(answer) for context, answer in pairs)
    rows, labels = torch.zeros(len(pairs), length, dtype=torch.long), torch.full((len(pairs), length), -100)
    for line, (context, answer) in enumerate(pairs):
        end = len(context) + len(answer)
        rows[line, :end] = torch.tensor([*context, *answer])
        labels[line, len(context) - 1 : end - 1] = torch.tensor(answer)
    return rows, labels


def test_a_continuation_begins_with_a_space_and_its_context_does_not_end_with_one(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "lm.jsonl").write_text(json.dumps({"context": "the iron is ", "continuation": "hot!"}) + "\n")
    (task,) = load_tasks([str(tmp_path / "lm.jsonl")])
    (question,) = build_questions(task, 0, read_records(task).records, tokenizer, 128)
    (row,) = question.rows
    assert row.text == " hot!" and tokenizer.decode(row.continuation) == " hot!"
    assert tokenizer.decode(row.context) == "the iron is"
