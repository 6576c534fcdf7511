"""Each optimizer against its formula, written out by hand."""

import math

import pytest
import torch

from ingot.config.load import validate
from ingot.config.model import ModelConfig
from ingot.config.training import OptimizerConfig
from ingot.model.gpt import GPT
from ingot.model.init import build_model
from ingot.training.optimizer import Optimizer, orthogonal, orthogonal_in_stacks

CONFIG = ModelConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=11, max_seq_len=8)


def make(name: str, **values: object) -> tuple[GPT, Optimizer]:
    model = build_model(CONFIG, 1, torch.device("cpu"))
    return model, Optimizer(
        validate(OptimizerConfig, {"name": name, **values}), {p: n for n, p in model.named_parameters()}
    )


@pytest.mark.parametrize(("elements", "sizes"), [(10, [1, 1, 1, 1, 1]), (32, [2, 2, 1]), (1000, [5])])
def test_stacks_of_matrices_are_as_large_as_allowed_but_never_empty(
    monkeypatch: pytest.MonkeyPatch, elements: int, sizes: list[int]
) -> None:
    """Stacks bound the memory that Muon takes; a matrix beyond the bound is processed alone."""
    stacks: list[torch.Tensor] = []
    monkeypatch.setattr("ingot.training.optimizer.STACK_ELEMENTS", elements)
    monkeypatch.setattr("ingot.training.optimizer.orthogonal", lambda stack: (stacks.append(stack), stack)[1])
    found = list(orthogonal_in_stacks(torch.full((4, 4), float(i)) for i in range(5)))
    assert [len(stack) for stack in stacks] == sizes
    assert [int(matrix[0, 0]) for matrix in found] == [0, 1, 2, 3, 4]


