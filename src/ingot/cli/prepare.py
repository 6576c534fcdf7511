"""`ingot prepare`: text to token shards, in the words of LLM Foundry's, Megatron's and NeoX's converters."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ingot.errors import DataError
from ingot.storage.byte_sizes import parse_bytes

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


class PrepareCommand(TyperCommand):
    """Takes dashes for underscores, `--splits train val` for two splits, and says why an option is not needed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spellings = {option.lstrip("-").replace("-", "_"): option for p in self.params for option in p.opts}
        return super().parse_args(ctx, [_spelled(argument, spellings) for argument in translate(args)])


def _spelled(argument: str, spellings: dict[str, str]) -> str:
    """An option as it was declared, whichever of dashes and underscores it is written with."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return spellings.get(name[2:].replace("-", "_"), name) + equals + value


def translate(args: list[str]) -> list[str]:
    """The peers' way to write arguments, in ours."""
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


def prepare(
    path: Annotated[
        list[str] | None,
        typer.Option(
            "--path",
            "--input",
            "--input_folder",
            help="Files, folders, globs or URLs: json, jsonl, txt, parquet, csv, plain or .gz .zst .xz .bz2 .zip; "
            "from a folder only these, by a glob any text.",
        ),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="A Hugging Face hub data set, such as allenai/c4.")
    ] = None,
    data_subset: Annotated[str | None, typer.Option("--data_subset", help="Its configuration, such as en.")] = None,
    out_root: Annotated[
        Path | None,
        typer.Option("--out_root", "--output_folder", help="Folder of the data set; each split in its own."),
    ] = None,
    output_prefix: Annotated[
        str | None, typer.Option("--output_prefix", help="Write PREFIX_KEY_document.bin and .idx, as Megatron does.")
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            "--split", "--splits", help="train, val, train_small, ...: plain names; several only with --dataset."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", "--tokenizer_model", help="Folder, tokenizer.json or hub id; none keeps text as text."
        ),
    ] = None,
    tokenizer_type: Annotated[
        str | None,
        typer.Option(
            "--tokenizer_type", help="GPT2BPETokenizer, HFTokenizer, HuggingFaceTokenizer: how to read vocab_file."
        ),
    ] = None,
    vocab_file: Annotated[Path | None, typer.Option("--vocab_file", help="vocab.json, or a tokenizer.json.")] = None,
    merge_file: Annotated[Path | None, typer.Option("--merge_file", help="merges.txt beside a vocab.json.")] = None,
    concat_tokens: Annotated[int, typer.Option("--concat_tokens", help="Tokens of one MDS sample.")] = 2048,
    bos_text: Annotated[str, typer.Option("--bos_text", help="Put before each document.")] = "",
    eos_text: Annotated[
        str | None,
        typer.Option("--eos_text", help="Put after each document. Default: the tokenizer's own end of document."),
    ] = None,
    use_tokenizer_eos: Annotated[bool, typer.Option("--use_tokenizer_eos", help="The default, spelled out.")] = False,
    append_eod: Annotated[
        bool, typer.Option("--append_eod", help="End documents in PREFIX files, as Megatron does.")
    ] = False,
    no_wrap: Annotated[
        bool, typer.Option("--no_wrap", help="Samples begin with a document; the rest is left out.")
    ] = False,
    drop_last: Annotated[
        bool, typer.Option("--drop_last", help="Leave out the last, shorter sample, as peers do.")
    ] = False,
    max_samples: Annotated[int | None, typer.Option("--max_samples", help="Stop after so many samples.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="mds, or indexed (Megatron's .bin/.idx).")] = None,
    dataset_impl: Annotated[
        str, typer.Option("--dataset_impl", help="NeoX's name for the indexed format; only mmap exists here.")
    ] = "mmap",
    compression: Annotated[str | None, typer.Option("--compression", help="zstd or zstd:LEVEL, for MDS.")] = None,
    size_limit: Annotated[str, typer.Option("--size_limit", help="Size of one MDS shard before compression.")] = str(
        1 << 26
    ),
    token_type: Annotated[str, typer.Option("--token_type", help="auto (the narrowest), uint16, int32, ...")] = "auto",
    json_keys: Annotated[
        list[str] | None, typer.Option("--json_keys", "--jsonl_keys", help="Field or column that holds the text.")
    ] = None,
    num_workers: Annotated[
        int | None, typer.Option("--num_workers", "--workers", "--processes", help="Processes. Default: one per core.")
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", help="Memory that all processes together should stay below.")
    ] = "1.5gb",
    on_error: Annotated[
        str, typer.Option("--on_error", help="stop or skip, at a record that is no document.")
    ] = "stop",
    engine: Annotated[str, typer.Option("--engine", help="auto, gigatoken or hf.")] = "auto",
    reprocess: Annotated[
        bool, typer.Option("--reprocess", help="Remove an earlier result of prepare and start again.")
    ] = False,
    share: Annotated[
        str | None, typer.Option("--share", help="K/N: one of N processes, K from 0; one without it ends the work.")
    ] = None,
    max_document_bytes: Annotated[
        int, typer.Option("--max_document_bytes", help="Longest line or text taken for one document.")
    ] = 1 << 26,
    max_expansion: Annotated[
        int, typer.Option("--max_expansion", help="Times its size that a compressed file may grow to.")
    ] = 200,
) -> None:
    """Text to token shards, ready to train on. Run again after an interruption, it continues.

    Example: ingot prepare --path 'corpus/*.jsonl.zst' --out_root my-data --tokenizer EleutherAI/gpt-neox-20b

    Example: ingot prepare --dataset allenai/c4 --data_subset en --out_root ./my-copy-c4 --splits train val
    --concat_tokens 2048 --tokenizer EleutherAI/gpt-neox-20b --eos_text '<|endoftext|>' --num_workers 8
    """
    from ingot.data.prepare.input_files import hub_source
    from ingot.data.prepare.prepare import prepare as run

    splits = check_options(locals())
    if output_prefix and not append_eod and eos_text is None and not use_tokenizer_eos:
        eos_text = ""  # Megatron and NeoX end documents only when asked to
    part = _share(share) if share else None
    for name in splits:
        report = run(
            [hub_source(dataset, data_subset, name)] if dataset else path or [],
            out_root or Path(output_prefix or ".").parent,
            tokenizer=_tokenizer(tokenizer, tokenizer_type, vocab_file, merge_file),
            split=name,
            concat_tokens=concat_tokens,
            eos_text=eos_text,
            bos_text=bos_text,
            no_wrap=no_wrap,
            drop_last=drop_last,
            max_samples=max_samples,
            format=format or ("indexed" if output_prefix else "mds"),
            compression=compression,
            size_limit=_bytes("size_limit", size_limit),
            token_type=token_type,
            json_keys=json_keys or "text",
            output_prefix=output_prefix,
            num_workers=num_workers,
            memory=_bytes("memory", memory),
            on_error=on_error,
            engine=engine,
            reprocess=reprocess,
            share=part,
            max_document_bytes=max_document_bytes,
            max_expansion=max_expansion,
        )
        for which, text in report.splits.items():
            where = text.folder if len(report.splits) == 1 else f"{text.folder} ({which})"
            if part:
                done = f"{text.documents:,} documents, {text.bytes:,} bytes of text"
                print(f"{where}: share {share} is done: {done}")
            else:
                _print_summary(where, text, report.seconds)
        if not part:
            print(f"train on it: {report.train_command}")


def _tokenizer(name: str | None, kind: str | None, vocab: Path | None, merges: Path | None) -> Any:
    """The tokenizer that the peers' options describe; None for text as text."""
    from ingot.data.tokenizer import load_gpt2_tokenizer

    known = ("GPT2BPETokenizer", "HFGPT2Tokenizer", "HFTokenizer", "HuggingFaceTokenizer")
    if kind is not None and kind not in known:
        raise DataError(
            f"--tokenizer_type {kind}: known are {', '.join(known)}; or give --tokenizer with any tokenizer.json"
        )
    if name is not None and vocab is not None:
        raise DataError("--tokenizer and --vocab_file contradict each other; give one")
    if kind == "GPT2BPETokenizer" or merges is not None:
        if vocab is None or merges is None:
            raise DataError("--tokenizer_type GPT2BPETokenizer needs --vocab_file and --merge_file")
        return load_gpt2_tokenizer(vocab, merges)
    if kind is not None and name is None and vocab is None:
        raise DataError(f"--tokenizer_type {kind} needs --vocab_file with a tokenizer.json, or --tokenizer")
    return name if name is not None else vocab


def check_options(given: Mapping[str, Any]) -> list[str]:
    """Refuse options that cannot go together; returns the names of the splits."""
    from ingot.data.prepare.prepare import check_names

    if bool(given["path"]) == bool(given["dataset"]):
        raise DataError("give either --path with files, or --dataset with the name of a hub data set")
    if (given["out_root"] is None) == (given["output_prefix"] is None):
        raise DataError("give either --out_root, or --output_prefix for Megatron's files")
    if given["dataset_impl"] != "mmap":
        raise DataError(f"--dataset_impl {given['dataset_impl']}: only mmap is written, which all readers know")
    if given["format"] == "mds" and given["output_prefix"]:
        raise DataError("--output_prefix names Megatron's files; for --format mds give --out_root")
    if given["use_tokenizer_eos"] and given["eos_text"] is not None:
        raise DataError("--use_tokenizer_eos and --eos_text contradict each other; give one")
    splits = [s for item in given["split"] or ["train"] for s in re.split(r"[,\s]+", item.strip(", \t\n"))]
    for name in splits:
        check_names(name)
    if given["path"] and len(splits) > 1:
        raise DataError(
            f"--splits {' '.join(splits)}: each would get the same documents of --path; "
            "run `ingot prepare` once per split, with that split's files as --path"
        )
    if given["output_prefix"] is not None and len(splits) > 1:
        raise DataError("--output_prefix takes one split; call it once for each")
    return splits


def _share(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match:
        raise DataError(f"--share {text}: give K/N, such as 0/3, 1/3 and 2/3 for three processes")
    return int(match[1]), int(match[2])


def _bytes(option: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise DataError(f"--{option}: {error}") from None


def _print_summary(where: str, split: Any, seconds: float) -> None:
    each = seconds or 1e-9
    rates = f"{split.documents / each:,.0f} docs/s, {split.bytes / each / 1e6:.1f} MB/s"
    about = "about " if split.is_estimate else ""
    print(f"{where}: {about}{split.documents:,} documents, {about}{split.bytes:,} bytes of text, ", end="")
    print(f"{split.tokens:,} tokens" + (f", {split.samples:,} samples" if split.samples else ""), end="")
    print(f" in {split.shards:,} shard{'s' * (split.shards != 1)}; {seconds:.1f} s, {rates}")
    if split.skipped or split.empty:
        print(f"left out: {split.skipped:,} bad records, {split.empty:,} empty documents")
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
