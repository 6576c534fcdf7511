"""Texts of a corpus, or an even sample of them where it is large: what a tokenizer is trained on and measured with.

The sample takes whole pieces of some 8 MB at even distances, so that most of a corpus of many gigabytes is never read
and memory holds one piece at a time. It depends on the files alone: the same corpus yields the same sample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingot.data.prepare.holdout import Holdout
from ingot.data.prepare.options import PrepareOptions
from ingot.data.prepare.progress import follow
from ingot.data.sources.input_files import SourceFile, find_files
from ingot.data.sources.pieces import plan_pieces, read_piece
from ingot.errors import DataError
from ingot.storage.byte_sizes import format_bytes

SAMPLE_BYTES = 10**9
"""Most text that a tokenizer is trained on, if nothing else is said."""


@dataclass
class DocumentSample:
    """The texts of `files`, at most about `limit` bytes of them, as a preparation with `options` reads them. Iterating
    again yields the same texts."""

    files: list[SourceFile]
    limit: int
    options: PrepareOptions = field(default_factory=PrepareOptions)
    holdout: Holdout | None = None  # which documents, if not all
    what: str = "reading text"
    documents: int = field(default=0, init=False)
    bytes: int = field(default=0, init=False)
    bad: list[str] = field(default_factory=list, init=False)

    @classmethod
    def of(
        cls, inputs: Sequence[str | Path], limit: int, key: str = "text", say: Callable[[str], None] | None = None
    ) -> "DocumentSample":
        """The documents of files, folders, globs and URLs. `say` receives what is not read, and that it is a sample."""
        sample = cls(find_files(inputs, say), limit, PrepareOptions(json_keys=(key,)))
        if say:
            sample.announce(say)
        return sample

    def announce(self, say: Callable[[str], None]) -> None:
        """Say that it is a sample, if it is."""
        if self.share < 1:
            size = format_bytes(self.expected_bytes)
            say(f"sample: {format_bytes(self.limit)} of about {size} of text, in pieces at even distances")

    @property
    def expected_bytes(self) -> int:
        """About how many bytes of text the files hold: compressed ones several times their size."""
        return sum(f.size * (4 if f.compression or f.format == "parquet" else 1) for f in self.files)

    @property
    def share(self) -> float:
        """How much of the text is read."""
        return min(1.0, self.limit / max(self.expected_bytes, 1))

    def __iter__(self) -> Iterator[str]:
        self.documents, self.bytes, self.bad = 0, 0, []
        taken = 1 - self.share  # the first piece is always taken
        pieces = plan_pieces(self.files, False, self.options)
        for piece in follow(self.what, pieces, lambda piece: piece.size, sum(f.size for f in self.files)):
            before, taken = int(taken), taken + self.share
            if self.share < 1 and int(taken) == before:
                continue
            blocks = read_piece(piece, self.options, _line_end)
            continues = False  # whether a document goes on in the next block
            for block in (block for block, _ in self.holdout.select(blocks)) if self.holdout else blocks:
                self.bad += [f"{block.path}, record {record + 1}: {problem}" for record, problem in block.bad]
                for text in block.texts:
                    self.documents += not continues
                    continues = not block.ends
                    self.bytes += len(text)
                    yield text.decode()
                    if self.bytes >= self.limit:
                        return
        if not self.bytes:
            reason = f": {self.bad[0]}" if self.bad else ""
            raise DataError(f"{self.files[0].path}: no text in the input{reason}")


def _line_end(text: str, low: int, high: int) -> int:
    """A huge text is cut after a line, or else after a word: a token across that place would not be learned anyway."""
    return text.rfind("\n", low, high) + 1 or text.rfind(" ", low, high) + 1 or high
