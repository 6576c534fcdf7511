"""Loss, perplexity and bits per byte of a model on a dataset."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ingot.config.data import SourceConfig
from ingot.config.run import RunConfig
from ingot.data.loading.token_dataset import IGNORE, Dataset
from ingot.data.tokenizer import Tokenizer
from ingot.parallel.executors.base import Executor


@dataclass(frozen=True)
class Evaluation:
    """The result. Bits per byte does not depend on the tokenizer, so it compares any two models."""

    loss: float
    tokens: int
    bits_per_byte: float | None

    def metrics(self, label: str = "") -> dict[str, float]:
        """The metrics under the names of LLM Foundry; of several validation sets, each has its label in them."""
        perplexity = math.exp(min(self.loss, 700.0))
        row = {"metrics/eval/LanguageCrossEntropy": self.loss, "metrics/eval/LanguagePerplexity": perplexity}
        if self.bits_per_byte is not None:
            row["metrics/eval/BitsPerByte"] = self.bits_per_byte
        if not label:
            return row
        return {f"metrics/eval/{label}/{name.rpartition('/')[2]}": value for name, value in row.items()}


def evaluate(
    config: RunConfig,
    executor: Executor,
    source: SourceConfig,
    dataset: Dataset,
    tokenizer: Tokenizer | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """The mean loss over a validation set of a run, or over as many of its samples as the config says. `progress`
    receives the samples before each batch, and those in all.

    The ranks take turns, a batch each, and all evaluate the same number of batches.
    """
    order = dataset.order(config.order_seed(source), source.shuffle)
    count_bytes = _byte_counter(config, dataset, tokenizer)
    size = min(config.device_eval_batch_size or executor.microbatch, max(dataset.samples, executor.microbatch))
    limit = dataset.samples if config.eval_samples is None else min(dataset.samples, config.eval_samples)
    own = size * executor.data_rank
    loss = torch.zeros((), device=executor.device, dtype=torch.float64)
    tokens, text_bytes = 0, 0.0
    with executor.evaluating():
        for start in range(own, limit + own, size * executor.layout.data):
            ids = order.take(np.arange(min(start, limit), min(start + size, limit)))
            dataset.announce(order, min(start, limit - 1))
            progress(start - own, limit)
            inputs, labels = dataset.gather(ids)
            padding = ((0, size - len(ids)), (0, 0))  # one shape for all batches: the rest carries no loss
            labels = np.pad(labels, padding, constant_values=IGNORE)
            loss += executor.loss_sum(np.pad(inputs, padding), labels).double()
            counted = labels[labels != IGNORE]
            tokens += counted.size
            text_bytes += count_bytes(counted)
    loss_sum = float(executor.sum_loss(loss))
    counts = torch.tensor([tokens, text_bytes], dtype=torch.float64, device=executor.device)
    all_tokens, all_bytes = executor.sum_data(counts).tolist()
    bits = loss_sum / math.log(2) / all_bytes if all_bytes else None
    return Evaluation(loss_sum / max(all_tokens, 1), int(all_tokens), bits)


def _byte_counter(config: RunConfig, dataset: Dataset, tokenizer: Tokenizer | None) -> Callable[[np.ndarray], float]:
    """How many bytes of text some tokens represent: exactly with a tokenizer, otherwise by the dataset's average."""
    known = tokenizer.token_bytes() if tokenizer is not None else None
    if known is None:
        per_token = dataset.bytes_per_token or 0.0
        return lambda tokens: tokens.size * per_token
    token_bytes = np.pad(
        known, (0, max(0, config.model.vocab_size - len(known)))
    )  # ids beyond the tokenizer's are not text
    return lambda tokens: float(token_bytes[tokens].sum())
