"""What a run makes of some prompts at its checkpoints, for people to read: generated.jsonl in the run folder.

Each token is the most likely one, so the texts say something about the weights and draw no random numbers. The ranks
of any layout generate together, as they answer downstream tasks.
"""

import json
from collections.abc import Callable
from pathlib import Path

from ingot.config.evaluation import GENERATED
from ingot.config.run import RunConfig
from ingot.data.tokenizer import Tokenizer
from ingot.errors import ConfigError
from ingot.evaluation.tasks.prompts import PromptRow, Question
from ingot.evaluation.tasks.rank_scoring import RankScorer
from ingot.evaluation.tasks.records import Record
from ingot.parallel.executors.base import Executor, Messages
from ingot.storage.atomic import write_whole
from ingot.storage.json_lines import read_json_lines


def prompt_questions(config: RunConfig, tokenizer: Tokenizer | None) -> list[Question]:
    """The prompts of a run as questions without an answer, checked."""
    prompts, most = config.generate.prompts, config.generate.max_new_tokens
    if prompts and tokenizer is None:
        raise ConfigError("generate.prompts: prompts are text, and the run has no tokenizer; set tokenizer=FOLDER")
    questions = []
    for text in prompts:
        assert tokenizer is not None
        tokens = tokenizer.encode(text)
        if not tokens:
            raise ConfigError(f"generate.prompts: {text!r} has no tokens; write some text")
        if len(tokens) + most > config.max_seq_len:
            raise ConfigError(
                f"generate.prompts: {text[:40]!r} has {len(tokens)} tokens; with generate.max_new_tokens={most} that "
                f"is more than max_seq_len={config.max_seq_len}"
            )
        record = Record("generate.prompts", text, "", (), 0, (), "", "")
        questions.append(Question(record, (PromptRow(tuple(tokens), (), "", False),), text, most))
    return questions


class PromptContinuations:
    """Continues the prompts of a run."""

    def __init__(
        self, config: RunConfig, executor: Executor, questions: list[Question], tokenizer: Tokenizer | None,
        messages: Messages,
    ):  # fmt: skip
        self.config, self.executor, self.messages = config, executor, messages
        self.questions, self.tokenizer = questions, tokenizer
        self.path = Path(config.run_folder) / GENERATED

    def forget_after(self, batch: int) -> None:
        """Remove the texts of batches that the run repeats."""
        if self.executor.rank_env.rank != 0:
            return
        lines = read_json_lines(self.path)
        kept = [line for line in lines if isinstance(line.get("batch"), int) and line["batch"] <= batch]
        if len(kept) < len(lines):
            write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, batch: int, progress: Callable[[], None]) -> None:
        """Continue all prompts, on all ranks. Rank 0 appends the texts to the file, and they are shown."""
        assert self.tokenizer is not None
        tokens = (self.config.device_eval_batch_size or self.executor.microbatch) * self.config.max_seq_len
        scorer = RankScorer(self.executor, self.config.model, self.config.precision, tokens)
        texts = scorer.generate(self.questions, self.tokenizer, (), lambda tokens: progress())
        if self.executor.rank_env.rank != 0:
            return
        prompts = self.config.generate.prompts
        found = [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]
        for each in found:
            self.messages.note(f"batch {batch} continues {each['prompt'][:60]!r}: {each['text'][:120]!r}")
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"batch": batch, "texts": found}) + "\n")
        except OSError as error:  # the other ranks go on
            self.messages.warn(f"cannot write {self.path}: {error.strerror}")
