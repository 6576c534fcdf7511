"""The log of each rank but the first."""

from pathlib import Path

from ingot.report.rank_log import RankLog


def test_what_a_rank_says_before_the_run_folder_exists_is_in_its_log_later(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path / "run"), 1)
    log.note("early")
    log.warn("early too")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "logs").mkdir(parents=True)  # by the first rank
    log.begin(0, 10, None)
    log.note("late")
    lines = (tmp_path / "run" / "logs" / "rank-1.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["early", "warning: early too", "late"]
