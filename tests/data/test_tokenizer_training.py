"""Training a tokenizer on one's own text, the sample that it is trained on, and how tokenizers are compared."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ingot.cli.main import app
from ingot.data import tokenizer_training
from ingot.data.document_sample import DocumentSample
from ingot.data.prepare.own_tokenizer import discard_tokenizer
from ingot.data.sources import documents, pieces
from ingot.data.tokenizer import load_tokenizer
from ingot.data.tokenizer_report import measure_fit
from ingot.data.tokenizer_training import train_tokenizer
from ingot.errors import DataError

HARD = "we're in 12345 naïve cafés\r\n\r\n\n  def f(x):\n\treturn x**2  # 坩堝 😀\n  trailing  "


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["tokenizer", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with (folder / "a.jsonl").open("w") as file:
        for number in range(3000):
            file.write(json.dumps({"text": f"document {number}: " + "the quick brown fox jumps " * 3}) + "\n")
    (folder / "b.txt").write_text(HARD * 5)
    return folder


@pytest.mark.parametrize("splitter", ["gpt2", "cl100k"])
def test_what_is_trained_reproduces_every_text(splitter: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([HARD] * 3, 400, tmp_path, splitter)
    assert tokenizer.decode(tokenizer.encode(HARD)) == HARD
    assert load_tokenizer(tmp_path).encode(HARD) == tokenizer.encode(HARD)


def test_splitters_differ_where_they_should(tmp_path: Path) -> None:
    text = "1234567 " * 200
    longest = {}
    for splitter in ("gpt2", "cl100k"):
        tokenizer = train_tokenizer([text], 300, tmp_path / splitter, splitter)
        longest[splitter] = max(len(re.sub(r"\D", "", token)) for token in tokenizer.vocab)
    assert longest == {"gpt2": 7, "cl100k": 3}


def test_special_tokens_get_the_first_ids_and_the_first_one_ends_documents(tmp_path: Path) -> None:
    train_tokenizer([HARD], 400, tmp_path, special_tokens=["<eod>", "<pad>"])
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab["<eod>"], tokenizer.vocab["<pad>"], tokenizer.eos_id) == (0, 1, 0)


def test_only_a_tokenizer_of_its_own_that_no_split_uses_is_discarded(tmp_path: Path) -> None:
    for name in ("unused", "used", "given"):
        folder = tmp_path / name / "tokenizer"
        train_tokenizer([HARD] * 9, 300, folder)
        if name != "given":
            (folder / "trained.json").write_text('{"signature": "x"}')
    (tmp_path / "used" / "train").mkdir()
    (tmp_path / "used" / "train" / "meta.json").write_text("{}")
    for name in ("unused", "used", "given"):
        discard_tokenizer(tmp_path / name / "tokenizer")
    left = {path.parents[1].name for path in tmp_path.glob("*/tokenizer/tokenizer.json")}
    assert left == {"used", "given"} and not (tmp_path / "unused" / "tokenizer").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 256}, "at least 257"),
        ({"splitter": "gpt5"}, "known are gpt2 and cl100k"),
        ({"special_tokens": []}, "one or more"),
        ({"special_tokens": ["a", "a"]}, "different"),
    ],
)
def test_impossible_vocabularies_are_refused_before_text_is_read(change: dict, message: str, tmp_path: Path) -> None:
    def never():
        raise AssertionError("text was read")
        yield

    with pytest.raises(DataError, match=message):
        train_tokenizer(never(), **{"vocab_size": 300, "folder": tmp_path, **change})


def test_a_sample_takes_its_limit_from_all_over_the_files(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    everything = list(DocumentSample.of([corpus / "a.jsonl"], 1 << 30))
    assert len(everything) == 3000
    limit = sum(map(len, everything)) // 10
    said: list[str] = []
    sample = DocumentSample.of([corpus / "a.jsonl"], limit, say=said.append)
    taken = list(sample)
    assert taken == list(sample) and set(taken) < set(everything)
    assert 0.8 * limit < sample.bytes <= limit + 4096 and "sample:" in said[0]
    positions = [everything.index(text) / 3000 for text in taken]
    assert positions[0] < 0.1 and positions[-1] > 0.8


def test_input_without_text_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\xff\x00" * 100)
    with pytest.raises(DataError, match="no text in the input"):
        list(DocumentSample.of([tmp_path / "empty.txt"], 100))
    with pytest.raises(DataError, match=r"UTF-8|NUL"):
        list(DocumentSample.of([tmp_path / "binary.txt"], 100))


def test_a_fit_counts_tokens_and_notices_texts_that_change(tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = train_tokenizer([HARD], 300, tmp_path)
    fit = measure_fit(tokenizer, [HARD, "ABC"])
    assert fit.tokens == len(tokenizer.encode(HARD)) + len(tokenizer.encode("ABC")) and fit.changed == 0
    assert fit.bytes == len(HARD.encode()) + 3
    tokenizer.backend.normalizer = normalizers.Lowercase()
    changed = measure_fit(tokenizer, [HARD.lower(), "xABC"])
    assert changed.changed == 1 and changed.first_change == "'ABC' decodes to 'abc'"


@pytest.mark.parametrize("splitter", ["gpt2", "cl100k"])
def test_long_texts_are_learned_in_parts_with_the_same_result(
    splitter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(f"word{i % 97} and{'  ' * (i % 3)} it's{chr(10) * (i % 4)} naïve" for i in range(5000))
    whole = train_tokenizer([text], 500, splitter=splitter)
    parts: list[str] = []
    monkeypatch.setattr(tokenizer_training, "_PART", 1000)
    for part in tokenizer_training._parts(text):
        parts.append(part)
    assert "".join(parts) == text and max(map(len, parts)) <= 1000
    assert train_tokenizer([text], 500, splitter=splitter).fingerprint() == whole.fingerprint()


def test_an_endless_word_is_learned_in_parts(tmp_path: Path) -> None:
    assert max(map(len, tokenizer_training._parts("x" * 200_000))) == 4096
    assert train_tokenizer(["xyz" * 100_000], 300).vocab_size > 257


def test_a_huge_line_is_sampled_and_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1 << 20)
    for number, line in enumerate(("word " * 800_000, "x" * 4_000_000)):
        (tmp_path / f"{number}.txt").write_text(line)
        texts = list(DocumentSample.of([tmp_path / f"{number}.txt"], 10_000_000))
        assert "".join(texts) == line and len(texts) > 2


def test_the_verb_trains_shows_and_compares(corpus: Path, tmp_path: Path) -> None:
    made = run("train", corpus, "--vocab-size", 300, "-o", tmp_path / "small")
    assert "300 tokens learned from 3,001 documents" in made and "model.vocab_size=300" in made
    run("train", corpus / "a.jsonl", "--vocab_size", 400, "-o", tmp_path / "large")
    shown = run("show", tmp_path / "small", "--text", corpus / "b.txt")
    assert "<|endoftext|> 0" in shown and "exact" in shown
    rows = json.loads(run("compare", tmp_path / "small", tmp_path / "large", "--text", corpus / "a.jsonl", "--json"))
    assert [row["vocab_size"] for row in rows] == [300, 400]
    assert rows[1]["tokens"] < rows[0]["tokens"] and rows[0]["changed_documents"] == 0
    table = run("compare", tmp_path / "small", tmp_path / "large", "--text", corpus / "a.jsonl")
    assert table.index("large") < table.index("small")  # the fewest tokens first


def test_a_text_too_small_for_the_vocabulary_is_reported(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abab abab")
    made = run("train", tmp_path / "t.txt", "--vocab-size", 1000, "-o", tmp_path / "t")
    assert "fewer than the 1,000 asked for" in made
    with pytest.raises(DataError, match="already holds a tokenizer"):
        run("train", tmp_path / "t.txt", "-o", tmp_path / "t")
