"""Hugging Face folders: export a model so that transformers loads it, and import published models.

Tensors are converted one at a time and written shard by shard, so a model larger than memory can be exported. An export
gets its name only when every byte is on disk. Files are safetensors both ways: a pickle is never opened.
"""

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from ingot.checkpoint.hf.config import CLASS_OF_TYPE, from_hf_config, to_hf_config
from ingot.checkpoint.hf.weights import PREFIX, from_hf, hf_names, to_hf
from ingot.checkpoint.safetensors_file import open_safetensors
from ingot.config.model import ModelConfig
from ingot.errors import CheckpointError, disk_error
from ingot.model.shapes import parameter_shapes
from ingot.storage.atomic import sync

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
END_OF_TEXT = "<|endoftext|>"
BUFFER = re.compile(r"(^|\.)((attn|attention)\.(bias|masked_bias)|rotary_emb\.inv_freq)$")  # constants in old files


class TensorReader(Protocol):
    """Parameters under our names, each read on request."""

    def names(self) -> list[str]: ...

    def get(self, name: str) -> Tensor: ...


def export_hf(
    tensors: TensorReader,
    config: ModelConfig,
    out: Path,
    *,
    tokenizer: Path | None,
    max_shard_bytes: int = 5 * 10**9,
    dtype: str | None = None,
) -> str:
    """Write a folder that transformers loads without remote code. Returns its class. By default, bits are kept."""
    values = to_hf_config(config)
    hf: str = values["architectures"][0]
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(
            f"cannot export as {dtype!r}; choose {', '.join(DTYPES)}, or none to keep the stored type"
        )
    out = out.absolute()
    partial = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CheckpointError(f"{out} already exists and is not an empty folder; choose another one for the export")
        partial.mkdir(parents=True)
        values |= _write_tokenizer(tokenizer, config, partial)
        values["torch_dtype"] = write_shards(_converted(tensors, hf, config, dtype), partial, max_shard_bytes)
        _write_json(partial / "config.json", values)
        special = {key: values[key] for key in ("bos_token_id", "eos_token_id") if values[key] is not None}
        _write_json(partial / "generation_config.json", special)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(out)
        sync(partial.parent)
    except OSError as error:
        raise disk_error("export to", out, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return hf


def _converted(tensors: TensorReader, hf: str, config: ModelConfig, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the exported model, in order, under its full Hugging Face name."""
    shapes, have = shapes_of(config), set(tensors.names())
    if wrong := sorted(have ^ shapes.keys()):
        state = "is not part of" if wrong[0] in have else "is missing from"
        raise CheckpointError(f"cannot export: tensor {wrong[0]} {state} the model that its config describes")
    for name, shape in shapes.items():
        tensor = tensors.get(name).detach().cpu()
        if (found := tensor.shape) != shape:
            raise CheckpointError(f"cannot export: {name} has shape {list(found)}, its config says {list(shape)}")
        if dtype is not None:
            exact, tensor = tensor, tensor.to(DTYPES[dtype])
            if not tensor.isfinite().all() and exact.isfinite().all():
                what = f"cannot export as {tensor.dtype}: {name} holds values that are too large for it"
                raise CheckpointError(f"{what}; choose bf16 or fp32")
        for theirs, part in zip(hf_names(hf, name), to_hf(hf, config, name, tensor), strict=True):
            yield theirs if name == "head.weight" else PREFIX[hf] + theirs, part


def write_shards(tensors: Iterator[tuple[str, Tensor]], folder: Path, max_shard_bytes: int) -> str:
    """Write one file, or numbered shards and their index, holding one shard in memory. Returns the weights' dtype."""
    shards: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    shard_bytes = total_bytes = 0
    dtype = ""

    def flush() -> None:
        path = folder / f"shard-{len(shards)}"
        try:
            save_file(shard, path, metadata={"format": "pt"})
        except SafetensorError as error:  # how the library reports a failed write
            raise OSError(0, str(error)) from None
        path.chmod(folder.stat().st_mode & 0o666)  # the library writes 0600; the folder has what the umask allows
        shards.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            shard_bytes = 0
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)  # a view would keep its whole storage alive
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(shards) == 1:
        shards[0][0].rename(folder / SINGLE)
        return dtype
    weight_map: dict[str, str] = {}
    for k, (path, names) in enumerate(shards, start=1):
        file = f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return dtype


def _write_tokenizer(source: Path | None, config: ModelConfig, folder: Path) -> dict[str, int | None]:
    """Copy the tokenizer. Returns the special tokens' ids, None where unknown."""
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if source is None:
        return ids
    path = source / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{source} holds no tokenizer.json; name the folder of the tokenizer that the model was trained with"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from None
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= config.vocab_size:
        raise CheckpointError(
            f"{path} has token id {largest} and the model {config.vocab_size} tokens: they do not belong together"
        )
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, folder / file)
    if (folder / "tokenizer_config.json").exists():
        settings = _read_json(source / "tokenizer_config.json")
    else:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context}
        if any(token.content == END_OF_TEXT for token in tokenizer.get_added_tokens_decoder().values()):
            settings["eos_token"] = END_OF_TEXT
        _write_json(folder / "tokenizer_config.json", settings)
    for kind in ("bos", "eos"):
        token = settings.get(f"{kind}_token")  # a string, or a mapping with the string as content
        token = token.get("content") if isinstance(token, dict) else token
        ids[f"{kind}_token_id"] = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return ids


