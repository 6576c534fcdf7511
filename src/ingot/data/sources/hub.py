"""Datasets of the Hugging Face hub, streamed: nothing is downloaded before it is used.

The hub often answers "too many requests". The stream is then opened again, after a pause that doubles, right after the
last document that arrived.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources.documents import TextBatch, TextBlock, text_of
from ingot.data.sources.input_files import HUB
from ingot.errors import DataError, MissingExtra, first_sentence

_RETRIES = 8
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 120.0


def read_hub(url: str, options: PrepareOptions) -> Iterator[TextBlock]:
    """The documents of a dataset named by `hub_source`, in blocks."""
    dataset, _, rest = url.removeprefix(HUB).partition("?")
    subset, _, split = rest.partition("#")
    yield from read_records(lambda done: _open(dataset, subset or None, split, done), url, options)


def read_records(
    open_at: Callable[[int], Iterator[dict[str, Any]]],
    name: str,
    options: PrepareOptions,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[TextBlock]:
    """Blocks of the records of a stream that can be opened after its first n records, and may break at any record."""
    batch = TextBatch(name)
    done = failures = 0
    while True:
        try:
            for record in open_at(done):
                batch.add(done, *text_of(record, options.key))
                done += 1
                failures = 0
                if batch.is_full:
                    yield batch.take()
            break
        except (OSError, RuntimeError) as error:
            failures += 1
            if failures > _RETRIES:
                raise DataError(f"{name}: the hub failed {failures} times after record {done:,}: {error}") from None
            pause(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (failures - 1)))
    yield batch.take()


def _open(dataset: str, subset: str | None, split: str, done: int) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtra("reading a dataset of the Hugging Face hub", "hf") from None
    try:
        stream = load_dataset(dataset, subset, split=split, streaming=True)
    except (ValueError, FileNotFoundError) as error:  # no such dataset, subset or split
        raise DataError(f"{dataset}: cannot be opened on the hub: {first_sentence(error)}") from None
    return iter(stream.skip(done) if done else stream)
