"""`ingot config keys`: what each key takes, its default and its meaning."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from conftest import Ingot

from ingot.cli.config_keys import default_text, type_name
from ingot.config.durations import Duration


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "integer"), (float, "number"), (str, "text"), (bool, "true or false"), (int | None, "integer"),
        (Literal["a", "b"], "a or b"), (int | Literal["auto"], "integer or auto"), (float | str | None, "number or text"),
        (Annotated[int | None, "x"], "integer"), (tuple[float, float], "2 numbers"), (Duration, "duration"),
        (Duration | None, "duration"), (Path, "path"),
    ],
)  # fmt: skip
def test_a_type_is_told_in_words(annotation: Any, words: str) -> None:
    assert type_name(annotation) == words


@pytest.mark.parametrize(
    ("default", "text"), [(None, "null"), (True, "true"), (False, "false"), (1.5, "1.5"), ((0.9, 0.95), "[0.9, 0.95]")]
)
def test_a_default_is_told_as_it_is_written(default: object, text: str) -> None:
    assert default_text(default) == text


def test_keys_are_told_with_default_type_and_meaning(ingot_here: Ingot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = ingot_here("config", "keys", "model").stdout.splitlines()
    assert all(len(line) <= 60 for line in lines) and all(line.startswith(("model.", "    ")) for line in lines)
    at = lines.index("model.n_kv_heads=null")
    assert lines[at + 1].startswith("    integer. Key/value heads: fewer than n_heads")
    (key,) = json.loads(ingot_here("config", "keys", "optimizer.betas", "--json").stdout)
    assert key["key"] == "optimizer.betas" and key["type"] == "2 numbers" and not key["required"] and key["meaning"]
    done = ingot_here("config", "keys", "modle", check=False)
    assert done.returncode == 2 and "there is no config key or section modle; did you mean model?" in done.stderr
