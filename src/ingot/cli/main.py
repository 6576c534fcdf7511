"""The `ingot` command."""

import sys
import traceback
from pathlib import Path

import typer

from ingot.cli.checkpoint import checkpoint_app
from ingot.cli.config import config_app
from ingot.cli.demo import demo
from ingot.cli.doctor import doctor
from ingot.cli.eval import evaluate
from ingot.cli.export import export
from ingot.cli.generate import generate
from ingot.cli.import_ import import_
from ingot.cli.inspect import inspect
from ingot.cli.launch import launch_app
from ingot.cli.options import SectionCommand
from ingot.cli.prepare import prepare
from ingot.cli.recipes import recipes_app
from ingot.cli.status import logs, status, stop
from ingot.cli.tokenizer import tokenizer_app
from ingot.cli.train import train
from ingot.config.secrets import redact
from ingot.errors import EXIT_FAULT, IngotError
from ingot.launch.supervisor.failure import record_failure

app = typer.Typer(
    name="ingot",
    help="From raw text to a pretrained GPT: prepare, train, resume, evaluate, generate, export.\n\n"
    "Every verb takes --debug: the stack trace of a failure then goes to ingot-debug.log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


app.command("prepare", cls=SectionCommand)(prepare)
app.command("inspect", cls=SectionCommand)(inspect)
app.add_typer(tokenizer_app, name="tokenizer")
app.command("train")(train)
app.command("eval")(evaluate)
app.command("generate")(generate)
app.command("export")(export)
app.command("import")(import_)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(recipes_app, name="recipes")
app.add_typer(config_app, name="config")
app.add_typer(launch_app, name="launch")
app.command("status")(status)
app.command("logs")(logs)
app.command("stop")(stop)
app.command("doctor")(doctor)
app.command("demo")(demo)


def main() -> None:
    """Run a verb; a failure is one sentence on standard error and a non-zero exit code."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        code = app(arguments, prog_name="ingot", standalone_mode=False)
        if code == 130:  # how typer gives back Ctrl-C
            raise KeyboardInterrupt
    except IngotError as error:
        code = _fail(f"error: {error}", error.exit_code, debug)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("interrupted; the same command continues from the last checkpoint", 130, debug=False)
    except BrokenPipeError:
        code = 0
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own: a wrong option or argument
            error.show()
            sys.exit(error.exit_code)
        hint = "" if debug else "; run again with --debug for the stack trace"
        code = _fail(f"internal error: {type(error).__name__}: {error}{hint}", EXIT_FAULT, debug)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, debug: bool) -> int:
    # First the record: standard error may be on a full disk, and this process may be killed while it prints.
    recorded = record_failure(message.removeprefix("error: "), code, sys.exc_info()[1])
    print(redact(message), file=sys.stderr)
    if recorded:  # standard error is this process's log; the launcher prints the sentence
        print(redact(traceback.format_exc()), file=sys.stderr)
    if debug:
        path = Path("ingot-debug.log")
        path.write_text(redact(traceback.format_exc()), encoding="utf-8")
        print(f"the stack trace is in {path}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
