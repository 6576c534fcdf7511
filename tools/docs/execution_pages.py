"""Tables and charts of how one card runs the current tree, from the rows that `benchmarks/gpu_check.py` leaves.

A row is a variant of a section: plain or wrapped, deterministic, with dropout, a peer, an earlier tree. Ratios are of
variants of one call only. A goal that has no row yet is shown as not measured.
"""

from typing import Any

from drawing import bars, table

Row = dict[str, Any]
SHARDED_GOALS = {"125m": 0.96, "1b": 0.99, "llama-1b": 0.99, "7b": 0.99}
DETERMINISTIC_GOALS = {"125m": 0.95, "1b": 0.97, "llama-1b": 0.93}
RATE_GOALS = {"125m": 0.84, "350m": 0.86, "760m": 0.92, "1b": 0.93, "3b": 0.94, "7b": 0.93, "llama-1b": 0.92,
              "pythia-1b": 0.90, "pythia-2.8b": 0.90}  # fmt: skip
SIZES = ["pythia-14m", *RATE_GOALS]  # in which order rows are shown
LONGEST_CALL = 700  # seconds
OTHER_QUESTIONS = ("pythia-14m", "125m-small", "1b-two-ranks", "1b-dropout")
"""Sections of which the rate is not of interest: too small to reach one, or the same as in another section."""
LONG_CONTEXT_GOAL, FP8_GOAL, TREE_GOAL, GRAPH_GOAL = 0.75, 1.35, 0.99, 1.2
NOT_MEASURED = "not measured"


class Executions:
    """The rows of `gpu.json`, by section and variant or case."""

    def __init__(self, gpu: Any):
        rows: list[Row] = [row for row in gpu["executions"] if "error" not in row]
        self.rows = sorted(rows, key=lambda row: SIZES.index(size) if (size := size_of(row)) in SIZES else len(SIZES))
        self.failed = {row["section"] for row in gpu["executions"] if "error" in row}
        self.known = {(row["section"], row.get("variant") or row.get("case")): row for row in self.rows}

    def get(self, section: str, variant: str) -> Row | None:
        return self.known.get((section, variant))

    def variants(self, *names: str) -> list[Row]:
        return [row for row in self.rows if row.get("variant") in names and "tokens_per_second" in row]

    def ratio(self, row: Row, base: str = "plain") -> float | None:
        """The speed of a row over that of another of its section, if one call has measured both."""
        if row.get("base") == base:
            return float(row["ratio"])
        other = self.get(row["section"], base)
        if other is None or other["command"] != row["command"] or abs(other["at"] - row["at"]) > LONGEST_CALL:
            return None
        return float(row["tokens_per_second"] / other["tokens_per_second"])


def pages(gpu: Any) -> dict[str, str]:
    found = Executions(gpu)
    return {
        "sharded.md": sharded_table(found),
        "sharded.svg": sharded_chart(found),
        "determinism.md": determinism_table(found),
        "determinism.svg": cost_chart(found, "deterministic"),
        "repeatable.md": repeatable_table(found),
        "dropout.md": dropout_table(found),
        "dropout.svg": cost_chart(found, "dropout", "dropout but for attention"),
        "start-up.md": start_table(found),
        "start-up.svg": start_chart(found),
        "checkpoint-loading.md": loading_table(found),
        "checkpoint-loading.svg": loading_chart(found),
        "gpu-now.md": peer_table(found) + "\n" + tree_table(found),
        "gpu-rates.md": rate_table(found),
        "gpu-profiles.md": profile_table(found),
        "execution-goals.md": goal_table(found),
    }


def size_of(row: Row) -> str:
    return str(row["section"]).removeprefix("peers-")


def label(row: Row) -> str:
    """A model and its sequence length where that is not 2048."""
    name = str(row["model"]).removeprefix("mpt-")
    return name if row["seq_len"] == 2048 else f"{name} at {row['seq_len']:,} tokens"


def met(found: float | None, goal: float) -> str:
    return NOT_MEASURED if found is None else "met" if round(found, 3) >= goal else "missed"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# --- one process and FSDP2 on one card


def sharded_table(found: Executions) -> str:
    rows: list[list[object]] = []
    for row in found.variants("wrapped", "wrapped fp8"):
        base = "plain fp8" if row["precision"] == "fp8" else "plain" if row["section"] != "pythia-14m" else "one by one"
        plain = found.get(row["section"], base)
        if plain is None:
            continue
        goal = SHARDED_GOALS.get(row["section"]) if row["precision"] == "bf16" else None
        rows.append([
            f"{label(row)}{', fp8' if row['precision'] == 'fp8' else ''}", f"{plain['tokens_per_second']:,}",
            f"{row['tokens_per_second']:,}", number(found.ratio(row, base)), goal or "",
            f"{row['memory_gib'] - plain['memory_gib']:+.2f}", how(plain), how(row),
        ])  # fmt: skip
    head = [
        "model",
        "plain, tokens/s",
        "wrapped, tokens/s",
        "ratio",
        "goal",
        "memory, GiB",
        "plain runs",
        "wrapped runs",
    ]
    return table(head, rows)


