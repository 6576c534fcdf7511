"""Python's collector of cyclic garbage, run where the loop can afford it.

Left alone it looks through all objects of a process whenever enough have come into being: some hundred ms, at a moment
of its own choosing, and on many processes at a different moment on each, where all wait for the slowest. What start-up
and compiling have made is set aside after the first step, so that what is looked through later is little.
"""

import gc

EVERY = 100  # steps


class Garbage:
    """The collector in our hands, from here to `close`."""

    def __init__(self) -> None:
        gc.disable()
        self.steps = 0

    def after_step(self) -> None:
        self.steps += 1
        if self.steps == 1 or self.steps % EVERY == 0:
            gc.collect()
        if self.steps == 1:
            gc.freeze()

    def close(self) -> None:
        gc.unfreeze()
        gc.enable()
