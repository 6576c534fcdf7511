"""Text to a data set: sources -> tokenizer -> packer -> shards, on all cores, restartable, in bounded memory.

The peers funnel tokens through one writing process, and begin again after a crash. Here the input is divided into
pieces (`sources`), workers turn pieces into parts and parts into shards (`prepare_worker`), a packer says what a shard
is (`packing`) and a journal remembers what is done (`prepare_run`). A shard is a range of the token stream of the whole
input: it depends neither on how the input was divided nor on who did the work, so any number of workers gives the same
bytes.
"""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.config.names import plain_name
from ingot.data.prepare.input_files import ReadOptions, find_files
from ingot.data.prepare.pool import Pool
from ingot.data.prepare.progress import Reporter
from ingot.errors import DataError

if TYPE_CHECKING:  # what takes a tenth of a second to import is imported while the workers start
    from ingot.data.prepare.scheduler import SplitReport
    from ingot.data.tokenizer import Tokenizer

# LLM Foundry's truncated splits: how many samples each holds.
SPLIT_SAMPLES = {"train_small": 100_000, "val_small": 10_000, "val_xsmall": 3_000, "val_xxsmall": 100}
_SMALL_INPUT = 8 << 20  # bytes that one process is done with before others have started
_WORKER_BYTES = 240 << 20  # what one worker needs, and about what this process does


@dataclass
class PrepareReport:
    """What `prepare` did."""

    splits: dict[str, "SplitReport"]  # by the split's name; of several fields, by "SPLIT FIELD"
    seconds: float
    engine: str
    train_command: str
    documents: int
    tokens: int
    bytes: int
    skipped: int


def prepare(
    input: str | Path | Sequence[str | Path],
    out_root: str | Path,
    *,
    tokenizer: "str | Path | Tokenizer | None",
    split: str = "train",
    concat_tokens: int = 2048,
    eos_text: str | None = None,
    bos_text: str = "",
    no_wrap: bool = False,
    drop_last: bool = False,
    max_samples: int | None = None,
    format: str = "mds",
    compression: str | None = None,
    size_limit: int = 1 << 26,
    token_type: str = "auto",
    json_keys: str | Sequence[str] = "text",
    output_prefix: str | None = None,
    num_workers: int | None = None,
    memory: int = 1_500_000_000,
    on_error: str = "stop",
    engine: str = "auto",
    reprocess: bool = False,
    share: tuple[int, int] | None = None,
    max_document_bytes: int = 1 << 26,
    max_expansion: int = 200,
    show: Callable[[str], None] | None = None,
) -> PrepareReport:
    """Turn text files into one split of a data set; run again with the same arguments, it continues.

    input: files, folders, globs: json, jsonl, txt, parquet, csv, plain or .gz .zst .xz .bz2 .zip
    tokenizer: folder, file or hub id; None keeps text as text (MDS column `text`)
    split: one plain name, that of the folder below out_root
    eos_text: ends a document; None means the tokenizer's own end of document, "" means none
    no_wrap, drop_last: as LLM Foundry packs: a sample starts with a document; the last, shorter sample is left out
    max_samples: stop after so many samples; by default what LLM Foundry has for train_small and its kin
    size_limit: bytes of one raw MDS shard, as Streaming counts them
    output_prefix: for the indexed format, where the pair goes (default: OUT_ROOT/SPLIT/SPLIT)
    memory: bytes that all processes together should stay below; limits the default number of workers
    reprocess: remove what an earlier run wrote there, and start again; a folder that `prepare` did not write is refused
    share: (K, N) with K from 0: one of N processes that divide the pieces; a call without it, afterwards, does the rest
    show: receives lines of progress; by default a bar on a terminal, lines otherwise
    """
    started = time.monotonic()
    if not 1 << 10 <= size_limit < 1 << 32:
        raise DataError(
            f"size_limit={size_limit}: a shard is between 1 KiB and 4 GiB, since its offsets are 32 bits wide"
        )
    _check_choices(format, compression, on_error, concat_tokens, tokenizer, no_wrap)
    keys = [json_keys] if isinstance(json_keys, str) else list(json_keys)
    check_names(split, keys if format == "indexed" else [])
    if share and not 0 <= share[0] < share[1]:
        raise DataError(f"share={share[0]}/{share[1]}: the first number counts from 0 and stays below the second")
    if share and reprocess:
        raise DataError("reprocess: each share would remove what the others have done; remove the old result first")
    if len(keys) > 1 and format == "mds":
        raise DataError("several json_keys need format=indexed: an MDS data set here has one column")
    inputs = [input] if isinstance(input, str | Path) else list(input)
    reporter = Reporter(show)
    files = find_files(inputs, None if share and share[0] else reporter.say)  # of several processes the first says it
    small = sum(f.size for f in files) <= _SMALL_INPUT and all(f.format != "hub" for f in files)
    workers = _worker_count(num_workers, memory, small, reporter)
    starting = closing(Pool(workers, tokenizes=tokenizer is not None)) if workers else nullcontext()
    with starting as pool:
        from ingot.data.prepare.packing import PackingPlan
        from ingot.data.prepare.scheduler import SplitJob, Target
        from ingot.data.prepare.tokenize_engine import choose_engine
        from ingot.data.tokenizer import Tokenizer, load_tokenizer

        tok = tokenizer if isinstance(tokenizer, Tokenizer) or tokenizer is None else load_tokenizer(tokenizer)
        plan = PackingPlan(
            format=format,
            is_text=tok is None,
            dtype=_token_dtype(tok, format, token_type),
            before=tok.encode(bos_text) if tok else [],
            after=_eos_ids(tok, eos_text) if tok else [],
            concat_tokens=concat_tokens,
            no_wrap=no_wrap,
            drop_last=drop_last,
            max_samples=max_samples if max_samples is not None else SPLIT_SAMPLES.get(split),
            compression=compression,
            size_limit=size_limit,
            options=ReadOptions("", max_document_bytes, max_expansion, on_error == "skip"),
        )
        name, chosen = "none", None
        if tok:
            if pool:
                name, reason = pool.load(tok, engine)
            else:
                chosen = choose_engine(tok, engine)
                name, reason = chosen.name, chosen.reason
            reporter.say(f"engine: {name} ({reason})")
        reports = {}
        for key in keys:
            target = Target.choose(Path(out_root), split, format, output_prefix, key)
            if reprocess:
                target.remove()
            this = replace(plan, options=replace(plan.options, key=key))
            made = SplitJob(target, this, files, tok, pool or chosen, reporter, share).run()
            reports[split if len(keys) == 1 else f"{split} {key}"] = made
    prefix = f"{output_prefix}_{keys[0]}_document" if output_prefix else None
    command = _train_command(Path(out_root), split, prefix)
    counts = ((r.documents, r.tokens, r.bytes, r.skipped) for r in reports.values())
    totals = (sum(count) for count in zip(*counts, strict=True))
    return PrepareReport(reports, time.monotonic() - started, name, command, *totals)


