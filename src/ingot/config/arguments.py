"""Megatron's arguments, read from words or from a shell script.

A script is read as data and never run: only lists of options are looked at, and a `$VARIABLE` counts only where the
same file sets it to a plain value. What a script takes from elsewhere stays a `$VARIABLE`, for the dialect to refuse.
"""

import re
import shlex
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError

LISTS = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "rampup_batch_size", "recompute_modules",
    "cp_comm_type", "iterations_to_skip", "profile_ranks", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "window_size",
)  # fmt: skip


def read_words(words: list[tuple[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Words of an argument list, each with its place, as keys and values with theirs; the last of a flag counts."""
    given, places = {}, {}
    key, values = "", list[Any]()
    for word, place in [*words, ("--", "")]:
        if not word.startswith("--"):
            if not key:
                raise ConfigError(f"{place}: '{word}' belongs to no argument; Megatron's begin with --")
            values.append(scalar(word))
            if len(values) > 1 and key not in LISTS:
                raise ConfigError(f"{place}: --{key.replace('_', '-')} takes one value, not {values}")
            continue
        if key:
            given[key] = values if key in LISTS else values[0] if values else True
        name, mark, value = word[2:].partition("=")
        key, values = name.replace("-", "_"), [scalar(value)] if mark else []
        places[key] = place
    del places[""]
    return given, places


def read_script(path: Path) -> list[tuple[str, str]]:
    """The words of a shell script that are arguments, in order: those in its arrays, in strings of options, and after
    the name of a training program, such as pretrain_gpt.py."""
    words: list[tuple[str, str]] = []
    plain: dict[str, str] = {}
    joined: set[str] = set()  # names of strings of options, whose words are known already
    end, depth = "", 0  # what ends the piece that we are in: a parenthesis, a quote or a line
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        place, text = f"{path}:{number}", line.strip()
        depth += bool(re.match(r"(if|for|while|case|until)\b", text))
        depth -= bool(re.search(r"(^|;\s*)(fi|done|esac)\b", text))
        if not end:
            if array := re.match(r"(?:export\s+|local\s+)?\w+\+?=\((.*)", text):
                end, text = ")", array[1]
            elif options := re.match(r"(?:export\s+)?(\w+)\+?=\"\s*(\\?$|--.*)", text):
                end, text = '"', options[2]
                joined.add(options[1])
            elif not depth and (command := re.match(r"[^#]*?train\w*\.py(\s.*|$)", text)):
                end, text = "\n", command[1]
            elif not depth and (
                setting := re.match(r"(?:export\s+)?(\w+)=([^\s;]*|\"[^\"]*\"|'[^']*')\s*(?:#.*)?$", text)
            ):
                value = _expand(setting[2].strip("\"'"), plain)
                if "$" not in value and "`" not in value:
                    plain[setting[1]] = value
            if end and depth:
                raise ConfigError(
                    f"{place}: these arguments depend on a condition; give them after -- instead of the script"
                )
        if not end:
            continue
        goes_on = text.endswith("\\")
        text = text.removesuffix("\\")
        if closed := end == '"' and '"' in text:
            text = text.partition('"')[0]
        try:
            found = shlex.split(text, comments=True)
        except ValueError as error:
            raise ConfigError(f"{place}: cannot be read as shell words: {error}") from None
        if end == ")" and found and found[-1].endswith(")") and "(" not in found[-1]:
            closed, found[-1] = True, found[-1].removesuffix(")")
        if end == "\n":
            closed = not goes_on
            found = found[: next((i for i, word in enumerate(found) if re.match(r"\d*[|>&;]", word)), len(found))]
        # "$1 or $(date)" stay as they are; `translate` refuses them where their value matters
        words += [(_expand(word, plain), place) for word in found if word and not _is_known_list(word, joined)]
        end = "" if closed else end
    if end not in ("", "\n") or not words:
        raise ConfigError(f"{path}: holds no complete list of arguments, such as ARGS=( --num-layers 24 )")
    return words


def _is_known_list(word: str, joined: set[str]) -> bool:
    """Whether a word stands for a list whose words were read where it was set."""
    name = re.fullmatch(r"\$\{?(\w+)(\[[@*]\])?\}?", word)
    return name is not None and (name[2] is not None or name[1] in joined)


def _expand(text: str, plain: dict[str, str]) -> str:
    """Put in what is known; `${X}` would be an interpolation to the YAML layer, so what is left becomes `$X`."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: plain.get(m[1] or m[2], f"${m[1] or m[2]}"), text).replace(
        "${", "$"
    )


def scalar(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
