"""Out of memory in the middle of a run: the same batch again, in smaller microbatches.

A single process drops the attempt and repeats the batch in place. Of several ranks, one may be out of memory while
the others wait for it inside a collective, which cannot be undone. That rank exits, its launcher ends the others, and
all restart from the last checkpoint with the smaller size.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from ingot.errors import EXIT_FAULT, IngotError

T = TypeVar("T")


class OutOfMemory(IngotError):
    """A step did not fit into memory. `next_microbatch` is the size to try next, if there is one."""

    exit_code = EXIT_FAULT

    def __init__(self, where: str, microbatch: int, detail: str):
        self.microbatch, self.next_microbatch = microbatch, microbatch // 2 or None
        hint = (
            f"start again with device_train_microbatch_size={self.next_microbatch}"
            if self.next_microbatch
            else "use activation_checkpointing=true, more processes to shard over, or a shorter max_seq_len"
        )
        super().__init__(f"out of memory {where} with microbatches of {microbatch}; {hint} ({detail})")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "CUDA out of memory" in text)


def as_out_of_memory(error: BaseException, where: str, microbatch: int) -> OutOfMemory | None:
    """The error that says where memory ran out and what to do; None if an error is about something else."""
    if isinstance(error, OutOfMemory):
        return error
    return OutOfMemory(where, microbatch, str(error).partition("\n")[0]) if is_out_of_memory(error) else None


def retry_without_cache(work: Callable[[], T], where: str, microbatch: int) -> T:
    """What `work` returns. If it runs out of memory, which must leave nothing half done, free what torch's allocator
    keeps for later and try once more."""
    for is_last in (False, True):
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            problem = as_out_of_memory(error, where, microbatch)
            if problem is None:
                raise
            if is_last:
                raise problem from None
        torch.cuda.empty_cache()
    raise AssertionError("unreachable")
