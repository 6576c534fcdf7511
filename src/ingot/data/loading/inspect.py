"""Describes a dataset: counts, sizes, hashes, tokenizer, samples, and a loader test.

It reads through the same code as training, so data that passes here opens there.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from ingot.config.base import Section
from ingot.config.data import DatasetConfig, SourceConfig
from ingot.config.load import validate
from ingot.data.formats.indexed_reader import IndexFile
from ingot.data.formats.mds_reader import read_index
from ingot.data.loading.batch_loader import BatchLoader
from ingot.data.loading.open_dataset import fetch_index, locate, open_dataset, split_folders, tokenizer_folder
from ingot.data.loading.shard_stream import verify_file
from ingot.data.loading.token_dataset import IGNORE, Dataset
from ingot.data.prepare.progress import follow
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import DataError
from ingot.plurals import count_of


class InspectOptions(Section):
    """The options of `ingot inspect`."""

    split: str | None = None
    """One split only."""
    text: bool = False
    """Show the first samples as text."""
    loader: bool = False
    """Read batches as training does, and measure the speed."""
    local: Path | None = None
    """Folder for files fetched from a URL."""
    max_seq_len: int = Field(2048, ge=1, json_schema_extra={"flags": ["--max_seq_len", "--max-seq-len"]})
    """Tokens of a sample to show or load."""
    samples: int = Field(2, ge=1)
    """Samples to show."""
    batches: int = Field(100, ge=1)
    """Batches of 8 to load."""
    verify: bool = Field(True, json_schema_extra={"flags": ["--verify/--no-verify"]})
    """Check sizes and hashes of all shards."""


Finding = tuple[str, dict[str, Any]]
"""A line for people, and what it says by name."""


def inspect_dataset(path: str, options: dict[str, Any]) -> Iterator[str]:
    """The lines that `ingot inspect` prints."""
    asked = validate(InspectOptions, options)
    for split in find_splits(path, asked.split):
        for line, _ in _inspect_split(path, split, asked):
            yield line


def inspect_as_json(path: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What `ingot inspect --json` prints: an object for each split."""
    asked = validate(InspectOptions, options)
    found = []
    for split in find_splits(path, asked.split):
        facts: dict[str, Any] = {"path": path, "split": split}
        for _, more in _inspect_split(path, split, asked):
            facts |= more
        found.append(facts)
    return found


def _inspect_split(path: str, split: str | None, asked: InspectOptions) -> Iterator[Finding]:
    yield from findings(path, split, asked.local, asked.verify)
    if asked.text:
        texts = list(decoded_samples(path, split, asked.local, asked.max_seq_len, asked.samples))
        for number, sample in enumerate(texts):
            yield f"--- sample {number}\n{sample}", {"text": texts}
    if asked.loader:
        yield from loader_findings(path, split, asked.local, asked.max_seq_len, asked.batches)


def find_splits(path: str, split: str | None) -> list[str | None]:
    """The requested split, all splits in a folder, or the folder itself (None)."""
    folder = Path(path)
    validate(DatasetConfig, {"split": split})
    if split or "://" in path or (folder / "index.json").is_file() or not folder.is_dir():
        return [split]
    return [s for s in sorted(split_folders(folder)) if not s.startswith(".")] or [None]


def describe(path: str, split: str | None, local: Path | None, verify: bool) -> Iterator[str]:
    """Lines that describe a dataset; raises DataError if it is damaged."""
    for line, _ in findings(path, split, local, verify):
        yield line


def findings(path: str, split: str | None, local: Path | None, verify: bool) -> Iterator[Finding]:
    """What is in a dataset; raises DataError if it is damaged."""
    try:
        yield from _describe(path, split, local, verify)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: index.json or meta.json is damaged: {error!r}; prepare or copy it again") from None


def _describe(path: str, split: str | None, local: Path | None, verify: bool) -> Iterator[Finding]:
    if "://" in path:
        kind, location, _ = fetch_index(path, _cache(local), split, None)
        verify = False  # the loader verifies each shard as it arrives
    else:
        kind, location = locate(Path(path), split)
    meta_path = location / "meta.json" if kind == "mds" else Path(f"{location}.meta.json")
    if kind == "mds":
        yield from _describe_mds(location, verify)
    else:
        index = IndexFile(Path(f"{location}.idx"))
        binary = Path(f"{location}.bin")
        expected = index.tokens * index.dtype.itemsize
        if "://" not in path and binary.stat().st_size != expected:
            raise DataError(f"{binary} has {binary.stat().st_size:,} bytes, not {expected:,}; copy it again")
        facts: dict[str, Any] = {"folder": str(location), "format": "indexed", "token_type": index.dtype.name}
        yield f"{location}: Megatron's .bin/.idx, {index.dtype.name} tokens", facts
        count = len(index.documents) - 1
        facts = {"documents": count, "tokens": index.tokens, "bytes": expected, "verified": True}
        yield f"{count_of(count, 'document')}, {index.tokens:,} tokens, {expected:,} bytes; sizes match", facts
    if not meta_path.is_file():
        yield "no meta.json: written by another tool", {}
        return
    meta = json.loads(meta_path.read_text(encoding="utf-8"))
    about = "about " if meta.get("prepare", {}).get("report", {}).get("is_estimate") else ""
    documents = count_of(meta["documents"], "document")
    facts = {"documents": meta["documents"], "text_bytes": meta["bytes"], "tokens": meta["tokens"]}
    line = f"{about}{documents}, {about}{meta['bytes']:,} bytes of text, {meta['tokens']:,} tokens"
    yield line, facts | {"is_estimate": bool(about)}
    if folder := tokenizer_folder(location, *location.parents[:2]):
        tokenizer = load_tokenizer(folder)
        made_with = meta.get("prepare", {}).get("tokenizer")
        if meta["max_token"] >= tokenizer.vocab_size or (made_with and made_with != tokenizer.fingerprint()):
            raise DataError(f"{folder} is not the tokenizer that made {location}; put the right one there")
        facts = {"tokenizer": str(folder), "vocab_size": tokenizer.vocab_size}
        yield f"tokenizer: {tokenizer.vocab_size:,} tokens, matches the data", facts


