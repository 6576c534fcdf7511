"""Progress: silent at first, then lines or a bar with the speed of this run and the time that is left."""

import io
import sys
from collections.abc import Callable

import pytest

from ingot.data.prepare import progress
from ingot.data.prepare.progress import PrepareProgress, follow


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_lines_tell_the_share_the_speed_and_the_time_left_every_ten_seconds(at: Callable[[float], None]) -> None:
    lines: list[str] = []
    shown = PrepareProgress(lines.append)
    shown.start(total=1000, resumed=2)
    assert lines == ["continuing: 2 pieces already done"]
    shown.consumed(400, earlier=True)  # by the run before, so it says nothing about the speed of this one
    at(1.9)
    shown.advance({"documents": 10, "bytes": 10_000_000, "units": 1_000_000})
    at(9.9)
    shown.refresh()
    assert len(lines) == 1
    at(20.0)
    shown.consumed(200)
    shown.advance({"documents": 30, "bytes": 30_000_000, "units": 3_000_000})
    assert lines[1:] == ["60% 2 docs/s, 2.0 MB/s, 0.20 M tokens/s, 0:00:40 left"]
    at(29.9)
    shown.refresh()
    assert len(lines) == 2
    at(30.0)
    shown.refresh()
    assert len(lines) == 3 and lines[2].startswith("60% 1 docs/s")


def test_a_terminal_gets_a_bar_that_goes_away(at: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    shown = PrepareProgress()
    shown.start(total=1000)
    shown.consumed(250)
    shown.refresh()
    assert screen.getvalue() == ""
    at(2.0)
    shown.advance({"documents": 8})
    shown.stop()
    drawn = screen.getvalue()
    assert "25%" in drawn and "4 docs/s" in drawn and "0:00:06 left" in drawn
    shown.stop()
    assert screen.getvalue() == drawn


@pytest.mark.parametrize(("terminal", "expected"), [(True, ["20%", "70%", "100%"]), (False, ["20%", "70%"])])
def test_what_is_followed_tells_its_share(
    at: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, terminal: bool, expected: list[str]
) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    for number, item in enumerate(follow("reading", [2, 5, 3], lambda size: size)):
        assert item == [2, 5, 3][number]
        at([2.1, 12.2, 13.0][number])
    assert [line.removeprefix("reading: ") for line in screen.getvalue().split() if "%" in line] == expected


def test_only_the_first_process_tells_what_is_followed(
    at: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, told in (("1", False), ("0", True)):
        at(0.0)
        monkeypatch.setenv("RANK", rank)
        for _ in follow("reading", [1, 1]):
            at(100.0)
        assert ("reading: 50%" in capsys.readouterr().err) == told
