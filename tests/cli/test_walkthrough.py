"""The walkthroughs print what a user would type, and not the advice that the single commands end with."""

from pathlib import Path

import pytest

from ingot.cli.walkthrough import run_verb


def test_advice_on_what_to_type_next_is_left_to_the_walkthrough(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ingot.cli.main import app

    arguments = ["prepare", str(data / "text" / "val.txt"), "--tokenizer", str(data / "tokenizer"), "-o"]
    run_verb(*arguments, str(tmp_path / "inside"))
    assert "train on it" not in capsys.readouterr().out
    app([*arguments, str(tmp_path / "alone")], prog_name="ingot", standalone_mode=False)
    assert "train on it: ingot train" in capsys.readouterr().out
