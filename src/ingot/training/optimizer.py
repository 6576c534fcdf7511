"""Optimizers, and their state as named tensors.

AdamW calls torch's fused kernel directly, on local shards. torch.optim.AdamW(fused=True) computes the same bits (a
test compares them), but imports the compiler, so a run on a CPU starts 0.8 to 1.3 s later. Its step takes 1.7 ms of
host time for 500 small parameters instead of 1.5 ms, and 9.0 ms for 500 DTensors instead of 2.6 ms (torch 2.13).

Composer's decoupled AdamW decays by (lr / peak) x weight_decay, which is AdamW with weight_decay / peak. Lion is not in
torch. torch's Muon does not support sharded matrices and takes matrices one by one; ours uses its formula.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ingot.config.training import OptimizerConfig
from ingot.model.shapes import is_matrix
from ingot.parallel.dtensor import apply_to_full_tensors, is_sharded, local

STATE = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "muon": ("momentum_buffer",)}
STACK_ELEMENTS = 1 << 27  # of the matrices that Muon processes at a time: a quarter of a GB in bf16
# the names in Composer's dashboards
LABELS = {"adamw": "AdamW", "decoupled_adamw": "DecoupledAdamW", "lion": "DecoupledLionW"}


class ParamGroupOptimizer:
    """Groups of parameters, each with its own settings, and the state of each parameter: tensors by name."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: Any):
        self.param_groups = [defaults | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self, overflow: Tensor | None = None) -> None:
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self.update(parameters, group, overflow)

    def update(self, parameters: list[Any], group: dict[str, Any], overflow: Tensor | None) -> None:
        """Update weights in place from their gradients."""
        raise NotImplementedError

    def local_state(self, parameters: list[Any], key: str) -> list[Tensor]:
        """This rank's shards of a state that is shaped like the parameters; zeros at first."""
        for p in parameters:
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(p)
        return [local(self.state[p][key]) for p in parameters]


