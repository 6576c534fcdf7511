"""The text and the tokenizer of `ingot demo`: of bounded size, and made once."""

from pathlib import Path

import pytest

from ingot import demo


def test_the_corpus_is_bounded_and_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CORPUS_BYTES", 200_000)
    documents, size = demo.write_corpus(tmp_path)
    assert documents > 2 and 200_000 <= size < 1_000_000  # the last document ends it
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.iterdir()}
    assert set(before) == {"train.jsonl", "val.jsonl"} and all(size for _, size in before.values())
    assert demo.write_corpus(tmp_path) == (documents, size)
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.iterdir()} == before

    monkeypatch.setattr(demo, "VOCAB_SIZE", 300)
    assert demo.make_tokenizer(tmp_path, tmp_path / "tokenizer") == 300
    monkeypatch.setattr(demo, "VOCAB_SIZE", 310)
    assert demo.make_tokenizer(tmp_path, tmp_path / "tokenizer") == 300  # it is there
