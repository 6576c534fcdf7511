"""The tables of a report, and the marks on its time line, from the files next to the metrics."""

import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ingot.checkpoint.manifest import CHECKPOINTS, MANIFEST, MAX_MANIFEST_BYTES, steps_in
from ingot.config.evaluation import GENERATED
from ingot.config.secrets import redact
from ingot.report.page.run_text import own_file, read_objects, read_tail
from ingot.training.profiling.tables import read_profiles
from ingot.training.runtime.run_files import FAILURES, GUARDS, LOGS

MOST_TABLE_ROWS = 100
MOST_TEXT = 2000  # characters of a cell
LOG = f"{LOGS}/train.log"
DEVICE = re.compile(r"^\S+ (device|peak|torch\.compile): (.+)$", re.MULTILINE)
IDLE = "idle"
RESUMED = re.compile(r"^(\S+) resumed from \S.* at batch (\d{1,15}) of \d+$", re.MULTILINE)


def environment(folder: Path) -> dict[str, str]:
    """The device by the log; versions and layout by the newest checkpoint."""
    found = {name: cut(text) for name, text in DEVICE.findall(read_tail(folder, LOG))}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, msgspec.DecodeError):
        newest = f"{CHECKPOINTS}/{max(steps_in(folder / CHECKPOINTS))}/{MANIFEST}"
        if (path := own_file(folder, newest)) is not None and path.stat().st_size <= MAX_MANIFEST_BYTES:
            state = msgspec.json.decode(path.read_bytes())["state"]
            found |= {f"{name} version": cut(version) for name, version in state.get("versions", {}).items()}
            found |= {name: cut(value) for name, value in state.get("execution", {}).items()}
    return found


def checkpoints(folder: Path) -> list[list[Any]]:
    """Step, size and time of the newest checkpoints."""
    rows: list[list[Any]] = []
    with suppress(OSError):
        for step in sorted(steps_in(folder / CHECKPOINTS))[-MOST_TABLE_ROWS:]:
            path = folder / CHECKPOINTS / str(step)
            with suppress(OSError):
                size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
                saved = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")
                rows.append([step, f"{size / 1e6:,.1f} MB", saved])
    return rows


def generated(folder: Path) -> list[list[Any]]:
    """Batch, prompt and text of the newest generated texts, the newest first."""
    rows: list[list[Any]] = []
    for line in reversed(read_objects(folder, GENERATED)):
        with suppress(KeyError, TypeError):
            rows += [[whole(line["batch"]), cut(each["prompt"]), cut(each["text"])] for each in line["texts"]]
    return rows[:MOST_TABLE_ROWS]


def profiles(folder: Path) -> list[dict[str, Any]]:
    """Where the time of profiled steps went: a title, and category, milliseconds per step and share."""
    shown = []
    for table in read_profiles(folder):
        total = table.total_milliseconds_per_step or 1.0
        ordered = sorted(table.milliseconds_per_step.items(), key=lambda item: (item[0] == IDLE, -item[1]))
        rows = [[name, f"{ms:,.1f} ms", f"{ms / total:.1%}"] for name, ms in ordered]
        steps = f"steps {table.steps[0]} to {table.steps[1]}"
        where = "on the GPU" if table.on_gpu else "on the CPU"
        shown.append({"title": f"Where the time of {steps} went {where}", "rows": rows})
    return shown


def marks(folder: Path) -> list[list[Any]]:
    """Batch, kind and text of anomalies, failures and restarts."""
    found = [[whole(line.get("batch")), "anomaly", cut(f"{line.get('what')}: {line.get('action')}")]
             for line in read_objects(folder, GUARDS)]  # fmt: skip
    for line in read_objects(folder, FAILURES):
        if line.get("kind") != "start":
            where = f"(rank {line.get('rank')} on {line.get('host')})"
            what = cut(f"{line.get('time', '')} {line.get('kind')}: {line.get('message')} {where}")
            found.append([whole(line.get("batch")), "failure", what])
    for time, batch in RESUMED.findall(read_tail(folder, LOG)):
        found.append([int(batch), "restart", cut(f"{time} continued after batch {batch}")])
    return sorted(found)[-MOST_TABLE_ROWS:]


def whole(value: Any) -> int:
    """A number of a file as a batch; 0 for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 53 else 0


def cut(text: object) -> str:
    """Text of a file for a cell."""
    return redact(str(text)[: 2 * MOST_TEXT])[:MOST_TEXT]
