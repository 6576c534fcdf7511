"""Text to a dataset: pieces -> tokens -> shards, on all cores, restartable, in bounded memory.

The input is divided into pieces (`pieces`), workers turn pieces into parts and parts into shards (`worker`), a packer
decides what a shard is (`packing`), and a journal remembers what is done (`journal`, `scheduler`). A shard is a range
of the token stream of the whole input, so any number of workers writes the same bytes.
"""

import functools
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.data.prepare.holdout import VAL, Holdout, find_threshold
from ingot.data.prepare.options import TRAIN, PrepareOptions, check_options, takes_options
from ingot.data.prepare.pool import InProcess, WorkerPool
from ingot.data.prepare.progress import PrepareProgress
from ingot.data.sources.input_files import TEXT_UNITS, describe_documents, find_files
from ingot.storage.byte_sizes import format_bytes

if TYPE_CHECKING:  # imports that take a tenth of a second happen while the workers start
    from ingot.data.prepare.journal import SplitReport
    from ingot.data.tokenizer import Tokenizer

_SMALL_INPUT = 8 << 20  # bytes that one process has prepared before others have started
_WORKER_BYTES = 240 << 20  # memory of a worker, and about that of this process


@dataclass
class PrepareReport:
    """What `prepare` did."""

    splits: dict[str, "SplitReport"]  # by the name of the split, or by "SPLIT FIELD" for several fields
    seconds: float
    engine: str
    train_command: str | None  # None for text that is kept as text
    documents: int
    tokens: int
    bytes: int
    skipped: int


@takes_options
def prepare(
    input: str | Path | Sequence[str | Path],
    out_root: str | Path | None,
    *,
    tokenizer: "str | Path | Tokenizer | None",
    show: Callable[[str], None] | None = None,
    **options: Any,
) -> PrepareReport:
    """Turn text files into one split of a dataset. Run again with the same arguments, it continues.

    input: files, folders, globs or URLs
    out_root: folder of the dataset
    tokenizer: folder, file or hub id, train:SIZE, or a loaded one; None keeps text as text (MDS column `text`)
    show: receives lines of progress. Default: a bar on a terminal, lines otherwise
    """
    inputs = [input] if isinstance(input, str | Path) else list(input)
    named = None if tokenizer is None else str(tokenizer)
    values = {"input": list(map(str, inputs)), "out_root": out_root, "tokenizer": named, **options}
    return _prepare(check_options(values), tokenizer, show)


def _prepare(
    options: PrepareOptions, tokenizer: "str | Path | Tokenizer | None", show: Callable[[str], None] | None
) -> PrepareReport:
    started = time.monotonic()
    progress = PrepareProgress(show)
    # of several processes only the first reports which files are not read
    say = None if options.share and options.share[0] else progress.say
    files = find_files(options.input, say, _output_folders(options))
    if say and (line := describe_documents(files, options)):
        say(line)
    small = sum(f.size for f in files) <= _SMALL_INPUT and all(f.format != "hub" for f in files)
    workers = _worker_count(options, small, progress)
    with closing(WorkerPool(workers, tokenizer is not None) if workers else InProcess()) as pool:
        from ingot.data.prepare.journal import Target
        from ingot.data.prepare.own_tokenizer import own_tokenizer
        from ingot.data.prepare.packing import PackingPlan
        from ingot.data.prepare.scheduler import SplitJob
        from ingot.data.tokenizer import Tokenizer, load_tokenizer

        splits = _divide(options)
        targets = [Target.choose(split, key) for split, _ in splits for key in split.json_keys]
        if options.reprocess:
            for target in targets:
                target.remove()
        held_out = functools.cache(lambda: find_threshold(options, files, workers) if options.holds_out else 0)
        if isinstance(tokenizer, str) and tokenizer.startswith(TRAIN):
            tokenizer = own_tokenizer(options, files, targets[0].tokenizer_folder, held_out, progress.say)
        tok = tokenizer if isinstance(tokenizer, Tokenizer) or tokenizer is None else load_tokenizer(tokenizer)
        engine, reason = pool.load(tok, options.engine)
        if tok:
            progress.say(f"engine: {engine} ({reason})")
        plans = [
            replace(PackingPlan.of(split, tok).for_key(key), holdout=holdout)
            for split, holdout in splits for key in split.json_keys
        ]  # fmt: skip
        reports = {}
        for target, plan in zip(targets, plans, strict=True):
            job = SplitJob(target, plan, files, tok, pool, progress)
            name = plan.options.split if len(options.json_keys) == 1 else f"{options.split} {plan.options.key}"
            reports[name] = job.finished() or job.run(held_out())
    reports = dict(reversed(reports.items())) if options.holds_out else reports
    if options.documents not in TEXT_UNITS and say:
        divided = sum(report.documents + report.empty for report in reports.values())
        if divided <= len(files) and all(file.format == "text" for file in files):
            say(f"warning: {options.documents!r} is in none of the files, so each is one document")
    counts = ((r.documents, r.tokens, r.bytes, r.skipped) for r in reports.values())
    totals = (sum(count) for count in zip(*counts, strict=True))
    return PrepareReport(reports, time.monotonic() - started, engine, _train_command(options), *totals)


def _divide(options: PrepareOptions) -> "list[tuple[PrepareOptions, Holdout | None]]":
    """The options of each split, and which documents it takes; None for all. Those that are held out come first:
    whether both splits get some is then known before anything is in place."""
    if not options.holds_out:
        return [(options, None)]
    held_out = options.model_copy(update={"split": VAL, "max_samples": None})
    return [(held_out, Holdout(takes_held_out=True)), (options, Holdout(takes_held_out=False))]


def _output_folders(options: PrepareOptions) -> list[Path]:
    """Folders that are not read if they are below a folder of the input: what an earlier run wrote there."""
    names = {options.split, "tokenizer", *([VAL] if options.holds_out else [])}
    return [options.folder, *(options.folder / name for name in names)]


def _worker_count(options: PrepareOptions, small: bool, progress: PrepareProgress) -> int:
    """How many worker processes; 0 to do the work in this one, which is faster for little input."""
    if options.num_workers is not None:
        return options.num_workers
    if small:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = max(1, options.memory // _WORKER_BYTES - 1)
    if fitting < cores:
        limit = format_bytes(options.memory)
        progress.say(f"{fitting} workers on {cores} cores: more would need over {limit} (memory=...)")
    return min(cores, fitting)


def _train_command(options: PrepareOptions) -> str | None:
    if options.tokenizer is None:
        return None
    if options.output_prefix:
        return f"ingot train mpt-125m data={shlex.quote(f'{options.output_prefix}_{options.key}_document')}"
    root, split = shlex.quote(str(options.folder)), options.split
    other = {"train": "val", "val": "train"}.get(split)
    if other and (options.folder / other).is_dir():
        return f"ingot train mpt-125m data={root}"
    return f"ingot train mpt-125m data.train.path={root} data.train.split={shlex.quote(split)} data.eval=null"
