"""Merges the slices of a foreign checkpoint into our parameters, one at a time.

Each stack's module yields its tensors under our names, one mapping per tensor-parallel rank. What is left is the layout
of the rows: which dimension was split, how queries, keys and values alternate, what each rank has a copy of. All of it
is checked on shapes alone before the first tensor is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ingot.checkpoint.hf.folder import shapes_of
from ingot.checkpoint.hf.weights import EMBEDDINGS, fuse_qkv
from ingot.config.load import validate
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError, ConfigError
from ingot.migrate.checkpoints.pt_reader import StoredTensor
from ingot.migrate.translation import Translation

Rank = dict[str, StoredTensor]
ROW_PARALLEL = ("attn.out.weight", "mlp.down.weight")
ROW_BIASES = ("attn.out.bias", "mlp.down.bias")
COPIED = ("wpe", "norm_1", "norm_2", "norm_f", "q_norm", "k_norm")


@dataclass(frozen=True)
class SliceLayout:
    """How a stack lays out the rows of its weights."""

    qkv: str = "grouped"
    """In a slice: `grouped` as ours (each key/value head: queries, key, value), `blocks` (all queries, all keys, all
    values), or `last` (for each row of each head: query, key, value)."""
    glu: tuple[str, str] = ("gate", "up")  # the order of the two halves of a fused gated projection
    summed_biases: bool = False
    """Row-parallel biases are added on every rank before the reduction, so the model's bias is their sum."""
    padding: int = 1
    """Rows of the embedding are padded to a multiple of this; what our config does not need is cut."""
    centered_norms: bool = False  # norm weights are stored less one


