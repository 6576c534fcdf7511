"""How a text becomes a dataset: what a document is, the size of the vocabulary, and what is held out for validation."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.data.document_sample import DocumentSample
from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources.input_files import SourceFile, find_files
from ingot.errors import DataError
from ingot.plurals import count_of
from ingot.storage.byte_sizes import format_bytes

_LOOK_BYTES = 32_000_000  # of text that is read to count documents
_ENOUGH_DOCUMENTS = 20
_VAL_BYTES = 200_000  # enough to compare losses, and evaluated in seconds
_VAL_SHARE = 0.05
_BYTES_PER_TOKEN = 2000  # of text for each token that is learned, so that a token occurs often
_VOCABULARY = (512, 8192)


@dataclass(frozen=True)
class DataPlan:
    """Options of `ingot prepare`, and why."""

    arguments: list[str]
    reasons: list[str]
    sequence: int  # tokens
    prompt: str  # the beginning of a document


@dataclass(frozen=True)
class _Count:
    """Documents of a text, for one meaning of the word."""

    documents: int
    is_exact: bool
    prompt: str


def plan_data(inputs: Sequence[str], key: str, longest: int, say: Callable[[str], None]) -> DataPlan:
    """Look at the text and decide. `longest`: tokens of a sequence, where there is enough text."""
    files = find_files(inputs, say)
    size = DocumentSample(files, 1).expected_bytes
    unit, count = _choose_documents(files, key)
    reasons = [f"text: {count_of(len(files), 'file')}, {format_bytes(size)}"]
    about = "" if count.is_exact else "about "
    why = (
        "" if unit == "file" else f" (fewer than {_ENOUGH_DOCUMENTS} files: text files are divided, other formats not)"
    )
    reasons.append(f"documents: {about}{count.documents:,}, --documents {unit}{why}")
    smallest, largest = _VOCABULARY
    vocabulary = min(max(1 << round(math.log2(max(size / _BYTES_PER_TOKEN, 1))), smallest), largest)
    reasons.append(
        f"vocabulary: {vocabulary:,} tokens (one for each {_BYTES_PER_TOKEN:,} bytes of text, from {smallest} to "
        f"{largest:,})"
    )
    sequence = min(longest, max(32, 1 << int(math.log2(max(size / 1000, 1)))))
    reasons.append(f"sequences: {sequence} tokens" + ("" if sequence == longest else " (little text)"))
    held_out, reason = _held_out(count, size)
    reasons.append(f"validation: {reason}")
    arguments = [
        "--tokenizer", f"train:{vocabulary}", "--documents", unit, *held_out, "--concat-tokens", str(sequence),
        "--on-error", "skip", *(["--json-keys", key] if key != "text" else []),
    ]  # fmt: skip
    return DataPlan(arguments, reasons, sequence, count.prompt)


def _choose_documents(files: Sequence[SourceFile], key: str) -> tuple[str, _Count]:
    """Files, paragraphs or lines: the first of which there are enough, or of which there are most."""
    can_divide = any(file.format in ("text", "zip") for file in files)
    counts: dict[str, _Count] = {}
    for unit in ("file", "paragraph", "line") if can_divide else ("file",):
        counts[unit] = _count(files, PrepareOptions(documents=unit, json_keys=(key,)))
        if counts[unit].documents >= _ENOUGH_DOCUMENTS:
            break
    unit = max(counts, key=lambda name: counts[name].documents)
    if counts[unit].documents < 2:
        where = files[0].path if len(files) == 1 else f"the {len(files)} files"
        raise DataError(
            f"{Path(where).name}: one document without line breaks, so nothing would be left to validate on; divide it "
            "into lines, paragraphs or files"
        )
    return unit, counts[unit]


def _count(files: Sequence[SourceFile], options: PrepareOptions) -> _Count:
    sample = DocumentSample(list(files), _LOOK_BYTES, options, what="looking at the text")
    prompt = ""
    for text in sample:
        prompt = prompt or _beginning(text)
    share = sample.share
    return _Count(round(sample.documents / share), share == 1, prompt or "The")


def _beginning(text: str) -> str:
    """Some words at the beginning of a document, if it begins with words."""
    found = re.match(r"\w[\w',-]*(?: \w[\w',-]*){1,3}", text[:60])
    return found[0] if found else ""


def _held_out(count: _Count, size: int) -> tuple[list[str], str]:
    share = min(_VAL_SHARE, _VAL_BYTES / max(size, 1))
    if count.documents * share >= 2 * _ENOUGH_DOCUMENTS:
        fraction = f"{share:.2g}"
        return [
            "--val-fraction",
            fraction,
        ], f"{fraction} of the documents (at most {format_bytes(_VAL_BYTES)})"
    number = max(1, min(count.documents // 20, 2 * _ENOUGH_DOCUMENTS))
    return ["--val-documents", str(number)], f"{count_of(number, 'document')} (a share would be too few)"
