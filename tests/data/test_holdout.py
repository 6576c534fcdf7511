"""Validation documents are held out by their text: the same ones for any order, workers, shares and crashes."""

import hashlib
import json
import os
import random
import signal
from pathlib import Path

import pytest
from test_prepare import content, die_at, document, in_a_fork, run
from test_writers import read_mds

from ingot.data.prepare.prepare import prepare
from ingot.data.sources import documents
from ingot.data.sources import pieces as sources
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.data.tokenizer_training import train_tokenizer
from ingot.errors import DataError

TEXTS = [f"{i} {document(i)}" for i in range(400)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(TEXTS[:100], 400, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 20_000)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def divided(out: Path) -> tuple[list[str], list[str]]:
    """The documents of both splits of a dataset that keeps text as text."""
    train, val = ([v.decode() for s in sorted((out / split).glob("*.mds")) for v in read_mds(s)]
                  for split in ("train", "val"))  # fmt: skip
    return train, val


@pytest.mark.parametrize("option", [{"val_fraction": 0.1}, {"val_documents": 37}], ids=str)
def test_every_document_is_in_one_split_whatever_the_order_files_and_workers(option: dict, tmp_path: Path) -> None:
    run(write(tmp_path / "a.jsonl", TEXTS), tmp_path / "a", None, **option)
    train, val = divided(tmp_path / "a")
    assert sorted(train + val) == sorted(TEXTS) and not set(train) & set(val)
    assert len(val) == option.get("val_documents", len(val)) and 20 < len(val) < 60
    shuffled = random.Random(1).sample(TEXTS, 400)
    parts = [write(tmp_path / f"{n}.jsonl", shuffled[n::3]) for n in range(3)]
    run(parts, tmp_path / "b", None, num_workers=2, **option)
    assert set(divided(tmp_path / "b")[1]) == set(val)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "all.txt").write_text("\n@@@\n".join(text for text in TEXTS))
    run(tmp_path / "texts", tmp_path / "c", None, documents="@@@", **option)
    assert set(divided(tmp_path / "c")[1]) == {text.strip("\n") for text in val}


def test_copies_of_a_document_are_in_one_split_and_count_once(tmp_path: Path) -> None:
    run(write(tmp_path / "a.jsonl", TEXTS * 3), tmp_path / "a", None, val_documents=30)
    train, val = divided(tmp_path / "a")
    assert len(set(val)) == 30 and len(val) == 90 and not set(train) & set(val)


