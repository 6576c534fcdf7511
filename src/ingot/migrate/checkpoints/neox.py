"""GPT-NeoX checkpoints, as DeepSpeed lays them out in `global_stepN`.

With pipeline stages (also one) each layer is a file per tensor-parallel rank, whatever stage held it; without, a rank's
whole model is one file. Layer 0 is the embedding, 2 to L+1 the blocks, L+3 the final norm, L+4 the head.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from ingot.checkpoint.hf.folder import TensorReader
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError
from ingot.migrate.checkpoints.merge import MergedTensors, Rank, SliceLayout, checked_config
from ingot.migrate.checkpoints.pt_reader import Piece, unpack
from ingot.migrate.detect import translate
from ingot.migrate.translation import Translation

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
BUFFER = re.compile(r"inv_freq$|masked_bias$")
MODULES = {
    "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "attention.query_key_value": "attn.qkv",
    "attention.dense": "attn.out", "mlp.linear1": "mlp.up", "mlp.dense_h_to_4h": "mlp.up", "mlp.linear2": "mlp.down",
    "mlp.dense_4h_to_h": "mlp.down", "mlp.w1": "mlp.gate", "mlp.w3": "mlp.up", "mlp.w2": "mlp.down",
}  # fmt: skip


def is_neox(folder: Path) -> bool:
    return any(LAYER_FILE.fullmatch(file.name) or RANK_FILE.fullmatch(file.name) for file in folder.iterdir())


def read_neox(folder: Path, given: ModelConfig | Translation | None, work: Path) -> tuple[ModelConfig, TensorReader]:
    """The config and the parameters in a `global_stepN` folder."""
    found = list(_tensors(folder, work))  # rank, layer, name, piece
    tp = max((rank for rank, *_ in found), default=0) + 1
    embeddings = [piece for _, layer, name, piece in found if (layer, name) == (0, "word_embeddings.weight")]
    if not embeddings:
        raise CheckpointError(f"{folder} has no word_embeddings.weight in layer 0: it is no GPT-NeoX model")
    if given is None:
        files = [file for file in sorted((folder / "configs").glob("*")) if file.suffix in (".yml", ".yaml", ".json")]
        if not files:
            how = "give the files it was trained with, as --config FILE"
            raise CheckpointError(f"{folder} has no configs/*.yml; {how}")
        given = translate(list(map(str, files)), "neox")
    known = {"vocab_size": tp * sum(embeddings[0].shape[:1])}
    if isinstance(given, Translation):
        if (size := given.get("model_parallel_size", 1)) != tp:
            raise CheckpointError(
                f"{folder} holds slices of {tp} tensor-parallel ranks, its config says model_parallel_size {size}; "
                "copy the whole folder"
            )
        if given.values["model"].get("activation") == "swiglu":  # its width has been computed in several ways
            down = [p.shape for _, layer, name, p in found if layer == 2 and MODULES.get(name[:-7]) == "mlp.down"]
            known |= {"ffn_hidden_size": tp * down[0][-1]} if down else {}
    config = checked_config(given, **known)
    ranks: list[Rank] = [{} for _ in range(tp)]
    for rank, layer, name, piece in found:
        if not BUFFER.search(name):
            ranks[rank][_ours(layer, name, config)] = piece
    grouped = config.kv_heads != config.n_heads
    # with parallel residuals attention and MLP are reduced together, after each rank added its own biases
    layout = SliceLayout("blocks" if grouped else "grouped", ("up", "gate"), config.parallel_residual, padding=128 * tp)
    return config, MergedTensors(config, ranks, layout, str(folder))


def _tensors(folder: Path, work: Path) -> Iterator[tuple[int, int, str, Piece]]:
    """Every tensor, with its rank, the number of its layer, and its name there."""
    layers = {file: match for file in sorted(folder.iterdir()) if (match := LAYER_FILE.fullmatch(file.name))}
    if not layers:
        files = [file for file in sorted(folder.iterdir()) if RANK_FILE.fullmatch(file.name)]
        _complete(folder, {f.name for f in files}, [f"mp_rank_{k:02d}_model_states.pt" for k in range(len(files))])
        for rank, found in enumerate(unpack(files, ["module."], work)):
            for name, piece in found.tensors.items():
                if match := re.fullmatch(r"module\.sequential\.(\d+)\.(.+)", name):
                    yield rank, int(match[1]), match[2], piece
        return
    ranks = range(max(int(match[2]) for match in layers.values()) + 1)
    wanted = [f"layer_{match[1]}-model_{rank:02d}-model_states.pt" for match in layers.values() for rank in ranks]
    _complete(folder, {file.name for file in layers}, wanted)
    for found in unpack(list(layers), [""], work):
        match = layers[found.path]
        for name, piece in found.tensors.items():
            yield int(match[2]), int(match[1]), name, piece


def _complete(folder: Path, have: set[str], wanted: list[str]) -> None:
    for name in wanted:
        if name not in have:
            raise CheckpointError(f"{folder / name} is missing; copy the whole folder")


def _ours(layer: int, name: str, config: ModelConfig) -> str:
    """Our name of a tensor, or theirs where the model has no such part."""
    module, _, leaf = name.rpartition(".")
    leaf = "weight" if leaf == "scale" else leaf  # of its RMSNorm
    if module in ("word_embeddings", "position_embeddings"):
        return f"{'head' if layer else 'wte' if module[0] == 'w' else 'wpe'}.{leaf}"
    if module in ("norm", "final_linear"):
        return f"{'norm_f' if module == 'norm' else 'head'}.{leaf}"
    if module not in MODULES:
        return f"{layer}.{name}"
    part = MODULES[module]
    if part == "mlp.up" and module != "mlp.w3" and config.activation == "swiglu":
        part = "mlp.fused"
    return f"blocks.{layer - 2}.{part}.{leaf}"
