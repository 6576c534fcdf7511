"""Optimizers, and their state as named tensors.

torch's own fused AdamW and Muon do the work. Composer's decoupled AdamW decays by (lr / peak) x weight_decay, which is
AdamW with weight_decay / peak, so it needs no code of its own. Lion is not in torch; ours runs on whole lists of
tensors (foreach), not parameter by parameter.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ingot.errors import CheckpointError
from ingot.model.gpt import is_matrix
from ingot.parallel.weights import fill, local
from ingot.train.config import OptimizerConfig

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


class Optimizer:
    """One or two torch optimizers that step together under one learning-rate multiplier."""

    def __init__(self, config: OptimizerConfig, names: dict[Tensor, str]):
        """`names` holds the parameters of this process with the names that they have in the whole model."""
        self.config, self.names = config, names
        self.parts: dict[str, torch.optim.Optimizer] = {}
        hidden = {p for p, name in names.items() if config.name == "muon" and is_matrix(name, p)}
        # AdamW decays by lr x weight_decay; the decoupled forms by (lr / peak) x weight_decay
        decay = config.weight_decay if config.name in ("adamw", "muon") else config.weight_decay / config.lr
        rest = [p for p in self.names if p not in hidden]
        groups = _decay_groups(rest, decay, decay if config.decay == "all" else 0.0)
        if config.name == "lion":
            self.parts[LABELS["lion"]] = Lion(groups, config.lr, config.betas)
        else:
            label = LABELS.get(config.name, "AdamW")
            self.parts[label] = torch.optim.AdamW(
                groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=True
            )
        if hidden:
            ordered = [p for p in self.names if p in hidden]
            self.parts["Muon"] = torch.optim.Muon(
                ordered, lr=config.lr, weight_decay=decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
            )  # scaled to AdamW's update size, so that one learning rate serves both

    def set_lr(self, multiplier: float) -> None:
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = self.config.lr * multiplier

    def learning_rates(self) -> dict[str, float]:
        """The current rates under the names that dashboards have."""
        rates = {}
        for label, part in self.parts.items():
            for number, group in enumerate(part.param_groups):
                rates[f"lr-{label}/group{number}"] = float(group["lr"])
        return rates

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """All state, as tensors named `KEY/PARAMETER`, such as `exp_avg/blocks.0.attn.qkv.weight`."""
        tensors = {}
        for part in self.parts.values():
            for parameter, state in part.state.items():
                for key, value in state.items():
                    tensors[f"{key}/{self.names[parameter]}"] = value
        return tensors

    def load_state_tensors(self, tensors: Iterable[tuple[str, Tensor]], model_names: Iterable[str]) -> None:
        """Put back what `state_tensors` gave; of a spread model, the part that belongs here."""
        known = set(model_names)
        parameters: dict[str, list[Tensor]] = {}
        for parameter, name in self.names.items():
            parameters.setdefault(name, []).append(parameter)
        owner = {p: part for part in self.parts.values() for group in part.param_groups for p in group["params"]}
        for name, tensor in tensors:
            key, _, parameter_name = name.partition("/")
            if parameter_name not in known:
                raise CheckpointError(f"the checkpoint has optimizer state for {parameter_name}, which the model lacks")
            for parameter in parameters.get(parameter_name, []):
                if tensor.shape == parameter.shape:
                    state = torch.empty_like(parameter, dtype=tensor.dtype)
                    fill(state, tensor.to(parameter.device))
                else:  # the `step` counter
                    state = tensor.to(parameter.device).clone()
                owner[parameter].state[parameter][key] = state


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
    """Scale gradients to a global norm of at most `limit`; gives the norm before, on the device."""
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=True)
    if limit is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm, foreach=True)
    return norm


def _decay_groups(parameters: list[Tensor], decay: float, vector_decay: float) -> list[dict]:
    """Matrices and embeddings in one group, biases and norms in another."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": vector_decay}]
    return [group for group in groups if group["params"]]
