"""`ingot inspect` describes a dataset and finds what is damaged."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ingot

from ingot.data.loading.inspect import decoded_samples, describe, find_splits, inspect_dataset, loader_findings
from ingot.data.prepare import progress
from ingot.data.prepare.prepare import prepare
from ingot.data.tokenizer_training import train_tokenizer
from ingot.errors import DataError

TEXT = "The ferryman counted every ingot twice, and said nothing of it.\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inspect")
    (root / "x.txt").write_text(TEXT * 100)
    tokenizer = train_tokenizer([TEXT], 300, root / "made")
    for split in ("train", "val"):
        for format in ("mds", "indexed"):
            out = root / format
            prepare(
                root / "x.txt", out, tokenizer=tokenizer, split=split, format=format, concat_tokens=32,
                show=lambda line: None,
            )  # fmt: skip
    return root


@pytest.mark.parametrize("format", ["mds", "indexed"])
def test_it_prints_counts_and_verifies(format: str, made: Path) -> None:
    path = str(made / format)
    assert find_splits(path, None) == ["train", "val"]
    told = "\n".join(describe(path, "train", None, verify=True))
    assert "1 document, 6,400 bytes of text" in told
    shards = len(list((made / "mds/train").glob("shard.*")))
    verified = f"the sizes of all shards and the hashes of {shards} of {shards} match the index"
    assert (verified if format == "mds" else "sizes match") in told
    assert "matches the data" in told


@pytest.mark.parametrize("format", ["mds", "indexed"])
def test_samples_come_back_as_text(format: str, made: Path) -> None:
    (first, second) = decoded_samples(str(made / format), "train", None, 32, 2)
    assert (TEXT * 100).startswith(first)
    assert second in TEXT * 100
    assert (TEXT * 100).startswith(first + second)  # nothing between them is left out


@pytest.mark.parametrize("format", ["mds", "indexed"])
def test_the_loader_reads_it(format: str, made: Path) -> None:
    told = "\n".join(line for line, _ in loader_findings(str(made / format), "train", None, 16, 5))
    assert "tokens [8, 16]" in told and "samples/s" in told


@pytest.mark.parametrize("asked", [{}, {"text": True, "samples": 1}, {"loader": True, "batches": 1}], ids=str)
def test_text_and_loader_are_shown_on_request(made: Path, asked: dict[str, object]) -> None:
    told = "\n".join(inspect_dataset(str(made / "mds"), {"split": "train", "max_seq_len": 16, **asked}))
    assert ("--- sample 0" in told) == ("text" in asked) and ("samples/s" in told) == ("loader" in asked)


def test_the_verb_prints_what_is_found(made: Path, ingot_here: Ingot) -> None:
    told = list(inspect_dataset(str(made / "mds"), {"split": "train"}))
    assert told and ingot_here("inspect", str(made / "mds"), "--split", "train").stdout.splitlines() == told
    (found,) = json.loads(ingot_here("inspect", str(made / "mds"), "--split", "train", "--json").stdout)
    assert found["format"] == "mds" and found["tokens"] > 0


def test_a_remote_dataset_is_streamed_to_a_local_folder(made: Path, tmp_path: Path) -> None:
    url = f"file://{made / 'mds'}"
    told = "\n".join(line for line, _ in loader_findings(url, "train", tmp_path / "cache", 16, 5))
    assert "samples/s" in told
    assert list((tmp_path / "cache" / "train").glob("shard.*"))
    with pytest.raises(DataError, match="set --local"):
        list(describe(url, "train", None, verify=True))


def test_a_damaged_shard_is_found(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "mds", tmp_path / "copy")
    shard = tmp_path / "copy" / "train" / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        list(describe(str(tmp_path / "copy"), "train", None, verify=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [("index.json", ""), ("index.json", "[]"), ("index.json", '{"shards": null}'), ("index.json", "[" * 100_000),
     ("meta.json", "?"), ("meta.json", "[]"), ("meta.json", '{"tokens": "x"}')],
)  # fmt: skip
def test_a_damaged_description_is_one_sentence(name: str, text: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "mds", tmp_path / "copy")
    (tmp_path / "copy" / "train" / name).write_text(text)
    with pytest.raises(DataError, match="is damaged"):
        list(describe(str(tmp_path / "copy"), "train", None, verify=True))


def test_a_long_verification_shows_its_progress(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    list(describe(str(made / "mds"), "train", None, verify=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)  # as if it had taken longer
    list(describe(str(made / "mds"), "train", None, verify=True))
    assert "train: " in capsys.readouterr().err


def test_a_foreign_tokenizer_is_found(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "mds", tmp_path / "copy")
    train_tokenizer(["other"], 280, tmp_path / "copy" / "tokenizer")
    with pytest.raises(DataError, match="not the tokenizer that made"):
        list(describe(str(tmp_path / "copy"), "train", None, verify=True))


def test_a_dataset_of_text_is_reported_as_such(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT)
    prepare(tmp_path / "x.txt", tmp_path / "out", tokenizer=None, show=lambda line: None)
    assert json.loads((tmp_path / "out" / "train" / "meta.json").read_text())["vocab_size"] is None
    assert "contains text, not tokens" in next(describe(str(tmp_path / "out"), "train", None, verify=True))


@pytest.mark.parametrize("format", ["mds", "indexed"])
def test_json_says_what_the_lines_say(
    format: str, made: Path, ingot_here: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    told = "\n".join(describe(str(made / format), "val", None, verify=True))
    options = ["--json", "--text", "--loader", "--max-seq-len", "32"]
    train, val = json.loads(ingot_here("inspect", str(made / format), *options).stdout)
    assert (train["split"], val["split"], val["format"]) == ("train", "val", format)
    assert val["documents"] == 1 and val["text_bytes"] == 6400 and val["verified"] is True
    assert f"{val['tokens']:,} tokens" in told and f"{val['bytes']:,} bytes" in told
    assert f"tokenizer: {val['vocab_size']:,} tokens" in told
    assert len(val["text"]) == 2 and len(val["first_samples"]) > 0 and val["samples_per_second"] > 0
