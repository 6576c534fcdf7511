"""A GPT with its loss as one module, built for one process. Several processes: `parallelize`."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ingot.config.model import ModelConfig
from ingot.model import kernels
from ingot.model.branch_attention import TokenRows
from ingot.model.gpt import GPT
from ingot.model.init import build_model


@dataclass(frozen=True)
class BuildOptions:
    """How a model is executed. None of it changes the mathematics."""

    device: torch.device
    precision: str
    seq_len: int
    activation_checkpointing: str | None = None
    compiled: bool = False
    allocating: AbstractContextManager = field(default_factory=nullcontext)
    """Entered while memory is allocated, such as the mode of fake tensors in a dry run."""


class LossModel(nn.Module):
    """A GPT as executors call it: tokens and labels [B, T] and the sequences' dropout keys [B] in, the summed loss out.

    The hooks of FSDP2 and the compiler attach to the call of a module, so the loss must be one.
    """

    def __init__(self, gpt: GPT):
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor, labels: Tensor, sequence_keys: Tensor | None = None) -> Tensor:
        return self.gpt.loss(tokens, labels, None, sequence_keys)

    def token_scores(self, rows: TokenRows) -> Tensor:
        """What the model makes of the scored tokens, [P, 3]: see `CrossEntropy.token_scores`."""
        return self.gpt.token_scores(rows)


def build_loss_model(config: ModelConfig, seed: int, options: BuildOptions) -> tuple[LossModel, list[str]]:
    """The whole model on one process, with its initial weights, and notes for the user.

    It is not compiled yet: what it recomputes may depend on a trial (`compile_model`).
    """
    gpt = build_model(config, seed, options.device)
    gpt.activation_checkpointing = options.activation_checkpointing
    notes = kernels.attach(gpt, device=options.device, precision=options.precision)
    return LossModel(gpt), notes


def uncompiled(gpt: GPT) -> AbstractContextManager:
    """Run compiled blocks as they are: rows of questions have shapes and masks of their own."""
    if any(block._compiled_call_impl is not None for block in gpt.blocks.values()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def compile_model(root: LossModel) -> None:
    """Compile in place, at the first pass: block by block, whose layers share one program, and what follows them.

    A program of all layers at once is up to 1% faster on one process, which a run of half an hour does not earn back:
    125m starts in 37 s instead of 24. And FSDP2 gathers weights between blocks, where a program has to end.
    """
    gpt = root.gpt
    for block in gpt.blocks.values():
        block.compile(dynamic=False)
    if gpt.has_head:
        gpt.norm_f.compile(dynamic=False)
        gpt.loss_fn.compile(dynamic=False)