def _describe_mds(folder: Path, verify: bool) -> Iterator[Finding]:
    index = json.loads((folder / "index.json").read_bytes())
    columns = {name for shard in index["shards"] for name in shard["column_names"]}
    if "tokens" not in columns:
        samples = sum(int(s["samples"]) for s in index["shards"])
        contents = f"{count_of(samples, 'sample')} of {', '.join(sorted(columns))}"
        facts: dict[str, Any] = {"folder": str(folder), "format": "mds", "samples": samples, "columns": sorted(columns)}
        yield f"{folder}: MDS with {contents}; contains text, not tokens", facts
        return
    shards = read_index(folder / "index.json")
    samples, size = sum(s.samples for s in shards), sum((s.packed or s.raw).bytes for s in shards)
    kinds = {s.encoding for s in shards} | {s.compression for s in shards if s.compression}
    counts = f"{count_of(len(shards), 'shard')} ({', '.join(sorted(kinds))}), {count_of(samples, 'sample')}"
    facts = {"folder": str(folder), "format": "mds", "samples": samples, "columns": sorted(columns)}
    yield f"{folder}: MDS, {counts}, {size:,} bytes", facts | {"shards": len(shards), "bytes": size, "verified": False}
    if verify:
        hashed = 0
        for shard in follow(f"verifying {folder}", shards, lambda shard: shard.raw.bytes):
            file = shard.packed if shard.packed and (folder / shard.packed.basename).exists() else shard.raw
            verify_file(folder / file.basename, file)
            hashed += bool(file.hashes)
        line = f"verified: the sizes of all shards and the hashes of {hashed} of {len(shards)} match the index"
        yield line, {"verified": True, "hashed_shards": hashed}


def decoded_samples(path: str, split: str | None, local: Path | None, seq_len: int, count: int) -> Iterator[str]:
    """The first samples as text."""
    dataset, tokenizer = _open(path, split, local, seq_len)
    if tokenizer is None:
        raise DataError(f"{path} has no tokenizer next to it, so its text cannot be shown")
    tokens, labels = dataset.gather(np.arange(min(count, dataset.samples)))
    for row, label in zip(tokens, labels, strict=True):
        yield tokenizer.decode(row[: int((label != IGNORE).sum()) + 1][: len(row)])


def loader_findings(path: str, split: str | None, local: Path | None, seq_len: int, batches: int) -> Iterator[Finding]:
    """Read shuffled batches as training does, and measure the speed."""
    dataset, _ = _open(path, split, local, seq_len)
    batch_samples = min(8, dataset.samples)
    started = time.monotonic()
    loader = BatchLoader(dataset, batch_samples, seed=17, shuffle=True).batches()
    try:
        first = next(loader)
        first_seconds = time.monotonic() - started
        ids = first.samples.tolist()
        line = f"first batch: tokens {list(first.tokens.shape)} in {first_seconds:.3f} s, samples {ids}"
        yield line, {"first_batch_seconds": first_seconds, "first_samples": ids}
        yield f"  {first.tokens[0][:16].tolist()} ...", {"first_tokens": first.tokens[0][:16].tolist()}
        started = time.monotonic()
        for _ in range(batches):
            next(loader)
    finally:
        loader.close()
    seconds = time.monotonic() - started
    rate = batches * batch_samples / seconds
    yield f"loader: {rate:,.0f} samples/s of {seq_len} tokens", {"samples_per_second": rate}


def _open(path: str, split: str | None, local: Path | None, seq_len: int) -> tuple[Dataset, Tokenizer | None]:
    remote = {"remote": path, "path": str(_cache(local))} if "://" in path else {"path": path}
    dataset = open_dataset(SourceConfig(**remote, split=split), seq_len)
    tokenizer = load_tokenizer(dataset.tokenizer_folder) if dataset.tokenizer_folder else None
    return dataset, tokenizer


def _cache(local: Path | None) -> Path:
    if local is None:
        raise DataError("a remote dataset needs a folder for the fetched files; set --local FOLDER")
    return local
