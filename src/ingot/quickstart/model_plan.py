"""Which model to train: as large as the time allows, measured on this machine.

A model sees as many tokens as the machine computes in the time, but no more than some passes over the text. Of a few
shapes, the largest one is taken that sees enough tokens for its size. Speed comes from a trial of a few steps of
`ingot train`; the speed of other shapes follows from their arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ingot.errors import DataError

TRIAL_STEPS = 8
_PASSES = 8  # over the text; more would mostly learn it by heart
_TOKENS_PER_PARAMETER = 2
_MIN_STEPS = 20
_STEPS = 300  # a batch is as large as leaves this many steps
_BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)  # sequences
_EVAL_TOKENS = 60_000
_EVAL_BATCH = 8
_TRIAL_SECONDS = 10  # with less time, nothing is measured
_FIRST_GUESS = 4e10  # FLOP/s that a trial starts from


@dataclass(frozen=True)
class Shape:
    """The size of a model."""

    d_model: int
    n_layers: int
    n_heads: int

    def parameters(self, vocabulary: int) -> int:
        """Weights, with those of the embedding."""
        return 12 * self.n_layers * self.d_model**2 + vocabulary * self.d_model


SHAPES = [Shape(64, 2, 2), Shape(128, 3, 4), Shape(192, 4, 6), Shape(256, 6, 8), Shape(384, 8, 6), Shape(512, 8, 8),
          Shape(768, 12, 12), Shape(1024, 24, 16), Shape(2048, 24, 16)]  # fmt: skip


@dataclass(frozen=True)
class Corpus:
    """What there is to train on."""

    tokens: int
    vocabulary: int
    sequence: int
    val_tokens: int


@dataclass(frozen=True)
class ModelPlan:
    """Overrides of `ingot train demo`, and why."""

    arguments: list[str]
    reasons: list[str]


def plan_model(corpus: Corpus, seconds: float, measure: Callable[[list[str]], float]) -> ModelPlan:
    """Choose shape, batch and duration. `measure` returns the tokens per second of a trial with some overrides."""
    if corpus.tokens < corpus.sequence:
        raise DataError(
            f"the text has {corpus.tokens} tokens, which do not fill one sequence of {corpus.sequence}; add text"
        )
    shape, speed = _choose_shape(corpus, seconds, measure)
    affordable, passes = speed * seconds, _PASSES * corpus.tokens
    tokens = min(affordable, passes)
    fitting = [b for b in _BATCHES if b * corpus.sequence * _STEPS <= tokens]
    batch = max(fitting, default=_BATCHES[0])
    steps = max(_MIN_STEPS, int(tokens / (batch * corpus.sequence)))
    parameters = shape.parameters(corpus.vocabulary)
    limit = (
        f"{speed:,.0f} tokens/s measured, {seconds:.0f} s left"
        if affordable <= passes
        else f"{_PASSES} passes over the text"
    )
    reasons = [
        f"model: {parameters / 1e6:.1f}M parameters, {shape.n_layers} layers of width {shape.d_model} (the largest "
        f"that sees {_TOKENS_PER_PARAMETER} tokens for each parameter, or the smallest)",
        f"batch: {batch} sequences of {corpus.sequence} tokens (the largest with {_STEPS} steps, or the smallest)",
        f"duration: {steps} steps, {steps * batch * corpus.sequence:,} tokens ({limit})",
        f"learning rate: {_learning_rate(shape)} (0.6 / width, at most 5e-3)",
    ]
    return ModelPlan(_arguments(shape, corpus, batch, steps), reasons)


def _choose_shape(corpus: Corpus, seconds: float, measure: Callable[[list[str]], float]) -> tuple[Shape, float]:
    """The shape, and its tokens per second; 0 if there is no time to measure them."""
    if seconds < _TRIAL_SECONDS:
        return SHAPES[0], 0.0
    shape = _largest(corpus, seconds, lambda s: _FIRST_GUESS / (6 * s.parameters(corpus.vocabulary)))
    speed = _measured(shape, corpus, measure)
    work = speed * shape.parameters(corpus.vocabulary)
    better = _largest(corpus, seconds, lambda s: work / s.parameters(corpus.vocabulary))
    return (shape, speed) if better == shape else (better, _measured(better, corpus, measure))


def _largest(corpus: Corpus, seconds: float, speed: Callable[[Shape], float]) -> Shape:
    def tokens(shape: Shape) -> float:
        return min(speed(shape) * seconds, _PASSES * corpus.tokens)

    enough = [s for s in SHAPES if tokens(s) >= _TOKENS_PER_PARAMETER * s.parameters(corpus.vocabulary)]
    return enough[-1] if enough else SHAPES[0]


def _measured(shape: Shape, corpus: Corpus, measure: Callable[[list[str]], float]) -> float:
    return measure(_arguments(shape, corpus, 16, TRIAL_STEPS))


def _learning_rate(shape: Shape) -> str:
    return f"{min(5e-3, 0.6 / shape.d_model):.1e}"


def _arguments(shape: Shape, corpus: Corpus, batch: int, steps: int) -> list[str]:
    checks = max(1, steps // 4)  # evaluations and checkpoints
    subset = _EVAL_TOKENS // (_EVAL_BATCH * corpus.sequence)
    return [
        f"model.d_model={shape.d_model}", f"model.n_layers={shape.n_layers}", f"model.n_heads={shape.n_heads}",
        f"model.vocab_size={corpus.vocabulary}", f"max_seq_len={corpus.sequence}", f"global_train_batch_size={batch}",
        f"max_duration={steps}ba", f"optimizer.lr={_learning_rate(shape)}", f"scheduler.t_warmup={steps // 10}ba",
        f"eval_interval={checks}ba", f"save_interval={checks}ba",
        *([f"eval_subset_num_batches={subset}"] if corpus.val_tokens > _EVAL_TOKENS else []),
    ]  # fmt: skip
