"""One optimizer step: the same result however the batch is cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ingot.config.load import validate
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.data.loading.token_dataset import IGNORE
from ingot.parallel.executors import single
from ingot.parallel.executors.base import squared_norm
from ingot.parallel.executors.device import peak_flops
from ingot.parallel.executors.oom import OutOfMemory
from ingot.parallel.executors.single import SingleProcess
from ingot.parallel.loss_model import BuildOptions, build_loss_model
from ingot.training.loss_scale import LossScale
from ingot.training.optimizer import Optimizer
from ingot.training.step import StepResult, train_step

CPU = torch.device("cpu")


class Step:
    """An executor, its optimizer and its scaler."""

    def __init__(self, config: RunConfig, executor: SingleProcess):
        self.config, self.executor, self.model = config, executor, executor.model.gpt
        self.optimizer = Optimizer(config.optimizer, {p.tensor: p.name for p in executor.parameters})
        self.scaler = LossScale(CPU, enabled=config.precision == "fp16")

    def accumulate(self, batch: Batch) -> torch.Tensor:
        return self.executor.accumulate(batch)

    def run(self, batch: Batch) -> StepResult:
        return train_step(self.executor, self.optimizer, self.scaler, batch, self.config.gradient_clipping)


def make_step(micro: int, **values: object) -> Step:
    model = {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 24}
    base = {"model": model, "max_seq_len": 24, "data": "x", "global_train_batch_size": 8, "precision": "fp32"}
    config = validate(RunConfig, base | values)
    model, _ = build_loss_model(config.model, 1, BuildOptions(CPU, config.precision, config.max_seq_len))
    executor = SingleProcess(model, config, CPU)
    executor.microbatch = micro
    executor.set_recompute(config.recompute)
    executor.weights_changed()
    return Step(config, executor)


def make_batch(uneven: bool) -> Batch:
    rng = np.random.default_rng(5)
    tokens, labels = rng.integers(0, 97, (8, 24)), rng.integers(0, 97, (8, 24))
    if uneven:  # sequences with 24, 21, ... loss tokens, and one with none
        for row in range(8):
            labels[row, 24 - 3 * row :] = IGNORE
        labels[7] = IGNORE
    return Batch(tokens, labels, np.arange(8))


def gradients(step: Step, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    loss = float(step.accumulate(batch))
    return loss, {name: p.grad.double() for name, p in step.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_microbatches_change_neither_loss_nor_gradients(micro: int, uneven: bool) -> None:
    batch = make_batch(uneven)
    whole_loss, whole = gradients(make_step(8), batch)
    loss, parts = gradients(make_step(micro), batch)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert parts.keys() == whole.keys()
    difference = torch.stack([(parts[n] - whole[n]).norm() for n in whole]).norm()
    assert difference <= 1e-6 * torch.stack([g.norm() for g in whole.values()]).norm()


def test_the_loss_is_the_mean_over_tokens_not_over_sequences() -> None:
    batch = make_batch(uneven=True)
    step = make_step(2)
    with torch.no_grad():
        logits = step.model(torch.from_numpy(batch.tokens))
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten(), ignore_index=IGNORE
        )
    assert float(step.accumulate(batch)) == pytest.approx(float(expected), rel=1e-6)


def test_a_batch_without_loss_tokens_has_a_loss_of_zero_not_nan() -> None:
    batch = make_batch(False)
    empty = Batch(batch.tokens, np.full_like(batch.labels, IGNORE), batch.samples)
    assert float(make_step(4).accumulate(empty)) == 0.0


@pytest.mark.parametrize("mode", [True, "full", "selective"])
def test_recomputing_blocks_gives_the_same_gradients(mode: object) -> None:
    batch = make_batch(False)
    _, plain = gradients(make_step(4), batch)
    _, again = gradients(make_step(4, activation_checkpointing=mode), batch)
    for name in plain:
        assert torch.equal(plain[name], again[name]), name


def test_the_logged_norm_is_from_before_clipping_and_the_update_from_after() -> None:
    batch = make_batch(False)
    _, raw = gradients(make_step(8), batch)
    true_norm = float(torch.stack([g.norm() for g in raw.values()]).norm())
    limit = true_norm / 10
    optimizer = {"name": "adamw", "lr": 0.1, "eps": 1e3}  # a large eps makes the update proportional to the gradient

    def moved(clip: float | None) -> tuple[float, float]:
        step = make_step(8, gradient_clipping=clip, optimizer=optimizer)
        before = [p.detach().clone() for p in step.model.parameters()]
        norm = step.run(batch).grad_norm
        change = [(a.detach() - b).norm() for a, b in zip(step.model.parameters(), before, strict=True)]
        return float(norm), float(torch.stack(change).norm())

    clipped_norm, clipped_move = moved(limit)
    free_norm, free_move = moved(None)
    assert clipped_norm == pytest.approx(true_norm, rel=1e-5) == free_norm
    assert free_move / clipped_move == pytest.approx(10, rel=0.01)


def test_bf16_trains_with_fp32_weights_and_stays_close_to_fp32() -> None:
    batch = make_batch(False)
    exact = make_step(8).run(batch).loss_share
    step = make_step(8, precision="bf16")
    rough = step.run(batch).loss_share
    assert all(p.dtype == torch.float32 for p in step.model.parameters())
    assert all(t.dtype == torch.float32 for t in step.optimizer.state_tensors().values())
    assert float(rough) != float(exact)
    assert float(rough) == pytest.approx(float(exact), rel=0.02)


def test_dropout_depends_on_seed_and_step_and_on_nothing_drawn_before() -> None:
    batch = make_batch(False)
    model = {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 24, "resid_pdrop": 0.3,
             "attn_pdrop": 0.3, "emb_pdrop": 0.3}  # fmt: skip

    def loss(seed: int, step: int, drawn_before: int) -> float:
        torch.manual_seed(drawn_before)
        made = make_step(8, model=model, seed=seed)
        made.executor.begin_step(step)
        return float(made.accumulate(batch))

    assert loss(1, 5, 0) == loss(1, 5, 1)
    assert len({loss(1, 5, 0), loss(2, 5, 0), loss(1, 6, 0)}) == 3


@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_dropout_is_the_same_for_every_microbatch_size(recompute: bool | str) -> None:
    batch = make_batch(uneven=True)
    model = {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 24, "resid_pdrop": 0.1,
             "attn_pdrop": 0.1, "emb_pdrop": 0.1}  # fmt: skip
    loss, expected = gradients(make_step(8, model=model), batch)
    for micro in (1, 3):
        found = gradients(make_step(micro, model=model, activation_checkpointing=recompute), batch)
        assert found[0] == pytest.approx(loss, rel=1e-6)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_fp16_leaves_the_weights_alone_when_a_gradient_overflows_and_halves_the_scale(optimizer: str) -> None:
    batch = make_batch(False)
    step = make_step(4, precision="fp16", optimizer={"name": optimizer, "lr": 0.01})
    before = [p.detach().clone() for p in step.model.parameters()]
    step.scaler.factor.fill_(1e30)
    result = step.run(batch)
    assert torch.isfinite(result.loss_share) and not torch.isfinite(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), before, strict=True))
    assert step.scaler.get_scale() == pytest.approx(5e29)
    step.scaler.factor.fill_(1024.0)
    step.run(batch)
    assert not any(torch.equal(a, b) for a, b in zip(step.model.parameters(), before, strict=True))
    assert all(p.isfinite().all() for p in step.model.parameters())
    assert step.scaler.state_dict() == {"scale": 1024.0, "calm_steps": 1}


def test_a_loss_scale_goes_on_from_its_state() -> None:
    scaler, restored = (LossScale(CPU, enabled=True) for _ in range(2))
    for overflow in (1.0, 0.0, 0.0):
        scaler.update(torch.tensor(overflow))
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict() == {"scale": 32768.0, "calm_steps": 2}
    restored.load_state_dict({})  # of a run in another precision
    assert restored.state_dict() == scaler.state_dict()


def test_fp16_gives_the_norm_and_the_update_of_fp32_nearly() -> None:
    batch = make_batch(False)
    exact = make_step(4).run(batch)
    scaled = make_step(4, precision="fp16").run(batch)
    assert float(scaled.loss_share) == pytest.approx(float(exact.loss_share), rel=1e-3)
    assert float(scaled.grad_norm) == pytest.approx(float(exact.grad_norm), rel=1e-2)


@pytest.mark.parametrize(("precision", "choices"), [("fp32", {True}), ("fp16", {True}), ("bf16", {True, False})])
def test_only_bf16_has_copies_of_weights_to_hold_or_not(precision: str, choices: set[bool]) -> None:
    assert make_step(4, precision=precision).executor.hold_choices.keys() == choices


def test_timing_the_peak_leaves_the_random_numbers_of_the_run_alone() -> None:
    """Or dropout would depend on it: a GPU with a data sheet is not timed, nor is a second run of a process."""
    before = torch.get_rng_state()
    peak_flops.__wrapped__(CPU, "fp32")
    assert torch.equal(torch.get_rng_state(), before)


class Recorded:
    """Stands for a CUDA graph: the same pass, and a count of its uses."""

    def __init__(self, executor: SingleProcess):
        self.executor, self.begun, self.rows = executor, 0, []

    def begin(self) -> None:
        self.begun += 1

    def run(self, inputs: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(inputs))
        return self.executor.forward_backward(inputs, labels, divisor)


def test_a_graph_is_used_for_whole_microbatches_only() -> None:
    batch = make_batch(uneven=True)
    plain, step = make_step(3), make_step(3)
    step.executor.graph = graph = Recorded(step.executor)  # type: ignore[assignment]
    expected, found = gradients(plain, batch), gradients(step, batch)
    assert (graph.begun, graph.rows) == (1, [3, 3])  # of 8 sequences the last 2 are another shape
    assert found[0] == expected[0] and all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


def test_a_batch_that_does_not_fit_is_repeated_in_microbatches_half_as_large() -> None:
    """A real allocation that fails, beyond two sequences, with half of the gradients already added."""
    batch, said = make_batch(uneven=True), []
    expected, step = gradients(make_step(2), batch), make_step(4)
    step.executor.messages = SimpleNamespace(warn=said.append)  # type: ignore[assignment]
    step.executor.graph = Recorded(step.executor)  # type: ignore[assignment]
    plain, calls = step.executor.model.forward, []

    def limited(tokens: torch.Tensor, labels: torch.Tensor, keys: None) -> torch.Tensor:
        calls.append(len(tokens))
        if calls == [4, 4]:
            torch.empty(1 << 60)
        return plain(tokens, labels, keys)

    step.executor.model.forward = limited  # type: ignore[method-assign]
    step.executor.begin_step(6)
    found = gradients(step, batch)
    assert calls == [4, 4, 2, 2, 2, 2] and step.executor.microbatch == 2
    assert said == ["out of memory at batch 7; trying it again with microbatches of 2"]
    assert step.executor.graph is None  # captured for microbatches of 4
    assert found[0] == expected[0] and all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.parametrize("failures", [1, 2])
def test_clipping_that_runs_out_of_memory_is_tried_again_and_then_says_where(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    step, left = make_step(4), [failures]

    def limited(tensors: list[torch.Tensor]) -> torch.Tensor:
        if left[0]:
            left[0] -= 1
            torch.empty(1 << 60)
        return squared_norm(tensors)

    monkeypatch.setattr(single, "squared_norm", limited)
    step.executor.begin_step(6)
    step.accumulate(make_batch(uneven=False))
    if failures == 1:
        assert float(step.executor.clip_gradients(1.0)) > 0
    else:
        with pytest.raises(
            OutOfMemory, match="out of memory while clipping the gradients of batch 7 with microbatches"
        ):
            step.executor.clip_gradients(1.0)


def test_an_evaluation_that_fails_leaves_the_model_in_training_mode() -> None:
    """Otherwise it would no longer learn: dropout, recomputation and gradient buffers are off in evaluation mode."""
    step = make_step(4)
    with pytest.raises(RuntimeError, match="out of memory"), step.executor.evaluating():
        raise RuntimeError("out of memory")
    assert step.model.training
