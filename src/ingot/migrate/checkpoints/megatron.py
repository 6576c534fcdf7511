"""Megatron GPT checkpoints of the `torch` format: `iter_NNNNNNN/mp_rank_TT[_PPP]/model_optim_rng.pt`.

Both namings are read: Megatron-core's `decoder.layers` (norms separate or inside Transformer Engine's linear
layers) and the older `language_model`. The run's arguments are in the file. Layers are numbered within a pipeline
stage, so those of the stages before count on.
"""

import re
from pathlib import Path
from typing import Any

from ingot.checkpoint.hf.folder import TensorReader
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError
from ingot.migrate.checkpoints.merge import MergedTensors, Rank, SliceLayout, checked_config
from ingot.migrate.checkpoints.pt_reader import StoredTensor, Unpacked, unpack
from ingot.migrate.megatron import MEGATRON
from ingot.migrate.megatron_common import VOCABULARIES
from ingot.migrate.translation import Translation

FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
BUFFER = re.compile(r"inv_freq$|_extra_state(\.|$)")
NEGATED = {"add_bias_linear": "disable_bias_linear", "bias_gelu_fusion": "no_bias_gelu_fusion",
           "add_position_embedding": "no_position_embedding"}  # fmt: skip
OTHER_MATH = ("apply_residual_connection_post_layernorm", "openai_gelu", "geglu")
PREFIX = re.compile(r"model(\d*)\.(?:module\.)*(?:language_model\.)?(?:encoder\.|transformer\.|decoder\.)?")
LAYER = re.compile(r"layers\.(\d+)\.(.+)")
TOP = {
    "embedding.word_embeddings.weight": "wte.weight", "embedding.position_embeddings.weight": "wpe.weight",
    "output_layer.weight": "head.weight", "word_embeddings_for_head.weight": "head.weight",
}  # fmt: skip
MODULES = {
    "input_layernorm": "norm_1", "input_norm": "norm_1", "pre_mlp_layernorm": "norm_2",
    "post_attention_layernorm": "norm_2", "post_attention_norm": "norm_2",
    "self_attention.q_layernorm": "attn.q_norm", "self_attention.k_layernorm": "attn.k_norm",
    "self_attention.linear_qkv": "attn.qkv", "self_attention.query_key_value": "attn.qkv",
    "attention.query_key_value": "attn.qkv", "self_attention.linear_proj": "attn.out",
    "self_attention.dense": "attn.out", "attention.dense": "attn.out", "mlp.linear_fc1": "mlp.up",
    "mlp.dense_h_to_4h": "mlp.up", "mlp.linear_fc2": "mlp.down", "mlp.dense_4h_to_h": "mlp.down",
}  # fmt: skip
FUSED_NORMS = {"self_attention.linear_qkv.layer_norm_": "norm_1.", "mlp.linear_fc1.layer_norm_": "norm_2."}


def rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """The folders of an iteration by pipeline stage and tensor-parallel rank."""
    found = {}
    for path in folder.iterdir():
        if match := RANK_FOLDER.fullmatch(path.name):
            found[int(match[2] or 0), int(match[1])] = path
        elif path.name.startswith("mp_rank_"):
            raise CheckpointError(f"{path}: slices of experts; mixtures of experts are not supported")
    return found


