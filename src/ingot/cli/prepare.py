"""`ingot prepare`"""

from pathlib import Path
from typing import Annotated

import typer


def prepare(
    path: Annotated[Path, typer.Option("--path", help="Text files.")],
    out_root: Annotated[Path, typer.Option("--out_root")],
    tokenizer: Annotated[str, typer.Option("--tokenizer")],
    split: Annotated[str, typer.Option("--split")] = "train",
    concat_tokens: Annotated[int, typer.Option("--concat_tokens")] = 2048,
) -> None:
    """Text to token shards."""
    from ingot.data.prepare import prepare as run

    run(path, out_root, tokenizer=tokenizer, split=split, concat_tokens=concat_tokens)