class MergedTensors:
    """Our parameters, merged from the slices of all ranks (a `TensorReader`)."""

    def __init__(self, config: ModelConfig, ranks: list[Rank], layout: SliceLayout, where: str):
        self.config, self.ranks, self.layout, self.where = config, ranks, layout, where
        self._check_slices()
        if f"blocks.{config.n_layers - 1}.norm_1.weight" not in ranks[0]:  # before computing their shapes
            raise CheckpointError(f"{where} has fewer layers than its config, which says {config.n_layers}")
        self.shapes = shapes_of(config)
        self._check_shapes()

    def names(self) -> list[str]:
        return list(self.shapes)

    def get(self, name: str) -> Tensor:
        return self._merge(name, StoredTensor.get).contiguous()

    def _merge(self, name: str, read: Callable[[StoredTensor], Tensor]) -> Tensor:
        """One parameter; `read` returns a slice, or a tensor on the meta device if only the shape matters."""

        def slices(source: str) -> list[Tensor]:
            return [read(rank[source]) for rank in self.ranks]

        module, leaf = name.rsplit(".", 1)
        part = ".".join(module.split(".")[2:]) if module.startswith("blocks.") else module
        if part == "attn.qkv":
            return torch.cat([self._qkv(rank, module, leaf, read) for rank in self.ranks])
        fused = f"{module.rpartition('.')[0]}.fused.{leaf}"
        if part in ("mlp.gate", "mlp.up") and fused in self.ranks[0]:
            half = self.layout.glu.index(part.removeprefix("mlp."))
            return torch.cat([t.chunk(2)[half] for t in slices(fused)])
        if part.split(".")[-1] in COPIED or f"{part}.{leaf}" in ROW_BIASES:
            copied = slices(name)
            if f"{part}.{leaf}" in ROW_BIASES and self.layout.summed_biases:
                return torch.stack([bias.float() for bias in copied]).sum(0).to(copied[0].dtype)
            centered = self.layout.centered_norms and "norm" in part and leaf == "weight"
            return _mean(copied).float() + 1 if centered else _mean(copied)
        merged = torch.cat(slices(name), dim=1 if f"{part}.{leaf}" in ROW_PARALLEL else 0)
        if name in EMBEDDINGS and 0 <= merged.shape[0] - self.config.vocab_rows < self.layout.padding:
            merged = merged[: self.config.vocab_rows]
        return merged

    def _qkv(self, rank: Rank, module: str, leaf: str, read: Callable[[StoredTensor], Tensor]) -> Tensor:
        """The fused projection of one rank, in our order."""
        config, width = self.config, self.config.head_width
        if f"{module}.{leaf}" not in rank:  # three projections
            return fuse_qkv(config, *(read(rank[f"{module.removesuffix('qkv')}{p}.{leaf}"]) for p in "qkv"))
        fused = read(rank[f"{module}.{leaf}"])
        if self.layout.qkv == "grouped":
            return fused
        if self.layout.qkv == "last":  # [heads, D, 3, ...], one key and value for every head
            return fused.reshape(-1, width, 3, *fused.shape[1:]).transpose(1, 2).reshape(fused.shape)
        queries, groups = (heads // len(self.ranks) * width for heads in (config.n_heads, config.kv_heads))
        return fuse_qkv(config, *fused.split([queries, groups, groups]))

    def _check_slices(self) -> None:
        first = self.ranks[0]
        for k, rank in enumerate(self.ranks):
            for name in sorted(first.keys() ^ rank.keys()):
                piece, lacks = (first[name], k) if name in first else (rank[name], 0)
                raise CheckpointError(f"{piece.origin} has {piece.name}, tensor-parallel rank {lacks} lacks it")
            for name, piece in rank.items():
                what, other = f"{piece.origin}: {piece.name}", first[name]
                if piece.shape != other.shape:
                    rest = f"in {other.origin} it has {other.shape}: these are not slices of one model"
                    raise CheckpointError(f"{what} has shape {piece.shape}, {rest}")
                if piece.dtype not in ("F64", "F32", "BF16", "F16"):
                    raise CheckpointError(f"{what} is stored as {piece.dtype}; use floats")

    def _check_shapes(self) -> None:
        used: set[StoredTensor] = set()

        def imagine(piece: StoredTensor) -> Tensor:
            used.add(piece)
            return torch.empty(piece.shape, device="meta")

        for name, wanted in self.shapes.items():
            try:
                shape = self._merge(name, imagine).shape
            except KeyError as missing:
                name = missing.args[0]
                raise CheckpointError(f"{self.where} has no tensor for {name}, which its config calls for") from None
            except (RuntimeError, ValueError, IndexError) as error:
                reason = str(error).splitlines()[0]
                raise CheckpointError(f"{self.where}: {name} does not fit its config: {reason}") from None
            if shape != wanted:
                sizes = f"{name} comes out as {list(shape)}, its config says {list(wanted)}"
                raise CheckpointError(f"{self.where}: {sizes}")
        for name, piece in self.ranks[0].items():
            if name == "head.weight" and self.config.tie_word_embeddings:  # the last pipeline stage has a copy
                if not all(torch.equal(rank[name].get(), rank["wte.weight"].get()) for rank in self.ranks):
                    raise CheckpointError(f"{piece.origin}: {piece.name} differs from the embedding it is tied to")
            elif piece not in used:
                raise CheckpointError(f"{piece.origin}: the model in its config has no tensor for {piece.name}")


def _mean(copies: list[Tensor]) -> Tensor:
    """The value that all ranks hold; where they drifted apart, the mean."""
    first = copies[0]
    if first.is_meta or all(torch.equal(first, other) for other in copies[1:]):
        return first
    return torch.stack([copy.float() for copy in copies]).mean(0).to(first.dtype)


def checked_config(translation: ModelConfig | Translation, **known: Any) -> ModelConfig:
    """The model of a translated run description; keys of the run, which is over, do not matter.

    `known` is what the tensors themselves say. A model of a native file is taken as it is.
    """
    if isinstance(translation, ModelConfig):
        return translation
    model_keys = translation.dialect.table.get("model_keys", [])
    rows = translation.rows.items()
    translation.rows = {key: row for key, row in rows if key in model_keys or key.startswith("model.")}
    if translation.problems:
        raise CheckpointError(f"cannot import this model: {translation.problems[0]}")
    values = {**translation.values["model"], **known}
    values.setdefault("max_seq_len", translation.values.get("max_seq_len"))
    return validated(values, next(iter(translation.lines.values()), translation.dialect.title))


def validated(values: dict[str, Any], where: str) -> ModelConfig:
    try:
        return validate(ModelConfig, values)
    except ConfigError as error:
        raise CheckpointError(f"{where}: {str(error).splitlines()[0]}") from None