def read_megatron(
    folder: Path, given: ModelConfig | Translation | None, work: Path
) -> tuple[ModelConfig, TensorReader]:
    """The config and the parameters in an `iter_NNNNNNN` or `release` folder."""
    folders = rank_folders(folder)
    stages, tp = max(stage for stage, _ in folders) + 1, max(rank for _, rank in folders) + 1
    ranks_of_stages = [(stage, rank) for stage in range(stages) for rank in range(tp)]
    for stage, rank in ranks_of_stages:
        if (stage, rank) not in folders:
            raise CheckpointError(f"{folder} lacks the slice of tensor-parallel rank {rank}, pipeline stage {stage}")
    files = [_weights_file(folders[key]) for key in ranks_of_stages]
    found = dict(zip(ranks_of_stages, unpack(files, ["model", "args", "checkpoint_version"], work), strict=True))
    args = found[0, 0].values.get("args")
    args = args if isinstance(args, dict) else {}
    for key, have in {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": stages}.items():
        if (size := args.get(key)) not in (None, have):
            raise CheckpointError(f"{folder} holds slices for {key} {have}, its args say {size}; copy the whole folder")
    embeddings = [piece for name, piece in found[0, 0].tensors.items() if "word_embeddings.weight" in name]
    if not embeddings:
        raise CheckpointError(f"{files[0]} has no word embeddings, so it is not a Megatron GPT")
    rows = tp * sum(embeddings[0].shape[:1])
    padding = args.get("make_vocab_size_divisible_by")
    padding = padding if isinstance(padding, int) and padding > 0 else 128
    tokens = min(_tokens(args) or rows, rows)
    known = {"vocab_size": tokens, "vocab_multiple": padding if -(-tokens // padding) * padding <= rows else 1}
    config = checked_config(given or _arguments(args, files[0]), **known)
    ranks = [_rank([found[stage, rank] for stage in range(stages)], config) for rank in range(tp)]
    version = found[0, 0].values.get("checkpoint_version") or 0
    qkv = "blocks" if version == 0 else "last" if version == 1 else "grouped"
    layout = SliceLayout(qkv, padding=padding * tp, centered_norms=bool(args.get("apply_layernorm_1p")))
    return config, MergedTensors(config, ranks, layout, str(folder))


def _weights_file(folder: Path) -> Path:
    if file := next((folder / name for name in FILES if (folder / name).is_file()), None):
        return file
    raise CheckpointError(f"{folder} has no {FILES[0]}; only checkpoints of --ckpt-format torch are imported")


def _arguments(args: dict[str, Any], where: Path) -> Translation:
    """The arguments in the file as the command line that made them."""
    if not args:
        raise CheckpointError(f"{where} does not hold the run's args; pass the script it was trained with as --config")
    for key in OTHER_MATH:
        if args.get(key):
            raise CheckpointError(f"{where}: cannot import a model with {key}; it is not supported by the model here")
    given = {key: value for key, value in args.items() if key in MEGATRON.table["model_keys"]}
    given |= {no: True for key, no in NEGATED.items() if args.get(key) is False}
    return Translation(MEGATRON, given, dict.fromkeys(given, str(where))).run()


def _tokens(args: dict[str, Any]) -> int | None:
    """Tokens before padding, as far as the arguments tell."""
    kind, size = str(args.get("tokenizer_type")).lower(), args.get("vocab_size")
    if kind in VOCABULARIES:
        return VOCABULARIES[kind]
    return size + (kind == "nulltokenizer") if isinstance(size, int) else None  # that one adds an end of document


def _rank(stages: list[Unpacked], config: ModelConfig) -> Rank:
    """The tensors of one tensor-parallel rank, over all its pipeline stages, under our names."""
    chunks: dict[tuple[int, int], dict[str, StoredTensor]] = {}  # interleaved stages hold several, model0, model1, ...
    for stage, unpacked in enumerate(stages):
        for name, piece in unpacked.tensors.items():
            if not BUFFER.search(name) and (match := PREFIX.match(name)):
                chunks.setdefault((int(match[1] or 0), stage), {})[name[match.end() :]] = piece
    rank: Rank = {}
    before = 0
    for _, chunk in sorted(chunks.items()):
        here = {int(match[1]) for name in chunk if (match := LAYER.fullmatch(name))}
        for name, piece in chunk.items():
            rank[_ours(name, before, config)] = piece
        before += max(here, default=-1) + 1
    return rank


def _ours(name: str, before: int, config: ModelConfig) -> str:
    """Our name of a tensor, or theirs where the model has no such part."""
    if name in TOP:
        return TOP[name]
    if name.startswith(("final_layernorm.", "final_norm.")):
        return f"norm_f.{name.rpartition('.')[2]}"
    if not (match := LAYER.fullmatch(name)):
        return name
    block, inner = f"blocks.{before + int(match[1])}", match[2]
    for fused, norm in FUSED_NORMS.items():
        if inner.startswith(fused):
            return f"{block}.{norm}{inner.removeprefix(fused)}"
    module, _, leaf = inner.rpartition(".")
    part = MODULES.get(module, module)
    return f"{block}.{'mlp.fused' if part == 'mlp.up' and config.activation == 'swiglu' else part}.{leaf}"
