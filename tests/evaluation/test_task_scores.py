"""Scores of tasks against plain loops over transformers, question by question, and against the whole model."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import CPU, FAMILIES, make_model, model_config, task, train_small_tokenizer, write_tasks
from state_reader import StateReader

from ingot.checkpoint.hf.folder import export_hf
from ingot.config.evaluation import TaskConfig
from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.answering import generate_answers
from ingot.evaluation.tasks.metrics import LM_ACCURACY, PREFIX, calibration_error, metrics_of, select_metrics
from ingot.evaluation.tasks.prompts import build_questions, draw_examples
from ingot.evaluation.tasks.records import read_records
from ingot.evaluation.tasks.run import TaskScore, prepare_tasks, score_task
from ingot.evaluation.tasks.scoring import Scorer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    return folder


def run_task(config: TaskConfig, model: Any, tokenizer: Tokenizer, length: int = 200) -> TaskScore:
    (prepared,) = prepare_tasks([config], tokenizer, length, 256)
    return score_task(prepared, Scorer(model, CPU, "fp32"), tokenizer)


def log_probs_one_by_one(logits_of: Any, context: tuple[int, ...], continuation: tuple[int, ...]) -> list[float]:
    """The slow way: the whole row alone, unpadded, all logits."""
    logits = logits_of(torch.tensor([[*context, *continuation]]))[0].float()
    found = F.log_softmax(logits.detach(), -1)[len(context) - 1 : -1]
    return [float(row[token]) for row, token in zip(found, continuation, strict=True)]


def test_metrics_are_asked_for_by_a_part_of_their_names_in_any_case() -> None:
    values = {"label": "t", "dataset_uri": "t.jsonl", "icl_task_type": "language_modeling", "num_fewshot": (0,)}
    names = metrics_of("language_modeling")
    found = select_metrics(TaskConfig.model_validate(values | {"metric_names": ["lmaccuracy"]}), names)
    assert [name for name in found if name.startswith(PREFIX)] == [LM_ACCURACY]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["lm", "mc", "schema"])
def test_packed_rows_score_as_each_row_alone(name: str, family: str, folder: Path, tokenizer: Tokenizer) -> None:
    model = make_model(family, tokenizer)
    config = task(folder, name)
    questions = build_questions(config, 2, read_records(config).records, tokenizer, 200)
    scorer = Scorer(model, CPU, "fp32")
    scorer.batch_tokens = 300
    found = scorer.score([question.rows for question in questions])
    for question, scores in zip(questions, found, strict=True):
        for row, score in zip(question.rows, scores, strict=True):
            alone = log_probs_one_by_one(model, row.context, row.continuation)
            np.testing.assert_allclose(score.log_probs, alone, atol=1e-4)
    assert model.attention_op is not None and type(model.attention_op).__name__ == "SdpaAttention"


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "GPT2LMHeadModel"), ("mpt", "MptForCausalLM"),
                                              ("llama", "LlamaForCausalLM")])  # fmt: skip
def test_scores_equal_plain_loops_over_transformers(
    family: str, kind: str, folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = model_config(family, tokenizer.vocab_size)
    model = make_model(family, tokenizer)
    export_hf(StateReader(model), config, tmp_path / "hf", tokenizer=None)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(reference).__name__ == kind
    with torch.inference_mode():

        def logits_of(tokens: torch.Tensor) -> torch.Tensor:
            return reference(tokens).logits

        for name in ("lm", "mc", "schema"):
            spec = task(folder, name)
            result = run_task(spec, model, tokenizer)
            questions = build_questions(spec, 2, read_records(spec).records, tokenizer, 200)
            right = [slow_answer(name, question, logits_of) == judged["right"] for question, judged in
                     zip(questions, result.judged, strict=True)]  # fmt: skip
            assert all(right)
        spec = task(folder, "gen")
        questions = build_questions(spec, 2, read_records(spec).records, tokenizer, 200)
        outputs = generate_answers(model, questions, tokenizer, (), "fp32", 600)
        for question, output in zip(questions, outputs, strict=True):
            assert output == slow_generation(question, logits_of, tokenizer)


def slow_answer(name: str, question: Any, logits_of: Any) -> bool:
    if name == "lm":
        row = question.rows[0]
        logits = logits_of(torch.tensor([[*row.context, *row.continuation]]))[0]
        return logits[len(row.context) - 1 : -1].argmax(-1).tolist() == list(row.continuation)
    perplexities = []
    for row in question.rows:
        values = log_probs_one_by_one(logits_of, row.context, row.continuation)
        perplexities.append(math.exp(-sum(values) / len(values)))
    return perplexities.index(min(perplexities)) == question.record.gold


def slow_generation(question: Any, logits_of: Any, tokenizer: Tokenizer) -> str:
    tokens, new = list(question.rows[0].context), []
    for _ in range(question.max_new_tokens):
        token = int(logits_of(torch.tensor([tokens]))[0, -1, : tokenizer.vocab_size].argmax())
        if token == tokenizer.eos_id:
            break
        tokens.append(token)
        new.append(token)
    return tokenizer.decode(new)


def test_the_size_of_batches_changes_no_prediction(folder: Path, tokenizer: Tokenizer) -> None:
    model, config = make_model("mpt", tokenizer), task(folder, "mc")
    questions = build_questions(config, 2, read_records(config).records, tokenizer, 200)
    likelihoods = []
    for size in (1, 256, 100_000):
        scorer = Scorer(model, CPU, "fp32")
        scorer.batch_tokens = size
        scores = scorer.score([question.rows for question in questions])
        likelihoods.append([[score.log_likelihood for score in row] for row in scores])
    np.testing.assert_allclose(likelihoods[0], likelihoods[2], atol=1e-4)
    np.testing.assert_allclose(likelihoods[1], likelihoods[2], atol=1e-4)


def test_a_model_without_a_preference_answers_with_the_first_choice(folder: Path, tokenizer: Tokenizer) -> None:
    model = make_model("mpt", tokenizer)
    with torch.no_grad():
        model.wte.weight.zero_()  # all logits are equal
    result = run_task(task(folder, "mc"), model, tokenizer)
    assert result.accuracy == pytest.approx(5 / 14)  # gold = 0 in 5 of 14 records
    assert result.metrics["GoldBitsPerByte"] > 0 and 0 < result.metrics["GoldProbability"] < 1


def test_categories_have_examples_and_scores_of_their_own(folder: Path, tokenizer: Tokenizer) -> None:
    model = make_model("mpt", tokenizer)
    prepared = prepare_tasks([task(folder, "lm", has_categories=True)], tokenizer, 200, 256)
    assert [p.name for p in prepared] == ["lm/2-shot/a", "lm/2-shot/b"]
    assert all(len(p.questions) == 7 for p in prepared)
    names = score_task(prepared[0], Scorer(model, CPU, "fp32"), tokenizer).named_metrics()
    assert "metrics/lm/2-shot/a/InContextLearningLMAccuracy" in names


def test_a_prompt_that_is_too_long_loses_its_beginning_and_is_counted(folder: Path, tokenizer: Tokenizer) -> None:
    model = make_model("mpt", tokenizer)
    config = task(folder, "lm", num_fewshot=5)
    whole = build_questions(config, 5, read_records(config).records, tokenizer, 250)
    short = build_questions(config, 5, read_records(config).records, tokenizer, 40)
    assert not any(q.rows[0].is_cut for q in whole)
    cut = [s.rows[0] for s in short if s.rows[0].is_cut]
    assert cut and all(len(row.context) + len(row.continuation) == 40 for row in cut)
    for long, row in zip(whole, short, strict=True):
        assert long.rows[0].context[-len(row.rows[0].context) :] == row.rows[0].context
    assert run_task(config, model, tokenizer, 40).cut_rows == len(cut)


def test_examples_never_include_the_question_itself() -> None:
    for index, examples in enumerate(draw_examples(5, 3, 1234)):
        assert index not in examples and len(set(examples)) == 3
    assert draw_examples(2, 10, 0) == [[1], [0]]  # fewer records than examples asked for
    assert draw_examples(3, 0, 0) == [[], [], []]


def test_calibration_error_compares_each_bucket_with_its_midpoint() -> None:
    assert calibration_error([0.95, 0.92], [True, True]) == pytest.approx(0.05)
    assert calibration_error([0.95, 1.0, 0.15], [True, False, False]) == pytest.approx(2 / 3 * 0.45 + 1 / 3 * 0.15)
