"""The seam for tests that interfere with a training step, and for nothing else."""

from collections.abc import Callable
from typing import Any

Step = Callable[[Any], Any]
"""From a batch to a `StepResult`."""
_wrapper: Callable[[Any, Any, Step], Any] = lambda trainer, batch, step: step(batch)  # noqa: E731


def wrap_step(wrapper: Callable[[Any, Any, Step], Any]) -> None:
    """From now on, `wrapper(trainer, batch, step)` runs every training step of this process; `step(batch)` is the
    plain step."""
    global _wrapper
    _wrapper = wrapper


def run_step(trainer: Any, batch: Any, step: Step) -> Any:
    return _wrapper(trainer, batch, step)
