"""The rows of `gpu_check.py`: how they are read, merged into `benchmarks/results/gpu.json`, and printed.

Several calls share a file. A row is known by its section and its variant or case; of two that are known by the same the
newer one stays, unless it is of a failure and the older one was measured.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LONG = ("notes", "losses", "digest")  # what only helps to find out why a row is so


def read_rows(*folders: Path) -> list[Row]:
    """The rows of several calls, the oldest first."""
    rows = [json.loads(line) for folder in folders for line in (folder / "rows.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row.get("at", 0))


def add_row(out: Path, row: Row, printed: bool = True) -> None:
    """Write a row as soon as it is known, with when and by which command it was measured."""
    command = os.environ.get("BENCHMARK_COMMAND", " ".join(["python", *sys.argv]))
    row = row | {"at": round(time.time()), "command": command}
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")
    if printed:
        shown = {key: value for key, value in row.items() if key not in ("command", *LONG)}
        print(f"  {json.dumps(shown)}", flush=True)


def wait_for_turn() -> bool:
    """For a process that was given `--wait`: whether somebody wants it, once its imports are done."""
    return "--wait" not in sys.argv or bool(sys.stdin.readline())


def row_key(row: Row) -> tuple[str, str]:
    return row["section"], row.get("variant") or row.get("case") or ""


def merge(*parts: list[Row]) -> list[Row]:
    """The newest row of each key, in the order of the keys' first appearance."""
    kept: dict[tuple[str, str], Row] = {}
    for row in (row for part in parts for row in part):
        known = kept.get(row_key(row))
        if known is None or "error" not in row or "error" in known:
            kept[row_key(row)] = row
    return list(kept.values())


def short(row: Row) -> Row:
    """A row as the file of results has it."""
    row = {key: value for key, value in row.items() if key not in LONG}
    if "host_syncs" in row:
        row["host_syncs"] = row["host_syncs"] if isinstance(row["host_syncs"], int) else len(row["host_syncs"])
    return row


def keep(rows: list[Row], into: Path) -> None:
    """Put rows among the `executions` of a file of results, whose other content stays."""
    found = json.loads(into.read_text())
    found["executions"] = merge(found.get("executions", []), [short(row) for row in rows])
    into.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[Row]) -> str:
    """What a reader wants first, in few lines."""
    lines = [f"{'section':14} {'variant':24} {'tok/s':>8} {'ratio':>6} {'causal':>6} {'GiB':>7} {'micro':>5} recompute"]
    for row in rows:
        lines.append(line_of(row))
    return "\n".join([*lines, *conclusions(rows)])


def line_of(row: Row) -> str:
    if row["section"] == "tests":
        return f"tests: {row['PASSED']} passed, {row['SKIPPED']} skipped, failed: {row['failed']}"
    if row["section"] == "repeatable":
        said = f"equal {row['equal']}, resumed {row['equal_resumed']}" if "equal" in row else row["error"][-150:]
        return f"repeatable     {row.get('case'):24} {said}"
    named = f"{row['section']:14} {row.get('variant') or row.get('case', ''):24}"
    if "error" in row:
        return f"{named} {row['error'][:150]}"
    if "tokens_per_second" not in row or "recompute" not in row:
        skipped = {"section", "variant", "case", "at", "command", "torch", "device", *LONG}
        return f"{named} " + ", ".join(f"{key} {value}" for key, value in row.items() if key not in skipped)
    first = row.get("seconds_to_first_step")
    spent = {kind: ms for kind, ms in row.get("milliseconds", {}).items() if ms}
    return (
        f"{named} {row['tokens_per_second']:8,} {row.get('ratio', ''):>6} {row['causal_rate']:6.3f} "
        f"{row['memory_gib']:7.2f} {row['microbatch']:5} {row['recompute'] or 'nothing'}; "
        f"waits {short(row).get('host_syncs')}"
        + (f"; first step {first} s" if first else "")
        + (f"; ms {spent}" if spent else "")
    )


def conclusions(rows: list[Row]) -> list[str]:
    """Ratios between variants that were alone on the card."""
    speeds: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if "tokens_per_second" in row and "base" not in row and "variant" in row:
            key = row["section"].removesuffix("-again"), row["variant"]
            speeds.setdefault(key, []).append(row["tokens_per_second"])
    mean = {key: sum(found) / len(found) for key, found in speeds.items()}
    pairs = [("7b", "wrapped", "plain"), ("7b", "wrapped fp8", "wrapped"), ("7b", "plain fp8", "plain"),
             ("llama-8b", "wrapped", "plain"), ("llama-1b-32k", "wrapped", "plain")]  # fmt: skip
    return [f"{size}: {a} is {mean[size, a] / mean[size, b]:.3f} of {b}"
            for size, a, b in pairs if (size, a) in mean and (size, b) in mean]  # fmt: skip
