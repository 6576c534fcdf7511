"""What tests share: a small real data set, made by the project's own code, and a way to run the command."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run in as many processes as there are cores
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from object_store import s3  # noqa: F401  an S3 server, for whoever names it

from ingot.data.prepare.prepare import prepare
from ingot.data.tokenizer_training import train_tokenizer

SENTENCES = [
    f"{who} {what} {where}, {why}.\n"
    for who in ("The miller", "A young smith", "Nobody", "The old ferryman", "My aunt")
    for what in ("poured the molten brass", "counted every ingot twice", "kept the ledger", "sang")
    for where in ("by the river", "under the arch", "in the long hall", "before dawn")
    for why in ("because the day was short", "as the law demands", "and said nothing of it")
]
TINY = [
    "model.d_model=32", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=320", "max_seq_len=32",
    "global_train_batch_size=8", "max_duration=12ba", "precision=fp32", "scheduler.t_warmup=2ba", "optimizer.lr=0.01",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The README's commands take minutes: first, so that they do not run on alone when all else is done."""
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared data set with train and val splits and its tokenizer (320 tokens)."""
    root = tmp_path_factory.mktemp("data")
    text = root / "text"
    text.mkdir()
    train_tokenizer(SENTENCES, 320, root / "tokenizer")
    for split, part in (("train", SENTENCES[10:]), ("val", SENTENCES[:10])):
        (text / f"{split}.txt").write_text("".join(part))
        prepare(text / f"{split}.txt", root, split=split, tokenizer=root / "tokenizer", concat_tokens=64)
    return root


@pytest.fixture
def tiny(data: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run that takes a second: a two-layer model on the small data set."""
    return [*TINY, f"data={data}", f"save_folder={tmp_path / 'run'}"]


Ingot = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ingot(tmp_path: Path) -> Ingot:
    """Run the `ingot` command as a user would, in an empty folder."""

    def run(*arguments: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ingot.cli.main", *arguments]
        options.setdefault("cwd", tmp_path)
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, **options)  # type: ignore[call-overload]
        if check and done.returncode:
            raise AssertionError(f"ingot {' '.join(arguments)} -> {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run
