"""Loss, perplexity and bits per byte of a model on a data set."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ingot.config.run import RunConfig
from ingot.data.loading.token_dataset import IGNORE, Dataset
from ingot.data.tokenizer import Tokenizer
from ingot.model.kernels import refresh
from ingot.training.device import autocast
from ingot.training.step import to_device

if TYPE_CHECKING:
    from ingot.parallel.executors.distributed import Spread


@dataclass(frozen=True)
class Evaluation:
    """What came out. Bits per byte does not depend on the tokenizer, so it compares any two models."""

    loss: float
    tokens: int
    bits_per_byte: float | None

    def metrics(self) -> dict[str, float]:
        perplexity = math.exp(min(self.loss, 700.0))
        row = {"metrics/eval/LanguageCrossEntropy": self.loss, "metrics/eval/LanguagePerplexity": perplexity}
        if self.bits_per_byte is not None:
            row["metrics/eval/BitsPerByte"] = self.bits_per_byte
        return row


@torch.no_grad()  # not inference_mode: what FSDP2 gathers there cannot take part in training afterwards
def evaluate(
    config: RunConfig,
    model: nn.Module,
    dataset: Dataset,
    device: torch.device,
    batch: int,
    tokenizer: Tokenizer | None,
    spread: "Spread | None" = None,
    alive: Callable[[], None] = lambda: None,
) -> Evaluation:
    """The mean loss over the validation data of a run, or over as many samples as the config says.

    The processes of a spread model take turns: each evaluates every so many-th batch, and all run equally often.
    """
    source = config.sources.eval
    assert source is not None
    order = dataset.order(config.order_seed(source), source.shuffle)
    token_bytes = tokenizer.token_bytes() if tokenizer is not None else None
    if token_bytes is not None:  # ids beyond the tokenizer's stand for no text
        token_bytes = np.pad(token_bytes, (0, max(0, config.model.vocab_size - len(token_bytes))))
    was_training = model.training
    refresh(model)
    spread.train(False) if spread is not None else model.eval()
    rank, ranks = (spread.mesh.data_rank, spread.mesh.layout.data) if spread is not None else (0, 1)
    total = torch.zeros((), device=device, dtype=torch.float64)
    tokens, text_bytes = 0, 0.0
    limit = dataset.samples if config.eval_samples is None else min(dataset.samples, config.eval_samples)
    for start in range(batch * rank, limit + batch * rank, batch * ranks):
        ids = order.take(np.arange(min(start, limit), min(start + batch, limit)))
        dataset.announce(order, min(start, limit - 1))
        alive()
        inputs, labels = dataset.gather(ids)
        if len(ids) < batch:  # one shape for all batches: the rest carries no loss
            inputs = np.pad(inputs, ((0, batch - len(ids)), (0, 0)))
            labels = np.pad(labels, ((0, batch - len(ids)), (0, 0)), constant_values=IGNORE)
        run = spread.loss_sum if spread is not None else model
        with autocast(config.precision, device):
            total += run(to_device(inputs, device), to_device(labels, device)).double()
        real = labels[labels != IGNORE]
        tokens += real.size
        if token_bytes is not None:
            text_bytes += float(token_bytes[real].sum())
        else:
            text_bytes += real.size * (dataset.bytes_per_token or 0.0)
    if spread is not None:
        spread.train(was_training)
        total = spread.total_loss(total)
        counts = torch.tensor([tokens, text_bytes], dtype=torch.float64, device=device)
        tokens, text_bytes = spread.mesh.sum(counts, spread.mesh.speaks_for_data).tolist()
    model.train(was_training)
    loss_sum = float(total)
    bits = loss_sum / math.log(2) / text_bytes if text_bytes else None
    return Evaluation(loss_sum / max(tokens, 1), int(tokens), bits)
