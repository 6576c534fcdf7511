"""The `ingot` command."""

import os
import sys
import traceback
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.commands import OptionGroup, Verb
from ingot.cli.usage_errors import usage_sentence
from ingot.config.secrets import redact
from ingot.errors import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError, Interrupted, disk_error
from ingot.launch.agent.failure import exit_code_of
from ingot.version import __version__

VERBS = {
    "Data": {
        "prepare": "Turn text into token shards, ready to train on.",
        "inspect": "Describe and verify a dataset.",
        "tokenizer": "Train, show and compare tokenizers.",
    },
    "Train": {
        "train": "Train a model, or continue an interrupted run.",
        "recipes": "List and show the recipes that ship with ingot.",
        "config": "Check, convert and document configs.",
        "quickstart": "Train a model on your own text in minutes.",
        "demo": "Train a small model on a CPU in minutes, without a network.",
    },
    "Evaluate and use": {
        "eval": "Measure the loss of a model, or its scores on tasks.",
        "generate": "Continue texts with a model.",
        "export": "Convert a checkpoint to a format that other libraries read.",
        "import": "Convert another stack's checkpoint to a run folder.",
    },
    "Cluster": {
        "launch": "Run on Slurm, Kubernetes or this machine; restart after faults.",
        "status": "Show state, step, loss, speed and failures of a run.",
        "logs": "Show or follow the logs of a run.",
        "stop": "Ask a run to save and stop.",
    },
    "Inspect": {
        "runs": "List runs with state, step, loss, speed and last checkpoint.",
        "profile": "Show where the time of a training step goes, from a few steps.",
        "watch": "Show the loss curve and state of a run, live in the terminal.",
        "compare": "Show how runs differ: config keys, last and best metrics.",
        "report": "Show runs in a browser, as one file or live.",
        "sync": "Send what a run has logged to an experiment tracker.",
        "checkpoint": "List, verify, show, size, copy and consolidate checkpoints.",
        "doctor": "Check this machine, or the nodes of a cluster.",
    },
}
CONTINUES = {"prepare": "; the same command continues where it stopped"}  # after Ctrl-C; train says more
_MODULES = {"import": "import_"}  # others are named like their verb


class IngotCommand(OptionGroup):
    """All verbs."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.commands = {
            name: Verb(name, summary, panel, _MODULES.get(name, name))
            for panel, verbs in VERBS.items()
            for name, summary in verbs.items()
        }

    def invoke(self, ctx: Any) -> Any:
        """typer would turn Ctrl-C into an exit code without words, and a closed pipe into a failure."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()  # a reader that has gone shows here at the latest
            return code
        except KeyboardInterrupt as error:
            raise Interrupted(str(error) or f"interrupted{CONTINUES.get(ctx.invoked_subcommand, '')}") from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's last flush
            return EXIT_FINISHED


app = typer.Typer(
    cls=IngotCommand,
    name="ingot",
    help="From raw text to a pretrained GPT.",
    epilog="Start with `ingot demo`, or `ingot quickstart` on your text. `ingot VERB -h` shows options and examples.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"ingot {__version__}")
        raise typer.Exit


@app.callback()
def ingot(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[  # `main` removes it, so that it may come after the verb as well
        bool, typer.Option("--debug", help="With any verb: write the stack trace of a failure to ingot-debug.log.")
    ] = False,
) -> None: ...


def all_commands(command: Any = None, name: str = "ingot") -> Iterator[tuple[str, Any]]:
    """Every command with its full name, such as `ingot launch slurm`. Imports them all."""
    command = command or typer.main.get_command(app)
    if isinstance(command, Verb):
        command = command.load()
    yield name, command
    for inner in getattr(command, "commands", {}).values():
        yield from all_commands(inner, f"{name} {inner.name}")


def main() -> None:
    """Run a verb; a failure is one sentence on standard error and a non-zero exit code."""
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  None if the caller closed it
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 gets a mark for what it cannot show
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    hint = "" if debug else "; run again with --debug for the stack trace"
    sys.exit(exit_code_of(lambda: _run(arguments, debug), hint))


def _run(arguments: list[str], debug: bool) -> int:
    try:
        code = app(arguments, prog_name="ingot", standalone_mode=False)
    except typer.Abort:
        code = EXIT_INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
            return EXIT_USER_ERROR
        if hasattr(error, "format_message"):  # typer's own: a wrong option or argument
            raise ConfigError(usage_sentence(error, arguments)) from None
        if debug:
            path = Path("ingot-debug.log")
            path.write_text(redact(traceback.format_exc()), encoding="utf-8")
            print(f"the stack trace is in {path}", file=sys.stderr)
        if isinstance(error, OSError) and error.strerror:
            name = error.filename or "standard output"
            raise disk_error("use", name, error) from None
        raise
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
