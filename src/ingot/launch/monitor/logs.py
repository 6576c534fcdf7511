"""The logs of a run: the console's, each rank's in each attempt, and Slurm's."""

import math
from collections.abc import Iterator
from pathlib import Path

from ingot.config.secrets import redact
from ingot.errors import ConfigError
from ingot.launch.monitor.advice import without_bad_advice
from ingot.launch.monitor.attempts import attempts_of, read_launches
from ingot.launch.protocol import LaunchFolder
from ingot.launch.supervisor.failure_log import read_all_failures
from ingot.storage.small_files import read_bytes
from ingot.training.runtime.run_files import LOGS, MARK, attempt_mark

TAIL = 40  # lines of a failed rank's log
MOST_FILES = 4  # of what nodes printed


def log_files(run: Path, rank: int | None) -> list[Path]:
    """The console's log, or all files of one rank, oldest first; NCCL's log is next to them in nccl-RANK.log."""
    if rank is None:
        return [*LaunchFolder(run).slurm_logs(), run / LOGS / "train.log"]
    found = [*(run / LOGS).glob(f"rank-{rank}.log"), *(run / LOGS).glob(f"*/rank-{rank}.log")]
    return sorted(found, key=lambda path: path.stat().st_mtime)


def check_rank(run: Path, rank: int) -> None:
    """Refuse a rank that has no log where others have one."""
    found = {path.stem.removeprefix("rank-") for path in (run / LOGS).glob("**/rank-*.log")}
    ranks = sorted(int(name) for name in found if name.isdecimal())
    if ranks and rank not in ranks:
        shown = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        raise ConfigError(f"{run} has no log of rank {rank}, only of {shown}")


def new_lines(files: list[Path], places: dict[str, int]) -> Iterator[str]:
    """Complete lines after the positions in `places`, which move on."""
    for path in files:
        if not path.is_file():
            continue
        start = places.get(str(path), 0)
        with path.open("rb") as file:
            file.seek(start)
            content = file.read()
        end = content.rfind(b"\n") + 1
        places[str(path)] = start + end
        yield from redact(content[:end].decode(errors="replace")).splitlines()


def error_lines(run: Path) -> list[str]:
    """The cause of each failure, and the end of the log of the rank that failed last, in the attempt that it failed."""
    launches, problem = read_launches(run)
    attempts = sorted((a for view in launches for a in attempts_of(view) if a.closed), key=lambda a: a.closed)
    failed = [attempt for attempt in attempts if attempt.kind not in ("finished", "stopped")]
    known = {attempt.attempt for attempt in attempts}
    earlier = [failure for failure in read_all_failures(run) if failure["attempt"] not in known]
    if not failed and not earlier:
        return [problem.message] if problem else ["no failure is recorded"]
    lines = [problem.message] if problem else []
    for f in earlier:
        message = without_bad_advice(f["message"])
        lines.append(f"{f['time']} attempt {f['attempt']}, rank {f['rank']} on {f['host']}: {message}")
    lines += [f"{attempt.closed} attempt {attempt.line()}" for attempt in failed]
    last = (failed[-1].attempt, failed[-1].rank, failed[-1].kind) if failed else (
        str(earlier[-1]["attempt"]), earlier[-1]["rank"], earlier[-1]["kind"])  # fmt: skip
    for path in _evidence(run, *last):
        content = _of_attempt(read_bytes(path, math.inf).decode(errors="replace").splitlines(), last[0])
        lines += ["", f"the end of {path}:", *content[-TAIL:]]
    return [redact(line) for line in lines]


def _evidence(run: Path, attempt: str, rank: int, kind: str) -> list[Path]:
    """The files that show why an attempt failed: of its failing rank, or, without one, what its nodes printed."""
    folder = run / LOGS / attempt if (run / LOGS / attempt).is_dir() else run / LOGS
    paths = [folder / f"rank-{rank}.log"] + [folder / f"stacks-{rank}.txt"] * (kind == "hang") if rank >= 0 else []
    if rank >= 0 and any(path.exists() for path in paths):
        return [path for path in paths if _has_content(path)]
    output = LaunchFolder(run).path / "output"
    printed = [*output.glob(f"{attempt}.*.out"), *output.glob(f"{attempt.rpartition('.')[0]}.*.out")]
    return sorted(path for path in printed if _has_content(path))[:MOST_FILES] or LaunchFolder(run).slurm_logs()[-1:]


def _of_attempt(lines: list[str], attempt: str) -> list[str]:
    """The part of a log that one attempt has written; all of a log that has no mark of it."""
    begin = max((number for number, line in enumerate(lines) if line.endswith(attempt_mark(attempt))), default=-1)
    if begin < 0:
        return lines
    later = (number for number, line in enumerate(lines) if number > begin and MARK in line)
    return lines[begin : next(later, len(lines))]


def _has_content(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
