"""`ingot prepare`: text to token shards, in the words of LLM Foundry's, Megatron's and NeoX's converters."""

import re
import sys
from typing import TYPE_CHECKING, Any

from ingot.cli.options import OptionCommand, options_from

if TYPE_CHECKING:
    from ingot.cli.prepare_options import PrepareRequest

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
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            for item in values or [""]:
                out += [f"--{name}", item]
        else:
            out.append(f"--{name}={value}" if equals else f"--{name}")
    return out


def _sections() -> Any:
    from ingot.cli.prepare_options import PeerOptions
    from ingot.data.prepare.options import PrepareOptions

    return PrepareOptions, PeerOptions


@options_from(_sections, cls=PrepareCommand, underscores=True)
def prepare(**options: Any) -> None:
    """Text to token shards, ready to train on. Run again after an interruption, it continues.

    Example: ingot prepare --path 'corpus/*.jsonl.zst' --out_root my-data --tokenizer EleutherAI/gpt-neox-20b

    Example: ingot prepare --dataset allenai/c4 --data_subset en --out_root ./my-copy-c4 --splits train val
    --concat_tokens 2048 --tokenizer EleutherAI/gpt-neox-20b --eos_text '<|endoftext|>' --num_workers 8
    """
    from ingot.cli.prepare_options import read_request
    from ingot.data.prepare.prepare import prepare as run

    request = read_request(options)
    tokenizer = request.tokenizer()
    for split in request.splits:
        given = {name: getattr(split, name) for name in split.model_fields_set - {"input", "tokenizer"}}
        report = run(list(split.input), **{"out_root": None, **given}, tokenizer=tokenizer)
        for which, made in report.splits.items():
            where = made.folder if len(report.splits) == 1 else f"{made.folder} ({which})"
            if split.share:
                share = "{}/{}".format(*split.share)
                print(f"{where}: share {share} is done: {made.documents:,} documents, {made.bytes:,} bytes of text")
            else:
                _print_summary(where, made, report.seconds)
        if not split.share:
            print(f"train on it: {report.train_command}")


@options_from(_sections, cls=PrepareCommand, underscores=True)
def _read(**options: Any) -> Any:
    from ingot.cli.prepare_options import read_request

    return read_request(options)


def read_arguments(arguments: list[str]) -> "PrepareRequest":
    """What a command line of `ingot prepare` asks for; nothing is run."""
    command = _read.build_command()  # type: ignore[attr-defined]
    return command.invoke(command.make_context("prepare", arguments))


def _print_summary(where: str, split: Any, seconds: float) -> None:
    each = seconds or 1e-9
    rates = f"{split.documents / each:,.0f} docs/s, {split.bytes / each / 1e6:.1f} MB/s"
    about = "about " if split.is_estimate else ""
    print(f"{where}: {about}{split.documents:,} documents, {about}{split.bytes:,} bytes of text, ", end="")
    print(f"{split.tokens:,} tokens" + (f", {split.samples:,} samples" if split.samples else ""), end="")
    print(f" in {split.shards:,} shard{'s' * (split.shards != 1)}; {seconds:.1f} s, {rates}")
    if split.skipped or split.empty:
        print(f"skipped: {split.skipped:,} bad records, {split.empty:,} empty documents")
        for line in split.bad_records:
            print(f"  {line}")
    if any(split.histogram):
        print("documents by length" + (" in tokens:" if split.tokens else " in bytes:"))
        largest = max(split.histogram)
        for bits, count in enumerate(split.histogram):
            if count:
                low, high = (1 << bits) // 2, (1 << bits) - 1
                print(f"  {low:>10,} to {high:>10,} {count:>12,} {'#' * (-(-count * 40 // largest))}")
    for size, document in split.longest[:3]:
        print(f"  longest: {size:,} in {document}")
