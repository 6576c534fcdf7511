"""The picture that `ingot demo` promises."""

import json
from pathlib import Path

from ingot.report.loss_curve import EVAL, TRAIN, draw_loss_curve


def test_ten_rows_of_metrics_become_a_picture(tmp_path: Path) -> None:
    rows = [{"time/token": 256 * batch, TRAIN: 6.0 / batch} for batch in range(1, 11)]
    rows[-1][EVAL] = 0.7
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_loss_curve(tmp_path, tmp_path / "loss.png", "ten batches")
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 5_000


def test_a_run_without_a_validation_loss_becomes_a_picture_too(tmp_path: Path) -> None:
    rows = [{"time/token": 256 * batch, TRAIN: 6.0 / batch} for batch in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_loss_curve(tmp_path, tmp_path / "loss.png", "stopped early")
    without = (tmp_path / "loss.png").read_bytes()
    rows[-1][EVAL] = 0.7
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw_loss_curve(tmp_path, tmp_path / "loss.png", "stopped early")
    assert without.startswith(b"\x89PNG") and without != (tmp_path / "loss.png").read_bytes()
