"""Small models of every family and small tasks of every type, for tests of evaluation."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from ingot.config.evaluation import TaskConfig
from ingot.config.model import ModelConfig
from ingot.data.tokenizer import Tokenizer
from ingot.data.tokenizer_training import train_tokenizer
from ingot.model.gpt import GPT
from ingot.model.init import build_model

CPU = torch.device("cpu")
WORDS = [
    "iron",
    "copper",
    "melt",
    "the",
    "a",
    "mold",
    "heat",
    "pour",
    "cast",
    "into",
    "bar",
    "gold",
    "12",
    "7",
    "is",
    "was.",
    "casts,",
    "hot!",
    "Question:",
    "Answer:",
]
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "activation": "gelu_tanh"},
    "mpt": {"positions": "alibi", "no_bias": True},
    "llama": {"positions": "rotary", "no_bias": True, "n_kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu",
              "tie_word_embeddings": False},
    "window": {"positions": "rotary", "sliding_window": 12},
}  # fmt: skip


def model_config(family: str, vocab_size: int) -> ModelConfig:
    known = {name: value for name, value in FAMILIES[family].items() if name in ModelConfig.model_fields}
    usual = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": vocab_size, "max_seq_len": 256}
    return ModelConfig(**usual | known)


def train_small_tokenizer(folder: Path) -> Tokenizer:
    return train_tokenizer([" ".join(WORDS)] * 20, 320, folder)


def write_tasks(folder: Path) -> None:
    """Small task files of every type."""
    draw = random.Random(5)

    def text(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    files = {
        "lm": lambda i: {"context": text(12), "continuation": text(4), "category": "ab"[i % 2]},
        "mc": lambda i: {"query": text(12) + "\n", "choices": [text(5) for _ in range(3)], "gold": i % 3},
        "schema": lambda i: {"context_options": [text(9), text(9)], "continuation": text(5), "gold": i % 2},
        "gen": lambda i: {"context": text(9), "answer": text(3), "aliases": [text(2)], "chain_of_thought": text(4)},
    }
    for name, make in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(make(i)) + "\n" for i in range(14)))


def task(folder: Path, name: str, **more: Any) -> TaskConfig:
    kinds = {"lm": "language_modeling", "mc": "multiple_choice", "schema": "schema", "gen": "question_answering"}
    values = {"label": name, "dataset_uri": str(folder / f"{name}.jsonl"), "icl_task_type": kinds[name]}
    return TaskConfig.model_validate({**values, "num_fewshot": 2, **more})


def make_model(family: str, tokenizer: Tokenizer) -> GPT:
    torch.manual_seed(0)
    model = build_model(model_config(family, tokenizer.vocab_size), 3, CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # so that choices differ clearly
    return model.eval()
