"""Our Triton kernels against the same mathematics in fp64 or fp32, on fresh random inputs, in both directions."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    torch.seed()


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


PLAIN = (None, 0.0, True)


@pytest.mark.parametrize(
    ("batch", "time", "groups", "per_group", "width", "window", "documents", "alibi"),
    [(2, 300, 3, 1, 64, *PLAIN), (1, 2048, 2, 2, 64, *PLAIN), (1, 333, 2, 1, 80, *PLAIN), (1, 190, 2, 1, 96, *PLAIN),
     (2, 1000, 2, 1, 128, *PLAIN), (1, 65, 1, 4, 128, *PLAIN), (1, 1, 1, 1, 64, *PLAIN),
     (2, 300, 3, 1, 64, 70, 0.0, True), (2, 300, 3, 1, 64, 1, 0.0, True), (2, 300, 3, 1, 64, None, 0.01, False),
     (1, 2048, 2, 2, 64, 100, 0.05, True), (1, 333, 2, 1, 80, None, 0.01, True), (2, 1000, 2, 1, 128, 70, 0.0, False),
     (2, 1000, 2, 1, 128, 100, 0.05, True), (1, 65, 1, 4, 128, None, 0.05, True)],
)  # fmt: skip
def test_alibi_attention_equals_the_formula(
    batch: int, time: int, groups: int, per_group: int, width: int, window: int | None, documents: float, alibi: bool
) -> None:
    """With sliding windows, with documents, and without slopes."""
    from ingot.model.attention import alibi_slopes, causal_bias
    from ingot.model.kernels.alibi_attention import alibi_attention
    from ingot.model.kernels.fused_attention import visible_span

    heads, slots = groups * per_group, (slice(0, per_group), per_group, per_group + 1)
    slopes = alibi_slopes(heads, 8).cuda() * alibi
    numbered = (torch.rand(batch, time, device="cuda") < documents).cumsum(1) if documents else None
    qkv = torch.randn(batch, time, groups, per_group + 2, width, device="cuda").bfloat16()
    slope = torch.randn(batch, time, heads, width, device="cuda").bfloat16()
    exact, fast = qkv.double().requires_grad_(), qkv.clone().requires_grad_()
    q = exact[:, :, :, :per_group].flatten(2, 3).transpose(1, 2)
    k, v = (exact[:, :, :, slot].repeat_interleave(per_group, 2).transpose(1, 2) for slot in slots[1:])
    scores = q @ k.mT / width**0.5 + causal_bias(slopes, time, time, qkv.device, window).double()
    if numbered is not None:
        scores = scores.masked_fill(numbered[:, None, :, None] != numbered[:, None, None, :], float("-inf"))
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    expected.backward(slope.double())
    bias = torch.zeros(groups * (per_group + 2) * width, device="cuda", requires_grad=True)  # added to qkv already
    found, _, _ = alibi_attention(fast, slopes, width**-0.5, visible_span(time, window, numbered, qkv.device), bias)
    found.backward(slope)
    assert apart(found, expected) < 4e-3
    assert exact.grad is not None and fast.grad is not None
    for slot in slots:
        if (time > 1 and window != 1) or slot == per_group + 1:  # a lone token's scores have no gradient
            assert apart(fast.grad[:, :, :, slot], exact.grad[:, :, :, slot]) < 6e-3
    assert bias.grad is not None and apart(bias.grad, exact.grad.sum((0, 1)).flatten()) < 1e-2


def test_alibi_attention_looks_only_as_far_as_matters_and_no_less() -> None:
    """Large keys far away must be seen, however steep the slope."""
    from ingot.model.kernels.alibi_attention import alibi_attention

    qkv = torch.randn(1, 1024, 1, 3, 64, device="cuda").bfloat16()
    slopes = torch.tensor([0.25], device="cuda")
    assert int(alibi_attention(qkv, slopes, 0.125)[2]) < 600
    qkv[0, 5, 0, 1] = 80 * qkv[0, -1, 0, 0]  # a key that the last query likes far more than it is away
    out, _, reach = alibi_attention(qkv, slopes, 0.125)
    assert int(reach) > 1024
    torch.testing.assert_close(out[0, -1, 0], qkv[0, 5, 0, 2], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("tokens", "width", "vocab", "rows"), [(1000, 768, 50257, 50304), (333, 128, 1000, 1024)])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("loud", [False, True])
def test_linear_cross_entropy_equals_the_two_apart(
    tokens: int, width: int, vocab: int, rows: int, chunks: int, loud: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`loud`: late columns lie so far above the early ones that the kernel must bring what it wrote to a new level."""
    from ingot.model.kernels import linear_cross_entropy as module
    from ingot.model.kernels.bf16_weights import CopiedWeight

    monkeypatch.setattr(module, "CHUNK_BYTES", 2 * tokens * rows // chunks)
    hidden, weight = (
        torch.randn(tokens, width, device="cuda").bfloat16(),
        torch.randn(rows, width, device="cuda") * 0.05,
    )
    if loud:
        weight[vocab - vocab // 8 : vocab - vocab // 9] *= 100
        monkeypatch.setattr(module, "BLOCK", 256)
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    labels[::7] = -100
    exact = [hidden.float().requires_grad_(), weight.clone().requires_grad_()]
    logits = (exact[0] @ exact[1].bfloat16().float().t())[:, :vocab]
    logits = logits + (logits.bfloat16().float() - logits).detach()  # rounded as they are in memory
    expected = F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    (expected / 1000).backward()
    fast = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = module.linear_cross_entropy(fast[0], fast[1], labels, vocab, -100)
    (found / 1000).backward()
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    for a, b in zip(fast, exact, strict=True):
        assert a.grad is not None and b.grad is not None and apart(a.grad, b.grad) < (5e-2 if loud else 7e-3)
    with torch.no_grad():
        alone = module.linear_cross_entropy(hidden, weight, labels, vocab, -100)
    assert float(alone) == pytest.approx(float(found.detach()), rel=1e-6)
    assert fast[1].grad is not None
    before = torch.randn_like(weight) * fast[1].grad.std()  # of its size, or the sum rounds it away
    added = torch.nn.Parameter(weight.clone())
    working = CopiedWeight(added)
    added.grad, total = None, working.grad_buffer().copy_(before)
    state = hidden.clone().requires_grad_()
    found = module.linear_cross_entropy(state, added, labels, vocab, -100, working)
    (found / 1000).backward()
    assert added.grad is None and apart(total - before, fast[1].grad) < 1e-4
    assert state.grad is not None and fast[0].grad is not None and torch.equal(state.grad, fast[0].grad)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (1000, 3072), (333, 250), (4097, 1024)])
