"""Our Triton kernels against the reference on random odd shapes, on a CPU by Triton's interpreter.

Inputs are fp16 or fp32 where the types of training are test_gpu_kernels' claim. Skipped without Triton, which the CPU
builds of torch come without: `pip install triton` (3.6 does not interpret with numpy 2.4, 3.9 does).
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")
SHAPES = [random.Random(seed) for seed in range(9)]  # the same in each run, so that a failure can be repeated

if os.environ.get("TRITON_INTERPRET") != "1":

    @pytest.mark.slow
    def test_kernels_equal_the_reference_in_the_interpreter() -> None:
        """In a process of its own: Triton decides at its import."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", __file__]
        environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 0, done.stdout[-3000:]

else:
    from ingot.model.attention import alibi_slopes, causal_bias
    from ingot.model.dropout import attention_keys, dropout, sequence_keys
    from ingot.model.kernels import linear_cross_entropy as loss_kernel
    from ingot.model.kernels.add_norm import add_norm
    from ingot.model.kernels.alibi_attention import alibi_attention
    from ingot.model.kernels.biased_gelu import biased_gelu
    from ingot.model.kernels.fp8.linear import BACKWARD, FORWARD, LEAST
    from ingot.model.kernels.fp8.quantize import quantize_both, quantize_into
    from ingot.model.kernels.fused_attention import visible_span
    from ingot.model.kernels.split_qkv import split_heads

    def close(found: Tensor | None, expected: Tensor | None, limit: float = 2e-3) -> bool:
        assert found is not None and expected is not None
        distance = (found.detach().double() - expected.detach().double()).norm()
        return float(distance) <= limit * float(expected.detach().double().norm()) + 1e-9

    @pytest.mark.parametrize("rng", SHAPES, ids=range(len(SHAPES)))
    @pytest.mark.parametrize("pdrop", [0.0, 0.3])
    def test_attention(rng: random.Random, pdrop: float) -> None:
        torch.manual_seed(0)
        rows, time, groups, members = rng.randint(1, 2), rng.randint(1, 150), rng.randint(1, 2), rng.randint(1, 3)
        width, window = rng.choice([rng.randint(2, 70), 80, 96, 127, 128]), rng.choice([None, 1, 37])
        heads = groups * members
        slopes = alibi_slopes(heads, 8) * rng.randint(0, 1)
        documents = (torch.rand(rows, time) < 0.05).cumsum(1) if rng.random() < 0.5 else None
        qkv, slope = torch.randn(rows, time, groups, members + 2, width).half(), torch.randn(rows, time, heads, width)
        keys = attention_keys(sequence_keys(1, 2, 3, rows, qkv.device), 1, heads, 0, time)
        exact, fast = qkv.double().requires_grad_(), qkv.clone().requires_grad_()
        q = exact[:, :, :, :members].flatten(2, 3).transpose(1, 2)
        k, v = (exact[:, :, :, members + i].repeat_interleave(members, 2).transpose(1, 2) for i in (0, 1))
        scores = q @ k.mT / width**0.5 + causal_bias(slopes, time, time, qkv.device, window).double()
        if documents is not None:
            scores = scores.masked_fill(documents[:, None, :, None] != documents[:, None, None, :], float("-inf"))
        expected = (dropout(scores.softmax(-1), keys, pdrop) @ v).transpose(1, 2)
        expected.backward(slope.double())
        span = visible_span(time, window, documents, qkv.device)
        found, _, _ = alibi_attention(fast, slopes, width**-0.5, span, None, keys if pdrop else None, pdrop)
        found.backward(slope.half())
        assert close(found, expected) and close(fast.grad, exact.grad)

    @pytest.mark.parametrize("rng", SHAPES, ids=range(len(SHAPES)))
    @pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
    def test_addition_and_norm(rng: random.Random, kind: type[torch.nn.LayerNorm | torch.nn.RMSNorm]) -> None:
        rows, width = rng.randint(1, 40), rng.randint(2, 700)
        norm, exact = kind(width, eps=1e-5), kind(width, eps=1e-5).double()
        x, y, past, slope = (torch.randn(1, rows, width) for _ in range(4))
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        found = add_norm(norm, ours, y, None)
        torch.autograd.backward(found, (past, slope))
        total = theirs + y.double()
        torch.autograd.backward((total * 1, exact(total)), (past.double(), slope.double()))
        assert close(found[1], exact(total)) and close(ours.grad, theirs.grad)
        assert close(norm.weight.grad, exact.weight.grad)

    @pytest.mark.parametrize("rng", SHAPES, ids=range(len(SHAPES)))
    def test_gelu_and_the_gradient_of_its_bias(rng: random.Random) -> None:
        x = torch.randn(rng.randint(1, 150), rng.randint(1, 1100)) * 3
        ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
        bias = torch.zeros(x.shape[1], requires_grad=True)
        biased_gelu(ours, bias).sum().backward()
        F.gelu(theirs).sum().backward()
        assert close(biased_gelu(x, None), F.gelu(theirs)) and close(ours.grad, theirs.grad)
        assert theirs.grad is not None and close(bias.grad, theirs.grad.sum(0))

    @pytest.mark.parametrize("rng", SHAPES, ids=range(len(SHAPES)))
    def test_heads_are_split_and_joined(rng: random.Random) -> None:
        groups, members, width = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 70)
        qkv = torch.randn(2, rng.randint(1, 150), groups * (members + 2) * width, requires_grad=True)
        bias = torch.zeros(qkv.shape[2], requires_grad=True)
        parts = split_heads(qkv, bias, groups, width)
        whole = qkv.unflatten(2, (groups, -1, width))
        assert torch.equal(parts[0], whole[:, :, :, :-2].flatten(2, 3).transpose(1, 2))
        slopes = [torch.randn_like(part) for part in parts]
        torch.autograd.backward(parts, slopes)
        joined = [s.transpose(1, 2).unflatten(2, (groups, -1)) for s in slopes]
        expected = torch.cat(joined, 3).flatten(2)
        assert qkv.grad is not None and torch.equal(qkv.grad, expected) and close(bias.grad, expected.sum((0, 1)))

    @pytest.mark.parametrize("rng", SHAPES, ids=range(len(SHAPES)))
    def test_the_loss_of_an_odd_vocabulary(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loss_kernel, "BLOCK", 64)
        tokens, width, vocab = rng.randint(1, 60), rng.randint(1, 50), rng.randint(2, 333)
        hidden, weight = torch.randn(tokens, width), torch.randn(vocab + rng.randint(0, 40), width)
        labels = torch.randint(0, vocab, (tokens,))
        labels[::5] = -100
        h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
        expected = F.cross_entropy((h @ w.t())[:, :vocab], labels, reduction="sum", ignore_index=-100)
        expected.backward()
        found = loss_kernel._linear_cross_entropy(hidden, weight, labels, vocab, -100, torch.float32)
        loss, d_hidden, d_weight, scales = found
        assert close(loss, expected) and close(d_hidden * scales[:, None], h.grad) and close(d_weight, w.grad)

    @pytest.mark.parametrize("rng", SHAPES, ids=range(len(SHAPES)))
    @pytest.mark.parametrize("dtype", [FORWARD, BACKWARD])
    def test_8_bits_by_rows_and_by_columns(rng: random.Random, dtype: torch.dtype) -> None:
        """Of values that 8 bits hold, times a power of two: the interpreter rounds others wrongly where they carry."""
        shape = rng.randint(1, 200), rng.randint(1, 300)
        exact = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype).float().nan_to_num(0.0, 0.0, 0.0)
        exact[0, 0] = torch.finfo(dtype).max
        rows, columns, scale = quantize_both((exact / 64).bfloat16(), dtype, True, LEAST)
        assert torch.equal(rows.float(), exact) and torch.equal(columns.float(), exact.t()) and float(scale) == 1 / 64
        quantize_into((-exact / 32).bfloat16(), rows, columns, scale, LEAST)  # the next step's weight
        assert torch.equal(rows.float(), -exact) and torch.equal(columns.float(), -exact.t()) and float(scale) == 1 / 32
