"""`ingot prepare`: text to token shards, in the words of LLM Foundry's, Megatron's and NeoX's converters."""

import re
import sys
from typing import Annotated, Any

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.options import options_from
from ingot.cli.prepare_options import PeerOptions, PrepareRequest, read_request
from ingot.cli.walkthrough import is_walkthrough
from ingot.data.prepare.options import PrepareOptions
from ingot.data.prepare.prepare import prepare as run
from ingot.plurals import count_of

NO_TOKENS = (
    "warning: without --tokenizer the shards hold text, which cannot be trained on; name a tokenizer, or train one on "
    "this text with --tokenizer train:32000"
)
# Options of the peers that take several values after one name.
_LISTS = {"splits", "json_keys", "jsonl_keys", "input", "path", "input_folder"}
# Options of the peers that have no counterpart here, and why that loses nothing.
_NOT_NEEDED = {
    "partitions": (1, "workers write their own parts, so there is nothing to divide by hand"),
    "log_interval": (1, "progress is shown by time"),
    "keep_sequential_samples": (0, "documents always keep their order"),
    "keep_newlines": (0, "newlines are always kept"),
    "num_docs": (1, "the time left is estimated from bytes"),
    "logging_level": (1, "there is one level"),
    "trust_remote_code": (0, "a tokenizer is data here; no code is loaded with it"),
}


class PrepareCommand(OptionCommand):
    """Takes `--splits train val` for two splits, and says why an option of the peers is not needed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translate(args))


def with_paths(paths: list[str] | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options with what was given without --path."""
    return {**options, "input": [*paths, *options.get("input", [])]} if paths else options


def translate(args: list[str]) -> list[str]:
    """Arguments as the peers write them, as this command takes them."""
    out: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not re.match(r"--[a-zA-Z]", arg) or arg == "--help":
            out.append(arg)
            continue
        name, equals, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        if name in _NOT_NEEDED:
            count, reason = _NOT_NEEDED[name]
            del rest[: 0 if equals else count]
            print(f"--{name}: not needed here, because {reason}", file=sys.stderr)
        elif name in _LISTS and not equals:
            values = []
            while rest and not rest[0].startswith("--") and rest[0] not in ("-o", "-h"):
                values.append(rest.pop(0))
            for item in values or [""]:
                out += [f"--{name}", item]
        else:
            out.append(f"--{name}={value}" if equals else f"--{name}")
    return out


Paths = Annotated[list[str] | None, typer.Argument(metavar="[PATH]...", help="What to read, as with --path.")]
_options = options_from(
    PrepareOptions,
    PeerOptions,
    underscores=True,
    panels={
        "Samples and shards": [
            "concat_tokens", "bos_text", "eos_text", "no_wrap", "drop_last", "max_samples", "format", "compression",
            "size_limit", "token_type",
        ],
        "Workers and limits": [
            "num_workers", "memory", "share", "engine", "max_document_bytes", "max_expansion",
        ],
        "Spellings of other stacks": set(PeerOptions.model_fields) - {"dataset", "data_subset", "verbose"},
    },
)  # fmt: skip
app = typer.Typer(add_completion=False)


@app.command(cls=PrepareCommand)
@_options
def prepare(paths: Paths = None, **options: Any) -> None:
    """Turn text into token shards, ready to train on.

    Interrupted, the same command continues where it stopped.

    Examples:
      ingot prepare my-texts --out my-data --tokenizer train:8000 \\
        --documents paragraph --val-fraction 0.01
      ingot prepare 'corpus/*.jsonl.zst' --out my-data \\
        --tokenizer EleutherAI/gpt-neox-20b
      ingot prepare --dataset allenai/c4 --data_subset en --splits train val \\
        --out_root my-c4 --tokenizer EleutherAI/gpt-neox-20b --num_workers 8
    """
    request = read_request(with_paths(paths, options))
    tokenizer = request.tokenizer()
    if tokenizer is None:
        print(NO_TOKENS, file=sys.stderr)
    for split in request.splits:
        given = {name: getattr(split, name) for name in split.model_fields_set - {"input", "tokenizer"}}
        report = run(list(split.input), **{"out_root": None, **given}, tokenizer=tokenizer)
        for which, made in report.splits.items():
            where = made.folder if len(split.json_keys) == 1 else f"{made.folder} ({which})"
            if split.share:
                share = "{}/{}".format(*split.share)
                counts = f"{count_of(made.documents, 'document')}, {count_of(made.bytes, 'byte')} of text"
                print(f"{where}: share {share} is done: {counts}")
            else:
                _print_summary(where, made, report.seconds)
                if request.peer.verbose:
                    _print_lengths(made)
        if not split.share and not is_walkthrough():
            print(f"train on it: {report.train_command}" if report.train_command else NO_TOKENS)


def read_arguments(arguments: list[str]) -> PrepareRequest:
    """What a command line of `ingot prepare` asks for; nothing is run."""

    def read(paths: Paths = None, **options: Any) -> PrepareRequest:
        return read_request(with_paths(paths, options))

    reader = typer.Typer()
    reader.command(cls=PrepareCommand)(_options(read))
    request: PrepareRequest = typer.main.get_command(reader)(arguments, standalone_mode=False)
    return request


def _print_summary(where: str, split: Any, seconds: float) -> None:
    seconds = seconds or 1e-9
    about = "about " if split.is_estimate else ""
    counts = f"{about}{count_of(split.documents, 'document')}, {about}{count_of(split.bytes, 'byte')} of text"
    tokens = count_of(split.tokens, "token") + (f", {count_of(split.samples, 'sample')}" if split.samples else "")
    rates = f"{seconds:.1f} s, {split.documents / seconds:,.0f} docs/s, {split.bytes / seconds / 1e6:.1f} MB/s"
    print(f"{where}: {counts}, {tokens} in {count_of(split.shards, 'shard')}; {rates}")
    if split.skipped or split.empty:
        print(f"skipped: {count_of(split.skipped, 'bad record')}, {count_of(split.empty, 'empty document')}")
        for line in split.bad_records:
            print(f"  {line}")


def _print_lengths(split: Any) -> None:
    if any(split.histogram):
        print("documents by length" + (" in tokens:" if split.tokens else " in bytes:"))
        largest = max(split.histogram)
        for bits, count in enumerate(split.histogram):
            if count:
                low, high = (1 << bits) // 2, (1 << bits) - 1
                print(f"  {low:>10,} to {high:>10,} {count:>12,} {'#' * (-(-count * 40 // largest))}")
    for size, document in split.longest[:3]:
        print(f"  longest: {size:,} in {document}")