def check_names(split: str, keys: Sequence[str] = ()) -> None:
    """Refuse the name of a split, or of a field that names a pair of files, that could lead to another folder."""
    for what, name in [("split", split), *(("json_keys", key) for key in keys)]:
        try:
            plain_name(name)
        except ValueError as error:
            raise DataError(f"{what}={name!r}: {error}") from None
    if split == "tokenizer":
        raise DataError("split='tokenizer': the tokenizer is saved in the folder of this name; choose another name")


def _check_choices(
    format: str, compression: str | None, on_error: str, concat_tokens: int, tokenizer: object, no_wrap: bool
) -> None:
    if format not in ("mds", "indexed"):
        raise DataError(f"format={format}: known are mds and indexed")
    kind, _, level = (compression or "zstd").partition(":")
    if kind != "zstd" or (level and not (level.isdigit() and 1 <= int(level) <= 22)):
        raise DataError(f"compression={compression}: known are zstd and zstd:LEVEL with a level from 1 to 22")
    if compression and format == "indexed":
        raise DataError("compression: the indexed format is read in place and cannot be compressed")
    if on_error not in ("stop", "skip"):
        raise DataError(f"on_error={on_error}: known are stop and skip")
    if concat_tokens < 1:
        raise DataError(f"concat_tokens={concat_tokens}: a sample needs at least one token")
    if tokenizer is None and format == "indexed":
        raise DataError("the indexed format holds tokens: give a tokenizer")
    if no_wrap and format == "indexed":
        raise DataError("no_wrap: the indexed format keeps whole documents, nothing is wrapped")


def _token_dtype(tokenizer: "Tokenizer | None", format: str, token_type: str) -> str:
    import numpy as np

    from ingot.data.formats import indexed_writer as indexed

    if tokenizer is None:
        return "uint8"
    if token_type == "auto":
        if format == "indexed":
            return indexed.default_dtype(tokenizer.vocab_size)
        return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    known = ("uint16", "uint32", "int32", "int64") if format == "mds" else ("uint16", "int32", "int64")
    if token_type not in known:
        raise DataError(f"token_type={token_type}: known are auto, {', '.join(known)}")
    if np.iinfo(token_type).max < tokenizer.vocab_size - 1:
        raise DataError(f"token_type={token_type} cannot hold the {tokenizer.vocab_size:,} tokens of the vocabulary")
    return token_type


def _eos_ids(tokenizer: "Tokenizer", eos_text: str | None) -> list[int]:
    if eos_text is not None:
        return tokenizer.encode(eos_text)
    if tokenizer.eos_id is None:
        raise DataError("the tokenizer names no end of document: give eos_text, or eos_text='' to have none")
    if tokenizer.encode("a", special_tokens=True)[-1] == tokenizer.eos_id:
        return []  # it adds its own
    return [tokenizer.eos_id]


def _worker_count(wanted: int | None, memory: int, small: bool, reporter: Reporter) -> int:
    """How many worker processes; 0 does the work in this one, which is quicker for little input."""
    if wanted is not None and wanted < 0:
        raise DataError(f"num_workers={wanted}: must be 0 (this process) or more")
    if wanted is not None:
        return wanted
    if small:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = max(1, memory // _WORKER_BYTES - 1)
    if fitting < cores:
        reporter.say(f"{fitting} workers on {cores} cores: more would need over {memory / 1e9:.1f} GB (memory=...)")
    return min(cores, fitting)


def _train_command(out_root: Path, split: str, prefix: str | None) -> str:
    if prefix:
        return f"ingot train mpt-125m data={shlex.quote(prefix)}"
    root = shlex.quote(str(out_root))
    other = {"train": "val", "val": "train"}.get(split)
    if other and (out_root / other).is_dir():
        return f"ingot train mpt-125m data={root}"
    return f"ingot train mpt-125m data.train.path={root} data.train.split={shlex.quote(split)} data.eval=null"
