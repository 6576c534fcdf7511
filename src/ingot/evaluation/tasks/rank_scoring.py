"""Scores on the ranks of a run, whatever its layout.

Data ranks share the questions, each scored once; ranks that share a model work on the same ones. The ranks make equally
many passes, since collectives must meet: where one has nothing left, it passes an empty row.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ingot.config.model import ModelConfig
from ingot.data.tokenizer import Tokenizer
from ingot.evaluation.tasks.answering import cut, generate_answers
from ingot.evaluation.tasks.packing import Unit, make_units, pack
from ingot.evaluation.tasks.prompts import PromptRow, Question
from ingot.evaluation.tasks.scoring import RowScore, ScoreTable, shapes_for, to_device
from ingot.model.branch_attention import PADDING, TokenRows
from ingot.parallel.executors.base import Executor
from ingot.parallel.loss_model import uncompiled

_ROUND = 64  # lengths of rows are multiples of this


class RankScorer:
    """Scores questions with the model of a run. All ranks must call it with the same questions."""

    def __init__(self, executor: Executor, config: ModelConfig, precision: str, batch_tokens: int):
        self.executor, self.precision, self.batch_tokens = executor, precision, batch_tokens
        self.shapes = shapes_for(config, batch_tokens, alone=False)  # layouts cut rows: one kind of them

    def score(
        self, questions: Sequence[Sequence[PromptRow]], progress: Callable[[int], None] = lambda tokens: None
    ) -> list[list[RowScore]]:
        """The scores of each question's rows, on all ranks. `progress` receives the tokens of each batch."""
        table = ScoreTable(questions)
        batches = list(pack(self._own_units(questions), table.rows, self.shapes))
        found = torch.zeros(table.tokens, 3, dtype=torch.float64, device=self.executor.device)
        with self.executor.evaluating():
            for number in range(self._rounds(len(batches))):
                batch = batches[number] if number < len(batches) else None
                rows = to_device(batch, self.executor.device) if batch else self._nothing()
                scores = self.executor.token_scores(rows)
                progress(batch.tokens.size * self.executor.layout.data if batch else 0)
                if batch:
                    found[self._on_device(table.places(batch))] += scores.double()
        return table.by_question(self.executor.sum_loss(found).cpu().numpy())

    def generate(
        self, questions: Sequence[Question], tokenizer: Tokenizer, stops: Sequence[str],
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> list[str]:  # fmt: skip
        """What each prompt is continued with, most likely token by most likely token, on all ranks.

        With several ranks every token costs a pass over its whole row: a cache would have to be cut as the model is.
        """
        if (model := self.executor.whole_model) is not None:
            with self.executor.evaluating(), uncompiled(model):
                return generate_answers(model, questions, tokenizer, stops, self.precision, self.batch_tokens, progress)
        order = sorted(range(len(questions)), key=lambda i: -len(questions[i].rows[0].context))
        own, most = order[self.executor.data_rank :: self.executor.layout.data], questions[0].max_new_tokens
        groups: list[list[int]] = []
        while own:
            length = len(questions[own[0]].rows[0].context) + most
            count = max(1, self.batch_tokens // length)
            groups.append(own[:count])
            own = own[count:]
        written = torch.zeros(len(questions), most, dtype=torch.float64, device=self.executor.device)
        with self.executor.evaluating():
            for number in range(self._rounds(len(groups))):
                group = groups[number] if number < len(groups) else []
                for i, ids in zip(group, self._continue(questions, group, tokenizer, stops, progress), strict=True):
                    written[i, : len(ids)] = torch.tensor(ids, device=written.device) + 1.0  # 0 is nothing
                progress(sum(len(questions[i].rows[0].context) + most for i in group) * self.executor.layout.data)
        texts = []
        for ids in self.executor.sum_data(written).long().tolist():
            texts.append(cut(tokenizer.decode([token - 1 for token in ids if token]), stops))
        return texts

    def _continue(
        self, questions: Sequence[Question], group: Sequence[int], tokenizer: Tokenizer, stops: Sequence[str],
        progress: Callable[[int], None],
    ) -> list[list[int]]:  # fmt: skip
        """The tokens that follow the prompts of this rank's group, until all ranks are done with theirs."""
        rows = [list(questions[i].rows[0].context) for i in group]
        written: list[list[int]] = [[] for _ in group]
        done = [False] * len(group)
        executor = self.executor
        for _ in range(questions[0].max_new_tokens):
            state = executor.all_gather([0.0 if all(done) else 1.0, float(len(group))])
            if not any(active for active, _ in state):
                break
            scores = executor.token_scores(self._last_tokens(rows) if rows else self._nothing())
            # the ranks that share this group do not all see the result
            table = torch.zeros(executor.layout.data, int(max(size for _, size in state)), device=executor.device)
            table[executor.data_rank, : len(group)] = scores[:, 2]
            tokens = executor.sum_loss(table)[executor.data_rank].long().tolist()
            progress(0)
            for number, row in enumerate(rows):
                token = tokens[number]
                row.append(token)
                if done[number]:
                    continue
                if token != tokenizer.eos_id:
                    written[number].append(token)
                text = tokenizer.decode(written[number]) if stops else ""
                done[number] = token == tokenizer.eos_id or any(stop in text for stop in stops)
        return written

    def _own_units(self, questions: Sequence[Sequence[PromptRow]]) -> list[Unit]:
        units = sorted(make_units(questions, self.shapes.shares), key=lambda unit: -unit.tokens)
        return units[self.executor.data_rank :: self.executor.layout.data]

    def _rounds(self, own: int) -> int:
        return int(max(row[0] for row in self.executor.all_gather([float(own)])))

    def _last_tokens(self, rows: Sequence[Sequence[int]]) -> TokenRows:
        """Rows of which the token after the last one is wanted."""
        length = -(-max(map(len, rows)) // _ROUND) * _ROUND
        tokens = np.zeros((len(rows), length), np.int64)
        question = np.full_like(tokens, PADDING)
        for line, row in enumerate(rows):
            tokens[line, : len(row)] = row
            question[line, : len(row)] = 0
        position = np.broadcast_to(np.arange(length), tokens.shape) * (question == 0)
        columns = np.array([len(row) - 1 for row in rows], np.int64)
        lines = np.arange(len(rows))
        arrays = (tokens, question, np.zeros_like(tokens), position, lines, columns, np.zeros_like(lines))
        return TokenRows(*map(self._on_device, arrays), has_branches=self.shapes.shares)

    def _nothing(self) -> TokenRows:
        """A row in which nothing is scored."""
        nowhere = np.zeros(0, np.int64)
        row = np.zeros((1, _ROUND), np.int64)
        arrays = (row, row, row, np.arange(_ROUND)[None], nowhere, nowhere, nowhere)
        return TokenRows(*map(self._on_device, arrays), has_branches=self.shapes.shares)

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.executor.device)
