"""Runs Python's cyclic garbage collector at fixed steps.

By default a collection starts whenever enough objects have been allocated: some hundred ms at any moment of a step, and
at a different moment on every rank, while the others wait. Objects made during start-up and compilation are excluded
after the first step, so later collections are fast.
"""

import gc

COLLECT_EVERY = 100  # steps


class GcControl:
    """Disables automatic collection until `close`."""

    def __init__(self) -> None:
        gc.disable()
        self.steps = 0

    def after_step(self) -> None:
        self.steps += 1
        if self.steps == 1 or self.steps % COLLECT_EVERY == 0:
            gc.collect()
        if self.steps == 1:
            gc.freeze()

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