@pytest.mark.parametrize("option", [{"val_fraction": 0.1}, {"val_documents": 37}], ids=str)
def test_workers_and_shares_write_the_same_bytes(option: dict, tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    run(source, tmp_path / "alone", tokenizer, **option)
    expected = content(tmp_path / "alone")
    run(source, tmp_path / "workers", tokenizer, num_workers=3, **option)
    assert content(tmp_path / "workers") == expected
    for share in ((1, 2), (0, 2), None):
        run(source, tmp_path / "shares", tokenizer, share=share, **option)
    assert content(tmp_path / "shares") == expected


@pytest.mark.parametrize("how", ["given", "train:300"])
def test_killed_anywhere_and_run_again_it_ends_with_the_same_bytes(
    how: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    wanted = how if how != "given" else tokenizer

    def go(out: Path) -> None:
        run(source, out, wanted, val_documents=20)  # type: ignore[arg-type]

    go(tmp_path / "whole")
    expected = content(tmp_path / "whole")
    kills = 0
    for number in range(1, 400, 19):
        out = tmp_path / f"out{number}"
        code = in_a_fork(lambda out=out, number=number: (die_at(number), go(out)))
        if code == -signal.SIGKILL:
            kills += 1
            assert in_a_fork(lambda out=out: go(out)) == 0
        found = {name: digest for name, digest in content(out).items() if name != ".tokenizer.lock"}
        assert found == expected, number
        if code == 0:
            break
    assert kills > 3 and code == 0


def test_a_huge_document_is_in_one_split_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1 << 20)
    (tmp_path / "texts").mkdir()
    texts = ["".join(f"{n}{document(i)} " for i in range(6000)) for n in range(4)]
    for n, text in enumerate(texts):
        (tmp_path / "texts" / f"{n}.txt").write_text(text)
    tokenizer = train_tokenizer(TEXTS[:100], 300, tmp_path / "tokenizer")
    report = run(tmp_path / "texts", tmp_path / "out", tokenizer, format="indexed", val_documents=1)
    sizes = {len(text.encode()) for text in texts}
    assert report.splits["val"].bytes in sizes and report.splits["val"].documents == 1
    assert report.splits["train"].documents == 3 and report.bytes == sum(len(text.encode()) for text in texts)


def test_bad_records_and_empty_documents_are_counted_once(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [*TEXTS, "", ""])
    source.write_text(source.read_text() + "not json\n")
    with pytest.raises(DataError, match=r"a\.jsonl:403"):
        run(source, tmp_path / "out", None, val_fraction=0.1)
    assert not (tmp_path / "out" / "val").exists()
    splits = run(source, tmp_path / "out", None, val_fraction=0.1, on_error="skip").splits
    assert list(splits) == ["train", "val"]
    assert (splits["train"].skipped, splits["train"].empty) == (1, 2)
    assert (splits["val"].skipped, splits["val"].empty) == (0, 0)


@pytest.mark.parametrize(
    ("texts", "option", "message"),
    [
        (TEXTS[:1], {"val_fraction": 0.5}, "one document, which cannot be divided .* --documents paragraph or line"),
        (TEXTS[:5], {"val_fraction": 1e-6}, "no document is held out of 5 .* use --val_documents N"),
        (TEXTS[:5], {"val_fraction": 1 - 1e-6}, "every document is held out of 5"),
        (TEXTS[:5], {"val_documents": 5}, "has 5 different documents, and none would be left"),
        ([""], {"val_fraction": 0.5}, "no text in"),
        (TEXTS[:5], {"val_fraction": 0}, "val_fraction = 0"),
        (TEXTS[:5], {"val_fraction": 1}, "val_fraction = 1"),
        (TEXTS[:5], {"val_fraction": -1}, "val_fraction = -1"),
        (TEXTS[:5], {"val_fraction": float("nan")}, "val_fraction = nan"),
        (TEXTS[:5], {"val_documents": 0}, "val_documents = 0"),
        (TEXTS[:5], {"val_documents": 10**30}, "val_documents = 1"),
        (TEXTS[:5], {"val_documents": 1, "val_fraction": 0.5}, "give one"),
        (TEXTS[:5], {"val_documents": 1, "split": "val"}, "another name for the rest"),
        (TEXTS[:5], {"val_documents": 1, "output_prefix": "x", "format": "indexed"}, "documents.split=99,1"),
    ],
    ids=str,
)
def test_a_division_that_leaves_a_split_empty_is_one_sentence_and_leaves_nothing(
    texts: list[str], option: dict, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    source = write(tmp_path / "a.jsonl", texts)
    out = None if "output_prefix" in option else tmp_path / "out"
    with pytest.raises(DataError, match=message) as error:
        run(source, out, tokenizer, **option)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.jsonl"]


def test_a_trained_tokenizer_has_not_seen_what_is_held_out(tmp_path: Path) -> None:
    """The same tokenizer as one that is trained on the training documents alone."""
    run(write(tmp_path / "a.jsonl", TEXTS), tmp_path / "text", None, val_fraction=0.3)
    train, _ = divided(tmp_path / "text")
    said: list[str] = []
    run(tmp_path / "a.jsonl", tmp_path / "own", "train:350", val_fraction=0.3, show=said.append)  # type: ignore[arg-type]
    expected = train_tokenizer(train, 350)
    assert load_tokenizer(tmp_path / "own" / "tokenizer").fingerprint() == expected.fingerprint()
    assert any("350 tokens learned from" in line for line in said)


def test_a_trained_tokenizer_is_kept_until_text_or_options_change(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)

    def go(size: int, **more: object) -> str:
        prepare(source, tmp_path / "out", tokenizer=f"train:{size}", show=lambda line: None, **more)
        return hashlib.sha256((tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()

    first = go(300)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    assert go(300) == first and {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before
    with pytest.raises(DataError, match=r"the split 'train' there uses it.*--reprocess"):
        go(310)
    assert go(310, reprocess=True) != first
    assert load_tokenizer(tmp_path / "out" / "tokenizer").vocab_size == 310


def test_a_tokenizer_that_prepare_did_not_train_is_never_replaced(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "out" / "tokenizer")
    with pytest.raises(DataError, match="`prepare` did not train it"):
        run(write(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", "train:300")  # type: ignore[arg-type]
    assert load_tokenizer(tmp_path / "out" / "tokenizer").fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("wrong", ["train:", "train:many", "train:-5", "train:12.5", "train:100", f"train:{10**15}"])
def test_a_vocabulary_that_cannot_be_trained_is_one_sentence(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"such as train:32000|at least 257 tokens|at most 1,000,000"):
        run(write(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", wrong)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.parametrize("below", ["", "data"])
def test_what_prepare_wrote_into_the_folder_of_the_text_is_not_read_again(below: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(TEXTS))
    options = {"documents": "paragraph", "val_fraction": 0.1}
    run(tmp_path, tmp_path / below, "train:300", **options)  # type: ignore[arg-type]
    before = content(tmp_path)
    assert str(Path(below, "val", "index.json")) in before
    run(tmp_path, tmp_path / below, "train:300", **options)  # type: ignore[arg-type]
    assert content(tmp_path) == before
