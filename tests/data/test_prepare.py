"""Text to a dataset: the same bytes for any number of workers and after any crash, and no half of a dataset."""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from test_writers import read_mds, read_tokens
from typer.testing import CliRunner

from ingot.cli.prepare import app, read_arguments, translate
from ingot.config.data import SourceConfig
from ingot.data.loading.inspect import find_splits
from ingot.data.loading.open_dataset import locate
from ingot.data.prepare.journal import Journal, SplitReport
from ingot.data.prepare.options import PrepareOptions
from ingot.data.prepare.packing import PackingPlan
from ingot.data.prepare.pool import Progress, WorkerPool
from ingot.data.prepare.prepare import PrepareReport, prepare
from ingot.data.prepare.scheduler import SplitJob
from ingot.data.prepare.tokenize_engine import choose_engine
from ingot.data.prepare.worker import Task
from ingot.data.sources import pieces as sources
from ingot.data.tokenizer import Tokenizer, load_tokenizer
from ingot.data.tokenizer_training import train_tokenizer
from ingot.errors import ConfigError, DataError, DiskError
from ingot.storage.atomic import write_json

WORDS = [
    "the",
    "crucible",
    "holds",
    "molten",
    "ore,",
    "naïve",
    "“gold”",
    "and",
    "12",
    "ingots;",
    "don't",
    "pour",
    "it",
    "before",
    "it's",
    "white\nhot",
    "坩堝",
    "😀",
]


def document(number: int) -> str:
    return " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(number % 60 + 1))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer((document(i) for i in range(100)), 400, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": document(i), "i": i}) + "\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 20_000)


OPTIONS: dict[str, object] = {"concat_tokens": 64, "size_limit": 4096, "num_workers": 0, "show": lambda line: None}


def run(input: object, out: Path, tokenizer: Tokenizer | None, **options: object):
    return prepare(input, out, tokenizer=tokenizer, **{**OPTIONS, **options})  # type: ignore[arg-type]


