"""What GPT-NeoX has from Megatron, translated once for both: batch, vocabulary, indexed data, checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

from ingot.config.dialects.table import Translation, processes

VOCABULARIES = {"gpt2bpetokenizer": 50257, "hfgpt2tokenizer": 50257, "charleveltokenizer": 512}
FILES = {"20B_tokenizer.json": 50277, "gpt2-vocab.json": 50257}
DataSets = list[tuple[float | None, str]]  # weight and path


def count(amount: float | None, unit: str = "ba") -> str:
    return f"{amount or 0:.15g}{unit}"


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else str(value).split() if value is not None else []


def put_parallel(t: Translation, axes: dict[str, str]) -> None:
    for axis in dict.fromkeys(axes.values()):
        keys = [key for key, name in axes.items() if name == axis]
        sizes = [t.size(key) for key in keys if t.number(key, 1) > 1]
        t.put(f"parallel.{axis}", max(sizes, default=1), *keys)


def put_batch(t: Translation, total: str, micro: str, accumulation: str | None, world: int, model: int) -> None:
    """The global batch: given, or micro x accumulation x data-parallel copies of the model, by the peers' own rule.

    `world` is the number of processes that the file itself names, `model` those that share one copy of the model.
    """
    batch, part = t.size(total), t.size(micro)
    steps = t.size(accumulation, 1) if accumulation else 1
    follows = [micro, *([accumulation] if accumulation else []), *t.given.keys() & {"global_num_gpus", "world_size"}]
    if batch is None and part is None:
        t.refuse(total, f"is missing, and so is {micro}; set it")
        return
    if batch is None:
        batch = part * steps * max(1, (world or processes()) // model)
        t.put("global_train_batch_size", batch, *follows)
    else:
        t.put("global_train_batch_size", batch, total)
        # without a number of processes, accumulation is free unless it is given
        unit = part * steps * (world // model or 1) if part else 1
        exact = world and accumulation in t.given
        if part and (batch != unit if exact else batch % unit):
            why = " x ".join(f"{key} {t.get(key)}" for key in follows if key in t.given)
            t.refuse(total, f"contradicts {why}; leave out one of them")
        t.skip("follows from the batch and the number of processes", *follows[1:])
    if part:
        t.put("device_train_microbatch_size", part, micro)


def put_eval(t: Translation, interval: Any) -> None:
    """`eval_iters` counts global batches; ours are as large as a device takes."""
    t.put("eval_interval", count(interval), "eval_interval")
    if "eval" in t.values.get("data", {}):
        batch, size = t.values.get("global_train_batch_size", 1), t.values.get("device_train_microbatch_size", 1)
        t.put("device_eval_batch_size", size, "eval_iters")
        t.put("eval_subset_num_batches", -(-t.number("eval_iters", 100) * batch // size), "eval_iters")


def put_vocabulary(t: Translation, files: tuple[str, ...], default: str, given: str, shards: int) -> None:
    """Rows of the embedding, padded as the peers do; they predict the padding too, so it is part of the vocabulary."""
    multiple = t.size("make_vocab_size_divisible_by", 128) * shards
    path = next((Path(str(t.get(key))) for key in files if t.get(key) is not None), None)
    if (rows := t.size("padded_vocab_size")) is not None:
        t.put("model.vocab_size", rows, "padded_vocab_size")
    else:
        size = t.size(given) or (path and (_tokens_of(path) or FILES.get(path.name)))
        size = size or VOCABULARIES.get(str(t.get("tokenizer_type", default)).lower())
        if size is None:
            t.refuse("tokenizer_type", f"the size of its vocabulary is not known here; set {given}")
        keys = ("make_vocab_size_divisible_by", given, "tokenizer_type")
        t.put("model.vocab_size", -(-(size or 1) // multiple) * multiple, *keys)
    t.put("model.vocab_multiple", 1, "make_vocab_size_divisible_by")
    if path is not None and path.name.endswith("tokenizer.json") and path.is_file():
        t.put("tokenizer", str(path), *files)
    t.skip("prepared data carries its tokenizer", "tokenizer_type", *files)


def _tokens_of(path: Path) -> int | None:
    """Tokens of a tokenizer.json, of a folder with one, or of GPT-2's vocab.json."""
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else {}
        model = content.get("model", {"vocab": content})
        return len(set(model["vocab"]) | {token["content"] for token in content.get("added_tokens", [])}) or None
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None


def put_data(t: Translation, whole: DataSets, parts: dict[str, DataSets], split: str) -> None:
    """Data sets with weights: `whole` is cut by documents, `parts` (training, then validation) are named one by one."""
    if bool(whole) == any(parts.values()):
        t.refuse("data_path", f"name the data once: with data_path, or with {' and '.join(parts)}")
    for native, (key, sets) in zip(("data.train", "data.eval"), parts.items(), strict=True):
        _blend(t, native, sets, key)
    if not whole:
        return
    text = str(t.get("split", split)).replace(" ", "")
    shares = [float(number) for number in re.findall(r"[0-9]*\.?[0-9]+", text)] + [0.0, 0.0]
    for part, native in enumerate(("data.train", "data.eval")):
        if not shares[part]:
            continue
        names = _blend(t, native, whole, "data_path")
        if shares[part] == sum(shares):
            t.skip("all of the data is one part", "split")
        elif f"{native}.documents" in t.native:
            for place in [f"{native}.mix.{name}" for name in names] if len(names) > 1 else [native]:
                t.put(f"{place}.documents", {"split": text, "part": part, "rule": t.dialect.name}, "split")
        else:
            t.refuse("split", f"{text}: one data set cannot be cut into parts here yet; write the parts as data sets "
                     f"of their own, and name them with {' and '.join(parts)}")  # fmt: skip


def _blend(t: Translation, native: str, sets: DataSets, key: str) -> list[str]:
    names: list[str] = []
    for weight, path in sets:
        name = Path(str(path)).name.replace(".", "_")
        names.append(name if name not in names else f"{name}_{len(names)}")
        place = f"{native}.mix.{names[-1]}" if len(sets) > 1 else native
        t.put(f"{place}.path", str(path), key)
        if weight is not None and len(sets) > 1:
            t.put(f"{place}.weight", weight, key)
    return names


def put_checkpoints(t: Translation, interval: str) -> None:
    save, load = t.get("save"), t.get("load")
    if save is not None:
        t.put("save_folder", str(save), "save")
    t.put("save_interval", count(t.number(interval)), interval)
    if load is not None and load != save:
        t.put("load_path", str(load), "load", "finetune")
        if not t.get("finetune"):
            t.refuse("load", "another run's optimizer state is not taken over, its weights are with finetune, after "
                     "`ingot import`; to continue a run of your own, let load and save be the same")  # fmt: skip
    t.skip("the same command continues the run", "load", "finetune")
