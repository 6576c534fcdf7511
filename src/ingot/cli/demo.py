"""`ingot demo`: text to a trained and exported model, without a network."""

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand
from ingot.cli.walkthrough import path_hint, run_verb, show_model
from ingot.demo import make_tokenizer, write_corpus

app = typer.Typer(add_completion=False)
PROMPT = "def __init__(self"


@app.command(cls=OptionCommand)
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Output folder.")] = Path("demo"),
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides.")] = None,
) -> None:
    """Train a small model on a CPU in minutes, without a network.

    Prepares Python's standard library, then trains, evaluates, samples and
    exports a model. Run again, it reuses what is there.

    Examples:
      ingot demo
      ingot demo --out /tmp/demo max_duration=100ba
    """
    documents, size = write_corpus(out / "corpus")
    print(f"corpus: {documents} modules of Python's standard library, {size / 1e6:.1f} MB, in {out / 'corpus'}")
    vocabulary = make_tokenizer(out / "corpus", out / "tokenizer")
    print(f"tokenizer: {vocabulary} byte-level BPE tokens, in {out / 'tokenizer'}")
    for split in ("train", "val"):
        if not (out / "data" / split).exists():
            run_verb("prepare", "--path", f"{out}/corpus/{split}.jsonl", "--out_root", f"{out}/data", "--split", split,
                     "--tokenizer", f"{out}/tokenizer", "--concat_tokens", "256")  # fmt: skip
    run_verb("train", "demo", f"data={out}/data", f"save_folder={out}/run", *(overrides or []))
    show_model(out, PROMPT, "ingot demo: a small MPT on Python's standard library")
    print(f"""
The report is in {out}/report.html, the loss curve in {out}/loss.png, the metrics in {out}/run/metrics.jsonl,
the model for transformers in {out}/hf.
The sample shows that it works, not more: useful models see a thousand times as much text.
{path_hint()}What to type next:
  ingot generate {out}/run --prompt "import os"           another sample
  ingot train demo max_duration=1000ba data={out}/data save_folder={out}/run
                                                          continue training
  ingot quickstart my-texts                               a model of your own text
  ingot recipes list                                      models from 14m to 175b
  ingot train mpt-125m data={out}/data max_duration=2ba global_train_batch_size=2 max_seq_len=128
                                                          a real recipe on this data""")
