"""The rows of `gpu_check.py`: how they are read, merged into `benchmarks/results/gpu.json`, and printed.

Several calls share a file. A row is known by its section and its variant or case; of two that are known by the same the
newer one stays, unless it is of a failure and the older one was measured. That a process failed is forgotten as soon as
its section has a newer figure.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PROCESS = "process"  # the variant of a row that says why a whole process failed
LONG = ("notes", "losses", "digest")  # what only helps to find out why a row is so


def read_rows(*folders: Path) -> list[Row]:
    """The rows of several calls, the oldest first."""
    rows = [json.loads(line) for folder in folders for line in (folder / "rows.jsonl").read_text().splitlines()]
    return sorted(rows, key=when)


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
    newest = {row["section"]: row.get("at", 0) for row in sorted(kept.values(), key=when) if "error" not in row}
    return [row for key, row in kept.items() if key[1] != PROCESS or when(row) >= newest.get(row["section"], 0)]


def when(row: Row) -> int:
    return row.get("at", 0)


def short(row: Row) -> Row:
    """A row as the file of results has it."""
    row = {key: value for key, value in row.items() if key not in LONG}
    if "command" in row:
        row["command"] = re.sub(r"--out \S+", "--out OUT", row["command"])
    if "host_syncs" in row:
        row["host_syncs"] = row["host_syncs"] if isinstance(row["host_syncs"], int) else len(row["host_syncs"])
    return row


def with_full_rate(row: Row) -> Row:
    """A row of before `full_rate` was written: the attention that `causal_rate` leaves out is 6 L d S per token."""
    if "causal_rate" not in row or "full_rate" in row:
        return row
    from ingot.config.load import load_config
    from ingot.config.run import RunConfig

    model = load_config(RunConfig, [row["model"], "data=none", "data.eval=null"]).model
    left_out = 6 * model.n_layers * model.n_heads * model.head_width * row["seq_len"]
    more = row["tokens_per_second"] * left_out / row["matmul_tflops"] / 1e12
    return row | {"full_rate": round(row["causal_rate"] + more, 4)}


def keep(rows: list[Row], into: Path) -> None:
    """Put rows among the `executions` of a file of results, whose other content stays."""
    found = json.loads(into.read_text())
    found["executions"] = merge(found.get("executions", []), [short(with_full_rate(row)) for row in rows])
    into.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[Row]) -> str:
    """What a reader wants first, in few lines."""
    speeds = f"{'tok/s':>8} {'ratio':>6} {'causal':>6} {'full':>6}"
    lines = [f"{'section':14} {'variant':24} {speeds} {'GiB':>7} {'micro':>5} recompute"]
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
        f"{with_full_rate(row)['full_rate']:6.3f} "
        f"{row['memory_gib']:7.2f} {row['microbatch']:5} {row['recompute'] or 'nothing'}; "
        f"waits {short(row).get('host_syncs')}"
        + (f"; first step {first} s" if first else "")
        + (f"; ms {spent}" if spent else "")
    )


LONGEST_CALL = 700  # seconds
ALONE = [("wrapped", "plain"), ("wrapped fp8", "wrapped"), ("plain fp8", "plain"), ("wrapped fp8", "plain fp8")]


def of_one_call(one: Row, other: Row) -> bool:
    return one.get("command") == other.get("command") and abs(when(one) - when(other)) < LONGEST_CALL


def conclusions(rows: list[Row]) -> list[str]:
    """Ratios between variants of a section that were alone on the card, in the same call."""
    alone = {(row["section"], row["variant"]): row for row in rows if "tokens_per_second" in row and "base" not in row}
    found = []
    for section in dict.fromkeys(section for section, _ in alone):
        for one, other in ALONE:
            own, base = alone.get((section, one)), alone.get((section, other))
            if own and base and of_one_call(own, base):
                ratio = own["tokens_per_second"] / base["tokens_per_second"]
                found.append(f"{section}: {one} is {ratio:.3f} of {other}")
    return found
