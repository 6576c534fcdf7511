"""The config of parallelism: how a run is divided over its processes."""

from typing import Literal

from ingot.config.base import Section

Auto = Literal["auto"]


class ParallelConfig(Section):
    """How model and batch are divided. The product of the five axes is the number of processes."""

    replicate: int | Auto = "auto"
    """Copies of the model, each with its own part of the batch. auto: the remaining processes, if shard is set."""
    shard: int | Auto = "auto"
    """Processes that shard weights, gradients and optimizer (FSDP2), each with its own part of the batch; together with
    replicate it is HSDP. auto: the remaining processes. A single process is only wrapped if this is 1."""
    context: int | Auto = "auto"
    """Processes that share a sequence: attention gathers keys and values over them. auto: 1, or as many as needed to
    fit into memory when tensor is not enough."""
    tensor: int | Auto = "auto"
    """Processes that share each matrix (tensor and sequence parallel). auto: 1, or as many of a machine as needed to
    fit into memory."""
    pipeline: int | Auto = "auto"
    """Processes that each hold a range of layers. auto: 1, or as many as needed when the others are not enough."""
    reshard_after_forward: bool | Auto = "auto"
    """Free a block's gathered weights after the forward pass and gather them again for the backward pass: less memory,
    50% more traffic. auto: true, except in a pipeline, where each microbatch would gather them again."""
    join_timeout: float = 300.0
    """Seconds to wait at the start for all processes to join."""
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes; with interleaved_1f1b and zero_bubble each process has two layer ranges."""
