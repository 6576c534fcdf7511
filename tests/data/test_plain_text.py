"""Documents of text files: lines, paragraphs and what is between separators."""

import gzip
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import Ingot

from ingot.data.prepare.options import PrepareOptions, check_options
from ingot.data.prepare.prepare import prepare
from ingot.data.sources import documents, plain_text
from ingot.data.sources import pieces as sources
from ingot.data.sources.input_files import describe_documents, find_files
from ingot.data.sources.pieces import plan_pieces, read_piece
from ingot.errors import DataError


def read(path: Path, kind: str, **more: object) -> tuple[list[str], list[int], list[tuple[int, str]]]:
    """Texts, their numbers in the file, and the bad ones."""
    options = PrepareOptions(documents=kind, **more)  # type: ignore[arg-type]
    blocks = [
        block for piece in plan_pieces(find_files([path]), False, options)
        for block in read_piece(piece, options, lambda *_: None)
    ]  # fmt: skip
    texts = [text.decode() for block in blocks for text in block.texts]
    return texts, [int(n) for block in blocks for n in block.records], [bad for block in blocks for bad in block.bad]


TEXT = "\ufeffone\r\n  two, indented\r\n\r\n \t\r\nthree — naïve\nfour\n\n\n\n<|end|>\nfive\n\nsix<|end|>\n\n"
EXPECTED = {
    "line": (["one", "  two, indented", "three — naïve", "four", "<|end|>", "five", "six<|end|>"],
             [0, 1, 4, 5, 9, 10, 12]),
    "paragraph": (["one\r\n  two, indented", "three — naïve\nfour", "<|end|>\nfive", "six<|end|>"], [0, 1, 2, 3]),
    "<|end|>": (["one\r\n  two, indented\r\n\r\n \t\r\nthree — naïve\nfour", "five\n\nsix"], [0, 1]),
    "\\n<|end|>\\n": (["one\r\n  two, indented\r\n\r\n \t\r\nthree — naïve\nfour", "five\n\nsix<|end|>"], [0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("how", ["txt", "txt.gz", "zip", "small blocks"])
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_text_file_is_divided_as_asked(kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a.{how.partition(' ')[0]}"
    if how == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", TEXT)
    else:
        path.write_bytes(gzip.compress(TEXT.encode()) if how == "txt.gz" else TEXT.encode())
    if how == "small blocks":
        path = path.rename(tmp_path / "a.txt")
        for size in (1, 7, 16, 64):
            monkeypatch.setattr(documents, "BLOCK_BYTES", size)
            monkeypatch.setattr(sources, "PIECE_BYTES", size)
            assert read(path, kind)[0] == EXPECTED[kind][0], size
    else:
        texts, records, bad = read(path, kind)
        assert (texts, records, bad) == (*EXPECTED[kind], [])


@pytest.mark.parametrize("kind", ["line", "paragraph", "@@"])
def test_blocks_and_byte_ranges_of_a_large_file_lose_and_double_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between = {"line": "\n", "paragraph": "\n\n", "@@": "@@"}[kind]
    expected = [f"document {i}" + " naïve" * (i % 50) for i in range(4000)]
    (tmp_path / "a.txt").write_text(between.join(expected))
    monkeypatch.setattr(sources, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 9_000)
    assert len(list(plan_pieces(find_files([tmp_path]), False, PrepareOptions(documents=kind)))) > 10
    assert read(tmp_path / "a.txt", kind)[0] == expected


def test_only_text_files_are_divided(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one\n\ntwo"}) + "\n")
    (tmp_path / "b.md").write_text("three\n\nfour")
    assert read(tmp_path, "paragraph")[0] == ["one\n\ntwo", "three", "four"]
    files = find_files([tmp_path])
    assert describe_documents(files, PrepareOptions(documents="paragraph")) == (
        "documents: each line of 1 .jsonl; each paragraph of 1 .md"
    )
    assert "each file of 1 .md (--documents line or paragraph divides" in describe_documents(files, PrepareOptions())


@pytest.mark.parametrize("kind", ["line", "paragraph", "@@"])
def test_bad_documents_are_numbered_and_the_others_are_kept(kind: str, tmp_path: Path) -> None:
    between = {"line": b"\n", "paragraph": b"\n\n", "@@": b"@@"}[kind]
    (tmp_path / "a.txt").write_bytes(between.join([b"good", b"b\xffad", b"fine", b"nul\0", b"x" * 100, b"end"]))
    texts, records, bad = read(tmp_path / "a.txt", kind, max_document_bytes=50)
    assert (texts, records) == (["good", "fine", "end"], [0, 2, 5])
    assert [number for number, _ in bad] == [1, 3, 4]
    for (_, problem), words in zip(bad, ("invalid UTF-8 at byte 2", "NUL bytes", "of more than max_"), strict=True):
        assert words in problem


@pytest.mark.parametrize("kind", ["file", "line", "paragraph", "@@"])
def test_utf_16_is_named_with_the_command_that_converts_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n\ntext", encoding="utf-16")
    texts, _, bad = read(tmp_path / "a.txt", kind)
    assert not texts and "iconv -f UTF-16" in bad[0][1]


@pytest.mark.parametrize("kind", ["paragraph", "@@"])
def test_an_endless_document_is_never_held_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(plain_text, "_OVERLAP", 100)
    (tmp_path / "a.txt").write_text("first" + "\n\n@@" + "x" * 100_000 + "\n\n@@" + "last")
    options = PrepareOptions(documents=kind, max_document_bytes=5000)
    assert max(len(p.lines) for p in plan_pieces(find_files([tmp_path]), False, options)) < 10_000
    texts, _, bad = read(tmp_path / "a.txt", kind, max_document_bytes=5000)
    assert [text.strip("@\n") for text in texts] == ["first", "last"] and len(bad) == 1


@pytest.mark.parametrize(
    ("value", "message"),
    [("lines", "did you mean line"), ("Paragraphs", "did you mean paragraph"), ("", "from 1 to 200 bytes"),
     ("x" * 300, "from 1 to 200 bytes")],
)  # fmt: skip
def test_a_mistyped_kind_of_document_is_not_taken_for_a_separator(value: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_options({"documents": value})


def test_numbers_of_documents_are_of_the_file_and_not_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 50)
    monkeypatch.setattr(sources, "PIECE_BYTES", 50)
    (tmp_path / "a.txt").write_text("\n\n".join(f"paragraph {i}" for i in range(100)))
    _, records, _ = read(tmp_path / "a.txt", "paragraph")
    assert np.array_equal(records, range(100))


def test_a_separator_that_never_occurs_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one text")
    said: list[str] = []
    prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer=None, documents="<|endoftxt|>", show=said.append)
    assert "warning: '<|endoftxt|>' is in none of the files, so each is one document" in said
    said.clear()
    prepare(tmp_path / "a.txt", tmp_path / "second", tokenizer=None, documents=" ", show=said.append)
    assert not any("warning" in line for line in said)


def test_a_name_that_is_not_utf_8_is_shown_in_a_strict_terminal(ingot: Ingot, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "ok.txt").write_text("good text")
    (tmp_path / "texts" / os.fsdecode(b"bad\xff.txt")).write_bytes(b"\0")
    done = ingot(
        "prepare", "texts", "-o", "out", "--on-error", "skip", env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    )
    assert "bad?.txt: NUL bytes" in done.stdout
    assert "warning: without --tokenizer the shards hold text" in done.stderr  # at once, before the work
