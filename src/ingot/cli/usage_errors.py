"""Wrong options and arguments as one sentence each, with what to write instead."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

KEY_VALUE = "KEY=VALUE"  # in the metavar of an argument that takes config keys


def usage_sentence(error: Any, arguments: Sequence[str]) -> str:
    """What is wrong with a command line. `error` is typer's, `arguments` what was typed after `ingot`."""
    context: Any = error.ctx
    if context is None:  # the parser found an option without its value
        verb = next((argument for argument in arguments if not argument.startswith("-")), "")
        return _in_words(error.format_message(), f"ingot {verb}".rstrip())
    path = context.command_path
    if type(error).__name__ == "NoSuchOption":
        return _unknown_option(error.option_name, path, context.command, arguments)
    message = error.format_message()
    if message.startswith("No such command"):
        name = message.partition("'")[2].partition("'")[0]
        close = difflib.get_close_matches(name, context.command.commands, n=1)
        hint = f"did you mean `{path} {close[0]}`?" if close else f"see `{path} -h`"
        return f"{path} has no command '{name}'; {hint}"
    return _in_words(message, path)


def _in_words(message: str, path: str) -> str:
    message = re.sub("Input should be a valid integer.*", "it must be a whole number", message)
    message = re.sub("Input should be a valid number.*", "it must be a number", message)
    return f"{path}: {message[0].lower()}{message[1:].rstrip('.')}; see `{path} -h`"


def _unknown_option(option: str, path: str, command: Any, arguments: Sequence[str]) -> str:
    typed, value = _as_typed(option, arguments)
    known = [flag for p in command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]
    close = difflib.get_close_matches(f"--{typed.lstrip('-').replace('_', '-')}", known, n=1, cutoff=0.75)
    hint = f"did you mean {close[0]}?" if close else ""
    if not close and any(KEY_VALUE in (getattr(p, "metavar", None) or "") for p in command.params):
        hint = _key_hint(typed.lstrip("-"), value)
    return f"{path} has no option {typed}; {hint or f'see `{path} -h`'}"


def _as_typed(option: str, arguments: Sequence[str]) -> tuple[str, str]:
    """The option as it was typed (`-data` is parsed as `-d`), and its value, or VALUE."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        same = name.replace("_", "-") == option.replace("_", "-")
        if same or (not option.startswith("--") and argument.startswith(option)):
            following = arguments[position + 1] if position + 1 < len(arguments) else ""
            if not equals and not following.startswith("-") and "=" not in following:
                value = following
            return name, value or "VALUE"
    return option, "VALUE"


def _key_hint(name: str, value: str) -> str:
    """How to write what looks like a config key."""
    from ingot.config.base import closest_key, known_keys
    from ingot.config.run import RunConfig

    key = name.replace("-", "_")
    if key not in known_keys(RunConfig):
        closest = closest_key(key, RunConfig)
        if closest is None:
            return "config keys are written key=value without dashes, see `ingot config keys`"
        key = closest
    return f"config keys are written without dashes: {key}={value}"
