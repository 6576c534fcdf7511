"""`ingot generate`"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.commands import OptionCommand

app = typer.Typer(add_completion=False)


@app.command(cls=OptionCommand)
def generate(
    run: Annotated[Path, typer.Argument(help="Run folder, checkpoint or Hugging Face folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the smallest set of tokens with this probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed, to reproduce a sample.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Continue a text with a model.

    Prints the text as it is generated.

    Examples:
      ingot generate runs/first --prompt "def main():"
      ingot generate ./my-model --prompt "Once" --temperature 0 --device cuda
    """
    from ingot.checkpoint.hf.transfer import tokenizer_of  # loads torch
    from ingot.checkpoint.load import load_model
    from ingot.model.generate import generate as sample

    model = load_model(run, device)
    tokenizer = tokenizer_of(run)
    tokens = tokenizer.encode(prompt)
    sys.stdout.write(prompt)
    new: list[int] = []
    shown = ""
    for token in sample(model, tokens, max_new_tokens, temperature, top_k, top_p, tokenizer.eos_id, seed):
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("�"):  # a character may need several tokens
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write(tokenizer.decode(new)[len(shown) :] + "\n")
