"""Running other programs: docker, enroot, kubectl and Slurm's commands. What goes wrong is one sentence."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from ingot.errors import EXIT_FAULT, ConfigError, IngotError


class ProgramError(IngotError):
    """Another program failed, or did not answer."""

    exit_code = EXIT_FAULT


def output_of(
    command: Sequence[str], *, text: str | None = None, env: Mapping[str, str] | None = None, hint: str = ""
) -> str:
    """What a command prints, given `text` on its standard input."""
    _check_installed(command[0])
    seconds = 120
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=seconds, env=env)
    except subprocess.TimeoutExpired:
        raise ProgramError(f"{command[0]} did not answer within {seconds} s: is its server running? {hint}") from None
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise ProgramError(f"{command[0]} failed: {reason}" + (f"; {hint}" if hint else ""))
    return done.stdout.strip()


def run_on_terminal(command: Sequence[str]) -> None:
    """Run a command that prints to the terminal, however long it takes."""
    _check_installed(command[0])
    if code := subprocess.run(command).returncode:
        raise ProgramError(f"{command[0]} {command[1]} failed with exit code {code}; its output is above")


def _check_installed(program: str) -> None:
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not on this machine; install it, or run this on a machine that has it")
