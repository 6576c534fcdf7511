"""How a run is divided over its processes, as configured."""

from typing import Literal

from ingot.config.base import Section

Degree = Literal["auto"]


class ParallelConfig(Section):
    """How the model and the batch are spread. The product of the axes is the number of processes."""

    replicate: int | Degree = "auto"
    """Copies of the model, each on its own part of the batch. auto: what the other axes leave, if shard is given."""
    shard: int | Degree = "auto"
    """Processes that share weights, gradients and optimizer (FSDP2), each on its own part of the batch; with replicate
    it is HSDP. auto: all that the other axes leave. One process alone is not wrapped, unless this says 1."""
    context: int | Degree = "auto"
    """Processes that share a sequence: attention gathers keys and values over them. auto: 1, or as many as it takes
    to fit where tensor alone does not."""
    tensor: int | Degree = "auto"
    """Processes that share each matrix (tensor and sequence parallel). auto: 1, or as many of a machine as it takes to
    fit into the devices' memory."""
    pipeline: int | Degree = "auto"
    """Processes that each hold a range of layers. auto: 1, or as many as it takes to fit where the others do not."""
    reshard_after_forward: bool | Degree = "auto"
    """Free a block's gathered weights after the forward pass and gather them again for the backward pass: less memory,
    half as much traffic again. auto: yes, but not in a pipeline, where each microbatch would gather them again."""
    join_timeout: float = 300.0
    """Seconds to wait at the start for all processes to arrive."""
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes; interleaved_1f1b and zero_bubble give each process two ranges of layers."""
