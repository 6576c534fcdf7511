"""`ingot tokenizer`: train, show and compare tokenizers."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import AsJson, OptionCommand, OptionGroup
from ingot.data.document_sample import DocumentSample
from ingot.data.tokenizer import load_tokenizer
from ingot.data.tokenizer_report import describe, measure_fit
from ingot.data.tokenizer_training import END_OF_DOCUMENT, check_vocabulary, describe_result, train_tokenizer
from ingot.errors import DataError
from ingot.plurals import count_of
from ingot.storage.byte_sizes import format_bytes, parse_bytes

app = typer.Typer(add_completion=False, cls=OptionGroup, no_args_is_help=True)

Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, folders, globs or URLs of text.")]
Texts = Annotated[list[str] | None, typer.Option("--text", help="Text to measure on; may be repeated.")]
Key = Annotated[str, typer.Option(help="Field or column of JSON, Parquet and CSV files that holds the text.")]
Name = Annotated[str, typer.Argument(metavar="TOKENIZER", help="Folder, tokenizer.json or hub id.")]
Sample = Annotated[str, typer.Option(help="How much text to encode at most.")]
Names = Annotated[list[str], typer.Argument(metavar="TOKENIZER...", help="Folders, files or hub ids.")]


def _say(line: str) -> None:
    print(line, file=sys.stderr)


@app.command("train", cls=OptionCommand)
def train(
    paths: Paths,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for tokenizer.json and tokenizer_config.json.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", "--vocab_size", help="Tokens to learn.")] = 32_000,
    splitter: Annotated[str, typer.Option(help="How text is split into words: gpt2 or cl100k.")] = "gpt2",
    special: Annotated[
        list[str] | None, typer.Option(help="Special token; may be repeated, the first ends documents.")
    ] = None,
    sample: Annotated[str, typer.Option(help="How much text to learn from at most; bounds memory.")] = "1GB",
    key: Key = "text",
) -> None:
    """Train a byte-level BPE tokenizer on your text.

    Examples:
      ingot tokenizer train my-texts --vocab-size 8000 -o my-tokenizer
      ingot tokenizer train 'code/**/*.py' --splitter cl100k -o my-tokenizer
    """
    names = special or [END_OF_DOCUMENT]
    check_vocabulary(vocab_size, splitter, names)
    if (out / "tokenizer.json").exists():
        raise DataError(f"{out} already holds a tokenizer; remove it, or choose another --out")
    texts = DocumentSample.of(paths, _bytes(sample), key, _say)
    tokenizer = train_tokenizer(texts, vocab_size, out, splitter, names)
    _report_bad(texts)
    print(describe_result(tokenizer, vocab_size, texts.documents, texts.bytes, out))
    use = f"ingot prepare ... --tokenizer {shlex.quote(str(out))}"
    print(f"use it: {use}, and model.vocab_size={tokenizer.vocab_size} or more")


@app.command("show", cls=OptionCommand)
def show(name: Name, text: Texts = None, sample: Sample = "10MB", key: Key = "text", as_json: AsJson = False) -> None:
    """Show what a tokenizer is, and how it encodes a text of yours.

    Examples:
      ingot tokenizer show my-tokenizer
      ingot tokenizer show EleutherAI/gpt-neox-20b --text my-texts
    """

    tokenizer = load_tokenizer(name)
    found = describe(tokenizer)
    if text:
        texts = _texts(text, sample, key)
        fit = measure_fit(tokenizer, texts)
        _report_bad(texts)
        found |= {
            "documents": fit.documents, "bytes": fit.bytes, "tokens": fit.tokens,
            "tokens_per_byte": round(fit.tokens_per_byte, 4), "tokens_used": fit.used,
            "round_trip": _round_trip(fit.changed, fit.documents, fit.first_change),
        }  # fmt: skip
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for label, value in found.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{token} {index}" for token, index in list(value.items())[:12]) or "none"
            shown += f" and {len(value) - 12} more" if len(value) > 12 else ""
        print(f"{label.replace('_', ' '):16} {shown}")


@app.command("compare", cls=OptionCommand)
def compare(
    names: Names, text: Texts = None, sample: Sample = "10MB", key: Key = "text", as_json: AsJson = False
) -> None:
    """Compare tokenizers by the number of tokens they need for your text.

    Examples:
      ingot tokenizer compare my-tokenizer gpt2 --text my-texts
      ingot tokenizer compare a/tokenizer.json b --text 'val/*.txt' --json
    """

    if not text:
        raise DataError("compare: give the text to compare on, as --text my-texts")
    loaded = {name: load_tokenizer(name) for name in names}
    texts = _texts(text, sample, key)
    fits = {name: measure_fit(tokenizer, texts) for name, tokenizer in loaded.items()}
    _report_bad(texts)
    if as_json:
        rows = [
            {"tokenizer": name, "vocab_size": loaded[name].vocab_size, "tokens": fit.tokens, "bytes": fit.bytes,
             "tokens_per_byte": round(fit.tokens_per_byte, 4), "changed_documents": fit.changed}
            for name, fit in fits.items()
        ]  # fmt: skip
        print(json.dumps(rows, ensure_ascii=False))
        return
    print(f"{count_of(texts.documents, 'document')}, {format_bytes(texts.bytes)}")
    print(f"{'vocabulary':>10} {'tokens':>12} {'tok/byte':>8} {'bytes/tok':>9}  round trip  tokenizer")
    for name, fit in sorted(fits.items(), key=lambda item: item[1].tokens):
        trip = "exact" if not fit.changed else f"{fit.changed:,} differ"
        row = (
            f"{loaded[name].vocab_size:>10,} {fit.tokens:>12,} {fit.tokens_per_byte:>8.4f} {fit.bytes_per_token:>9.2f}"
        )
        print(f"{row}  {trip:10}  {name}")


def _texts(paths: list[str], sample: str, key: str) -> DocumentSample:

    return DocumentSample.of(paths, _bytes(sample), key, _say)


def _bytes(text: str) -> int:

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise DataError(f"--sample: {error}") from None


def _round_trip(changed: int, documents: int, example: str) -> str:
    return "exact" if not changed else f"{changed:,} of {documents:,} documents change: {example}"


def _report_bad(texts: DocumentSample) -> None:
    if texts.bad:
        _say(f"skipped {count_of(len(texts.bad), 'bad record')}, such as {texts.bad[0]}")