def how(row: Row) -> str:
    return f"{row['microbatch']} sequences, {row['recompute'] or 'no'} recomputation"


def sharded_chart(found: Executions) -> str:
    labels, values = [], []
    for row in found.variants("wrapped"):
        if (ratio := found.ratio(row)) is not None:
            labels.append(label(row))
            values.append(ratio)
    return bars(labels, values, "speed wrapped by FSDP2 on one card, relative to the plain process", peers=False)


# --- what an option costs


def determinism_table(found: Executions) -> str:
    rows: list[list[object]] = []
    for row in found.variants("deterministic"):
        goal, ratio = DETERMINISTIC_GOALS[row["section"]], found.ratio(row)
        rows.append([label(row), f"{row['tokens_per_second']:,}", number(ratio), goal, met(ratio, goal),
                     f"{row['memory_over_base']:+.2f}"])  # fmt: skip
    head = ["`deterministic=true`", "tokens/s", "of the speed without", "goal", "", "memory, GiB"]
    return table(head, rows)


def repeatable_table(found: Executions) -> str:
    rows: list[list[object]] = [
        [row["case"], "equal" if row["equal"] else "different", "equal" if row["equal_resumed"] else "different"]
        for row in found.rows if row["section"] == "repeatable"
    ]  # fmt: skip
    return table(["20 steps, full width", "two runs", "one of them resumed"], rows)


def dropout_table(found: Executions) -> str:
    names = {"dropout": "embeddings, residuals and attention weights", "dropout but for attention": "all but attention"}
    rows: list[list[object]] = [
        [label(row), names[row["variant"]], f"{row['tokens_per_second']:,}", number(found.ratio(row)),
         f"{row['memory_over_base']:+.2f}"]
        for row in found.variants(*names)
    ]  # fmt: skip
    return table(["model", "dropout 0.1 of", "tokens/s", "of the speed without", "memory, GiB"], rows)


def cost_chart(found: Executions, *names: str) -> str:
    rows = found.variants(*names)
    labels = [label(row) + (f", {row['variant']}" if len(names) > 1 else "") for row in rows]
    unit = f"speed with {names[0]}{'=true' if names[0] == 'deterministic' else ''}, relative to without"
    return bars(labels, [found.ratio(row) or 0.0 for row in rows], unit, peers=False)


# --- start-up and checkpoints


def start_rows(found: Executions) -> list[Row]:
    return [row for row in found.rows if row["section"].startswith("peers-") and "seconds_to_ready" in row]


def system(row: Row) -> str:
    return {"nanogpt": "nanoGPT", "hf": "transformers"}.get(row["system"], row["system"])


def start_table(found: Executions) -> str:
    rows: list[list[object]] = [
        [f"{system(row)}, {label(row)}", "whole" if row["compiled"] == "whole" else "block by block",
         row["seconds_to_ready"]]
        for row in start_rows(found)
    ]  # fmt: skip
    return table(["", "compiled", "seconds"], rows)


def start_chart(found: Executions) -> str:
    rows = start_rows(found)
    labels = [f"{system(row)}, {label(row)}" for row in rows]
    return bars(labels, [row["seconds_to_ready"] for row in rows], "seconds until three steps are done, empty caches")


def loading_table(found: Executions) -> str:
    row = found.known["checkpoint", "load, warm"]
    rows: list[list[object]] = [
        [name, f"{row[key]:.2f}", ", ".join(f"{seconds:.2f}" for seconds in row[f"all_{key}"])]
        for name, key in (("ingot", "seconds"), ("DCP", "dcp_seconds"))
    ]
    return table([f"{row['gb']} GB to one H200", "median, s", "all five, s"], rows)


def loading_chart(found: Executions) -> str:
    row = found.known["checkpoint", "load, warm"]
    return bars(["ingot", "DCP"], [row["seconds"], row["dcp_seconds"]], f"seconds to load {row['gb']} GB, warm disk")


# --- peers, earlier trees, rates


def peer_table(found: Executions) -> str:
    rows: list[list[object]] = []
    for row in found.rows:
        if "ingot_over_peer" in row and (own := found.get(row["section"], "ingot")):
            rows.append([label(row), f"{own['tokens_per_second']:,}", f"{system(row)}, {row['tokens_per_second']:,}",
                         f"{row['ingot_over_peer']:.3f}", f"{own['memory_gib']} and {row['memory_gib']}"])  # fmt: skip
    return table(["same call, same card", "ingot, tokens/s", "peer, tokens/s", "ratio", "memory, GiB"], rows)


def tree_table(found: Executions) -> str:
    rows: list[list[object]] = [
        [f"{row['variant']}", f"{row['old']:,}", f"{row['new']:,}", number(row["ratio"]), met(row["ratio"], TREE_GOAL),
         f"{row['old_seconds_to_ready']} and {row['new_seconds_to_ready']}"]
        for row in found.rows if row["section"] == "trees"
    ]  # fmt: skip
    head = ["same call, same card", "before, tokens/s", "now, tokens/s", "ratio", f"goal {TREE_GOAL}", "ready after, s"]
    return table(head, rows)


