"""What GPT-NeoX took from Megatron, translated once for both: batch, vocabulary, indexed data, checkpoints."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.migrate.translation import Translation

VOCABULARIES = {"gpt2bpetokenizer": 50257, "hfgpt2tokenizer": 50257, "charleveltokenizer": 512}
EODS = {"gpt2bpetokenizer": 50256, "hfgpt2tokenizer": 50256, "charleveltokenizer": 0}  # what ends a document
KNOWN: dict[str, tuple[int | None, int | None]] = {  # files and hub names: tokens, and the one that ends a document
    "20B_tokenizer.json": (50277, 0), "gpt2-vocab.json": (50257, 50256), "gpt2": (50257, 50256),
    "openai-community/gpt2": (50257, 50256), "EleutherAI/gpt-neox-20b": (50277, 0), "bigscience/tokenizer": (250680, 2),
    "bigscience/bloom": (250680, 2), "meta-llama/Llama-2-7b-hf": (32000, 2),
    "meta-llama/Meta-Llama-3-8B": (128256, 128001),
}  # fmt: skip
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
DataSets = list[tuple[float | None, str]]  # weight and path


def count(amount: float | None, unit: str = "ba") -> str:
    return f"{amount or 0:.15g}{unit}"


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else str(value).split() if value is not None else []


def put_parallel(t: Translation, axes: dict[str, str]) -> None:
    """Degrees as they are given; without any, the model is whole and all processes are data-parallel."""
    for axis in dict.fromkeys(axes.values()):
        keys = [key for key, name in axes.items() if name == axis]
        sizes = [t.size(key) for key in keys if t.number(key, 1) > 1]
        if sizes or axis not in ("shard", "replicate"):
            t.put(f"parallel.{axis}", max(sizes, default=1), *keys)


def put_batch(t: Translation, total: str, micro: str, accumulation: str | None, world: int, model: int) -> None:
    """The global batch: given, or micro x accumulation x data-parallel copies of the model, by the peers' own rule.

    `world` is the number of processes that the file itself names, or 0; `model` those that share one copy of the model.
    Without any number of processes the batch is not certain and is refused.
    """
    batch, part = t.size(total), t.size(micro)
    steps = t.size(accumulation, 1) if accumulation else 1
    named = t.given.keys() & {"global_num_gpus", "world_size", "nproc_per_node", "nnodes", "num_gpus", "num_nodes"}
    follows = [micro, *([accumulation] if accumulation else []), *sorted(named)]
    if batch is None and part is None:
        t.refuse(total, f"is missing, and so is {micro}; set it")
        return
    if batch is None:
        launched = os.environ.get("WORLD_SIZE", "")  # processes of the job, where a launcher says so
        source = "" if world else ", from WORLD_SIZE"
        world = world or (int(launched) if launched.isdigit() else 0)
        if world and world % model == 0:
            t.put("global_train_batch_size", part * steps * (world // model), *follows)
            t.note(micro, f"for {world} processes{source}")
        else:
            why = f"{world} are not a multiple of {model}" if world else "which is not certain"
            t.refuse(micro, f"the global batch is this times the number of data-parallel processes, {why}; give "
                     f"{total}=..., ingot's global_train_batch_size")  # fmt: skip
    else:
        t.put("global_train_batch_size", batch, total)
        # without a number of processes, accumulation is free unless it is given
        unit = part * steps * (world // model or 1) if part else 1
        exact = world and accumulation in t.given
        if part and (batch != unit if exact else batch % unit):
            why = " x ".join(f"{key} {t.get(key)}" for key in follows if key in t.given)
            t.refuse(total, f"contradicts {why}; remove one of them")
        t.skip("follows from the batch and the number of processes", *follows[1:])
    if part:
        t.put("device_train_microbatch_size", part, micro)


def put_eval(t: Translation, interval: Any) -> None:
    """`eval_iters` counts global batches; ours are as large as a device takes."""
    t.put("eval_interval", count(interval), "eval_interval")
    if not (iterations := t.number("eval_iters", 100)):
        t.values.get("data", {}).pop("eval", None)
    if "eval" in t.values.get("data", {}):
        batch, size = t.values.get("global_train_batch_size", 1), t.values.get("device_train_microbatch_size", 1)
        t.put("device_eval_batch_size", size, "eval_iters")
        t.put("eval_subset_num_batches", -(-iterations * batch // size), "eval_iters")


@dataclass(frozen=True)
class GivenSize:
    """The size of the vocabulary as the run description says it. `certain`: this is what the peer itself reads."""

    key: str
    tokens: int | None
    certain: bool
    padded: tuple[str, ...] = ("padded_vocab_size",)
    """Keys of the number of rows, padding included."""


def put_vocabulary(t: Translation, files: tuple[str, ...], given: GivenSize, shards: int) -> int | None:
    """Rows of the embedding, padded as the peers do; they predict the padding too, so it is part of the vocabulary.
    Returns the token that ends a document, if it is known."""
    multiple = t.size("make_vocab_size_divisible_by", 128) * shards
    name = next((str(t.get(key)) for key in files if t.get(key) is not None), None)
    path = Path(name) if name is not None else None
    if name is not None and HUB_NAME.fullmatch(name) and not Path(name).exists():
        path = _cached(name) or path
    kind, ids = str(t.get("tokenizer_type", "GPT2BPETokenizer")).lower(), _ids_of(path) if path else {}
    known = KNOWN.get(str(name)) or KNOWN.get(path.name if path else "", (None, None))
    own = len(ids) or known[0] or VOCABULARIES.get(kind)
    size = given.tokens if given.certain else own or given.tokens
    if (rows := t.size(key := t.first_given(*given.padded))) is not None:
        t.put("model.vocab_size", rows, key)
    else:
        if size is None:
            t.refuse("tokenizer_type", "its vocabulary size is not known here; set padded_vocab_size to the rows of "
                     "the embedding, or name a tokenizer.json on this machine")  # fmt: skip
        if not given.certain and not own and given.tokens:
            t.warnings.append(f"{given.key} is taken as the number of tokens of {name or kind}, which Megatron counts "
                              "itself")  # fmt: skip
        keys = ("make_vocab_size_divisible_by", *([given.key] if size == given.tokens else []), "tokenizer_type")
        t.put("model.vocab_size", -(-(size or 1) // multiple) * multiple, *keys)
    t.skip("the tokenizer says how many tokens there are", given.key)
    t.put("model.vocab_multiple", 1, "make_vocab_size_divisible_by")
    if path is not None and path.name.endswith("tokenizer.json") and path.is_file():
        t.put("tokenizer", str(path), *files)
    t.skip("prepared data carries its tokenizer", "tokenizer_type", *files)
    if path is None:
        return EODS.get(kind)
    eos = _json((path if path.is_dir() else path.parent) / "tokenizer_config.json").get("eos_token", "<|endoftext|>")
    return ids.get(str(eos.get("content") if isinstance(eos, dict) else eos), known[1])


def _cached(name: str) -> Path | None:
    """The tokenizer of a hub name in the cache of what was downloaded before; nothing is fetched."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except ValueError:  # not a name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def _ids_of(path: Path) -> dict[str, int]:
    """Tokens of a tokenizer.json, of a folder with one, or of GPT-2's vocab.json."""
    content = _json(path / "tokenizer.json" if path.is_dir() else path)
    try:
        added = {token["content"]: token.get("id") for token in content.get("added_tokens", [])}
        return dict(content.get("model", {"vocab": content})["vocab"]) | added
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        return content if isinstance(content, dict) else {}
    except (ValueError, OSError):
        return {}


