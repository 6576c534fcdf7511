"""Runs public commands one after another, each printed as a user would type it: `ingot demo` and `ingot quickstart`."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path

from ingot.report.loss_curve import draw_loss_curve

_RUNS_VERBS = ContextVar("_RUNS_VERBS", default=False)
SHIPPED_TASKS = ("arithmetic", "copy", "capitalization", "brackets")


def run_verb(*arguments: str) -> None:
    """Print a command, then run it."""
    from ingot.cli.main import app as ingot

    print(f"\n$ {as_typed(arguments)}", flush=True)
    before = _RUNS_VERBS.set(True)
    try:
        ingot(list(arguments), prog_name="ingot", standalone_mode=False)
    except SystemExit as end:  # how train reports its result
        if end.code:
            raise
    finally:
        _RUNS_VERBS.reset(before)


def is_walkthrough() -> bool:
    """Whether `run_verb` runs the command, and not the user, who wants to know what to type next."""
    return _RUNS_VERBS.get()


def as_typed(arguments: Sequence[str]) -> str:
    """A command line of ingot."""
    return shlex.join(["ingot", *arguments])


def path_hint() -> str:
    """How to make `ingot` a command of this shell, if it is not: `make` installs it into .venv only."""
    if shutil.which("ingot") is not None:
        return ""
    return f"To type `ingot` as below, first run: source {Path(sys.prefix) / 'bin' / 'activate'}\n"


def show_model(out: Path, prompt: str, title: str) -> None:
    """Evaluate the run in a folder, let it continue a prompt, export it, draw its loss curve and
    write its report."""
    for arguments in commands_of_model(out, prompt):
        if arguments[0] != "export" or not (out / "hf").exists():
            run_verb(*arguments)
    draw_loss_curve(out / "run", out / "loss.png", title)
    run_verb("report", f"{out}/run", "-o", f"{out}/report.html")


def commands_of_model(out: Path, prompt: str) -> list[list[str]]:
    """What `show_model` runs."""
    return [
        ["eval", f"{out}/run"],
        ["generate", f"{out}/run", "--prompt", prompt, "--max-new-tokens", "120", "--seed", "1"],
        ["export", f"{out}/run", "--to", "hf", f"{out}/hf"],
        ["eval", f"{out}/run", "--tasks", *SHIPPED_TASKS],
    ]
