# mypy: disallow-untyped-defs=False
"""cuDNN's attention with gradients that repeat to the bit.

cuDNN has a deterministic backward pass on Hopper at 2 to 25% over its default, but torch does not ask for it: under
`use_deterministic_algorithms` it falls back to Flash, whose backward pass takes 1.6 to 1.9 times as long. So cuDNN is
called through its own Python package, nvidia-cudnn-frontend (`ingot-llm[gpu]`), which is thin: it describes one
operation as a graph, which is built once for each shape and executed on torch's tensors.

The deterministic backward pass keeps partial sums in a workspace that grows with the batch (8.5 GiB for 32 sequences of
2048 tokens with 32 heads of 64). It is bounded by working on a few sequences at a time.

A driver or version that fails is found before training: `why_no_cudnn` compares a small case with the reference.

Shapes: B batch, H heads, G key/value heads, T tokens, D head width; q [B, H, T, D], k and v [B, G, T, D].
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, library

from ingot.model.activation_checkpointing import EXPENSIVE_OPS

WORKSPACE_TOKENS = 1 << 19  # heads x tokens of the sequences of one call: about 1 GiB of workspace
CLOSE = 2e-2  # relative, in bf16: of the small case
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's shape and strides."""


def why_no_cudnn(device: torch.device, heads: int, groups: int, width: int) -> str | None:
    """Why cuDNN's deterministic attention cannot run here; None if it can."""
    if find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed (pip install 'nvidia-cudnn-frontend>=1.15')"
    if width % 8 or width > 128:
        return f"cuDNN takes heads of 8, 16, ... 128 features, not {width}"
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2, heads, 192, width), (2, groups, 192, width), (2, groups, 192, width), (2, heads, 192, width))
    q, k, v, d_out = (torch.randn(s, device=device, generator=generator).bfloat16() for s in shapes)
    try:
        results = []
        for _ in range(2):
            inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            out = cudnn_attention(inputs[0], inputs[1], inputs[2], width**-0.5)[0]
            results.append([out, *torch.autograd.grad(out, inputs, d_out)])
        exact = [t.detach().float().requires_grad_() for t in (q, k, v)]
        expected = _reference(exact[0], exact[1], exact[2], width**-0.5)
        wanted = [expected, *torch.autograd.grad(expected, exact, d_out.float())]
    except Exception as error:
        return f"cuDNN reports: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    distances = [float((a.float() - b).norm() / b.norm()) for a, b in zip(results[0], wanted, strict=True)]
    if max(distances) > CLOSE or not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        return f"cuDNN's results do not repeat or differ from the reference (by {max(distances):.3f})"
    return None


def _reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    members, time = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (t.repeat_interleave(members, 1) for t in (k, v))
    unseen = torch.ones(time, time, device=q.device, dtype=torch.bool).triu(1)
    return (q @ k.mT * scale).masked_fill(unseen, float("-inf")).softmax(-1) @ v


@library.custom_op("ingot::cudnn_attention", mutates_args=())
def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention [B, H, T, D], laid out as [B, T, H, D], and the statistics [B, H, T, 1] for its gradient."""
    out, stats = _outputs(q)
    plan = _forward_plan(*map(_layout, (q, k, v, out, stats)), scale, q.device)
    plan((q, k, v, out, stats))
    return out, stats


@cudnn_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return _outputs(q)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D).transpose(1, 2), q.new_empty(B, H, T, 1, dtype=torch.float32)


@library.custom_op("ingot::cudnn_attention_backward", mutates_args=())
def _backward(saved: list[Tensor], d_out: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, stats = saved
    d_q, d_k, d_v = (torch.empty_like(t) for t in (q, k, v))
    d_out = d_out if d_out.stride() == out.stride() else torch.empty_like(out).copy_(d_out)
    rows = max(1, WORKSPACE_TOKENS // (q.shape[1] * q.shape[2]))
    tensors = (q, k, v, out, d_out, stats, d_q, d_k, d_v)
    for part in zip(*(t.split(rows) for t in tensors), strict=True):
        _backward_plan(*map(_layout, part), scale, q.device)(part)
    return d_q, d_k, d_v


@_backward.register_fake
def _(saved: list[Tensor], d_out: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = saved
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradient(ctx, d_out: Tensor, d_stats: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(list(ctx.saved_tensors), d_out, ctx.scale), None


cudnn_attention.register_autograd(_gradient, setup_context=_save)
EXPENSIVE_OPS.add(torch.ops.ingot.cudnn_attention.default)


# --- graphs


class _Plan:
    """A graph that has been built, and what it needs to run on tensors."""

    def __init__(self, graph: Any, handles: list[Any], device: torch.device):
        import cudnn  # type: ignore[import-not-found]

        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        self.graph, self.handles, self.device = graph, handles, device
        self.bytes = graph.get_workspace_size()

    def __call__(self, tensors: tuple[Tensor, ...]) -> None:
        import cudnn

        handle = _handle(self.device)
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(self.device).cuda_stream)
        workspace = torch.empty(max(1, self.bytes), device=self.device, dtype=torch.uint8)
        pointers = {node: tensor.detach() for node, tensor in zip(self.handles, tensors, strict=True)}
        self.graph.execute(pointers, workspace, handle=handle)


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    return cudnn.create_handle()


def _graph(device: torch.device) -> Any:
    import cudnn

    kinds = cudnn.data_type
    return cudnn.pygraph(io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT,
                         compute_data_type=kinds.FLOAT, handle=_handle(device))  # fmt: skip


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tuple(tensor.stride())


def _input(graph: Any, layout: Layout, kind: Any = None) -> Any:
    import cudnn

    shape, strides = layout
    kind = cudnn.data_type.BFLOAT16 if kind is None else kind
    return graph.tensor(dim=list(shape), stride=list(strides), data_type=kind)


def _output(node: Any, layout: Layout) -> Any:
    shape, strides = layout
    return node.set_output(True).set_dim(list(shape)).set_stride(list(strides))


@cache
def _forward_plan(q: Layout, k: Layout, v: Layout, out: Layout, stats: Layout, scale: float, device: Any) -> _Plan:
    import cudnn

    graph = _graph(device)
    inputs = [_input(graph, x) for x in (q, k, v)]
    o, s = graph.sdpa(
        name="attention", q=inputs[0], k=inputs[1], v=inputs[2], is_inference=False, attn_scale=scale,
        use_causal_mask=True,
    )  # fmt: skip
    _output(o, out)
    _output(s, stats).set_data_type(cudnn.data_type.FLOAT)
    return _Plan(graph, [*inputs, o, s], device)


@cache
def _backward_plan(*given: Any) -> _Plan:
    import cudnn

    *layouts, scale, device = given
    graph = _graph(device)
    q, k, v, o, d_o = (_input(graph, x) for x in layouts[:5])
    stats = _input(graph, layouts[5], cudnn.data_type.FLOAT)
    gradients = graph.sdpa_backward(
        name="attention_backward", q=q, k=k, v=v, o=o, dO=d_o, stats=stats, attn_scale=scale, use_causal_mask=True,
        use_deterministic_algorithm=True,
    )  # fmt: skip
    for node, layout in zip(gradients, layouts[6:], strict=True):
        _output(node, layout)
    return _Plan(graph, [q, k, v, o, d_o, stats, *gradients], device)