def read_hf(folder: Path) -> tuple[ModelConfig, TensorReader]:
    """The config and the parameters of a published model, checked to the last tensor before any is read."""
    values = _read_json(folder / "config.json")
    config = from_hf_config(values, str(folder / "config.json"))
    return config, _HFReader(folder, CLASS_OF_TYPE[values["model_type"]], config)


class _HFReader:
    """Parameters of a Hugging Face folder under our names, in their stored type."""

    def __init__(self, folder: Path, hf: str, config: ModelConfig):
        self.folder, self.hf, self.config = folder, hf, config
        self.stored: dict[str, tuple[str, Any]] = {}  # name without prefix -> full name, open file
        for path in weight_files(folder):
            file = open_safetensors(path)
            for full in file.keys():  # noqa: SIM118 - not a mapping
                name = full.removeprefix(PREFIX[hf])
                if name == "lm_head.weight":
                    name = hf_names(hf, "head.weight")[0]  # newer GPT-NeoX files
                if name in self.stored:
                    raise CheckpointError(f"{folder} holds the tensor {full} twice")
                if not BUFFER.search(name):
                    self.stored[name] = (full, file)
        last = hf_names(hf, f"blocks.{config.n_layers - 1}.norm_1.weight")[0]
        self._must_have(last)  # before the shapes of that many layers are computed
        self.shapes = shapes_of(config)
        self._check()

    def names(self) -> list[str]:
        return list(self.shapes)

    def get(self, name: str) -> Tensor:
        parts = [self._tensor(theirs) for theirs in hf_names(self.hf, name)]
        return from_hf(self.hf, self.config, name, parts).contiguous()

    def _tensor(self, name: str) -> Tensor:
        full, file = self.stored[name]
        return file.get_tensor(full)

    def _must_have(self, name: str) -> None:
        if name not in self.stored:
            full = PREFIX[self.hf] + name
            raise CheckpointError(f"{self.folder} lacks the tensor {full} that its config.json calls for")

    def _check(self) -> None:
        known = set()
        for name, shape in self.shapes.items():
            wanted = to_hf(self.hf, self.config, name, torch.empty(shape, device="meta"))
            for theirs, part in zip(hf_names(self.hf, name), wanted, strict=True):
                self._must_have(theirs)
                known.add(theirs)
                full, file = self.stored[theirs]
                found, kind = file.get_slice(full).get_shape(), file.get_slice(full).get_dtype()
                what = f"{self.folder}: {full}"
                if found != list(part.shape):
                    raise CheckpointError(f"{what} has shape {found}, its config.json says {list(part.shape)}")
                if kind not in ("F64", "F32", "BF16", "F16"):
                    raise CheckpointError(f"{what} is stored as {kind}; quantized weights are not supported")
        head = hf_names(self.hf, "head.weight")[0]
        if self.config.tie_word_embeddings and head in self.stored:  # a copy that some tools write
            if not torch.equal(self._tensor(head), self._tensor(hf_names(self.hf, "wte.weight")[0])):
                full = self.stored[head][0]
                raise CheckpointError(f"{self.folder}: {full} differs from the embedding that config.json ties it to")
            known.add(head)
        if unknown := sorted(self.stored.keys() - known):
            raise CheckpointError(f"{self.folder}: {self.hf} has no place for the tensor {self.stored[unknown[0]][0]}")


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the model. Allocates nothing."""
    try:
        return parameter_shapes(config)
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64 bits
        raise CheckpointError(f"the config describes an impossible model: {str(error).splitlines()[0]}") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: one file, or the shards that its index names, which must be in the same folder."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise CheckpointError(
                f"{folder} holds only pickled weights, which can run code when opened; save it again as safetensors"
            )
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    files = []
    for file in sorted({str(file) for file in weight_map.values()}):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} names the file {file!r}, which is not a safetensors file of this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing although {INDEX} names it; fetch the model again")
        files.append(folder / file)
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {path.parent} is not a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} should hold a JSON object")
    return values


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