def content(folder: Path) -> dict[str, str]:
    """Every file below a folder and the hash of its bytes."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def stream(folder: Path, dtype: str = "uint16") -> list[int]:
    """All tokens of an MDS split, in order."""
    values = [v for shard in sorted(folder.glob("shard.*.mds")) for v in read_mds(shard)]
    return np.concatenate([read_tokens(v, dtype) for v in values]).tolist()


def expected_stream(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eos_id]]


TEXTS = [document(i) for i in range(400)]


def test_every_token_arrives_and_the_last_sample_may_be_shorter(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    report = run(corpus, tmp_path / "out", tokenizer)
    tokens = stream(tmp_path / "out" / "train")
    assert tokens == expected_stream(tokenizer, TEXTS)
    assert (report.tokens, report.documents) == (len(tokens), 400)
    assert report.bytes == sum(len(t.encode()) for t in TEXTS)
    meta = json.loads((tmp_path / "out" / "train" / "meta.json").read_text())
    assert meta["tokens"] == len(tokens) == sum(s["tokens"] for s in meta["shards"])
    assert (meta["documents"], meta["bytes"], meta["max_token"]) == (400, report.bytes, max(tokens))
    assert (meta["vocab_size"], meta["eos_id"]) == (tokenizer.vocab_size, 0)
    assert load_tokenizer(tmp_path / "out" / "tokenizer").fingerprint() == tokenizer.fingerprint()
    assert locate(tmp_path / "out", "train") == ("mds", tmp_path / "out" / "train")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"format": "indexed"},
        {"no_wrap": True},
        {"compression": "zstd"},
        {"max_samples": 70},
        {"tokenizer": None},
        {"drop_last": True, "token_type": "int32"},
    ],
    ids=str,
)
def test_one_two_or_five_workers_give_the_same_bytes(
    options: dict, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    results = []
    for workers in (0, 1, 2, 5) if len(options) < 1 or "format" in options else (0, 2):
        out = tmp_path / f"out{workers}"
        prepare(corpus, out, **{"tokenizer": tokenizer, **OPTIONS, "num_workers": workers, **options})
        results.append(content(out))
    assert len(results[0]) > 3
    assert all(r == results[0] for r in results)


def test_compressed_input_in_blocks_gives_the_bytes_of_plain_input(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import zstandard

    packed = tmp_path / "corpus.jsonl.zst"
    packed.write_bytes(zstandard.compress(corpus.read_bytes() * 4))
    plain = tmp_path / "four.jsonl"
    plain.write_bytes(corpus.read_bytes() * 4)
    run(plain, tmp_path / "plain", tokenizer)
    run(packed, tmp_path / "packed", tokenizer, num_workers=2)
    a, b = content(tmp_path / "plain" / "train"), content(tmp_path / "packed" / "train")
    assert {k: v for k, v in a.items() if k != "meta.json"} == {k: v for k, v in b.items() if k != "meta.json"}


def test_both_engines_write_the_same_bytes(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert choose_engine(tokenizer).name == "gigatoken"
    for engine in ("auto", "hf"):
        run(corpus, tmp_path / engine, tokenizer, engine=engine)
    assert content(tmp_path / "auto") == content(tmp_path / "hf")


def test_no_wrap_begins_each_sample_with_a_document(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out", tokenizer, no_wrap=True)
    values = [v for s in sorted((tmp_path / "out" / "train").glob("*.mds")) for v in read_mds(s)]
    buffer: list[int] = []
    expected = []
    for text in TEXTS:
        buffer += [*tokenizer.encode(text), 0]
        if len(buffer) >= 64:
            expected.append(buffer[:64])
            buffer = []
    assert [read_tokens(v, "uint16").tolist() for v in values] == expected


def test_a_truncated_split_holds_llm_foundrys_number_of_samples(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    report = run(corpus, tmp_path / "out", tokenizer, split="val_xxsmall")
    assert report.splits["val_xxsmall"].samples == 100
    tokens = stream(tmp_path / "out" / "val_xxsmall")
    assert tokens == expected_stream(tokenizer, TEXTS)[: 100 * 64]
    assert report.tokens == 6400
    assert 0 < report.documents < 400


def test_text_kept_as_text_comes_back(corpus: Path, tmp_path: Path) -> None:
    report = run(corpus, tmp_path / "out", None)
    values = [v.decode() for s in sorted((tmp_path / "out" / "train").glob("*.mds")) for v in read_mds(s)]
    assert values == TEXTS
    assert report.splits["train"].shards > 3
    entry = json.loads((tmp_path / "out" / "train" / "index.json").read_text())["shards"][0]
    assert (entry["column_names"], entry["column_encodings"]) == (["text"], ["str"])
    assert report.train_command is None


def test_beginning_and_end_of_documents_are_those_requested(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out", tokenizer, bos_text="the", eos_text=" ore")
    expected = [i for t in TEXTS for i in [*tokenizer.encode("the"), *tokenizer.encode(t), *tokenizer.encode(" ore")]]
    assert stream(tmp_path / "out" / "train") == expected
    run(corpus, tmp_path / "bare", tokenizer, eos_text="")
    assert stream(tmp_path / "bare" / "train") == [i for t in TEXTS for i in tokenizer.encode(t)]


def test_indexed_keeps_documents_and_several_keys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "two.jsonl"
    rows = [{"text": document(i), "title": "" if i % 3 == 0 else f"the ore {i}"} for i in range(50)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys, prefix = ["text", "title"], str(tmp_path / "x")
    report = run(source, tmp_path, tokenizer, format="indexed", json_keys=keys, output_prefix=prefix)
    titled = sum(1 for row in rows if row["title"])
    assert {name: split.documents for name, split in report.splits.items()} == {"train text": 50, "train title": titled}
    assert report.documents == 50 + titled
    for key in ("text", "title"):
        tokens = np.fromfile(tmp_path / f"x_{key}_document.bin", dtype=np.uint16).tolist()
        assert tokens == expected_stream(tokenizer, [row[key] for row in rows if row[key]])
    assert locate(tmp_path / "x_text_document", None) == ("indexed", tmp_path / "x_text_document")


def test_a_huge_text_file_is_one_document(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ingot.data.sources import documents

    monkeypatch.setattr(documents, "BLOCK_BYTES", 1 << 20)
    text = "".join(f"{document(i)} " for i in range(20_000))
    (tmp_path / "big.txt").write_text(text, encoding="utf-8")
    assert len(text) > 3 << 20
    report = run(tmp_path / "big.txt", tmp_path / "out", tokenizer, format="indexed")
    tokens = np.fromfile(tmp_path / "out" / "train" / "train_text_document.bin", dtype=np.uint16)
    assert report.documents == 1
    assert tokens.tolist() == expected_stream(tokenizer, [text])


@pytest.mark.parametrize("in_one_piece", [False, True])
def test_a_huge_text_whose_end_is_bad_leaves_nothing_behind(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_one_piece: bool
) -> None:
    from ingot.data.sources import documents

    monkeypatch.setattr(documents, "BLOCK_BYTES", 1 << 20)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text(document(1), encoding="utf-8")
    (folder / "b.txt").write_bytes("".join(f"{document(i)} " for i in range(20_000)).encode() + b"\xff\xff")
    (folder / "c.txt").write_text(document(2), encoding="utf-8")
    if in_one_piece:
        shutil.make_archive(str(tmp_path / "texts"), "zip", folder)
        folder = tmp_path / "texts.zip"
    report = run(folder, tmp_path / "out", tokenizer, format="indexed", on_error="skip")
    split = report.splits["train"]
    written = tmp_path / "out" / "train" / "train_text_document"
    tokens = np.fromfile(written.with_suffix(".bin"), dtype=np.uint16)
    assert (split.documents, split.skipped, split.tokens) == (2, 1, len(tokens))
    assert tokens.tolist() == expected_stream(tokenizer, [document(1), document(2)])
    lengths = np.frombuffer(written.with_suffix(".idx").read_bytes(), "<i4", count=2, offset=34)
    assert lengths.sum() == len(tokens)


def test_a_dataset_of_the_hub_is_shared_among_workers(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is not known in advance, so it must not be taken for a small one."""
    from ingot.data.sources import hub
    from ingot.data.sources.input_files import hub_source

    started = []
    monkeypatch.setattr(hub, "_open", lambda dataset, subset, split, done: iter([{"text": t} for t in TEXTS][done:]))
    monkeypatch.setattr("ingot.data.prepare.prepare.WorkerPool", lambda *a: started.append(a[0]) or WorkerPool(*a))
    for workers in (None, 0):
        source = hub_source("some/texts", None, "train")
        prepare(source, tmp_path / str(workers), tokenizer=tokenizer, **{**OPTIONS, "num_workers": workers})
    assert started and content(tmp_path / "None") == content(tmp_path / "0")


