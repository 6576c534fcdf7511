"""The logs of a run: the console's, each rank's in each attempt, and Slurm's."""

from collections.abc import Iterator
from pathlib import Path

from ingot.config.secrets import redact
from ingot.launch.protocol import LaunchFolder
from ingot.launch.supervisor.failure_log import read_all_failures
from ingot.training.runtime.run_files import LOGS

TAIL = 40  # lines of a failed rank's log


def log_files(run: Path, rank: int | None) -> list[Path]:
    """The console's log, or all files of one rank, oldest first; NCCL's log is next to them in nccl-RANK.log."""
    if rank is None:
        return [*LaunchFolder(run).slurm_logs(), run / LOGS / "train.log"]
    found = [*(run / LOGS).glob(f"rank-{rank}.log"), *(run / LOGS).glob(f"*/rank-{rank}.log")]
    return sorted(found, key=lambda path: path.stat().st_mtime)


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
    """The first cause of each failure, and the end of the log of the rank that failed last."""
    failures = read_all_failures(run)
    if not failures:
        return ["no failure is recorded"]
    lines = [f"{f['time']} attempt {f['attempt']}, rank {f['rank']} on {f['host']}: {f['message']}" for f in failures]
    for path in log_files(run, failures[-1]["rank"])[-1:]:
        lines += ["", f"the end of {path}:", *path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]]
    return [redact(line) for line in lines]
