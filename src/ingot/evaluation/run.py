"""Evaluating a finished model: `ingot eval`."""

from collections.abc import Sequence
from pathlib import Path

from ingot.checkpoint.hf.transfer import tokenizer_folder
from ingot.checkpoint.load import load_model
from ingot.config.run import EVAL_BATCH
from ingot.data.loading.open_dataset import open_dataset
from ingot.data.tokenizer import load_tokenizer
from ingot.evaluation.eval_config import load_eval_config
from ingot.evaluation.validation import Evaluation, evaluate
from ingot.model.kernels import attach
from ingot.parallel.executors.device import choose_device
from ingot.parallel.executors.single import SingleProcess
from ingot.parallel.loss_model import LossModel


def evaluate_run(path: Path, overrides: Sequence[str]) -> dict[str, tuple[Evaluation, str]]:
    """The loss of a run, checkpoint or Hugging Face folder on its validation sets by label, or on other data by
    overrides; with a line that says what was evaluated on."""
    config = load_eval_config(path, overrides)
    sources = config.sources.eval_sources
    device, _ = choose_device(config)
    shape = (config.max_seq_len, config.model.vocab_size, config.no_loss_after_token)
    data = {label: open_dataset(source, *shape) for label, source in sources.items()}
    folder = tokenizer_folder(path)
    tokenizer = load_tokenizer(folder) if folder else None
    model = load_model(path, device)
    attach(model, device=device, precision=config.precision)
    executor = SingleProcess(LossModel(model), config, device, compiled=False)
    executor.microbatch = EVAL_BATCH
    return {
        label: (evaluate(config, executor, sources[label], found, tokenizer), found.describe())
        for label, found in data.items()
    }
