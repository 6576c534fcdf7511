"""`ingot eval --nproc`: processes that share the questions. Each holds the whole model and scores a part of them; what
they find is added up, so that all know everything and the first one reports it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.prompts import PromptRow, Question
from ingot.evaluation.tasks.run import QuestionScorer
from ingot.evaluation.tasks.scoring import RowScore
from ingot.parallel.rank_env import RankEnv, find_rank_env
from ingot.parallel.rendezvous import join_world, leave_world

_JOIN_SECONDS = 300.0


class SharedScorer:
    """Scores the questions of this process with `inner`, and gets the scores of the others."""

    def __init__(self, inner: QuestionScorer, env: RankEnv):
        self.inner, self.rank, self.world = inner, env.rank, env.world

    def score(
        self, questions: Sequence[Sequence[PromptRow]], progress: Callable[[int], None] = lambda tokens: None
    ) -> list[list[RowScore]]:
        """The scores of each question's rows, in every process."""
        own = self._own([-sum(len(row.context) + len(row.continuation) for row in rows) for rows in questions])
        scores = self.inner.score([questions[i] for i in own], lambda tokens: progress(tokens * self.world))
        starts = np.cumsum([0, *(len(row.continuation) for rows in questions for row in rows)])
        first = np.cumsum([0, *map(len, questions)])  # the number of each question's first row
        table = torch.zeros(int(starts[-1]), 3, dtype=torch.float64)
        for i, found in zip(own, scores, strict=True):
            for row, score in enumerate(found, int(first[i])):
                part = table[int(starts[row]) : int(starts[row + 1])]
                part[:, 0], part[:, 1] = torch.tensor(score.log_probs), torch.tensor(score.confidences)
                part[:, 2] = float(score.is_greedy)
        dist.all_reduce(table)
        columns = table.numpy()
        parts = [columns[a:b] for a, b in pairwise(starts)]
        rows = [RowScore(part[:, 0].tolist(), part[:, 1].tolist(), bool(part[:, 2].all())) for part in parts]
        return [rows[a:b] for a, b in pairwise(first)]

    def generate(
        self, questions: Sequence[Question], tokenizer: Tokenizer, stops: Sequence[str],
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> list[str]:  # fmt: skip
        """What each prompt is continued with, in every process."""
        own = self._own([-len(question.rows[0].context) for question in questions])
        texts = self.inner.generate(
            [questions[i] for i in own], tokenizer, stops, lambda tokens: progress(tokens * self.world)
        )
        coded = [text.encode() for text in texts]
        longest = torch.tensor(max(map(len, coded), default=0))
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        table = torch.zeros(len(questions), int(longest) + 1, dtype=torch.int64)  # length, then bytes
        for i, text in zip(own, coded, strict=True):
            table[i, 0] = len(text)
            table[i, 1 : len(text) + 1] = torch.tensor(list(text), dtype=torch.int64)
        dist.all_reduce(table)
        return [bytes(row[1 : row[0] + 1]).decode() for row in table.tolist()]

    def _own(self, order: Sequence[int]) -> list[int]:
        """This process's questions: every so many of them in order of their length."""
        return sorted(range(len(order)), key=order.__getitem__)[self.rank :: self.world]


@contextmanager
def joined_processes() -> Iterator[None]:
    """Join the other processes, if there are any, and leave together with them; one that has failed does not wait."""
    env = find_rank_env()
    if env.world > 1:
        join_world(env, torch.device("cpu"), _JOIN_SECONDS)
    yield
    leave_world()
