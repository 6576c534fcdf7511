"""Optimizers, and their state as named tensors.

torch's own fused AdamW does the work. Composer's decoupled AdamW decays by (lr / peak) x weight_decay, which is AdamW
with weight_decay / peak, so it needs no code of its own. Lion is not in torch; ours runs on whole lists of tensors
(foreach), not parameter by parameter. Muon is torch's formula, which there knows no matrix that is spread, and takes
matrices one by one.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ingot.model.gpt import is_matrix
from ingot.parallel.weights import is_spread, local, on_whole, scale_to_limit
from ingot.train.config import OptimizerConfig

STATE = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "muon": ("momentum_buffer",)}
STACK_ELEMENTS = 1 << 27  # of matrices that Muon works on at a time: a quarter of a GB in bf16
LABELS = {"adamw": "AdamW", "decoupled_adamw": "DecoupledAdamW", "lion": "DecoupledLionW"}  # as dashboards know them


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023), weight decay scaled by the caller."""

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            momenta = [local(self.state[p]["exp_avg"]) for p in parameters]
            grads = [local(p.grad) for p in parameters]
            parameters = [local(p) for p in parameters]
            beta1, beta2 = group["betas"]
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            update = torch._foreach_mul(momenta, beta1)
            torch._foreach_add_(update, grads, alpha=1 - beta1)
            torch._foreach_sign_(update)
            torch._foreach_add_(parameters, update, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, grads, 1 - beta2)


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal (Jordan et al. 2024), scaled to AdamW's update size (Liu et al. 2025), so that one
    learning rate serves both. The processes that share the matrices of a spread model each work on some of them."""

    def __init__(self, parameters: list[Tensor], lr: float, momentum: float, weight_decay: float):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[object, list[Any]] = {}  # matrices of one shape, spread in one way
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.shape, getattr(p, "placements", None)), []).append(p)
            for parameters in alike.values():
                self._update(parameters, **{key: group[key] for key in ("lr", "momentum", "weight_decay")})

    def _update(self, parameters: list[Any], lr: float, momentum: float, weight_decay: float) -> None:
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        gradients = [local(p.grad) for p in parameters]
        momenta = [local(self.state[p]["momentum_buffer"]) for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        ahead = (g.lerp(m, momentum).bfloat16() for g, m in zip(gradients, momenta, strict=True))  # Nesterov's
        size = 0.2 * math.sqrt(max(parameters[0].shape))
        spread = is_spread(parameters[0])
        updates = on_whole(orthogonal, ahead, parameters[0]) if spread else orthogonal_in_stacks(ahead)
        for p, update in zip(parameters, updates, strict=True):
            local(p).mul_(1 - lr * weight_decay).add_(update, alpha=-lr * size)


def orthogonal_in_stacks(matrices: Iterable[Tensor]) -> Iterator[Tensor]:
    """Matrices of one shape made orthogonal, many at a time: a small one alone would leave most of a GPU idle."""
    queue = iter(matrices)
    for first in queue:
        rest = islice(queue, max(1, STACK_ELEMENTS // first.numel()) - 1)
        yield from orthogonal(torch.stack([first, *rest]))


def orthogonal(matrix: Tensor) -> Tensor:
    """Roughly the nearest orthogonal matrix to one, or to each of several, in bf16: five steps of a quintic
    Newton-Schulz iteration."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = (matrix.mT if tall else matrix).reshape(-1, *sorted(matrix.shape[-2:]))  # [N, m, n], m <= n
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).reshape(matrix.shape)


class Optimizer:
    """One or two torch optimizers that step together under one learning-rate multiplier."""

    def __init__(self, config: OptimizerConfig, names: dict[Tensor, str]):
        """`names` holds the parameters of this process with the names that they have in the whole model."""
        self.config, self.names = config, names
        self.parts: dict[str, torch.optim.Optimizer] = {}
        hidden = {p: name for p, name in names.items() if config.name == "muon" and is_matrix(name, p)}
        # AdamW decays by lr x weight_decay; the decoupled forms by (lr / peak) x weight_decay
        decay = config.weight_decay if config.name in ("adamw", "muon") else config.weight_decay / config.lr
        rest = [p for p in self.names if p not in hidden]
        matrices, vectors = [p for p in rest if p.ndim >= 2], [p for p in rest if p.ndim < 2]
        vector_decay = decay if config.decay == "all" else 0.0
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": vector_decay}]
        groups = [group for group in groups if group["params"]]
        label, lr, betas = LABELS.get(config.name, "AdamW"), config.lr, config.betas
        if config.name == "lion":
            self.parts[label] = Lion(groups, lr, betas)
        else:
            self.parts[label] = torch.optim.AdamW(groups, lr, betas, config.eps, weight_decay=0.0, fused=True)
        if hidden:
            self.parts["Muon"] = Muon(list(hidden), config.lr, config.momentum, decay)

    def set_lr(self, multiplier: float) -> None:
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = self.config.lr * multiplier

    def learning_rates(self) -> dict[str, float]:
        """The current rates under the names that dashboards have."""
        return {
            f"lr-{label}/group{number}": float(group["lr"])
            for label, part in self.parts.items()
            for number, group in enumerate(part.param_groups)
        }

    def step(self, overflow: Tensor | None = None) -> None:
        """Change the weights, unless `overflow` is 1; only AdamW learns of it without waiting for the device."""
        for part in self.parts.values():
            if overflow is not None and isinstance(part, torch.optim.AdamW):
                part.found_inf = overflow  # type: ignore[attr-defined]
            elif overflow:
                continue
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """All state, as tensors named `KEY/PARAMETER`, such as `exp_avg/blocks.0.attn.qkv.weight`."""
        return {
            f"{key}/{self.names[parameter]}": value
            for part in self.parts.values()
            for parameter, state in part.state.items()
            for key, value in state.items()
        }

    def state_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a whole model's state, given its parameters', of which this process may hold some."""
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            muon = self.config.name == "muon" and is_matrix(name, torch.empty(shape, device="meta"))
            keys = STATE["muon" if muon else "lion" if self.config.name == "lion" else "adamw"]
            found |= {f"{key}/{name}": () if key == "step" else shape for key in keys}
        return found

    def state_slots(self, stored: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that what `state_tensors` gave belongs in, made where there are none yet; names that belong to
        other processes are passed over."""
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


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None, scale: Tensor | None = None) -> Tensor:
    """Divide gradients by `scale` and bring them to a global norm of at most `limit`; gives the norm between the two,
    on the device."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    return scale_to_limit(gradients, norm, limit, scale)