def set_gradients(model: GPT, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def run(name: str, steps: int = 3, multiplier: float = 0.5, **values: object) -> tuple[GPT, dict[str, torch.Tensor]]:
    model, optimizer = make(name, **values)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(steps):
        set_gradients(model, step)
        optimizer.set_lr(multiplier)
        optimizer.step()
    return model, start


def adamw_by_hand(start: torch.Tensor, grads: list[torch.Tensor], lr: float, decay_factor: float) -> torch.Tensor:
    p, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for t, g in enumerate((g.double() for g in grads), start=1):
        p = p * (1 - decay_factor)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        p = p - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
    return p


def gradients_of(name: str, steps: int) -> list[torch.Tensor]:
    model, _ = make("adamw")
    out = []
    for step in range(steps):
        set_gradients(model, step)
        out.append(dict(model.named_parameters())[name].grad.clone())
    return out


@pytest.mark.parametrize(
    ("name", "factor"),
    [("adamw", 0.01 * 0.5 * 0.1), ("decoupled_adamw", 0.5 * 0.1)],  # lr x multiplier x decay; multiplier x decay
)
@pytest.mark.parametrize(
    "parameter", ["blocks.0.attn.qkv.weight", "blocks.0.attn.qkv.bias", "norm_f.weight", "wte.weight"]
)
def test_adamw_follows_its_formula_and_decays_only_matrices(name: str, factor: float, parameter: str) -> None:
    model, start = run(name, lr=0.01, weight_decay=0.1)
    decay = factor if start[parameter].ndim == 2 else 0.0
    expected = adamw_by_hand(start[parameter], gradients_of(parameter, 3), 0.01 * 0.5, decay)
    torch.testing.assert_close(dict(model.named_parameters())[parameter].double(), expected, rtol=1e-5, atol=1e-6)


def test_decay_of_all_reaches_biases_and_norms() -> None:
    model, start = run("decoupled_adamw", lr=0.01, weight_decay=0.1, decay="all")
    for parameter in ("blocks.0.attn.qkv.bias", "norm_f.weight"):
        expected = adamw_by_hand(start[parameter], gradients_of(parameter, 3), 0.01 * 0.5, 0.5 * 0.1)
        torch.testing.assert_close(dict(model.named_parameters())[parameter].double(), expected, rtol=1e-5, atol=1e-6)


def test_lion_follows_its_formula() -> None:
    name = "blocks.0.mlp.up.weight"
    model, start = run("lion", lr=0.01, betas=[0.9, 0.99], weight_decay=0.1)
    p, m = start[name].double(), torch.zeros_like(start[name]).double()
    for g in gradients_of(name, 3):
        p = p * (1 - 0.5 * 0.1)
        p = p - 0.005 * torch.sign(0.9 * m + 0.1 * g.double())
        m = 0.99 * m + 0.01 * g.double()
    torch.testing.assert_close(dict(model.named_parameters())[name].double(), p, rtol=1e-5, atol=1e-6)


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw() -> None:
    model, optimizer = make("muon", lr=0.01)
    owned = {label: {optimizer.names[p] for g in part.param_groups for p in g["params"]}
             for label, part in optimizer.parts.items()}  # fmt: skip
    assert owned["Muon"] == {f"blocks.0.{n}.weight" for n in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")}
    assert owned["Muon"] | owned["AdamW"] == set(dict(model.named_parameters()))
    assert not owned["Muon"] & owned["AdamW"]


def test_a_muon_update_is_nearly_orthogonal() -> None:
    model, start = run("muon", steps=1, multiplier=1.0, lr=0.01)
    name = "blocks.0.attn.out.weight"
    update = (start[name] - dict(model.named_parameters())[name]).double()
    values = torch.linalg.svdvals(update) / (0.01 * 0.2 * math.sqrt(16))  # scaled to AdamW's root mean square
    assert values.min() > 0.5 and values.max() < 1.5


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_computes_the_same_for_matrices_in_stacks_as_one_by_one(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.training.optimizer.STACK_ELEMENTS", 3 * shape[0] * shape[1])  # stacks of 3, 3 and 1
    matrices = [torch.randn(shape, generator=torch.Generator().manual_seed(n)) * 10.0 ** (n - 3) for n in range(7)]
    together = list(orthogonal_in_stacks(iter(matrices)))
    assert len(together) == 7
    for matrix, found in zip(matrices, together, strict=True):
        torch.testing.assert_close(found, orthogonal(matrix), rtol=1e-5, atol=1e-6)


def test_muon_is_torchs_own() -> None:
    name = "blocks.0.mlp.up.weight"
    model, start = run("muon", multiplier=1.0, lr=0.01, weight_decay=0.1, momentum=0.9)
    twin = torch.nn.Parameter(start[name])
    theirs = torch.optim.Muon([twin], lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients_of(name, 3):
        twin.grad = gradient
        theirs.step()
    torch.testing.assert_close(dict(model.named_parameters())[name], twin, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "labels"),
    [("adamw", ["lr-AdamW/group0", "lr-AdamW/group1"]),
     ("decoupled_adamw", ["lr-DecoupledAdamW/group0", "lr-DecoupledAdamW/group1"]),
     ("lion", ["lr-DecoupledLionW/group0", "lr-DecoupledLionW/group1"]),
     ("muon", ["lr-AdamW/group0", "lr-AdamW/group1", "lr-Muon/group0"])],
)  # fmt: skip
def test_learning_rates_carry_the_names_of_dashboards(name: str, labels: list[str]) -> None:
    _, optimizer = make(name, lr=0.25)
    optimizer.set_lr(0.5)
    assert optimizer.learning_rates() == dict.fromkeys(labels, 0.125)


@pytest.mark.parametrize("name", ["adamw", "decoupled_adamw", "lion", "muon"])
def test_state_moved_to_another_optimizer_continues_bit_for_bit(name: str) -> None:
    model, optimizer = make(name, lr=0.01, weight_decay=0.1)
    for step in range(2):
        set_gradients(model, step)
        optimizer.step()
    twin, other = make(name, lr=0.01, weight_decay=0.1)
    twin.load_state_dict(model.state_dict())
    state = {n: t.clone() for n, t in optimizer.state_tensors().items()}
    for name, slot in other.state_slots((n, t.dtype, t.shape) for n, t in state.items()):
        slot.copy_(state[name])
    for m, o in ((model, optimizer), (twin, other)):
        set_gradients(m, 9)
        o.step()
    for (n, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), n


@pytest.mark.parametrize("overflowing", [None, 0.0, 1.0])
def test_adamw_equals_torchs_own_to_the_last_bit(overflowing: float | None) -> None:
    name = "blocks.0.mlp.up.weight"
    model, optimizer = make("adamw", lr=0.01, weight_decay=0.1)
    own = dict(model.named_parameters())[name]
    twin = torch.nn.Parameter(own.detach().clone())
    theirs = torch.optim.AdamW([twin], lr=0.005, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for step in range(4):
        overflow = None if overflowing is None or step != 2 else torch.tensor(overflowing)
        set_gradients(model, step)
        twin.grad = own.grad.clone()
        theirs.found_inf = overflow
        optimizer.set_lr(0.5)
        optimizer.step(overflow)
        theirs.step()
    assert torch.equal(own, twin)
    state = {key: value for key, value in optimizer.state_tensors().items() if key.endswith(f"/{name}")}
    assert state.keys() == {f"{key}/{name}" for key in theirs.state[twin]}
    for key, value in theirs.state[twin].items():
        assert torch.equal(state[f"{key}/{name}"], value) and state[f"{key}/{name}"].dtype == value.dtype
    assert float(theirs.state[twin]["step"]) == (3 if overflowing else 4)
