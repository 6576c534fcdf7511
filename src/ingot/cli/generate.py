"""`ingot generate`"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from ingot.checkpoint.location import model_folder
from ingot.cli.commands import OptionCommand
from ingot.cli.options import options_from
from ingot.config.base import Section
from ingot.config.load import validate
from ingot.errors import ConfigError, DataError, IngotError

if TYPE_CHECKING:
    from ingot.data.tokenizer import Tokenizer
    from ingot.model.gpt import GPT

app = typer.Typer(add_completion=False)
MARK = "\n> "  # of the interactive prompt


class SampleOptions(Section):
    """How a text is continued."""

    max_new_tokens: int = Field(100, ge=1)
    """Stop after this many tokens."""
    temperature: float = Field(0.8, ge=0)
    """0 always takes the most likely token."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float = Field(1.0, ge=0, le=1)
    """Sample from the smallest set of tokens with this probability."""
    seed: int | None = None
    """Seed, to reproduce a sample."""


@app.command(cls=OptionCommand)
@options_from(SampleOptions)
def generate(
    run: Annotated[Path, typer.Argument(help="Run folder, checkpoint or Hugging Face folder.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option("-f", "--file", help="File with a text to continue; may be repeated.")
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of files and standard input is a prompt.")] = False,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint of a run. Default: the newest.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda. auto: a GPU if there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per prompt, one per line.")] = False,
    **options: Any,
) -> None:
    """Continue texts with a model.

    Prints each text as it is generated. Without a prompt it reads standard
    input, or on a terminal asks for one text after another. The model
    completes text; there is no chat template.

    Examples:
      ingot generate runs/first --prompt "def main():"
      ingot generate my-model --prompt Once --prompt Twice --temperature 0
      ingot generate runs/first --lines --json -f prompts.txt
    """
    sampling = validate(SampleOptions, options)
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device}: write auto, cpu or cuda")
    folder = model_folder(run, step)
    asks = not prompt and not file and sys.stdin is not None and sys.stdin.isatty()
    prompts = [] if asks else read_prompts(prompt or [], file or [], lines)
    from ingot.checkpoint.hf.transfer import tokenizer_of  # loads torch
    from ingot.checkpoint.load import load_model

    writer = Writer(load_model(folder, _device(device)), tokenizer_of(folder), sampling)
    if asks:
        _ask(writer)
        return
    for text in prompts:
        writer.check(text)  # nothing is printed if one cannot be continued
    for number, text in enumerate(prompts):
        if as_json:
            print(json.dumps({"prompt": text, "text": "".join(writer.pieces(text))}, ensure_ascii=False), flush=True)
            continue
        if len(prompts) > 1:
            print(f"{chr(10) if number else ''}--- {number + 1} of {len(prompts)}")
        writer.show(text)


def read_prompts(given: list[str], files: list[Path], lines: bool) -> list[str]:
    """All texts to continue: from options, then files, or from standard input if there are none."""
    try:
        read = [path.read_text(encoding="utf-8") for path in files]
        if not given and not files and sys.stdin is not None:
            read.append(sys.stdin.buffer.read().decode())
    except UnicodeDecodeError as error:
        raise DataError(f"a prompt is not UTF-8 text: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read the prompt {error.filename}: {error.strerror}") from None
    given = [text.encode(errors="surrogateescape").decode(errors="replace") for text in given]  # of any locale
    if lines:
        read = [line for text in read for line in text.splitlines() if line.strip()]
    prompts = [*given, *(text if lines else text.removesuffix("\n") for text in read)]
    if not any(prompts) or not all(prompts):
        raise ConfigError("a prompt is empty: give text with --prompt, --file or on standard input")
    return prompts


@dataclass
class Writer:
    """A model that continues texts."""

    model: "GPT"
    tokenizer: "Tokenizer"
    sampling: SampleOptions

    def check(self, text: str) -> list[int]:
        """The tokens of a prompt, if the model can continue it."""
        tokens, limit = self.tokenizer.encode(text), self.model.config.context
        if len(tokens) >= limit:
            if self.model.config.positions == "learned":
                raise DataError(
                    f"the prompt has {len(tokens)} tokens, and this model reads {limit} at most; shorten it to "
                    f"{limit - 1} or fewer"
                )
            print(f"warning: the prompt has {len(tokens)} tokens; the model was trained on {limit}", file=sys.stderr)
        return tokens

    def pieces(self, text: str) -> Iterator[str]:
        """The continuation, as it is generated."""
        from ingot.model.generate import generate as sample

        s, shown = self.sampling, ""
        new: list[int] = []
        tokens = self.tokenizer.encode(text)
        for token in sample(
            self.model, tokens, s.max_new_tokens, s.temperature, s.top_k, s.top_p, self.tokenizer.eos_id, s.seed
        ):
            new.append(token)
            decoded = self.tokenizer.decode(new)
            if not decoded.endswith("�"):  # a character may need several tokens
                yield decoded[len(shown) :]
                shown = decoded
        yield self.tokenizer.decode(new)[len(shown) :]

    def show(self, text: str) -> None:
        print(text, end="", flush=True)
        for piece in self.pieces(text):
            print(piece, end="", flush=True)
        print()


def _ask(writer: Writer) -> None:
    """Continue one text after another; Ctrl-C ends a continuation, Ctrl-D the command."""
    import readline  # noqa: F401  arrow keys and history in input()

    print("Type a text and press Enter; the model continues it. Ctrl-D ends.", end="")
    while True:
        try:
            text = input(MARK)
        except EOFError:
            print()
            return
        if not text.strip():
            continue
        try:
            writer.check(text)
            writer.show(text)
        except KeyboardInterrupt:
            print()
        except IngotError as error:
            print(error, file=sys.stderr)


def _device(name: str) -> str:
    import torch

    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ConfigError("--device cuda: torch finds no GPU here; `ingot doctor` shows what is missing")
    return "cuda" if found and name != "cpu" else "cpu"
