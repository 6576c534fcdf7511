"""Every layout scores as one process does: each question once, the same log-probabilities, the same answers."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from small_models import CPU, FAMILIES, make_model, task, train_small_tokenizer, write_tasks
from warm_process import spawn_warm

from ingot.checkpoint.store import MODEL, save_checkpoint
from ingot.config.evaluation import TaskConfig
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.evaluation.tasks.answering import generate_answers
from ingot.evaluation.tasks.prompts import build_questions
from ingot.evaluation.tasks.rank_scoring import RankScorer
from ingot.evaluation.tasks.records import read_records
from ingot.evaluation.tasks.scoring import Scorer

FSDP, TP, CP, PP = "shard=2", "tensor=2", "context=2", "pipeline=2"
LAYOUTS = {
    1: [("mpt", "")],
    2: [("mpt", FSDP), ("gpt2", "replicate=2"), ("llama", TP), ("mpt", TP), ("gpt2", TP), ("mpt", CP), ("llama", CP),
        ("window", CP), ("gpt2", PP), ("deep", f"{PP} pipeline_schedule=zero_bubble"), ("apart", FSDP), ("apart", TP)],
    4: [("mpt", "shard=4"), ("llama", f"{FSDP} {TP}"), ("gpt2", f"{PP} {FSDP}"), ("mpt", f"{CP} {TP}"),
        ("llama", f"{CP} {PP}")],
}  # fmt: skip
FAMILIES |= {
    "apart": {"positions": "learned", "document_mask": True, "document_positions": True, "eos_token_id": 0},
    "deep": {"positions": "alibi", "n_layers": 4},
}


def score_all(world: int, runs: list[tuple[str, str]], work: Path) -> None:
    """Score every task in every layout with `world` processes. Each rank writes what it found."""
    if world == 1:
        _worker(0, runs, 1, 0, str(work))
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn_warm(_worker, args=(runs, world, store.port, str(work)), nprocs=world)


def _worker(rank: int, runs: list[tuple[str, str]], world: int, port: int, work: str) -> None:
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
    torch.set_num_threads(1)
    for number, (family, layout) in enumerate(runs):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        (Path(work) / f"{world}-{number}-{rank}.json").write_text(json.dumps(score_here(Path(work), family, layout)))


def score_here(work: Path, family: str, layout: str) -> dict[str, Any]:
    from ingot.checkpoint.load import open_weights
    from ingot.parallel.dtensor import fill
    from ingot.parallel.executors.base import NoMessages
    from ingot.parallel.executors.build import build_distributed, build_single
    from ingot.parallel.layout import complete_layout
    from ingot.parallel.rank_env import find_rank_env
    from ingot.parallel.rendezvous import join_world

    model = work / family
    config = load_config(
        RunConfig, ["max_seq_len=64", "global_train_batch_size=8", "precision=fp32", "device=cpu",
                    *[f"parallel.{part}" for part in layout.split()]],
        {"model": json.loads((model / "model.json").read_text())},
    )  # fmt: skip
    env = find_rank_env()
    if env.world > 1:
        shape, _ = complete_layout(config.parallel, env.world, config.model, 64, 8)
        world = join_world(env, CPU, config.parallel.join_timeout)
        executor: Any = build_distributed(config, shape, world, CPU, False, NoMessages())
    else:
        executor = build_single(config, CPU, False, NoMessages())
    _, stored = open_weights(model)
    with torch.no_grad():
        for parameter in executor.parameters:
            fill(parameter.tensor, stored.get(parameter.name))
    executor.weights_changed()
    tokenizer = load_tokenizer(work / "tokenizer")
    scorer = RankScorer(executor, config.model, "fp32", 600)
    found: dict[str, Any] = {}
    for name, questions in questions_of(work, tokenizer).items():
        if name == "gen":
            found[name] = scorer.generate(questions, tokenizer, ["iron"])
        else:
            scores = scorer.score([question.rows for question in questions])
            found[name] = [[(s.log_probs, s.confidences, s.is_greedy) for s in rows] for rows in scores]
    executor.close()
    return found


def questions_of(work: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    specs = json.loads((work / "tasks.json").read_text())
    tasks = {name: TaskConfig.model_validate(spec) for name, spec in specs.items()}
    return {name: build_questions(t, 2, read_records(t).records, tokenizer, 200) for name, t in tasks.items()}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a model of each family, and the tasks."""
    work = tmp_path_factory.mktemp("layouts")
    tokenizer = train_small_tokenizer(work / "tokenizer")
    (work / "tasks").mkdir()
    write_tasks(work / "tasks")
    specs = {
        name: task(work / "tasks", name).model_dump(mode="json", exclude_unset=True)
        for name in ("lm", "mc", "schema", "gen")
    }
    (work / "tasks.json").write_text(json.dumps(specs))
    for family in FAMILIES:
        model = make_model(family, tokenizer)
        config = json.loads(model.config.model_dump_json())
        (work / family).mkdir()
        (work / family / "model.json").write_text(json.dumps(config))
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        save_checkpoint(work / family, 1, {MODEL: weights}, {"config": {"name": "x", "model": config}})
    return work


@pytest.fixture(scope="module")
def expected(work: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    tokenizer = load_tokenizer(work / "tokenizer")
    for family in FAMILIES:
        model, found[family] = make_model(family, tokenizer), {}
        for name, questions in questions_of(work, tokenizer).items():
            if name == "gen":
                found[family][name] = generate_answers(model, questions, tokenizer, ["iron"], "fp32", 600)
            else:
                found[family][name] = Scorer(model, CPU, "fp32").score([question.rows for question in questions])
    return found


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_scores_as_one_process(world: int, work: Path, expected: dict[str, dict[str, Any]]) -> None:
    score_all(world, LAYOUTS[world], work)
    for number, (family, layout) in enumerate(LAYOUTS[world]):
        for rank in range(world):
            found = json.loads((work / f"{world}-{number}-{rank}.json").read_text())
            for name, wanted in expected[family].items():
                if name == "gen":
                    assert found[name] == wanted, (family, layout, rank)
                    continue
                for rows, scores in zip(found[name], wanted, strict=True):
                    for (log_probs, confidences, is_greedy), score in zip(rows, scores, strict=True):
                        np.testing.assert_allclose(log_probs, score.log_probs, 1e-5, 1e-4, err_msg=f"{family} {layout}")
                        np.testing.assert_allclose(confidences, score.confidences, atol=1e-4)
                        assert is_greedy == score.is_greedy
