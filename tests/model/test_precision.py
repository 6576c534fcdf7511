"""bf16 copies of the weights and 8-bit products: what they promise, shown on the CPU."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ingot.config.model import ModelConfig
from ingot.model.gpt import GPT
from ingot.model.init import build_model
from ingot.model.kernels import attach, refresh, use_fp8
from ingot.model.kernels.bf16_weights import Bf16Embedding, Bf16Linear, CopiedWeight
from ingot.model.kernels.fp8.linear import BACKWARD, FORWARD, Fp8Linear, quantize, why_no_fp8
from ingot.parallel.loss_model import LossModel

CPU = torch.device("cpu")


def train(copies: bool, compiled: bool, recompute: str | None = None) -> tuple[list[float], list[Tensor]]:
    model = build_model(ModelConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=200, max_seq_len=32), 1, CPU)
    model.activation_checkpointing = recompute
    if copies:
        attach(model, device=CPU, precision="bf16")
    model.residual_dtype = torch.bfloat16
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = LossModel(model)
    if compiled:
        run.compile(backend="aot_eager", dynamic=False)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(3):
        run.train()
        refresh(run)
        for _ in range(2):
            tokens = torch.randint(0, 200, (4, 33), generator=generator)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(tokens[:, :-1], tokens[:, 1:]) / 100
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


def test_bf16_copies_train_to_the_same_bits_as_autocast() -> None:
    losses, weights = train(copies=False, compiled=False)
    for compiled, recompute in product((False, True), (None, "full", "selective")):
        copied_losses, trained = train(copies=True, compiled=compiled, recompute=recompute)
        assert copied_losses == losses
        assert all(torch.equal(a, b) for a, b in zip(weights, trained, strict=True))


def test_an_embedding_adds_its_gradient_where_the_others_add_theirs() -> None:
    plain, shared = nn.Embedding(50, 8), nn.Embedding(50, 8)
    shared.load_state_dict(plain.state_dict())
    working = CopiedWeight(shared.weight)
    layer = Bf16Embedding(shared, working)
    assert torch.equal(working.value(), plain.weight.bfloat16())
    tokens, slopes = torch.randint(0, 50, (2, 3, 40)), torch.randn(2, 3, 40, 8)
    for rows, slope in zip(tokens, slopes, strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = layer(rows)
        assert torch.equal(found, plain(rows))
        found.backward(slope)
        plain(rows).backward(slope)
    assert shared.weight.grad is working.grad_buffer()
    torch.testing.assert_close(working.grad_buffer(), plain.weight.grad)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(tokens[0]), plain(tokens[0]))


KINDS: list[dict] = [{"positions": "learned"}, {"positions": "alibi"}, {"positions": "rotary"},
                     {"positions": "rotary", "document_mask": True, "document_positions": True, "eos_token_id": 7}]  # fmt: skip
RECOMPUTED = [None, "full", "selective"]


@pytest.mark.parametrize(
    ("more", "recompute"),
    [  # each kind and each amount once; all pairs with the slow tests
        pytest.param(more, recompute, marks=[] if (k - r) % 3 == 0 else pytest.mark.slow)
        for k, more in enumerate(KINDS) for r, recompute in enumerate(RECOMPUTED)
    ],
)  # fmt: skip
def test_a_model_is_compiled_in_one_piece(more: dict, recompute: str | None) -> None:
    torch._dynamo.reset()  # each of these is another program of the same code
    config = ModelConfig(d_model=32, n_heads=2, n_layers=2, vocab_size=50, max_seq_len=8, **more)
    model = build_model(config, 1, CPU)
    model.activation_checkpointing = recompute
    attach(model, device=CPU, precision="bf16")
    model.wte = Bf16Embedding(model.wte, CopiedWeight(model.wte.weight))  # as on a GPU
    model.train()
    tokens = torch.randint(0, 50, (2, 9))
    loss = torch.compile(model.loss, backend="aot_eager", dynamic=False, fullgraph=True)  # fails where it would break
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters() if p.ndim > 1)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_a_compiled_block_whose_work_is_repeated_keeps_its_input_alone(device: str) -> None:
    torch._dynamo.reset()
    where = torch.device(device)
    model = build_model(ModelConfig(d_model=32, n_heads=2, n_layers=3, vocab_size=48, max_seq_len=64), 1, where)
    attach(model, device=where, precision="bf16")
    refresh(model.train())
    x, rows = torch.randn(2, 64, 32, device=where, dtype=torch.bfloat16), 2 * 64
    attend = model.attention_op.prepare(64, 64, where)
    kept: dict[str | None, set[tuple[int, int]]] = {}
    for kind in (None, "full"):
        model.activation_checkpointing = kind
        block, found = model.blocks["1"], set()
        block.compile(dynamic=False, backend="aot_eager")

        def note(tensor: Tensor, found: set[tuple[int, int]] = found) -> Tensor:
            if tensor.numel() >= rows * 32 and tensor.numel() % rows == 0 and tensor.data_ptr() != x.data_ptr():
                found.add((tensor.data_ptr(), tensor.numel()))
            return tensor

        keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with keeping, torch.autocast(device, dtype=torch.bfloat16):
            block(x.clone().requires_grad_(), None, attend)
        own = {p.numel() for p in block.parameters()}
        kept[kind] = {(address, size) for address, size in found if size not in own}
    assert len(kept["full"]) <= 1 < len(kept[None])  # the input


def test_blocks_compiled_one_by_one_share_a_program() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = build_model(ModelConfig(d_model=32, n_heads=2, n_layers=5, vocab_size=50, max_seq_len=8), 1, CPU)
    attach(model, device=CPU, precision="bf16")
    for block in model.blocks.values():
        block.compile(backend="aot_eager", dynamic=False)
    tokens = torch.randint(0, 50, (2, 9))
    for _ in range(2):
        refresh(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        model.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1


def test_bf16_copies_follow_every_change_when_refreshed() -> None:
    model = build_model(ModelConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=50, max_seq_len=8), 1, CPU)
    attach(model, device=CPU, precision="bf16")
    layer = model.blocks["0"].mlp.up
    assert isinstance(layer, Bf16Linear)
    for mode in (True, False):
        model.train(mode)
        with torch.no_grad():
            layer.weight.mul_(3.0)
        assert not torch.equal(layer.working.value(), layer.weight.bfloat16())
        refresh(model)
        assert torch.equal(layer.working.value(), layer.weight.bfloat16())


def test_refreshing_puts_gradients_that_were_dropped_back_at_zero() -> None:
    model = build_model(ModelConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=50, max_seq_len=8), 1, CPU)
    attach(model, device=CPU, precision="bf16")
    layer = model.blocks["0"].mlp.up
    gradient = layer.weight.grad
    gradient.fill_(3.0)
    refresh(model)
    assert layer.weight.grad is gradient and bool((gradient == 3).all())  # microbatches before it count
    model.zero_grad(set_to_none=True)
    refresh(model)
    assert layer.weight.grad is gradient and not gradient.any()  # at the same address, as CUDA graphs need


def test_bf16_copies_are_neither_saved_nor_used_in_fp32() -> None:
    config = ModelConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=50, max_seq_len=8)
    plain, copied = build_model(config, 1, CPU), build_model(config, 1, CPU)
    attach(copied, device=CPU, precision="bf16")
    assert list(plain.state_dict()) == list(copied.state_dict())
    copied.residual_dtype = None
    tokens = torch.arange(8)[None]
    assert torch.equal(plain(tokens), copied(tokens))


def fp8_layer() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32))
    assert use_fp8(model) == 1
    return model[0], torch.randn(4, 8, 48, requires_grad=True), torch.randn(4, 8, 32)


def test_an_fp8_layer_equals_quantizing_by_hand() -> None:
    layer, x, slope = fp8_layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.backward(slope.bfloat16())

    def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
        t = t.bfloat16().float()
        scale = t.abs().max() / torch.finfo(dtype).max
        return (t / scale).to(dtype).float() * scale

    x8, w8 = rounded(x.detach().flatten(0, 1), FORWARD), rounded(layer.weight.detach(), FORWARD)
    d8 = rounded(slope.bfloat16().float().flatten(0, 1), BACKWARD)
    expected = (x8 @ w8.t()).bfloat16() + layer.bias.bfloat16()
    torch.testing.assert_close(y.flatten(0, 1), expected, atol=2e-2, rtol=1e-2)
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1), d8 @ w8, atol=5e-3, rtol=1e-2)
    torch.testing.assert_close(layer.weight.grad, d8.t() @ x8, atol=1e-4, rtol=1e-4)
    assert layer.weight.grad.dtype == torch.float32
    assert layer.bias.grad is not None
    torch.testing.assert_close(layer.bias.grad, slope.sum((0, 1)), atol=5e-2, rtol=1e-2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), y)


def test_the_8_bit_weight_follows_the_weight_and_stays_where_it_is() -> None:
    layer, _, _ = fp8_layer()
    assert isinstance(layer, Fp8Linear) and layer.quantized is not None
    places = [tensor.data_ptr() for tensor in layer.quantized]
    with torch.no_grad():
        layer.weight.mul_(-3.0)
    assert not torch.equal(layer.quantized[2], quantize(layer.weight, FORWARD, True)[2])
    layer.refresh()
    assert [tensor.data_ptr() for tensor in layer.quantized] == places
    for kept, expected in zip(layer.quantized, quantize(layer.weight, FORWARD, True), strict=True):
        assert torch.equal(kept.float(), expected.float())


def test_fp8_keeps_the_largest_value_and_two_digits_of_the_rest() -> None:
    x = (torch.randn(64, 64) * 1e-4).bfloat16().float()
    for dtype, digits in ((FORWARD, 0.07), (BACKWARD, 0.13)):
        narrow, columns, scale = quantize(x, dtype, True)
        assert torch.equal(columns.float(), narrow.float().t()) and columns.is_contiguous()
        back = narrow.float() * scale
        assert back.abs().max() == x.abs().max()
        seen = x.abs() > x.abs().max() * 1e-2
        assert ((back / x - 1).abs()[seen] < digits).all()
    assert not quantize(torch.zeros(4, 4), FORWARD, False)[0].float().any()


def test_fp8_falls_back_to_bf16_with_the_reason_where_the_hardware_lacks_it() -> None:
    model = GPT(ModelConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=50, max_seq_len=8))
    notes = attach(model, device=CPU, precision="fp8")
    assert f"bf16 instead of fp8: {why_no_fp8(CPU)}" in notes
    assert type(model.blocks["0"].mlp.up) is Bf16Linear


@pytest.mark.parametrize(
    ("precision", "tensor_parallel"), [("fp32", False), ("fp16", False), ("bf16", False), ("bf16", True)]
)
def test_on_a_cpu_only_the_attention_is_told_of(precision: str, tensor_parallel: bool) -> None:
    model = build_model(ModelConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=50, max_seq_len=16), 1, CPU)
    (note,) = attach(model, device=CPU, precision=precision, tensor_parallel=tensor_parallel)
    assert note.startswith("attention: sdpa")
    linear = [layer for layer in model.blocks.modules() if isinstance(layer, Bf16Linear)]
    assert bool(linear) == (precision == "bf16" and not tensor_parallel)
