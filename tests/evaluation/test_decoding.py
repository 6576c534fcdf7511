"""Rows that a model works on together: each as if it were alone, and all of them counted."""

import torch

from ingot.config.model import ModelConfig
from ingot.evaluation.tasks.decoding import Decoding, continue_prompts
from ingot.evaluation.tasks.prompts import PromptRow
from ingot.evaluation.tasks.scoring import Scorer
from ingot.model.init import build_model

CONFIG = ModelConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=40, max_seq_len=32, init="normal", init_std=0.3)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


def test_a_text_that_ends_early_stays_as_it_is_while_others_go_on() -> None:
    model = build_model(CONFIG, 3, torch.device("cpu"))
    never = Decoding(12, None, lambda ids: False)
    whole = continue_prompts(model, PROMPTS, never, "fp32", 1000)
    assert [continue_prompts(model, [prompt], never, "fp32", 1000)[0] for prompt in PROMPTS] == whole
    last = whole[0][2]
    ends = [row.index(last) if last in row else len(row) for row in whole]
    assert len(set(ends)) > 1
    by_token = continue_prompts(model, PROMPTS, Decoding(12, last, lambda ids: False), "fp32", 1000)
    assert by_token == [row[:end] for row, end in zip(whole, ends, strict=True)]  # the token is not a part of the text
    by_text = continue_prompts(model, PROMPTS, Decoding(12, None, lambda ids: last in ids), "fp32", 1000)
    assert by_text == [row[: end + 1] for row, end in zip(whole, ends, strict=True)]


def test_the_progress_of_scoring_counts_the_tokens_of_every_batch() -> None:
    questions = [[PromptRow((1, 2, 3, n), (4, 5), "", False)] for n in range(20)]  # nothing that packing could share
    scorer = Scorer(build_model(CONFIG, 3, torch.device("cpu")), torch.device("cpu"), "fp32")
    scorer.batch_tokens = 40
    done: list[int] = []
    scores = scorer.score(questions, done.append)
    assert len(scores) == 20 and len(done) > 2
    assert sum(done) >= 20 * 5  # 4 tokens of context and one of two of the continuation are read