class AdamW(ParamGroupOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019). The kernel itself checks `overflow`."""

    def update(self, parameters: list[Any], group: dict[str, Any], overflow: Tensor | None) -> None:
        for p in parameters:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        steps = [self.state[p]["step"] for p in parameters]
        moments = self.local_state(parameters, "exp_avg"), self.local_state(parameters, "exp_avg_sq")
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            [local(p) for p in parameters], [local(p.grad) for p in parameters], *moments, [], steps,
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"],
            eps=group["eps"], amsgrad=False, maximize=False, grad_scale=None, found_inf=overflow,
        )  # fmt: skip
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))


class Lion(ParamGroupOptimizer):
    """Sign of an interpolated momentum (Chen et al. 2023), weight decay scaled by the caller."""

    def update(self, parameters: list[Any], group: dict[str, Any], overflow: Tensor | None) -> None:
        momenta, grads = self.local_state(parameters, "exp_avg"), [local(p.grad) for p in parameters]
        weights = [local(p) for p in parameters]
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        update = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(update, grads, alpha=1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_add_(weights, update, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, grads, 1 - beta2)


class Muon(ParamGroupOptimizer):
    """Orthogonalized momentum (Jordan et al. 2024), scaled to AdamW's update size (Liu et al. 2025), so that one
    learning rate serves both. Ranks that hold shards of the same matrices each orthogonalize some of them."""

    def update(self, parameters: list[Any], group: dict[str, Any], overflow: Tensor | None) -> None:
        groups: dict[object, list[Any]] = {}  # matrices of one shape, sharded in one way
        for p in parameters:
            groups.setdefault((p.shape, getattr(p, "placements", None)), []).append(p)
        for matrices in groups.values():
            self._update(matrices, **{key: group[key] for key in ("lr", "momentum", "weight_decay")})

    def _update(self, parameters: list[Any], lr: float, momentum: float, weight_decay: float) -> None:
        gradients = [local(p.grad) for p in parameters]
        momenta = self.local_state(parameters, "momentum_buffer")
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        ahead = (g.lerp(m, momentum).bfloat16() for g, m in zip(gradients, momenta, strict=True))  # Nesterov's
        size = 0.2 * math.sqrt(max(parameters[0].shape))
        like = parameters[0]
        sharded = is_sharded(like)
        updates = apply_to_full_tensors(orthogonal, ahead, like) if sharded else orthogonal_in_stacks(ahead)
        for p, update in zip(parameters, updates, strict=True):
            local(p).mul_(1 - lr * weight_decay).add_(update, alpha=-lr * size)


def orthogonal_in_stacks(matrices: Iterable[Tensor]) -> Iterator[Tensor]:
    """Orthogonalize matrices of one shape, many at a time: a small one alone would leave most of a GPU idle."""
    queue = iter(matrices)
    for first in queue:
        rest = islice(queue, max(1, STACK_ELEMENTS // first.numel()) - 1)
        yield from orthogonal(torch.stack([first, *rest]))


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximately the nearest orthogonal matrix to one, or to each of several, in bf16: five steps of a quintic
    Newton-Schulz iteration."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).reshape(-1, *sorted(matrix.shape[-2:]))  # [N, m, n], m <= n
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).reshape(matrix.shape)


class Optimizer:
    """One or two optimizers that step together under one learning-rate multiplier."""

    def __init__(self, config: OptimizerConfig, names: dict[Tensor, str]):
        """`names` holds this rank's parameters and their names in the whole model."""
        self.config, self.names = config, names
        self.parts: dict[str, ParamGroupOptimizer] = {}
        hidden = {p: name for p, name in names.items() if config.name == "muon" and is_matrix(name, p)}
        # AdamW decays by lr x weight_decay; the decoupled forms by (lr / peak) x weight_decay
        decay = config.weight_decay if config.name in ("adamw", "muon") else config.weight_decay / config.lr
        rest = [p for p in self.names if p not in hidden]
        matrices, vectors = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
        vector_decay = decay if config.decay == "all" else 0.0
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": vector_decay}]
        groups = [group for group in groups if group["params"]]
        kind = Lion if config.name == "lion" else AdamW
        self.parts[LABELS.get(config.name, "AdamW")] = kind(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        if hidden:
            matrix = {"params": list(hidden), "momentum": config.momentum, "weight_decay": decay}
            self.parts["Muon"] = Muon([matrix], lr=config.lr)

    def set_lr(self, multiplier: float) -> None:
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = self.config.lr * multiplier

    def learning_rates(self) -> dict[str, float]:
        """The current rates by metric name."""
        return {
            f"lr-{label}/group{number}": float(group["lr"])
            for label, part in self.parts.items()
            for number, group in enumerate(part.param_groups)
        }

    def step(self, overflow: Tensor | None = None) -> None:
        """Update the weights unless `overflow` is 1. AdamW checks that on the device, the others wait for it."""
        for part in self.parts.values():
            if isinstance(part, AdamW) or overflow is None or not overflow:
                part.step(overflow)

    def zero_grad(self) -> None:
        for parameter in self.names:
            parameter.grad = None

    def state_tensors(self, without: Iterable[Tensor] = ()) -> dict[str, Tensor]:
        """The state, as tensors named `KEY/PARAMETER`, such as `exp_avg/blocks.0.attn.qkv.weight`, but not that of the
        parameters in `without`."""
        left_out = set(without)
        return {
            f"{key}/{self.names[parameter]}": value
            for part in self.parts.values()
            for parameter, state in part.state.items()
            for key, value in state.items()
            if parameter not in left_out
        }

    def state_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the state of the whole model, given those of its parameters."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            muon = self.config.name == "muon" and is_matrix(name, torch.empty(shape, device="meta"))
            keys = STATE["muon" if muon else "lion" if self.config.name == "lion" else "adamw"]
            found |= {f"{key}/{name}": () if key == "step" else shape for key in keys}
        return found

    def state_slots(self, stored: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors to load a stored state into, allocated where needed. Names of other ranks are skipped."""
        parameters: dict[str, list[Tensor]] = {}
        for parameter, name in self.names.items():
            parameters.setdefault(name, []).append(parameter)
        owner = {p: part for part in self.parts.values() for group in part.param_groups for p in group["params"]}
        for name, dtype, shape in stored:
            key, _, parameter_name = name.partition("/")
            for parameter in parameters.get(parameter_name, []):
                state = owner[parameter].state[parameter]
                if key not in state and tuple(shape) == parameter.shape:
                    state[key] = torch.empty_like(parameter, dtype=dtype)
                elif key not in state:  # the `step` counter
                    state[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
                yield name, state[key]
