"""Text files to token shards."""

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path

import numpy as np

from ingot.data import mds_writer as mds
from ingot.data.files import write_json
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import DataError


@dataclass
class SplitReport:
    """What was written for one split."""

    folder: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0
    samples: int = 0
    shards: int = 0


@dataclass
class PrepareReport:
    """What `prepare` did."""

    splits: dict[str, SplitReport] = field(default_factory=dict)
    seconds: float = 0.0
    train_command: str = ""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    skipped: int = 0


def prepare(
    input: str | Path | Sequence[str | Path],
    out_root: str | Path,
    *,
    tokenizer: str | Path | Tokenizer,
    split: str = "train",
    concat_tokens: int = 2048,
    eos_text: str | None = None,
    bos_text: str = "",
    compression: str | None = None,
    token_type: str = "auto",
    json_key: str = "text",
) -> PrepareReport:
    """Tokenize text files into one split of a data set.

    eos_text: text that ends a document; None means the tokenizer's own end of document, "" means none.
    """
    started = time.monotonic()
    tok = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    out_root = Path(out_root)
    final = out_root / split
    if final.exists():
        raise DataError(f"{final} already exists; remove it or choose another out_root")
    eos = [tok.eos_id] if eos_text is None and tok.eos_id is not None else tok.encode(eos_text or "")
    bos = tok.encode(bos_text)
    dtype = np.dtype(
        ("uint16" if tok.vocab_size <= 1 << 16 else "uint32") if token_type == "auto" else token_type
    )
    config = mds.shard_config(mds.token_column(dtype), compression)
    report = SplitReport(str(final))
    partial = out_root / f".{split}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    sample_bytes = 4 + 4 + len(mds.array_header(concat_tokens)) + concat_tokens * dtype.itemsize
    per_shard = max(1, (mds.SIZE_LIMIT - mds.header_bytes(config)) // sample_bytes)
    shard_tokens = per_shard * concat_tokens
    entries, shard_infos = [], []
    buffer: list[np.ndarray] = []
    buffered, max_token = 0, 0

    def flush(count: int) -> None:
        nonlocal buffered, buffer
        tokens = np.concatenate(buffer) if buffer else np.zeros(0, dtype)
        now, rest = tokens[:count], tokens[count:]
        buffer, buffered = [rest], len(rest)
        rows = now[: len(now) // concat_tokens * concat_tokens].reshape(-1, concat_tokens)
        tail = now[rows.size :]
        if len(tail):
            values = [mds.token_value(r) for r in rows] + [mds.token_value(tail)]
            shard: bytes | bytearray = mds.shard_from_values(values, config)
        else:
            shard = mds.shard_from_rows(rows, config)
        samples = len(rows) + bool(len(tail))
        entry = mds.write_shard(partial, len(entries), shard, samples, config)
        entries.append(entry)
        shard_infos.append({"basename": entry["raw_data"]["basename"], "tokens": len(now)})
        report.samples += samples

    for texts in _batches(_documents(input, json_key)):
        report.documents += len(texts)
        report.bytes += sum(len(t.encode()) for t in texts)
        for encoding in tok.backend.encode_batch(texts):
            ids = np.array(bos + encoding.ids + eos, dtype=np.int64)
            max_token = max(max_token, int(ids.max(initial=0)))
            buffer.append(ids.astype(dtype))
            buffered += len(ids)
            report.tokens += len(ids)
        while buffered >= shard_tokens:
            flush(shard_tokens)
    if buffered:
        flush(buffered)
    if not report.tokens:
        raise DataError(f"no text in {input}")
    report.shards = len(entries)
    mds.write_index(partial, entries)
    meta = {
        "version": 1,
        "format": "mds",
        "tokens": report.tokens,
        "documents": report.documents,
        "bytes": report.bytes,
        "vocab_size": tok.vocab_size,
        "max_token": max_token,
        "eos_id": tok.eos_id,
        "shards": shard_infos,
    }
    write_json(partial / "meta.json", meta)
    tok.save(out_root / "tokenizer")
    partial.replace(final)
    return PrepareReport(
        {split: report},
        time.monotonic() - started,
        f"ingot train mpt-125m data={out_root}",
        report.documents,
        report.tokens,
        report.bytes,
        report.skipped,
    )


def _documents(input: str | Path | Sequence[str | Path], json_key: str) -> Iterator[str]:
    patterns = [input] if isinstance(input, str | Path) else input
    for pattern in patterns:
        files = sorted(glob(str(pattern), recursive=True))
        if not files:
            raise DataError(f"{pattern}: no such file")
        for name in files:
            if name.endswith((".jsonl", ".json")):
                with open(name, encoding="utf-8") as lines:
                    for number, line in enumerate(lines, 1):
                        if line.strip():
                            try:
                                yield json.loads(line)[json_key]
                            except (ValueError, KeyError, TypeError):
                                raise DataError(f"{name}:{number}: not a JSON object with a {json_key!r}") from None
            else:
                yield Path(name).read_text(encoding="utf-8")


def _batches(texts: Iterator[str], limit: int = 1 << 22) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        if not text:
            continue
        batch.append(text)
        size += len(text)
        if size >= limit:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
