"""One optimizer step: the same result however the batch is cut."""

import numpy as np
import pytest
import torch

from ingot.config.load import validate
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.data.loading.token_dataset import IGNORE
from ingot.model.init import build_model
from ingot.model.kernels import attach
from ingot.parallel.build import LossModel
from ingot.training.device import peak_flops
from ingot.training.optimizer import Optimizer
from ingot.training.step import TrainStep

CPU = torch.device("cpu")


def make_step(micro: int, **values: object) -> TrainStep:
    model = {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 24}
    base = {"model": model, "max_seq_len": 24, "data": "x", "global_train_batch_size": 8, "precision": "fp32"}
    config = validate(RunConfig, base | values)
    gpt = build_model(config.model, 1, CPU)
    gpt.activation_checkpointing = config.recompute
    attach(gpt, device=CPU, precision=config.precision)
    return TrainStep(
        config, LossModel(gpt), Optimizer(config.optimizer, {p: n for n, p in gpt.named_parameters()}), CPU, micro
    )


def make_batch(uneven: bool) -> Batch:
    rng = np.random.default_rng(5)
    tokens, labels = rng.integers(0, 97, (8, 24)), rng.integers(0, 97, (8, 24))
    if uneven:  # sequences with 24, 21, ... loss tokens, and one with none
        for row in range(8):
            labels[row, 24 - 3 * row :] = IGNORE
        labels[7] = IGNORE
    return Batch(tokens, labels, np.arange(8))


def gradients(step: TrainStep, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
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
        logits = step.model.gpt(torch.from_numpy(batch.tokens))
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten(), ignore_index=IGNORE
        )
    assert float(step.accumulate(batch)) == pytest.approx(float(expected), rel=1e-6)


def test_a_batch_without_loss_tokens_gives_zero_not_nan() -> None:
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
        _, norm = step.run(batch)
        change = [(a.detach() - b).norm() for a, b in zip(step.model.parameters(), before, strict=True)]
        return float(norm), float(torch.stack(change).norm())

    clipped_norm, clipped_move = moved(limit)
    free_norm, free_move = moved(None)
    assert clipped_norm == pytest.approx(true_norm, rel=1e-5) == free_norm
    assert free_move / clipped_move == pytest.approx(10, rel=0.01)


def test_bf16_trains_with_fp32_weights_and_stays_close_to_fp32() -> None:
    batch = make_batch(False)
    exact, _ = make_step(8).run(batch)
    step = make_step(8, precision="bf16")
    rough, _ = step.run(batch)
    assert all(p.dtype == torch.float32 for p in step.model.parameters())
    assert all(t.dtype == torch.float32 for t in step.optimizer.state_tensors().values())
    assert float(rough) != float(exact)
    assert float(rough) == pytest.approx(float(exact), rel=0.02)


def test_dropout_is_drawn_from_the_seed() -> None:
    batch = make_batch(False)
    model = {"d_model": 48, "n_heads": 4, "n_layers": 2, "vocab_size": 97, "max_seq_len": 24, "resid_pdrop": 0.3,
             "attn_pdrop": 0.3, "emb_pdrop": 0.3}  # fmt: skip

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(make_step(8, model=model).accumulate(batch))

    assert loss(1) == loss(1) != loss(2)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_fp16_leaves_the_weights_alone_when_a_gradient_overflows_and_halves_the_scale(optimizer: str) -> None:
    batch = make_batch(False)
    step = make_step(4, precision="fp16", optimizer={"name": optimizer, "lr": 0.01})
    before = [p.detach().clone() for p in step.model.parameters()]
    step.scaler.factor.fill_(1e30)
    loss, norm = step.run(batch)
    assert torch.isfinite(loss) and not torch.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(step.model.parameters(), before, strict=True))
    assert step.scaler.get_scale() == pytest.approx(5e29)
    step.scaler.factor.fill_(1024.0)
    step.run(batch)
    assert not any(torch.equal(a, b) for a, b in zip(step.model.parameters(), before, strict=True))
    assert all(p.isfinite().all() for p in step.model.parameters())
    assert step.scaler.state_dict() == {"scale": 1024.0, "calm_steps": 1}


def test_fp16_gives_the_norm_and_the_update_of_fp32_nearly() -> None:
    batch = make_batch(False)
    exact, norm = make_step(4).run(batch)
    loss, scaled = make_step(4, precision="fp16").run(batch)
    assert float(loss) == pytest.approx(float(exact), rel=1e-3)
    assert float(scaled) == pytest.approx(float(norm), rel=1e-2)


def test_timing_the_peak_leaves_the_random_numbers_of_the_run_alone() -> None:
    """Or dropout would depend on it: a GPU with a data sheet is not timed, nor is a second run of a process."""
    before = torch.get_rng_state()
    peak_flops.__wrapped__(CPU, "fp32")
    assert torch.equal(torch.get_rng_state(), before)


class Recorded:
    """Stands for a CUDA graph: the same pass, and a count of its uses."""

    def __init__(self, step: TrainStep):
        self.step, self.begun, self.rows = step, 0, []

    def begin(self) -> None:
        self.begun += 1

    def run(self, inputs: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(inputs))
        return self.step.forward_backward(inputs, labels, divisor)


def test_a_graph_stands_for_whole_microbatches_alone() -> None:
    batch = make_batch(uneven=True)
    plain, step = make_step(3), make_step(3)
    step.graph = graph = Recorded(step)
    expected, found = gradients(plain, batch), gradients(step, batch)
    assert (graph.begun, graph.rows) == (1, [3, 3])  # of 8 sequences the last 2 are another shape
    assert found[0] == expected[0] and all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    step.retry_with(2)
    assert step.graph is None  # recorded for microbatches of 3
