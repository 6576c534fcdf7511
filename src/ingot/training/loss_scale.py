"""The factor that keeps small fp16 gradients from vanishing: halved when one overflows, doubled after a long calm.

Not torch's GradScaler, which looks for infinities tensor by tensor, knows nothing of a pipeline's other stages, and
divides gradients in a pass of its own. Here the global gradient norm, which all processes share anyway, says whether
anything overflowed, and the division is part of clipping.
"""

from typing import Any

import torch
from torch import Tensor

GROWTH, BACKOFF, CALM_STEPS = 2.0, 0.5, 2000  # powers of two: scaling changes no bit of a gradient


class LossScale:
    """A factor on the device, so that nothing waits for it; 1 forever unless enabled."""

    def __init__(self, device: torch.device, enabled: bool):
        self.enabled = enabled
        self.factor = torch.tensor(65536.0 if enabled else 1.0, device=device)
        self.calm = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        """Move on after a step whose gradients did (1.0) or did not (0.0) overflow."""
        torch._amp_update_scale_(self.factor, self.calm, overflow, GROWTH, BACKOFF, CALM_STEPS)

    def get_scale(self) -> float:
        return float(self.factor)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": float(self.factor), "calm_steps": int(self.calm)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled and state:
            self.factor.fill_(state["scale"])
            self.calm.fill_(state["calm_steps"])