def rate_table(found: Executions) -> str:
    """FLOP/s of training over those of a large product, in both ways of counting attention."""
    rows: list[list[object]] = []
    seen = set()
    for row in found.variants("ingot", "plain", "wrapped", "wrapped fp8", "plain fp8"):
        size = size_of(row)
        if size in OTHER_QUESTIONS:
            continue
        goal = RATE_GOALS.get(size) if row["precision"] == "bf16" else None
        seen.add(size)
        rows.append([f"{label(row)}, {row['variant'].replace('ingot', 'plain, next to its peer')}",
                     f"{row['matmul_tflops']:.0f}", number(row["causal_rate"]), number(row["full_rate"]), goal or "",
                     met(row["full_rate"], goal) if goal else ""])  # fmt: skip
    missing = [name for name in RATE_GOALS if name not in seen]
    head = ["", "large product, TFLOP/s", "causal rate", "full rate", "goal of the full rate", ""]
    return table(head, rows) + (f"\nNot measured with the current tree: {', '.join(missing)}.\n" if missing else "")


def profile_table(found: Executions) -> str:
    """Where the time of a step goes, in percent, by kind of kernel."""
    profiles = [row for row in found.variants("ingot", "plain", "wrapped fp8") if row.get("milliseconds")]
    kinds = list(dict.fromkeys(kind for row in profiles for kind in row["milliseconds"]))
    rows: list[list[object]] = []
    for row in profiles:
        whole = sum(row["milliseconds"].values())
        name = label(row) + (", fp8, wrapped" if row["precision"] == "fp8" else "")
        rows.append([name, *(f"{row['milliseconds'].get(kind, 0.0) / whole:.1%}" for kind in kinds)])
    return table(["", *kinds], rows)


def goal_table(found: Executions) -> str:
    """The goals of sharded runs, fp8, start-up, checkpoints and CUDA graphs."""
    rows: list[list[object]] = []

    def add(goal: str, value: float | None, least: float, shown: str | None = None) -> None:
        rows.append([goal, shown or number(value), met(value, least)])

    def of(section: str, variant: str, base: str) -> float | None:
        row = found.get(section, variant)
        return found.ratio(row, base) if row else None

    for size, goal in SHARDED_GOALS.items():
        add(f"{size} wrapped by FSDP2 at {goal} of the plain process", of(size, "wrapped", "plain"), goal)
    add(f"7b in fp8, wrapped, at {FP8_GOAL} of bf16, wrapped", of("7b", "wrapped fp8", "wrapped"), FP8_GOAL)
    curve = found.get("fp8-300", "losses, fp8 and bf16")
    apart = curve["of_the_last_tenth"] if curve else None
    add(
        "loss of wrapped fp8 within 1% of bf16 after 300 steps",
        None if apart is None else 1 - apart,
        0.99,
        f"{apart:.2%} in the last tenth of the steps, at most {curve['largest_difference']:.1%} in one"
        if curve
        else None,
    )
    for size, goal in DETERMINISTIC_GOALS.items():
        name = "llama-1b at 8192 tokens" if size == "llama-1b" else size
        add(f"{name} with `deterministic=true` at {goal}", of(size, "deterministic", "plain"), goal)
    long = found.get("llama-1b-32k", "plain")
    add(f"llama-1b at 32k: causal rate {LONG_CONTEXT_GOAL}", long["causal_rate"] if long else None, LONG_CONTEXT_GOAL)
    far = found.get("llama-1b-128k", "plain")
    trains = 1.0 if far else 0.0 if "llama-1b-128k" in found.failed else None
    add("llama-1b trains at 128k", trains, 1.0, "yes" if far else "out of memory" if trains is not None else None)
    eight = found.get("llama-8b", "plain")
    add(
        "llama-8b at 2048 tokens trains on one H200",
        1.0 if eight else None,
        1.0,
        f"{eight['memory_gib']} GiB" if eight else None,
    )
    load = found.get("checkpoint", "load, warm")
    add("loading a checkpoint no slower than DCP", 1 / load["ratio"] if load else None, 1.0,
        f"{load['seconds']:.2f} s, DCP {load['dcp_seconds']:.2f} s" if load else None)  # fmt: skip
    ready = [row["seconds_to_ready"] for size in ("125m", "1b") if (row := found.get(f"peers-{size}", "ingot"))]
    add("125m is ready no later than 1b", ready[1] / ready[0] if len(ready) == 2 else None, 1.0,
        " and ".join(map(str, ready)) + " s" if len(ready) == 2 else None)  # fmt: skip
    add(f"a CUDA graph at {GRAPH_GOAL} times without, pythia-14m", of("pythia-14m", "graph", "one by one"), GRAPH_GOAL)
    waits = [row["host_syncs"] for row in found.rows if row.get("host_syncs") is not None]
    add("no step waits for the device", float(not any(waits)) if waits else None, 1.0,
        f"{sum(waits)} waits in {len(waits)} variants" if waits else None)  # fmt: skip
    return table(["goal", "result", ""], rows)
