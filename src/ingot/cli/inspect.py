"""`ingot inspect`: what is in a data set."""

from pathlib import Path
from typing import Annotated

import typer


def inspect(
    path: Annotated[str, typer.Argument(help="Folder, prefix of .bin/.idx, or URL of a data set.")],
    split: Annotated[str | None, typer.Option(help="One split only.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Show the first samples as text.")] = False,
    loader: Annotated[bool, typer.Option("--loader", help="Read batches as training does, and time them.")] = False,
    local: Annotated[Path | None, typer.Option(help="Where to keep what is fetched from a URL.")] = None,
    max_seq_len: Annotated[
        int, typer.Option("--max_seq_len", "--max-seq-len", min=1, help="Tokens of a sample to show or load.")
    ] = 2048,
    samples: Annotated[int, typer.Option(min=1, help="Samples to show.")] = 2,
    batches: Annotated[int, typer.Option(min=1, help="Batches of 8 to load.")] = 100,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check sizes and hashes of all shards.")] = True,
) -> None:
    """What is in a data set: counts, sizes and hashes verified, tokenizer, samples, a loader test.

    Example: ingot inspect my-data --split train --text --loader
    """
    from ingot.data.loading.inspect import decoded_samples, describe, find_splits, try_loader

    for name in find_splits(path, split):
        for line in describe(path, name, local, verify):
            print(line)
        if text:
            for number, sample in enumerate(decoded_samples(path, name, local, max_seq_len, samples)):
                print(f"--- sample {number}\n{sample}")
        if loader:
            for line in try_loader(path, name, local, max_seq_len, batches):
                print(line)
