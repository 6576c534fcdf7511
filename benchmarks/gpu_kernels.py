"""The kernels of a training step alone, in the shapes of our models, each next to what it replaces and to a limit.

    python benchmarks/gpu_kernels.py --out benchmarks/results/gpu_kernels.json
    python benchmarks/gpu_kernels.py benchmarks/results/gpu_kernels.json     print the results

Every kernel is timed forward and backward, with the gradients of its biases. The peer is the same mathematics as
torch.compile makes it (for attention torch's own kernel, without ALiBi). The limit is a copy for kernels that move
bytes, counting each tensor read or written once, and the largest matrix product for those that multiply; both are
measured in the same run. All are replayed from CUDA graphs, so that the time of the host is in none of them. Alone and
with pauses a kernel meets a cooler card than in a step.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu import SIZES
from gpu_profile import event_times, run_header
from torch import Tensor, nn

from ingot.config.load import load_config
from ingot.config.run import RunConfig

DEVICE = "cuda"
MODELS = [name for name in SIZES if name != "tiny"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", nargs="?", type=Path, help="results of before, to print as a table")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if arguments.found is not None:
        found = json.loads(arguments.found.read_text())
        print(table(found["rows"]))
        return
    if not torch.cuda.is_available():
        sys.exit("these kernels need a GPU, and torch finds none")
    copy, product = copy_speed(), product_speed()
    print(f"a copy moves {copy / 1e12:.2f} TB/s, a product does {product / 1e12:.0f} TFLOP/s", flush=True)
    found = {
        **run_header(torch.device(DEVICE)), "copy_bytes_per_second": copy, "flops_per_second": product, "rows": [],
    }  # fmt: skip
    for model in arguments.models:
        for kernel in kernels(load_config(RunConfig, [f"mpt-{model}"]), SIZES[model].micro):
            times, peers = measure(kernel.run), measure(kernel.peer) if kernel.peer is not None else None
            seconds, limit = statistics.median(times), kernel.bytes / copy + kernel.flops / product
            row = {"model": model, "kernel": kernel.name, "ms": round(1e3 * seconds, 3),
                   "peer_ms": round(1e3 * statistics.median(peers), 3) if peers else None,
                   "of_limit": round(limit / seconds, 3),
                   "spread": round((max(times) - min(times)) / seconds, 3)}  # fmt: skip
            print(json.dumps(row), flush=True)
            found["rows"].append(row)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    print(table(found["rows"]))


@dataclass
class Kernel:
    """One to time, and the bytes that it must move or the operations that it must do."""

    name: str
    run: Callable[[], Any]
    peer: Callable[[], Any] | None = None
    bytes: float = 0.0
    flops: float = 0.0


def kernels(config: RunConfig, batch: int) -> Iterator[Kernel]:
    """Those of a model, for a microbatch."""
    from ingot.model.attention import alibi_slopes
    from ingot.model.kernels.add_norm import add_norm
    from ingot.model.kernels.alibi_attention import alibi_attention
    from ingot.model.kernels.biased_gelu import biased_gelu
    from ingot.model.kernels.fp8.linear import FORWARD, quantize
    from ingot.model.kernels.linear_cross_entropy import linear_cross_entropy
    from ingot.model.kernels.split_qkv import split_heads

    compiled = partial(torch.compile, dynamic=False)
    d, heads, width = config.model.d_model, config.model.n_heads, config.model.head_width
    time, vocabulary = config.max_seq_len, config.model.vocab_size
    rows, stream = batch * time, (batch, time, d)
    unit = 2.0 * rows * d  # bytes of a tensor of the residual stream
    norm = nn.LayerNorm(d, device=DEVICE)

    def plain_norm(x: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        total = x + (y + bias.bfloat16())
        return total, F.layer_norm(total, (d,), norm.weight.bfloat16(), norm.bias.bfloat16())

    def plain_gelu(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias.bfloat16())

    def plain_heads(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        parts = (x + bias.bfloat16()).view(batch, time, heads, 3, width)
        return tuple(parts[:, :, :, n].transpose(1, 2) for n in range(3))

    ours = partial(add_norm, norm)
    both = (both_ways(f, stream, stream, vector(d), weights=norm.parameters()) for f in (ours, compiled(plain_norm)))
    yield Kernel("addition and norm", *both, bytes=8 * unit)  # 2 read, 2 written; back 3 read, 1 written
    both = (both_ways(f, (batch, time, 4 * d), vector(4 * d)) for f in (biased_gelu, compiled(plain_gelu)))
    yield Kernel("GELU and bias", *both, bytes=20 * unit)  # of 4 units each: 1 and 1; back 2 and 1
    split = partial(split_heads, groups=heads, width=width)
    both = (both_ways(f, (batch, time, 3 * d), vector(3 * d)) for f in (split, compiled(plain_heads)))
    yield Kernel("heads and bias", *both, bytes=6 * unit)  # views; back 3 and 3

    flops = 3.5 * 2 * batch * heads * time * time * width  # of the causal half
    by_torch = partial(F.scaled_dot_product_attention, is_causal=True)
    torchs = both_ways(by_torch, *[(batch, heads, time, width)] * 3)
    yield Kernel("attention by torch", torchs, flops=flops)
    slopes = alibi_slopes(heads, 8).to(DEVICE)
    alibi = both_ways(lambda x: alibi_attention(x, slopes, width**-0.5)[0], (batch, time, heads, 3, width))
    yield Kernel("attention with ALiBi", alibi, torchs, flops=flops)

    weight = nn.Parameter(torch.randn(vocabulary, d, device=DEVICE) * 0.02)
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)

    def plain_loss(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")

    def our_loss(x: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, labels, vocabulary, -100)

    both = (both_ways(f, (rows, d), weights=[weight]) for f in (our_loss, compiled(plain_loss)))
    yield Kernel("head and loss", *both, flops=6.0 * rows * d * vocabulary)
    shapes = ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))
    layers = [nn.Linear(*shape, bias=False, device=DEVICE, dtype=torch.bfloat16) for shape in shapes]
    steps = [both_ways(layer, (rows, layer.in_features), weights=[layer.weight]) for layer in layers]
    yield Kernel("products of a block", lambda: [step() for step in steps], flops=72.0 * rows * d * d)
    x = torch.randn(rows, 4 * d, device=DEVICE).bfloat16()
    both = (partial(f, x) for f in (partial(quantize, dtype=FORWARD, columns=True), compiled(plain_quantize)))
    yield Kernel("to 8 bits by rows and columns", *both, bytes=8 * unit)  # 4 read, 2 and 2 written


def plain_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = x.abs().amax(-1).amax().float() / torch.finfo(torch.float8_e4m3fn).max
    x8 = (x.float() / scale).to(torch.float8_e4m3fn)
    return x8, x8.t().contiguous(), scale


def vector(size: int) -> Tensor:
    return torch.zeros(size, device=DEVICE, requires_grad=True)


def both_ways(
    function: Callable, *inputs: tuple[int, ...] | Tensor, weights: Iterable[Tensor] = ()
) -> Callable[[], None]:
    """One call of a function on random inputs of these shapes, and its gradients by them and by its weights."""
    weights = list(weights)
    made = [x if isinstance(x, Tensor) else torch.randn(x, device=DEVICE).bfloat16().requires_grad_() for x in inputs]
    slopes: list[Tensor] = []

    def run() -> None:
        results = function(*made)
        results = results if isinstance(results, tuple) else (results,)
        if not slopes:
            slopes.extend(torch.randn_like(result) for result in results)
        torch.autograd.grad(results, [*made, *weights], slopes)

    return run


def measure(run: Callable[[], Any], seconds: float = 0.15) -> list[float]:
    """Seconds of each of some calls."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    first = event_times(graph.replay, 3)[-1]
    times = event_times(graph.replay, max(5, min(200, int(seconds / first))))
    graph.reset()
    torch.cuda.empty_cache()
    return times


def copy_speed() -> float:
    """Bytes per second of a kernel that reads and writes as much; in a graph, torch's own copy is a slower engine's."""
    source = torch.randn(1 << 29, device=DEVICE).bfloat16()
    target = torch.empty_like(source)
    return 4 * source.numel() / statistics.median(measure(lambda: torch.neg(source, out=target)))


def product_speed() -> float:
    a, b = (torch.randn(8192, 8192, device=DEVICE).bfloat16() for _ in range(2))
    return 2 * 8192.0**3 / statistics.median(measure(lambda: a @ b))


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| model | kernel, both ways | ms | its peer, ms | of the limit |", "|---|---|---:|---:|---:|"]
    for row in rows:
        peer = "" if row["peer_ms"] is None else f"{row['peer_ms']:.2f}"
        lines.append(f"| {row['model']} | {row['kernel']} | {row['ms']:.2f} | {peer} | {row['of_limit']:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
