"""The harness's own model and ours, on the same tasks: the same log-likelihoods, answers and metrics."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_models import make_model, model_config, task, train_small_tokenizer, write_tasks
from state_reader import StateReader
from typer.testing import CliRunner
from warm_process import run_warm

from ingot.checkpoint.hf.folder import export_hf
from ingot.checkpoint.store import MODEL, save_checkpoint
from ingot.cli.main import app
from ingot.data.tokenizer import Tokenizer
from ingot.errors import ConfigError, DataError, IngotError
from ingot.evaluation.tasks.prompts import build_questions
from ingot.evaluation.tasks.records import read_records
from ingot.evaluation.tasks.scoring import Scorer
from ingot.model.gpt import GPT

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")  # of the harness's own model

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from ingot.evaluation.lm_eval.model import IngotLM  # noqa: E402

MEAN = {"aggregation": "mean", "higher_is_better": True}
CHOICE = {"output_type": "multiple_choice", "doc_to_target": "gold", "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}]}  # fmt: skip
# task: file and what differs
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "choose": ("mc", {**CHOICE, "doc_to_text": "{{query.strip()}}", "doc_to_choice": "choices"}),
    "choose_2": ("mc", {**CHOICE, "doc_to_text": "{{query}}Answer:", "doc_to_choice": "choices", "num_fewshot": 2}),
    "options": ("schema", {**CHOICE, "doc_to_text": "{{gold}}", "doc_to_choice": "context_options", "doc_to_target": "continuation"}),
    "continue": ("lm", {"output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": " {{continuation}}",
                        "metric_list": [{"metric": "acc", **MEAN}]}),
    "alone": ("lm", {"output_type": "loglikelihood", "doc_to_text": "", "doc_to_target": "{{continuation}}",
                     "metric_list": [{"metric": "acc", **MEAN}]}),
    "roll": ("lm", {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}} {{context}}",
                    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}]}),
    "write": ("gen", {"output_type": "generate_until", "doc_to_text": "{{context}}\n", "doc_to_target": "{{answer}}",
                      "generation_kwargs": {"until": ["\n", " the"], "max_gen_toks": 12, "do_sample": False},
                      "metric_list": [{"metric": "exact_match", **MEAN}]}),
    "write_all": ("gen", {"output_type": "generate_until", "doc_to_text": "{{context}} {{context}}", "doc_to_target": "{{answer}}",
                          "num_fewshot": 1, "generation_kwargs": {"until": "?", "max_gen_toks": 20},
                          "metric_list": [{"metric": "exact_match", **MEAN}]}),
}  # fmt: skip


class Work:
    """A model as a run and as a Hugging Face folder, and task files."""

    def __init__(self, folder: Path, family: str):
        self.folder, self.hf, self.run = folder, folder / "hf", folder / "run"
        self.tokenizer: Tokenizer = train_small_tokenizer(self.run / "tokenizer")
        self.model: GPT = make_model(family, self.tokenizer)
        self.config = model_config(family, self.tokenizer.vocab_size)
        tensors = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        save_checkpoint(self.run, 3, {MODEL: tensors}, {"config": {"name": "small", "model": json.loads(self.config.model_dump_json())}})  # fmt: skip
        CliRunner().invoke(app, ["export", str(self.run), str(self.hf)], catch_exceptions=False)
        write_tasks(folder)
        (folder / "yaml").mkdir()
        for name, (file, values) in TASKS.items():
            data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{file}.jsonl")}, "cache_dir": str(folder / "cache")}}  # fmt: skip
            content = {"task": name, **data, "test_split": "test", "fewshot_split": "test", "num_fewshot": 0, **values}
            self.file(name).write_text(yaml.safe_dump(content))

    def file(self, name: str) -> Path:
        return self.folder / "yaml" / f"{name}.yaml"


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def work(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tmp_path_factory.mktemp("work"), request.param)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tmp_path_factory.mktemp("small"), "llama")


def theirs(work: Work, **more: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(work.hf), device="cpu", dtype="float32", batch_size=3, **more)


def run_harness(model: Any, work: Work) -> Any:
    files = [str(work.file(name)) for name in TASKS]
    manager = TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=files, task_manager=manager, bootstrap_iters=0, log_samples=True)


@pytest.mark.parametrize("length", [None, 40])  # with 40, contexts lose their beginning and texts need several windows
def test_every_request_has_the_answer_of_the_harness_own_model(work: Work, length: int | None) -> None:
    more = {} if length is None else {"max_length": length}
    expected, found = (
        run_harness(theirs(work, **more), work),
        run_harness(IngotLM(work.run, device="cpu", **more), work),
    )
    for name in TASKS:
        for one, other in zip(expected["samples"][name], found["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"]
            for [a], [b] in zip(one["resps"], other["resps"], strict=True):
                if isinstance(a, str):
                    assert a == b, name
                elif isinstance(a, tuple):
                    assert b[0] == pytest.approx(a[0], abs=1e-4) and a[1] == b[1], name
                else:
                    assert b == pytest.approx(a, abs=1e-4), name
        for metric, value in expected["results"][name].items():
            if metric.endswith(",none") and value != "N/A":
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-4, abs=1e-4), metric
    texts = [resps[0] for sample in found["samples"]["write_all"] for resps in sample["resps"]]
    assert len(set(texts)) > 1 and any(texts)


def test_the_native_scorer_finds_what_the_harness_finds(small: Work) -> None:
    results = run_harness(theirs(small), small)
    for name, kind in {"choose": "mc", "continue": "lm"}.items():
        expected = [resps[0][0] for sample in results["samples"][name] for resps in sample["resps"]]
        config = task(small.folder, kind, num_fewshot=0)
        questions = build_questions(config, 0, read_records(config).records, small.tokenizer, 200)
        scores = Scorer(small.model, torch.device("cpu"), "fp32").score([question.rows for question in questions])
        found = [row.log_likelihood for question in scores for row in question]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def request_for(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def test_requests_that_cannot_be_answered_say_why(small: Work) -> None:
    model = IngotLM(small.hf, device="cpu", max_length=40)
    ids = small.tokenizer.encode("iron")
    assert len(ids) == 1  # so that a continuation within the word adds no token
    for context, continuation, message in [
        ("iron", "", "empty continuation"), ("ir", "on", "adds no token"), ("iron", " gold" * 50, "reads 40"),
    ]:  # fmt: skip
        with pytest.raises(DataError, match=message):
            model.loglikelihood([request_for("loglikelihood", context, continuation)])
    assert model.loglikelihood([request_for("loglikelihood", "  ", "iron")])[0][0] < 0
    for settings, message in [({"max_gen_toks": 40}, "no room for a prompt"), ({"num_beams": 4}, "num_beams=4")]:
        with pytest.raises(ConfigError, match=message):
            model.generate_until([request_for("generate_until", "iron", settings)])
    assert model.generate_until([request_for("generate_until", "", {"max_gen_toks": 4})])[0]
    drawn = {"max_gen_toks": 20, "do_sample": True, "temperature": 3.0, "top_k": 50}
    sampled = model.generate_until([request_for("generate_until", "iron", drawn)])
    assert sampled != model.generate_until([request_for("generate_until", "iron", {"max_gen_toks": 20})])
    with pytest.raises(ConfigError, match="fp32 or bf16"):
        IngotLM(small.hf, device="cpu", precision="int8")
    with pytest.raises(ConfigError, match="batch_size=many"):
        IngotLM(small.hf, device="cpu", batch_size="many")


def test_the_batch_size_changes_no_score(small: Work) -> None:
    requests = [request_for("loglikelihood", "the iron " * n, " is hot!") for n in range(1, 12)]
    sizes = {size: IngotLM(small.hf, device="cpu", batch_size=size).loglikelihood(requests) for size in ("auto", "2")}
    np.testing.assert_allclose([x for x, _ in sizes["auto"]], [x for x, _ in sizes["2"]], atol=1e-5)


def test_texts_are_tokenized_ahead_in_batches(small: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request_for("loglikelihood", context, " is hot!") for context in ("the iron", "gold", "the iron")]
    model = IngotLM(small.hf, device="cpu")
    expected = model.loglikelihood(requests)

    def one_by_one(*arguments: object, **options: object) -> list[int]:
        raise AssertionError("a text was tokenized alone")

    monkeypatch.setattr(Tokenizer, "encode", one_by_one)
    assert model.loglikelihood(requests) == expected
    assert not model._encoded  # nothing is kept after the requests


def ingot_eval(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=False)


def test_the_verb_prints_the_harness_table_and_keeps_the_results(small: Work) -> None:
    options = ["--device", "cpu", "--limit", 5]
    done = ingot_eval(small.run, "--harness", small.file("choose"), small.file("write"), *options, "--questions")
    assert "|choose" in done.stdout and "exact_match" in done.stdout
    stored = json.loads((small.run / "evaluations" / "3-harness.json").read_text())
    assert stored["step"] == 3 and stored["packages"]["lm_eval"] == lm_eval.__version__
    assert stored["n-samples"]["choose"]["effective"] == 5 and len(stored["samples"]["choose"]) == 5
    (found,) = json.loads(ingot_eval(small.hf, "--harness", small.file("choose"), *options, "--json").stdout)
    assert found["metrics"]["choose/acc,none"] == stored["metrics"]["choose/acc,none"]
    assert "samples" not in found and found["step"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--harness", "no_such_task,"], "has no task no_such_task"),
        (["--harness", "absent.yaml"], "absent.yaml: no such task file"),
        (["--harness", "chose", "--include-path", "FOLDER/yaml"], "has no task chose; did you mean choose"),
        (["--harness", "FOLDER/run"], "no .yaml file in this folder"),
        (["--harness", "FOLDER/broken.yaml"], "broken.yaml cannot be read"),
        (["--harness", "x.yaml", "--gauntlet", "g.yaml"], "--gauntlet has no effect with --harness"),
        (["--harness", "x.yaml", "--tasks", "copy"], "separate evaluations"),
        (["--include-path", "x"], "add --tasks, --harness or --core"),
        (["--harness", "x.yaml", "a=b"], "leave it out"),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused_with_one_sentence(arguments: list[str], message: str, small: Work) -> None:
    broken = {"task": "broken", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "absent.jsonl"}}}
    (small.folder / "broken.yaml").write_text(yaml.safe_dump(broken | {"output_type": "loglikelihood"}))
    with pytest.raises(IngotError) as found:
        ingot_eval(small.run, *[argument.replace("FOLDER", str(small.folder)) for argument in arguments])
    assert message in str(found.value)


def test_a_model_without_its_tokenizer_is_refused(small: Work, tmp_path: Path) -> None:
    export_hf(StateReader(small.model), small.config, tmp_path / "bare", tokenizer=None)
    with pytest.raises(IngotError, match="has no tokenizer"):
        ingot_eval(tmp_path / "bare", "--harness", small.file("choose"))


def test_the_harness_own_command_line_knows_our_model(small: Work, tmp_path: Path) -> None:
    arguments = ["--model", "ingot", "--model_args", f"path={small.run}", "--tasks", "choose", "--device", "cpu",
                 "--include_path", str(small.folder / "yaml"), "--output_path", str(tmp_path / "out"), "--log_samples"]  # fmt: skip
    command = [sys.executable, "-m", "ingot.evaluation.lm_eval", *arguments]
    done = run_warm(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|choose" in done.stdout
    (stored,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(stored.read_text())["results"]["choose"]["acc,none"] >= 0