def put_documents(t: Translation, flags: dict[str, str], eod: int | None) -> None:
    """What restarts at the end of a document: KEY to NATIVE."""
    for key in [key for key in flags if t.get(key)]:
        t.put(flags[key], True, key)
        t.put("model.eos_token_id", eod, key)
        if eod is None:
            t.refuse(key, "the token that ends a document is not known here; name a tokenizer file on this machine")
    if t.get("eod_mask_loss"):
        t.rows["eod_mask_loss"].text += "; the mean is over all tokens of a batch, as with calculate_per_token_loss"


def put_data(t: Translation, whole: DataSets, parts: dict[str, DataSets]) -> None:
    """Datasets with weights: `whole` is split by documents, `parts` (training, then validation) are separate."""
    if bool(whole) == any(parts.values()):
        t.refuse("data_path", f"name the data once: with data_path, or with {' and '.join(parts)}")
    for native, (key, sets) in zip(("data.train", "data.eval"), parts.items(), strict=True):
        _blend(t, native, sets, key)
    if not whole:
        return
    numbers = re.findall(r"[0-9]*\.?[0-9]+", str(t.get("split", "969, 30, 1")))
    shares = [float(number) for number in numbers] + [0.0, 0.0, 0.0]
    if not shares[0] or len(numbers) > 3:
        t.refuse("split", "write the shares of training, validation and test, such as 969,30,1")
    for share, native, part in zip(shares, ("data.train", "data.eval"), ("train", "valid"), strict=False):
        if not share:
            continue
        names = _blend(t, native, whole, "data_path")
        if share == sum(shares):
            t.skip("all of the data is one part", "split")
            continue
        for target in [f"{native}.mix.{name}" for name in names] if len(names) > 1 else [native]:
            t.put(f"{target}.documents", {"split": ",".join(numbers), "part": part, "rule": t.dialect.name}, "split")


def _blend(t: Translation, native: str, sets: DataSets, key: str) -> list[str]:
    names: list[str] = []
    for weight, path in sets:
        name = Path(str(path)).name.replace(".", "_")
        names.append(name if name not in names else f"{name}_{len(names)}")
        target = f"{native}.mix.{names[-1]}" if len(sets) > 1 else native
        t.put(f"{target}.path", str(path), key)
        if weight is not None and len(sets) > 1:
            t.put(f"{target}.weight", weight, key)
    if len(sets) > 1:
        t.put(f"{native}.mix_order", "greedy", key)
    return names


def put_checkpoints(t: Translation, interval: str) -> None:
    """Where checkpoints go and come from, how often they are saved, and how often a line is logged."""
    save, load = t.get("save"), t.get("load")
    if save is not None:
        t.put("save_folder", str(save), "save")
    t.put("save_interval", count(t.number(interval)), interval)
    if load is not None and load != save:
        t.put("load_path", str(load), "load", "finetune")
        if not t.get("finetune"):
            t.refuse("load", "another run's optimizer state is not loaded, but its weights are with finetune, after "
                     "`ingot import`; to continue a run of your own, let load and save be the same")  # fmt: skip
    t.skip("the same command continues the run", "load", "finetune")
    t.put("log_interval", count(t.number("log_interval", 100)), "log_interval")
