"""Files of one JSON object per line."""

from pathlib import Path

import pytest

from ingot.launch.measured_times import read_times
from ingot.storage.json_lines import read_json_lines


def test_a_line_that_is_cut_off_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"checkpoint/write_seconds": 10.0}\n{"a": 2}\n[1]\n{"checkpoint/wri')
    assert read_json_lines(path) == [{"checkpoint/write_seconds": 10.0}, {"a": 2}]
    assert read_times(tmp_path).signal_seconds == 80


@pytest.mark.parametrize(("last_bytes", "expected"), [(9, [{"a": 3}]), (8, []), (1000, None)])
def test_the_last_bytes_of_a_file_hold_its_last_whole_lines(
    tmp_path: Path, last_bytes: int, expected: list[dict[str, int]] | None
) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f'{{"a": {n}}}\n' for n in range(4)))  # nine bytes each
    assert read_json_lines(path, last_bytes) == (read_json_lines(path) if expected is None else expected)


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "absent") == []