def test_the_summary_tells_lengths_and_the_longest(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    split = run(corpus, tmp_path / "out", tokenizer).splits["train"]
    lengths = [len(tokenizer.encode(t)) + 1 for t in TEXTS]
    assert sum(split.histogram) == 400
    for bits, count in enumerate(split.histogram):
        assert count == sum(n.bit_length() == bits for n in lengths)
    assert [size for size, _ in split.longest] == sorted(lengths, reverse=True)[:5]


def test_a_text_file_that_is_one_document_is_named_without_a_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text(TEXTS[0] * (1 + (name == "b")))
    split = run(tmp_path / "in", tmp_path / "out", tokenizer).splits["train"]
    assert [place for _, place in split.longest] == [str(tmp_path / "in" / f"{name}.txt") for name in "ba"]


# ---- again, and after a crash ----


def in_a_fork(action: Callable[[], object]) -> int:
    """Run something in a copy of this process; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(event_number: int) -> None:
    """SIGKILL this process at its n-th attempt to create, rename or remove a file."""
    seen = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(args[1], str) and args[1][0] in "wa"
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            seen += 1
            if seen == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("options", [{}, {"format": "indexed"}, {"no_wrap": True, "compression": "zstd"}], ids=str)
def test_killed_anywhere_and_run_again_it_ends_with_the_same_bytes(
    options: dict, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, tmp_path / "undisturbed", tokenizer, **options)
    expected = content(tmp_path / "undisturbed")
    kills = 0
    for number in range(1, 400, 5):
        out = tmp_path / f"out{number}"

        def killed(out: Path = out, number: int = number) -> None:
            die_at(number)
            run(corpus, out, tokenizer, **options)

        code = in_a_fork(killed)
        final = out / "train" / ("train_text_document.idx" if "format" in options else "index.json")
        if code == -signal.SIGKILL:
            kills += 1
            seen = {name: digest for name, digest in content(out).items() if ".partial/" not in name}
            assert not final.exists() or seen == expected  # complete, or not there
            assert in_a_fork(lambda out=out: run(corpus, out, tokenizer, **options)) == 0
        assert content(out) == expected
        if code == 0:
            break
    assert kills > 8


def test_a_second_kill_does_not_undo_the_first_recovery(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run(corpus, tmp_path / "undisturbed", tokenizer)

    codes = []
    for budget in range(20, 200, 5):

        def killed(budget: int = budget) -> None:
            die_at(budget)
            run(corpus, tmp_path / "out", tokenizer)

        codes.append(in_a_fork(killed))
        if codes[-1] == 0:
            break
    assert codes.count(-signal.SIGKILL) > 2 and codes[-1] == 0
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_a_damaged_part_is_rebuilt_and_intact_ones_are_not(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut the journal may name a part whose bytes never reached the disk."""
    run(corpus, tmp_path / "undisturbed", tokenizer, size_limit=1 << 20)

    parts: list[Path] = []
    for budget in range(10, 60, 3):

        def killed(budget: int = budget) -> None:
            die_at(budget)
            run(corpus, tmp_path / "out", tokenizer, size_limit=1 << 20)

        assert in_a_fork(killed) == -signal.SIGKILL
        parts = sorted((tmp_path / "out" / ".train.partial" / "parts").glob("*.data"))
        if len(parts) > 3:
            break
    parts[0].write_bytes(b"\0" * parts[0].stat().st_size)
    journal = (tmp_path / "out" / ".train.partial" / "journal.jsonl").read_text().splitlines(keepends=True)
    finished = {json.loads(line)["number"] for line in journal if line.endswith("\n")}
    assert len(finished) > 1
    made, record = set(), Journal.record
    monkeypatch.setattr(
        Journal, "record", lambda self, task, number, done: (made.add((task, number)), record(self, task, number, done))
    )
    run(corpus, tmp_path / "out", tokenizer, size_limit=1 << 20)
    assert {number for task, number in made if task == "tokenize"} & finished == {int(parts[0].stem)}
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_another_way_to_read_documents_is_another_result() -> None:
    """The hash of v0.1, which knew one way, must stay."""
    plans = [PackingPlan.of(PrepareOptions(documents=kind), None).identity for kind in ("file", "line", "paragraph")]
    assert "documents" not in plans[0]["options"]
    assert [plan["options"]["documents"] for plan in plans[1:]] == ["line", "paragraph"]


def test_the_same_command_again_does_nothing(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    first = run(corpus, tmp_path / "out", tokenizer)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    second = run(corpus, tmp_path / "out", tokenizer)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before
    assert second.splits["train"].tokens == first.splits["train"].tokens


def test_input_that_changed_in_between_starts_again(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def killed() -> None:
        die_at(20)
        run(corpus, tmp_path / "out", tokenizer)

    assert in_a_fork(killed) == -signal.SIGKILL
    changed = [document(i + 1) for i in range(400)]
    corpus.write_text("".join(json.dumps({"text": t}) + "\n" for t in changed))
    said: list[str] = []
    run(corpus, tmp_path / "out", tokenizer, show=said.append)
    assert any("starting again" in line for line in said)
    assert stream(tmp_path / "out" / "train") == expected_stream(tokenizer, changed)


def test_a_disk_that_fills_is_one_sentence_and_costs_nothing(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, tmp_path / "undisturbed", tokenizer)

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            run(corpus, tmp_path / "out", tokenizer)
        except DiskError as error:
            os._exit(3 if "cannot write" in str(error) else 4)

    assert in_a_fork(full) == 3
    assert not (tmp_path / "out" / "train").exists()
    run(corpus, tmp_path / "out", tokenizer)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_two_at_once_do_not_mix(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    import fcntl

    work = tmp_path / "out" / ".train.partial"
    work.mkdir(parents=True)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another `prepare` is running"):
            run(corpus, tmp_path / "out", tokenizer)


# ---- bad input ----


def test_a_bad_line_stops_with_its_number_or_is_skipped_and_counted(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = corpus.read_text().splitlines(keepends=True)
    lines[333] = '{"text": "cut\n'
    corpus.write_text("".join(lines))
    for workers in (0, 2):
        with pytest.raises(DataError, match=r"corpus.jsonl:334: not valid JSON.*--on_error skip"):
            run(corpus, tmp_path / "out", tokenizer, num_workers=workers)
        assert not (tmp_path / "out" / "train").exists()
    report = run(corpus, tmp_path / "out", tokenizer, on_error="skip")
    assert report.skipped == 1
    assert "corpus.jsonl:334: not valid JSON" in report.splits["train"].bad_records[0]
    assert stream(tmp_path / "out" / "train") == expected_stream(tokenizer, TEXTS[:333] + TEXTS[334:])


def test_empty_documents_are_counted_and_leave_no_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": ""}\n{"text": "ore"}\n{"text": ""}\n')
    report = run(source, tmp_path / "out", tokenizer)
    assert report.splits["train"].empty == 2 and report.documents == 1
    assert stream(tmp_path / "out" / "train") == expected_stream(tokenizer, ["ore"])


def test_input_without_text_is_not_a_dataset(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"no text in .*x\.jsonl$"):
        run(tmp_path / "x.jsonl", tmp_path / "out", tokenizer)
    assert not (tmp_path / "out" / "train").exists()


def test_an_output_folder_with_other_content_is_left_alone(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "precious.txt").write_text("mine")
    with pytest.raises(DataError, match="already there, and made from other input"):
        run(corpus, tmp_path / "out", tokenizer)
    run(corpus, tmp_path / "other", tokenizer)
    with pytest.raises(DataError, match="already there"):
        run(corpus, tmp_path / "other", tokenizer, concat_tokens=32)
    assert (tmp_path / "out" / "train" / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../../x", "a/b", "/abs", ".hidden", "a\\b", "a\0b", "a\nb", " ", "x" * 201, "tokenizer"],
)
def test_a_split_that_is_not_one_plain_name_is_refused_and_nothing_is_written(
    name: str, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    victim = tmp_path / "x"
    victim.mkdir()
    (victim / "precious.txt").write_text("mine")
    before = content(tmp_path)
    for options in {}, {"reprocess": True}, {"format": "indexed"}, {"share": (0, 2)}:
        with pytest.raises(DataError, match="split = "):
            run(corpus, tmp_path / "out", tokenizer, split=name, **options)
    if name != "tokenizer":
        with pytest.raises(ConfigError, match="split = "):
            find_splits(str(tmp_path), name)
    assert content(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", ["../x", "train,../x", "", ",", "/tmp/x", "a/../../x"])
def test_the_command_refuses_every_split_before_it_writes_the_first(split: str, corpus: Path, tmp_path: Path) -> None:
    options = ["--out_root", str(tmp_path / "a" / "out"), f"--split={split}", "--concat_tokens", "64"]
    with pytest.raises(DataError, match=r"split = .* must be one plain name"):
        command("--path", str(corpus), *options)
    with pytest.raises(DataError, match=r"split = .* must be one plain name"):
        command("--dataset", "allenai/c4", *options)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "lines"), [({"num_workers": 2}, 1), ({"share": (0, 3)}, 1), ({"share": (1, 3)}, 0)], ids=str
)
def test_files_of_a_folder_that_are_not_read_are_reported_once(
    options: dict, lines: int, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("a.txt", "b.pdf", "c.png", "d.png"):
        (text / name).write_text(document(7))
    said: list[str] = []
    run(text, tmp_path / "out", tokenizer, show=said.append, **options)
    assert [line.partition(" (")[0] for line in said if "skipped" in line] == [
        "skipped 3 files: 2 .png, 1 .pdf"
    ] * lines


def test_a_field_whose_name_is_a_path_does_not_name_a_pair_of_files(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"json_keys: .*must be one plain name"):
        run(corpus, tmp_path / "out", tokenizer, format="indexed", json_keys="a/../../../x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl"]


def test_reprocess_removes_only_what_prepare_wrote(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    (out / "train").mkdir(parents=True)
    victim.mkdir()
    for folder in out / "train", victim:
        (folder / "precious.txt").write_text("mine")
        write_json(folder / "index.json", {"shards": []})
        write_json(folder / "meta.json", {"made": "by another tool"})
    before = content(tmp_path)
    with pytest.raises(DataError, match="out/train: not removed"):
        run(corpus, out, tokenizer, reprocess=True)
    (out / "val").symlink_to(victim)
    with pytest.raises(DataError, match="out/val: not removed"):
        run(corpus, out, tokenizer, split="val", reprocess=True)
    with pytest.raises(DataError, match="out/val: already there"):
        run(corpus, out, tokenizer, split="val")
    (out / "pair").mkdir()
    (out / "pair" / "pair_text_document.bin").write_bytes(b"of Megatron")
    with pytest.raises(DataError, match="pair_text_document: not removed"):
        run(corpus, out, tokenizer, split="pair", format="indexed", reprocess=True)
    assert (out / "pair" / "pair_text_document.bin").read_bytes() == b"of Megatron"
    (out / "val").unlink()
    assert {k: v for k, v in content(tmp_path).items() if "pair" not in k} == before


@pytest.mark.parametrize("kind", ["folder", "link", "link inside"])
def test_a_work_folder_that_prepare_did_not_make_is_left_alone(
    kind: str, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    work = out / ".train.partial"
    for folder in out, victim:
        folder.mkdir()
    (victim / "precious.txt").write_text("mine")
    if kind == "link":
        work.symlink_to(victim)
    else:
        work.mkdir()
        if kind == "link inside":
            (work / "parts").symlink_to(victim)
        else:
            (work / "precious.txt").write_text("mine")
    before = content(tmp_path)
    for reprocess in False, True:
        with pytest.raises(DataError, match=r"\.train\.partial.* move it away"):
            run(corpus, out, tokenizer, reprocess=reprocess)
    assert content(tmp_path) == before and not (out / "train").exists()


@pytest.mark.parametrize("format", ["mds", "indexed"])
def test_reprocess_removes_a_result_and_the_rest_of_a_run_that_was_killed(
    format: str, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, tmp_path / "undisturbed", tokenizer, format=format)
    run(corpus, tmp_path / "out", tokenizer, format=format, max_document_bytes=1 << 20)
    run(corpus, tmp_path / "out", tokenizer, format=format, reprocess=True)
    for budget in (*range(1, 16, 2), 30, 45):

        def killed(budget: int = budget) -> None:
            die_at(budget)
            run(corpus, tmp_path / "out", tokenizer, format=format, reprocess=True)

        assert in_a_fork(killed) == -signal.SIGKILL
    run(corpus, tmp_path / "out", tokenizer, format=format, reprocess=True)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


def test_a_tokenizer_that_does_not_match_the_folder_is_refused(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    run(corpus, tmp_path / "out", tokenizer)
    other = train_tokenizer(["another text"], 300, tmp_path / "other")
    with pytest.raises(DataError, match="made with another tokenizer"):
        run(corpus, tmp_path / "out", other, split="val")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "tfrecord"}, "format = 'tfrecord': input should be 'mds' or 'indexed'"),
        ({"compression": "gzip"}, "use zstd or zstd:LEVEL"),
        ({"compression": "zstd:0"}, "use zstd or zstd:LEVEL"),
        ({"compression": "zstd:23"}, "use zstd or zstd:LEVEL"),
        ({"compression": "zstd:x"}, "use zstd or zstd:LEVEL"),
        ({"compression": "zstd", "format": "indexed"}, "cannot be compressed"),
        ({"token_type": "float32"}, "'auto', 'uint16', 'uint32'"),
        ({"token_type": "uint32", "format": "indexed"}, "token_type: uint32 does not exist in the indexed"),
        ({"concat_tokens": 0}, "concat_tokens = 0: must be at least 1"),
        ({"on_error": "ignore"}, "'stop' or 'skip'"),
        ({"num_workers": -1}, "num_workers = -1: must be at least 0"),
        ({"num_workers": 100_000}, "num_workers = 100000: must be at most 500"),
        ({"concat_tokens": 999_999_999_999}, "concat_tokens = 999999999999: must be at most"),
        ({"max_samples": -5}, "max_samples = -5: must be at least 1"),
        ({"max_expansion": 0}, "max_expansion = 0: must be at least 1"),
        ({"max_document_bytes": 0}, "max_document_bytes = 0: must be at least 1"),
        ({"engine": "magic"}, "'auto', 'gigatoken' or 'hf'"),
        ({"json_keys": ["a", "b"]}, "need format=indexed"),
        ({"size_limit": 1 << 33}, "size_limit = 8589934592: must be less than 4294967296"),
    ],
)
def test_a_choice_that_does_not_exist_is_one_sentence(
    options: dict, message: str, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        run(corpus, tmp_path / "out", tokenizer, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("level", [1, 22])
def test_the_lowest_and_the_highest_compression_level_are_accepted(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, level: int
) -> None:
    run(corpus, tmp_path / "out", tokenizer, compression=f"zstd:{level}", max_samples=4)
    assert (tmp_path / "out" / "train" / "shard.00000.mds.zstd").is_file()


def test_an_empty_compression_is_none() -> None:
    assert PrepareOptions(compression="").compression is None


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted as Linux shows them")
def test_the_process_that_forks_the_workers_has_one_thread(tokenizer: Tokenizer) -> None:
    """A fork copies locks that other threads hold, but not the threads that would release them."""
    pool = WorkerPool(2, tokenizes=True)
    try:
        assert pool.load(tokenizer, "auto")[0] == "gigatoken"
        assert len(list(Path(f"/proc/{pool.server.pid}/task").iterdir())) == 1
    finally:
        pool.close()


def test_a_worker_that_dies_is_reported_and_the_rest_can_continue(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path / "undisturbed", tokenizer)
    calls = iter(range(100))

    def dying(self: WorkerPool, task: Task, progress: Progress) -> Future:
        if next(calls) == 3:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGKILL)
        return real(self, task, progress)

    real = WorkerPool.submit
    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "submit", dying)
        with pytest.raises(DataError, match=r"worker process \d+ died"):
            run(corpus, tmp_path / "out", tokenizer, num_workers=2)
    run(corpus, tmp_path / "out", tokenizer, num_workers=2)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")


# ---- the command ----


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_peers_ways_to_write_arguments_are_understood() -> None:
    assert translate(["--splits", "train", "val", "--out-root", "x", "--eos_text=<|a-b|>", "--no-wrap"]) == [
        "--splits", "train", "--splits", "val", "--out_root", "x", "--eos_text=<|a-b|>", "--no_wrap",
    ]  # fmt: skip
    assert translate(["--log-interval", "100", "--input", "a", "b", "--partitions=2"]) == [
        "--input",
        "a",
        "--input",
        "b",
    ]


def test_inputs_come_with_or_without_path_and_before_or_after_the_output() -> None:
    for words in (["a", "b", "-o", "out"], ["-o", "out", "a", "b"], ["--path", "a", "b", "-o", "out"],
                  ["a", "--out", "out", "--path", "b"]):  # fmt: skip
        (split,) = read_arguments([*words, "--tokenizer", "t"]).splits
        assert (split.input, split.out_root, split.split) == (("a", "b"), Path("out"), "train"), words


def test_llm_foundrys_command(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tok")
    out = tmp_path / "out"
    printed = "".join(
        command(
            "--path", str(corpus), "--out_root", str(out), "--splits", split, "--concat_tokens", "64",
            "--tokenizer", str(tmp_path / "tok"), "--eos_text", "<|endoftext|>", "--compression", "zstd", "--num_workers", "0",
        )
        for split in ("train", "val_xxsmall")
    )  # fmt: skip
    assert sorted(p.name for p in out.iterdir()) == ["tokenizer", "train", "val_xxsmall"]
    assert (out / "train" / "shard.00000.mds.zstd").is_file()
    assert "train: 400 documents" in printed and "longest:" not in printed and "ingot train" in printed
    assert "val_xxsmall: about " in printed  # samples were left out, so how much text they hold is not known exactly


@pytest.mark.parametrize("splits", [["--splits", "train", "val"], ["--split", "train,val"], ["--split=a", "--split=b"]])
def test_several_splits_of_the_same_files_are_refused(splits: list[str], corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"same documents .* once per split, with that split's files"):
        command("--path", str(corpus), "--out_root", str(tmp_path / "out"), *splits)
    assert not (tmp_path / "out").exists()


def test_several_splits_of_a_hub_dataset_are_each_read_from_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def noted(input: object, *arguments: object, **options: object) -> PrepareReport:
        asked.append((input, options["split"]))
        return PrepareReport({}, 0.0, "none", "", 0, 0, 0, 0)

    monkeypatch.setattr("ingot.cli.prepare.run", noted)  # the hub cannot be reached
    command("--dataset", "allenai/c4", "--data_subset", "en", "--out_root", str(tmp_path), "--splits", "train", "val")
    assert asked == [(["hf://allenai/c4?en#train"], "train"), (["hf://allenai/c4?en#validation"], "val")]


def test_the_share_that_is_done_grows_with_the_pieces(
    corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.data.prepare.progress._QUIET_SECONDS", 0.0)
    monkeypatch.setattr("ingot.data.prepare.progress._LINE_SECONDS", 0.0)
    said: list[str] = []
    run(corpus, tmp_path / "out", tokenizer, show=said.append)
    shares = [int(match[1]) for line in said if (match := re.match(r"(\d+)% .* docs/s", line))]
    assert len(shares) > 3 and shares == sorted(shares) and shares[0] < 50 < shares[-1]


def test_verbose_shows_the_lengths_of_the_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tok")
    texts = ["iron", "iron " * 8, "iron " * 8, "iron " * 20]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lengths = [len(tokenizer.encode(text)) + 1 for text in texts]  # and what ends a document
    assert lengths[0] < 16 and all(32 <= n < 64 for n in lengths[1:3]) and 64 <= lengths[3] < 128
    given = ["--path", str(tmp_path / "a.jsonl"), "--out_root", str(tmp_path / "out"), "--workers", "0", "--verbose"]
    lines = command(*given, "--tokenizer", str(tmp_path / "tok")).splitlines()
    at = lines.index("documents by length in tokens:")
    short, middle, long = (line.split() for line in lines[at + 1 : at + 4])
    assert middle == ["32", "to", "63", "2", "#" * 40] and long == ["64", "to", "127", "1", "#" * 20]
    assert int(short[0]) <= lengths[0] <= int(short[2]) and short[3:] == ["1", "#" * 20]
    longest = [
        f"  longest: {n} in {tmp_path}/a.jsonl:{line}"
        for n, line in ((lengths[3], 4), (lengths[1], 2), (lengths[2], 3))
    ]
    assert lines[at + 4 : at + 7] == longest


def test_megatrons_command(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tok")
    spec = json.loads(tokenizer.json)
    write_json(tmp_path / "vocab.json", spec["model"]["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    common = ["--input", str(corpus), "--workers", "0", "--vocab-file", str(tmp_path / "vocab.json")]
    common += ["--merge-file", str(tmp_path / "merges.txt"), "--tokenizer-type", "GPT2BPETokenizer"]
    command(*common, "--output-prefix", str(tmp_path / "with"), "--append-eod", "--log-interval", "10")
    command(*common, "--output-prefix", str(tmp_path / "without"), "--json-keys", "text")
    read = lambda name: np.fromfile(tmp_path / f"{name}_text_document.bin", dtype=np.uint16).tolist()  # noqa: E731
    assert read("with") == expected_stream(tokenizer, TEXTS)
    assert read("without") == [i for t in TEXTS for i in tokenizer.encode(t)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "files, folders or globs, or --dataset"),
        (["--path", "a", "--dataset", "b"], "files, folders or globs, or --dataset"),
        (["--path", "a"], "--out FOLDER or --output_prefix"),
        (["--path", "a", "--out_root", "o", "--tokenizer_type", "SentencePiece"], "known are GPT2BPETokenizer"),
        (["--path", "a", "--out_root", "o", "--memory", "much"], "a size such as 1.5GB"),
        (["--path", "a", "--out_root", "o", "--memory", "1.2.3gb"], "a size such as 1.5GB"),
        (["--path", "a", "--out_root", "o", "--use_tokenizer_eos", "--eos_text", "x"], "contradict"),
        (["--path", "a", "--output_prefix", "o", "--dataset_impl", "lazy"], "only mmap"),
    ],
)
def test_contradicting_options_are_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        command(*arguments)


@pytest.mark.parametrize("options", [{}, {"no_wrap": True}, {"tokenizer": None}, {"format": "indexed"}], ids=str)
def test_no_part_outlives_the_shards_that_need_it(
    options: dict, corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[str] = []
    assemble = SplitJob._assemble

    def look(self: SplitJob) -> SplitReport:
        left.extend(path.name for path in (self.work / "parts").glob("*.data"))
        return assemble(self)

    monkeypatch.setattr(SplitJob, "_assemble", look)
    prepare(corpus, tmp_path / "out", **{"tokenizer": tokenizer, **OPTIONS, **options})
    assert left == []


def test_a_prepared_split_opens_in_the_loader(corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    from ingot.data.loading.open_dataset import open_dataset

    for format in ("mds", "indexed"):
        run(corpus, tmp_path / format, tokenizer, format=format)
        opened = open_dataset(SourceConfig(path=str(tmp_path / format), split="train"), seq_len=32, vocab_size=400)
        assert opened is not None


@pytest.mark.parametrize("number", [12, 16, 24, 36])
def test_killed_with_workers_still_at_work_it_ends_with_the_same_bytes(
    number: int, corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The workers of the dead run may still be writing while the next run starts."""
    run(corpus, tmp_path / "undisturbed", tokenizer)

    def killed() -> None:
        die_at(number)
        run(corpus, tmp_path / "out", tokenizer, num_workers=2)

    assert in_a_fork(killed) == -signal.SIGKILL
    run(corpus, tmp_path / "out", tokenizer, num_workers=2)
    assert content(tmp_path / "out") == content(tmp_path / "undisturbed")
