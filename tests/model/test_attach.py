"""Kernels in a model: the modules are in the right places and share parameters, shown with plain torch in their stead.

What the kernels themselves compute is the claim of test_gpu_kernels, which needs a GPU.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib.machinery, json, sys
from unittest.mock import MagicMock
import torch, torch._dynamo, torch._inductor.runtime.hints  # before these could find the triton below

for name in ("triton", "triton.language"):  # never called: the functions around the kernels are replaced below
    sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
sys.modules["triton"].jit = lambda function: function
import torch.nn.functional as F
from ingot.config.model import ModelConfig
from ingot.model import kernels
from ingot.model.init import build_model
from ingot.model.kernels import attach, fused_attention, fused_block, linear_cross_entropy, refresh

for name in ("triton", "triton.language"):
    del sys.modules[name]

def add_norm(norm, x, y=None, y_bias=None):
    calls.add("add_norm")
    total = x if y is None else x + y + (0 if y_bias is None else (y_bias - y_bias.detach()).to(x.dtype))
    plain = F.rms_norm if isinstance(norm, torch.nn.RMSNorm) else F.layer_norm
    more = () if isinstance(norm, torch.nn.RMSNorm) else (norm.bias,)
    return total, plain(total.float(), norm.normalized_shape, norm.weight, *more, norm.eps).to(x.dtype)

def biased_gelu(x, bias):
    calls.add("biased_gelu")
    return F.gelu(x if bias is None else x + (bias - bias.detach()).to(x.dtype))

def split_heads(qkv, bias, groups, width):
    calls.add("split_heads")
    qkv = qkv if bias is None else qkv + (bias - bias.detach()).to(qkv.dtype)
    parts = qkv.unflatten(2, (groups, -1, width))
    q, k, v = parts[:, :, :, :-2].flatten(2, 3), parts[:, :, :, -2], parts[:, :, :, -1]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

def loss(hidden, weight, labels, vocab, ignore, working):
    calls.add("linear_cross_entropy")
    assert torch.equal(working.value(), weight.bfloat16())
    logits = F.linear(hidden.bfloat16(), weight)[..., :vocab].float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore, reduction="sum")

calls = set()
kernels.why_no_triton = fused_attention.why_no_triton = lambda device: None
fused_block.add_norm, fused_block.biased_gelu, fused_attention.split_heads = add_norm, biased_gelu, split_heads
linear_cross_entropy.linear_cross_entropy = loss
values = json.loads(sys.argv[1])
config = ModelConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=50, max_seq_len=16, **values)
tokens = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(1))
found = []
for fused in (False, True):
    model = build_model(config, 1, torch.device("cpu"))
    names = list(model.state_dict())
    if fused:
        notes = attach(model, device=torch.device("cuda"), precision="bf16")
    model.residual_dtype = torch.bfloat16
    assert list(model.state_dict()) == names
    refresh(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = model.loss(tokens[:, :-1], tokens[:, 1:])
        value.backward()
        before = set(calls)
        with torch.no_grad():
            evaluated = model.loss(tokens[:, :-1], tokens[:, 1:])
    found.append((float(value), float(evaluated), {name: p.grad for name, p in model.named_parameters()}))
(plain, _, expected), (fused, evaluated, gradients) = found
assert abs(fused / plain - 1) < 5e-3 and abs(evaluated / plain - 1) < 5e-3, (plain, fused, evaluated)
for name, gradient in expected.items():
    apart = float((gradients[name] - gradient).norm() / gradient.norm())
    assert apart < 0.05, (name, apart)
print(*sorted(calls))
"""


@pytest.mark.parametrize(
    ("values", "used"),
    [
        ("{}", "add_norm biased_gelu linear_cross_entropy split_heads"),
        ('{"parallel_residual": true, "tie_word_embeddings": false}', "add_norm biased_gelu linear_cross_entropy split_heads"),
        ('{"family": "llama", "n_kv_heads": 2}', "add_norm linear_cross_entropy"),
    ],
)  # fmt: skip
def test_a_model_with_kernels_has_the_gradients_names_and_evaluation_of_the_plain_one(values: str, used: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, values], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == used
