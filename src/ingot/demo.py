"""The corpus of the demo: what a first run trains on without network, GPU or account.

Every machine that can run ingot has one large body of real text: the source and documentation of Python's standard
library. The demo turns it into documents and a tokenizer; everything after that uses the public verbs.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ingot.data.tokenizer import load_tokenizer
from ingot.data.tokenizer_training import train_tokenizer
from ingot.errors import DataError, disk_error
from ingot.storage.atomic import write_whole

CORPUS_BYTES = 12_000_000  # enough not to repeat in the demo's few minutes
VOCAB_SIZE = 4096
VAL_EVERY = 20  # one document in 20 is held out


def standard_library() -> Iterator[tuple[str, str]]:
    """Names and texts of the standard library's modules, in a fixed order that mixes packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [p for p in root.rglob("*.py") if not {"site-packages", "dist-packages", "__pycache__"} & set(p.parts)]
    names = sorted(p.relative_to(root).as_posix() for p in found)
    for name in sorted(names, key=lambda n: hashlib.sha256(n.encode()).digest()):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # test files with deliberately broken encodings
        if len(text) > 200:
            yield name, text


def write_corpus(folder: Path) -> tuple[int, int]:
    """Write train.jsonl and val.jsonl, unless they exist; returns the number of documents and of bytes."""
    paths = {split: folder / f"{split}.jsonl" for split in ("train", "val")}
    if not all(path.is_file() for path in paths.values()):
        lines: dict[str, list[str]] = {"train": [], "val": []}
        size = 0
        for number, (name, text) in enumerate(standard_library()):
            split = "val" if number % VAL_EVERY == 0 else "train"
            lines[split].append(json.dumps({"text": text, "source": name}, ensure_ascii=False) + "\n")
            size += len(text.encode())
            if size > CORPUS_BYTES:
                break
        if not lines["train"]:
            raise DataError("this Python has no source files of its standard library; use another Python for the demo")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for split, path in paths.items():
                write_whole(path, "".join(lines[split]))
        except OSError as error:
            raise disk_error("write the corpus to", folder, error) from None
    documents = 0
    for path in paths.values():
        with path.open("rb") as file:
            documents += sum(1 for _ in file)
    return documents, sum(path.stat().st_size for path in paths.values())


def make_tokenizer(corpus: Path, folder: Path) -> int:
    """Train a byte-level BPE tokenizer on the training documents, unless it exists; returns its size."""
    if not (folder / "tokenizer.json").is_file():
        with (corpus / "train.jsonl").open(encoding="utf-8") as file:
            train_tokenizer((json.loads(line)["text"] for line in file), VOCAB_SIZE, folder)
    return load_tokenizer(folder).vocab_size
