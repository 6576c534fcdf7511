"""Several processes divide a preparation, and a last one ends it: the bytes are those of one process."""

import fcntl
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SENTENCES

from ingot.data.prepare.journal import Journal
from ingot.data.prepare.prepare import PrepareReport, prepare
from ingot.data.prepare.worker import TokenizeWorker
from ingot.data.sources import pieces as sources
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.errors import DataError
from ingot.plurals import count_of

SHARES = 3


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sources, "PIECE_BYTES", 4_000)
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text * (1 + i % 5)}) + "\n" for i, text in enumerate(SENTENCES)))
    return path


@pytest.fixture
def tokenizer(data: Path) -> Tokenizer:
    return load_tokenizer(data / "tokenizer")


def run(corpus: Path, out: Path, tokenizer: Tokenizer, **options: Any) -> PrepareReport:
    fixed: dict[str, Any] = {"concat_tokens": 64, "size_limit": 4096, "num_workers": 0, "show": lambda line: None}
    chosen = None if options.pop("as_text", False) else tokenizer
    return prepare(corpus, out, tokenizer=chosen, **(fixed | options))


def content(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize(
    "options",
    [{}, {"format": "indexed"}, {"no_wrap": True}, {"compression": "zstd"}, {"as_text": True}, {"max_samples": 70}],
    ids=str,
)
def test_three_shares_and_a_last_process_give_the_bytes_of_one(
    options: dict[str, Any], corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    run(corpus, whole, tokenizer, **options)
    for turn in (2, 0, 1):
        run(corpus, divided, tokenizer, share=(turn, SHARES), **options)
        assert not (divided / "train" / "index.json").exists()
    run(corpus, divided, tokenizer, **options)
    assert content(divided) == content(whole)


def test_the_shares_do_all_pieces_and_none_twice(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    plain = TokenizeWorker.tokenize

    def tokenize(self: TokenizeWorker, number: int, *rest: Any) -> dict[str, Any]:
        done.append(number)
        return plain(self, number, *rest)

    monkeypatch.setattr(TokenizeWorker, "tokenize", tokenize)
    reports = [run(corpus, tmp_path / "out", tokenizer, share=(turn, SHARES)) for turn in range(SHARES)]
    count = len(done)
    assert count > 2 * SHARES and sorted(done) == list(range(count))
    whole = run(corpus, tmp_path / "out", tokenizer)
    assert len(done) == count
    assert (sum(r.documents for r in reports), sum(r.bytes for r in reports)) == (whole.documents, whole.bytes)


def test_a_share_that_was_killed_continues_when_it_is_run_again(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path / "whole", tokenizer)
    out, plain = tmp_path / "out", TokenizeWorker.tokenize

    def tokenize(self: TokenizeWorker, number: int, *rest: Any) -> dict[str, Any]:
        if number == 4:
            raise KeyboardInterrupt
        return plain(self, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(TokenizeWorker, "tokenize", tokenize)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, out, tokenizer, share=(1, SHARES))
    journal = out / ".train.partial" / "journal.1.jsonl"
    done = {json.loads(line)["number"] for line in journal.read_text().splitlines()}
    assert 1 in done and 4 not in done  # a piece after 4 may have been finished meanwhile
    with journal.open("a") as file:
        file.write('{"task": "tokenize", "num')  # killed while it wrote
    said: list[str] = []
    for turn in range(SHARES):
        run(corpus, out, tokenizer, share=(turn, SHARES), show=said.append)
    assert f"continuing: {count_of(len(done), 'piece')} already done" in said
    run(corpus, out, tokenizer)
    assert content(out) == content(tmp_path / "whole")


def test_the_last_process_finishes_what_a_share_left_undone(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run(corpus, tmp_path / "whole", tokenizer)
    out = tmp_path / "out"
    run(corpus, out, tokenizer, share=(0, SHARES))
    damaged = sorted((out / ".train.partial" / "parts").glob("*.data"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-2])  # a power cut on that machine
    run(corpus, out, tokenizer, share=(1, 5))  # another division of the same pieces
    run(corpus, out, tokenizer)
    assert content(out) == content(tmp_path / "whole")


def test_neither_the_same_share_nor_the_last_process_starts_next_to_one(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(corpus, out, tokenizer, share=(0, SHARES))
    with (out / ".train.partial" / "lock.1").open("w") as own, (out / ".train.partial" / "lock").open("r+") as common:
        fcntl.flock(own, fcntl.LOCK_EX)
        fcntl.flock(common, fcntl.LOCK_SH)  # as share 1 holds them
        run(corpus, out, tokenizer, share=(2, SHARES))
        for wrong in ({"share": (1, SHARES)}, {}, {"share": (2, SHARES), "concat_tokens": 32}):
            with pytest.raises(DataError, match="another `prepare` is running"):
                run(corpus, out, tokenizer, **wrong)
    run(corpus, out, tokenizer, share=(2, SHARES), concat_tokens=32)  # starts over, once nobody else is there


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"share": (3, 3)}, "K from 0 to N-1"), ({"share": (0, 3), "reprocess": True}, "remove the old result first")],
)
def test_an_impossible_share_is_refused(
    options: dict[str, Any], reason: str, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=reason):
        run(corpus, tmp_path / "out", tokenizer, **options)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_a_share(corpus: Path, data: Path, tmp_path: Path, ingot: Callable[..., Any]) -> None:
    command = ["prepare", "--path", str(corpus), "--out_root", "out", "--tokenizer", str(data / "tokenizer")]
    assert "share 0/1 is done: 240 documents" in ingot(*command, "--share", "0/1").stdout
    assert "share = '1': must be K/N" in ingot(*command, "--share", "1", check=False).stderr
    assert "240 documents" in ingot(*command).stdout


def test_a_share_runs_once_at_a_time_next_to_the_others(tmp_path: Path) -> None:
    def journal(share: tuple[int, int] | None) -> Journal:
        return Journal(tmp_path / "work", share, print)

    state = {"signature": "the same", "inputs": []}
    with journal((0, 2)).opened(state):
        with journal((1, 2)).opened(state):
            pass
        for share in ((0, 2), None):
            with pytest.raises(DataError, match="another `prepare` is running here"), journal(share).opened(state):
                pass
    with journal((0, 2)).opened(state):
        pass
