"""Text and tokenizers for the small forms of the walk-throughs, without a network: `small_text.py FOLDER`.

The text is the source of Python's own standard library, as in `ingot demo`. If INGOT_EXAMPLE_DATA names a folder with
c4_en_first1000.jsonl, 20B_tokenizer.json, gpt2-vocab.json and gpt2-merges.txt, those are taken instead: a real piece of
C4 and the real tokenizers. Either way FOLDER gets train.jsonl, val.jsonl, 20B_tokenizer.json, gpt2-vocab.json and
gpt2-merges.txt, so that what follows is the same.
"""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import tokenizers

from ingot.data.tokenizer_training import train_tokenizer
from ingot.demo import standard_library

DOCUMENTS, VOCABULARY = 120, 2048
TOKENIZERS = ("20B_tokenizer.json", "gpt2-vocab.json", "gpt2-merges.txt")


def texts(real: Path | None) -> Iterator[str]:
    if real is None:
        yield from (text for _, text in itertools.islice(standard_library(), DOCUMENTS))
    else:
        with (real / "c4_en_first1000.jsonl").open(encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def write_tokenizers(documents: list[str], folder: Path) -> None:
    """One learned vocabulary, under the names of the 20B tokenizer and of GPT-2's two files."""
    train_tokenizer(documents, VOCABULARY, folder)
    (folder / "tokenizer.json").rename(folder / TOKENIZERS[0])
    (folder / "tokenizer_config.json").unlink()
    backend = tokenizers.Tokenizer.from_file(str(folder / TOKENIZERS[0]))
    backend.model.save(str(folder), "gpt2")  # gpt2-vocab.json, gpt2-merges.txt


def main() -> None:
    folder = Path(sys.argv[1])
    if all((folder / name).is_file() for name in ("train.jsonl", "val.jsonl", *TOKENIZERS)):
        return
    folder.mkdir(parents=True, exist_ok=True)
    real = Path(os.environ["INGOT_EXAMPLE_DATA"]) if os.environ.get("INGOT_EXAMPLE_DATA") else None
    documents = list(texts(real))
    if real is None:
        write_tokenizers(documents, folder)
    else:
        for name in TOKENIZERS:
            shutil.copyfile(real / name, folder / name)
    held_out = len(documents) // 20
    for split, part in (("val", documents[:held_out]), ("train", documents[held_out:])):
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in part)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    source = f"{real}/c4_en_first1000.jsonl" if real else "the source of Python's standard library"
    print(f"text: {len(documents)} documents from {source}, in {folder}")


if __name__ == "__main__":
    main()