def test_gelu_and_the_gradient_of_the_bias_before_it_equal_the_formula(rows: int, width: int) -> None:
    from ingot.model.kernels.biased_gelu import biased_gelu

    x, slope = (torch.randn(rows, width, device="cuda").mul(3).bfloat16() for _ in range(2))
    exact, fast = x.double().requires_grad_(), x.clone().requires_grad_()
    bias = torch.zeros(width, device="cuda", requires_grad=True)
    expected, found = F.gelu(exact), biased_gelu(fast, bias)
    expected.backward(slope.double())
    found.backward(slope)
    assert exact.grad is not None and fast.grad is not None and bias.grad is not None
    assert apart(found, expected) < 3e-3 and apart(fast.grad, exact.grad) < 3e-3
    assert apart(bias.grad, exact.grad.sum(0)) < 1e-5


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (1000, 768), (333, 250), (300, 2048), (135, 4096), (50, 5000)])
@pytest.mark.parametrize("kind", ["layer, biased", "layer", "root mean square"])
@pytest.mark.parametrize("adds", [True, False])
def test_a_residual_addition_and_norm_in_one_equal_the_two_apart(rows: int, width: int, kind: str, adds: bool) -> None:
    from ingot.model.kernels.add_norm import add_norm

    biased = kind == "layer, biased"
    layer = partial(torch.nn.LayerNorm, bias=biased) if kind.startswith("layer") else torch.nn.RMSNorm
    norm = layer(width, eps=1e-5, device="cuda")
    torch.nn.init.normal_(norm.weight)
    x, y, past, slope = (torch.randn(1, rows, width, device="cuda").bfloat16() for _ in range(4))
    fast_x, fast_y = x.clone().requires_grad_(), y.clone().requires_grad_()
    y_bias = torch.zeros(width, device="cuda", requires_grad=True)
    found = add_norm(norm, fast_x, *((fast_y, y_bias) if adds else ()))
    torch.autograd.backward(found, (past, slope))
    total = (x + y if adds else x).double().requires_grad_()
    exact = layer(width, eps=1e-5, device="cuda").double()
    exact.load_state_dict(norm.state_dict())
    expected = exact(total)
    torch.autograd.backward((total * 1, expected), (past.double(), slope.double()))
    assert torch.equal(found[0].double(), total) and apart(found[1], expected) < 3e-3
    assert fast_x.grad is not None and total.grad is not None
    assert apart(fast_x.grad, total.grad) < 3e-3 and apart(norm.weight.grad, exact.weight.grad) < 1e-4
    if biased:
        assert apart(norm.bias.grad, exact.bias.grad) < 1e-4
    if adds:
        assert fast_y.grad is not None and torch.equal(fast_y.grad, fast_x.grad)
        assert y_bias.grad is not None and apart(y_bias.grad, total.grad.sum((0, 1))) < 1e-4


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("new", "total", "groups", "width"), [(512, 1536, 2, 64), (77, 200, 4, 80), (64, 128, 1, 128)])
def test_the_last_tokens_of_a_sequence_attend_by_a_fused_kernel_as_by_the_formula(
    new: int, total: int, groups: int, width: int, compiled: bool
) -> None:
    """As context parallelism needs it: no memory of the mask's shape, forward or backward."""
    from ingot.config.model import ModelConfig
    from ingot.model.attention import SdpaAttention, causal_bias

    torch._dynamo.reset()
    config = ModelConfig(d_model=4 * width, n_heads=4, n_kv_heads=groups, n_layers=1, vocab_size=50, max_seq_len=total)
    attend = SdpaAttention(config).prepare(new, total, torch.device("cuda"))
    shapes = ((2, 4, new, width), (2, groups, total, width), (2, groups, total, width))
    fast = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in shapes]
    slope = torch.randn(shapes[0], device="cuda").bfloat16()
    exact = [t.detach().double().requires_grad_() for t in fast]
    k, v = (t.repeat_interleave(4 // groups, 1) for t in exact[1:])
    scores = exact[0] @ k.mT / width**0.5 + causal_bias(None, new, total, slope.device).double()
    expected = scores.softmax(-1) @ v
    wanted = torch.autograd.grad(expected, exact, slope.double())
    run = torch.compile(attend.__call__, fullgraph=True, dynamic=False) if compiled else attend
    found = run(*fast, None)
    gradients = torch.autograd.grad(found, fast, slope)
    assert apart(found, expected) < 5e-3
    assert all(apart(a, b) < 1e-2 for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize(("batch", "time", "groups", "per_group", "width"), [(2, 300, 3, 1, 64), (1, 77, 2, 4, 80)])
def test_heads_are_split_and_their_gradients_joined(
    batch: int, time: int, groups: int, per_group: int, width: int
) -> None:
    from ingot.model.kernels.split_qkv import split_heads

    size = groups * (per_group + 2) * width
    qkv = torch.randn(batch, time, size, device="cuda").bfloat16()
    plain, fast = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    bias = torch.zeros(size, device="cuda", requires_grad=True)
    cut = plain.view(batch, time, groups, per_group + 2, width)
    expected = cut[:, :, :, :per_group].flatten(2, 3), cut[:, :, :, per_group], cut[:, :, :, per_group + 1]
    found = split_heads(fast, bias, groups, width)
    slopes = [torch.randn_like(part) for part in found]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b.transpose(1, 2))
    torch.autograd.backward(found, slopes)
    torch.autograd.backward(expected, [slope.transpose(1, 2) for slope in slopes])
    assert plain.grad is not None and fast.grad is not None and torch.equal(fast.grad, plain.grad)
    assert bias.grad is not None and apart(bias.grad, plain.grad.double().sum((0, 1))) < 1e-5


def test_a_product_is_added_to_an_fp32_gradient_without_rounding() -> None:
    from ingot.model.kernels.bf16_weights import add_product

    total, a, b = (torch.randn(*shape, device="cuda") for shape in ((130, 72), (1000, 130), (1000, 72)))
    a, b = a.bfloat16(), b.bfloat16()
    expected, there = total.double() + a.double().t() @ b.double(), total.data_ptr()
    add_product(total, a, b)
    assert apart(total, expected) < 1e-6 and total.data_ptr() == there


def test_fp8_products_equal_those_of_the_quantized_values() -> None:
    from ingot.model.kernels.fp8.linear import BACKWARD, FORWARD, multiply, quantize, why_no_fp8

    if why := why_no_fp8(torch.device("cuda")):
        pytest.skip(why)
    for left, right in ((FORWARD, FORWARD), (BACKWARD, FORWARD)):
        a, b = torch.randn(48, 256, device="cuda"), torch.randn(80, 256, device="cuda")
        (a8, _, a_scale), (b8, _, b_scale) = quantize(a, left, False), quantize(b, right, False)
        expected = (a8.double() * a_scale.double()) @ (b8.double() * b_scale.double()).t()
        assert apart(multiply(a8, a_scale, b8.t(), b_scale, torch.float32), expected) < 2e-3


@pytest.mark.parametrize(
    ("rows", "columns", "tokens"), [(16, 16, 16), (48, 80, 256), (1040, 784, 304), (4096, 1024, 2048)]
)
def test_fp8_products_are_added_to_an_fp32_gradient(rows: int, columns: int, tokens: int) -> None:
    """By the library itself: twice, and once on another stream."""
    from ingot.model.kernels.fp8.accumulate import add_product
    from ingot.model.kernels.fp8.linear import BACKWARD, FORWARD, quantize, why_no_fp8

    if why := why_no_fp8(torch.device("cuda")):
        pytest.skip(why)
    whole = torch.randn(rows + 1, columns, device="cuda")
    total, beyond = whole[:rows], whole[rows].clone()
    expected, there = total.double(), total.data_ptr()
    streams = [torch.cuda.current_stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    for stream in streams:
        a, b = torch.randn(rows, tokens, device="cuda"), torch.randn(columns, tokens, device="cuda").exp()
        (a8, _, a_scale), (b8, _, b_scale) = quantize(a, BACKWARD, False), quantize(b, FORWARD, False)
        expected += (a8.double() * a_scale.double()) @ (b8.double() * b_scale.double()).t()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert add_product(total, a8, a_scale, b8, b_scale)
        torch.cuda.synchronize()
    assert apart(total, expected) < 2e-3 and total.data_ptr() == there and torch.equal(whole[rows], beyond)


def test_fp8_products_without_the_library_are_added_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.model.kernels.fp8 import accumulate, linear

    if why := linear.why_no_fp8(torch.device("cuda")):
        pytest.skip(why)
    monkeypatch.setattr(torch.version, "cuda", "999.0")
    accumulate._library.cache_clear()
    total = torch.ones(48, 80, device="cuda")
    ones = [linear.quantize(torch.ones(size, 32, device="cuda"), linear.FORWARD, False) for size in (48, 80)]
    (a, _, a_scale), (b, _, b_scale) = ones
    assert not accumulate.add_product(total, a, a_scale, b, b_scale)
    linear._add_fp8_product(total, a, a_scale, b, b_scale)
    assert apart(total, torch.full_like(total, 33.0)) < 1e-3


@pytest.mark.parametrize("size", [(16, 16), (48, 256), (1040, 784), (7, 3), (4096, 2048)])
def test_8_bits_by_rows_and_by_columns_are_those_of_the_formula(size: tuple[int, int]) -> None:
    from ingot.model.kernels.fp8.linear import BACKWARD, FORWARD, quantize

    for dtype, wide in product((FORWARD, BACKWARD), (torch.bfloat16, torch.float32)):
        x = (torch.randn(size) * torch.randn(size).exp()).to(wide)
        for columns in (True, False):
            expected = quantize(x, dtype, columns)
            found = quantize(x.cuda(), dtype, columns)
            assert all(torch.equal(a.cpu().float(), b.float()) for a, b in zip(found, expected, strict=True))
            assert [a.shape for a in found] == [b.shape for b in expected]
    for odd in (float("nan"), float("inf")):
        x = torch.ones(size, device="cuda")
        x[-1, -1] = odd
        assert quantize(x, FORWARD, True)[1].float()[-1, -1].isnan()
    assert not quantize(torch.zeros(size, device="cuda"), FORWARD, True)[1].float().any()


@pytest.mark.parametrize(
    ("precision", "positions", "more"),
    [("bf16", "learned", {}), ("bf16", "learned", {"no_bias": True, "n_kv_heads": 2}), ("fp8", "learned", {}), ("bf16", "alibi", {}), ("fp8", "alibi", {}),
     ("bf16", "alibi", {"sliding_window": 50, "document_mask": True, "eos_token_id": 7}),
     ("bf16", "rotary", {"document_mask": True, "eos_token_id": 7}),
     ("bf16", "rotary", {"parallel_residual": True}), ("bf16", "learned", {"norm": "low_precision_layernorm"}),
     ("bf16", "rotary", {"norm": "rmsnorm", "activation": "swiglu", "no_bias": True, "n_kv_heads": 2})],
)  # fmt: skip
def test_a_compiled_step_has_the_gradients_of_the_plain_one(precision: str, positions: str, more: dict) -> None:
    """All kernels in their place: against fp32 on the CPU, as close as the precision allows, and each block in one piece."""
    from torch._dynamo.utils import counters

    from ingot.config.model import ModelConfig
    from ingot.model.init import build_model
    from ingot.model.kernels import attach
    from ingot.parallel.loss_model import LossModel, compile_model

    config = ModelConfig(
        d_model=256, n_heads=4, n_layers=2, vocab_size=1000, max_seq_len=200, positions=positions, **more
    )
    tokens = torch.randint(0, 1000, (4, 201))
    tokens[:, 40::60] = 7
    losses, gradients = [], []
    torch._dynamo.reset()
    counters.clear()
    for device in (torch.device("cpu"), torch.device("cuda")):
        model = build_model(config, 3, torch.device("cpu")).to(device)
        run = LossModel(model)
        if device.type == "cuda":
            attach(model, device=device, precision=precision)
            compile_model(run)
        run.train()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = run(tokens[:, :-1].to(device), tokens[:, 1:].to(device)) / 800
        loss.backward()
        losses.append(float(loss))
        gradients.append({name: p.grad.cpu() for name, p in model.named_parameters()})
    assert counters["stats"]["unique_graphs"] == 2  # the layers share one, and the last norm has its own
    # the loss has a kernel of its own, which the compiler leaves alone
    assert all("linear_cross_entropy" in reason for reason in counters["graph_break"])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    for name, expected in gradients[0].items():
        # quantized by hand on a CPU, the worst of fp8 is 0.26, the worst of bf16 0.03
        assert apart(gradients[1][name], expected) < (0.05 if precision == "bf16" else 0.3), name
