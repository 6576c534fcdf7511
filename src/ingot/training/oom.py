"""When memory runs out in the middle of a run: the same batch again, in smaller pieces.

One process drops the attempt and repeats the batch in place, as long as no weight has been touched. Of several, one
may be out of memory while the others wait for it inside a collective, which nothing can undo; so that process ends,
its launcher ends the others, and all start again from the last checkpoint with the smaller size.
"""

import torch

from ingot.errors import EXIT_FAULT, IngotError


class OutOfMemory(IngotError):
    """A step did not fit. `fits` is the microbatch size to try next, if there is one."""

    exit_code = EXIT_FAULT

    def __init__(self, place: str, micro: int, detail: str):
        self.fits = micro // 2 or None
        hint = (
            f"start again with device_train_microbatch_size={self.fits}"
            if self.fits
            else "use activation_checkpointing=true, more processes to shard over, or a shorter max_seq_len"
        )
        super().__init__(f"out of memory {place} with microbatches of {micro}; {hint} ({detail})")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "CUDA out of memory" in text)
