"""What was submitted for a run: a line per job in `launch/jobs.jsonl`, oldest first."""

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ingot.launch.spec import LAUNCH

JOBS = "jobs.jsonl"


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    back_end: str
    id: str
    time: str


def add_job(run: Path, back_end: str, job: str) -> Job:
    entry = Job(back_end, job, datetime.now().isoformat(timespec="seconds"))
    with (run / LAUNCH / JOBS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(entry)) + "\n")
    return entry


def read_jobs(run: Path) -> list[Job]:
    path = run / LAUNCH / JOBS
    if not path.is_file():
        return []
    return [Job(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
