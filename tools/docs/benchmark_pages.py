"""Tables and charts of docs/performance.md, from the results in benchmarks/results."""

import json
from pathlib import Path
from typing import Any

import execution_pages
from drawing import bars, table

FOLDER = "docs/generated"


def pages(results: Path) -> dict[str, str]:
    gpu, data = _read(results, "gpu"), _read(results, "data")
    faults, launch = _read(results, "faults"), _read(results, "launch")
    saves, graphs = _read(results, "checkpoint")["results"], _read(results, "cuda_graphs")
    again = [_read(results, path.stem) for path in sorted(results.glob("gpu_again_*.json"))]
    made = {
        "gpu.md": gpu_table(gpu),
        "gpu.svg": gpu_chart(gpu),
        "gpu-again.md": again_table(gpu, again),
        "gpu-train.md": train_table(gpu),
        "gpu-train.svg": train_chart(gpu),
        "gpu-goals.md": goal_table(gpu),
        "prepare.md": prepare_table(data),
        "prepare.svg": prepare_chart(data),
        "loading.md": loading_table(data),
        "loading.svg": loading_chart(data),
        "streaming.md": streaming_table(data),
        "streaming.svg": streaming_chart(data),
        "checkpoints.md": checkpoint_table(saves),
        "checkpoints.svg": checkpoint_chart(saves),
        "recovery.md": recovery_table(faults, launch),
        "recovery.svg": recovery_chart(faults, launch),
        "restarts.md": restart_table(_read(results, "recovery")),
        "restarts-at-scale.md": restart_estimate(_read(results, "recovery")),
        "cuda-graphs.md": graph_table(graphs),
        "cuda-graphs.svg": graph_chart(graphs),
        "profile.md": profile_table(gpu),
        "kernels.md": kernel_table(_read(results, "gpu_kernels")),
        "losses.md": loss_table(_read(results, "gpu_losses")),
        "evaluation.md": evaluation_table(_read(results, "evaluation")),
        "evaluation.svg": evaluation_chart(_read(results, "evaluation")),
        "memory.md": memory_table(gpu),
        "memory.svg": memory_chart(gpu),
        **execution_pages.pages(gpu),
    }
    return {f"{FOLDER}/{name}": text for name, text in made.items()}


def _read(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


# --- training on one GPU


def _gpu_rows(gpu: Any) -> list[dict[str, Any]]:
    sizes = ["125m", "350m", "760m", "1b", "3b", "7b"]
    return sorted(gpu["rows"], key=lambda r: (sizes.index(r["model"]), r["positions"], -r["tokens_per_second"]))


def _system(row: dict[str, Any]) -> str:
    names = {
        "nanogpt": "nanoGPT, compiled",
        "torch": "nn.TransformerEncoder, compiled",
        "hf": "transformers GPT-2, compiled",
    }
    name = names.get(row["system"], row["system"])
    return f"{name}, {row['optimizer']}" if row.get("optimizer", "adamw") != "adamw" else name


def gpu_table(gpu: Any) -> str:
    head = ["model", "positions", "precision", "system", "tokens/s", "MFU", "memory, GiB", "loss against fp32"]
    rows: list[list[object]] = []
    for r in _gpu_rows(gpu):
        difference = r["loss"] / r["reference_loss"] - 1 if r.get("loss") and r.get("reference_loss") else None
        rows.append([r["model"], r["positions"], r["precision"], _system(r), f"{r['tokens_per_second']:,.0f}",
                     f"{r['mfu_full']:.1%}", r["memory_gib"],
                     f"{difference:+.2%}" if difference is not None else ""])  # fmt: skip
    return table(head, rows)


def gpu_chart(gpu: Any) -> str:
    rows = [r for r in _gpu_rows(gpu) if r["positions"] == "learned" and r["precision"] == "bf16"]
    rows = [r for r in rows if r["system"] in ("ingot", "nanogpt") and r.get("optimizer", "adamw") == "adamw"]
    labels = [f"{'ingot' if r['system'] == 'ingot' else 'nanoGPT'}, {r['model']}" for r in rows]
    return bars(labels, [100 * r["mfu_full"] for r in rows], "MFU, percent (bf16, learned positions)")


def _own(gpu: Any, positions: str = "learned", precision: str = "bf16") -> dict[str, dict[str, Any]]:
    """The rows of ingot with AdamW, by model."""
    return {r["model"]: r for r in _gpu_rows(gpu)
            if (r["system"], r["positions"], r["precision"]) == ("ingot", positions, precision)
            and r.get("optimizer", "adamw") == "adamw"}  # fmt: skip


def again_table(gpu: Any, again: list[Any]) -> str:
    """The MFU of the table's machine and of others, and a sentence on how far they are apart."""
    rows: list[list[object]] = []
    apart = [0.0]
    for model, row in _own(gpu).items():
        others = [_own(other)[model]["mfu_full"] for other in again if model in _own(other)]
        every = [row["mfu_full"], *others]
        apart.append(max(every) / min(every) - 1)
        rows.append([model, f"{row['mfu_full']:.1%}", ", ".join(f"{mfu:.1%}" for mfu in others)])
    spread = max(r.get("spread", 0.0) for r in gpu["rows"])
    return table(["MFU", "here", "on other machines"], rows) + (
        f"\nTimed steps of a row differ by at most {spread:.1%}, machines by up to {max(apart):.1%}.\n"
    )


def train_table(gpu: Any) -> str:
    rows: list[list[object]] = [
        [r["model"], f"{r['tokens_per_second']:,.0f}", f"{_of_step(gpu, r):.1%}", r.get("seconds_to_first_step", "")]
        for r in gpu["train"]
    ]
    return table(["model", "tokens/s of `ingot train`", "of the step alone", "seconds to the first step"], rows)


def _of_step(gpu: Any, row: dict[str, Any]) -> float:
    return row["tokens_per_second"] / _own(gpu)[row["model"]]["tokens_per_second"]


def train_chart(gpu: Any) -> str:
    values = [100 * _of_step(gpu, r) for r in gpu["train"]]
    return bars(
        [r["model"] for r in gpu["train"]], values, "speed of ingot train, percent of the step alone", peers=False
    )


def goal_table(gpu: Any) -> str:
    """What was aimed at, and what the results are."""
    own, alibi, train = _own(gpu), _own(gpu, "alibi"), {r["model"]: r for r in gpu["train"]}
    goals = [(f"{model} at {goal:.0%} MFU", f"{own[model]['mfu_full']:.1%}", own[model]["mfu_full"] >= goal)
             for model, goal in zip(own, (0.56, 0.58, 0.62, 0.63, 0.64, 0.63), strict=True)]  # fmt: skip
    goals += [(f"{model} with ALiBi at {goal:.0%} MFU", f"{alibi[model]['mfu_full']:.1%}", alibi[model]["mfu_full"] >= goal)
              for model, goal in zip(alibi, (0.54, 0.56, 0.60, 0.61, 0.62, 0.61), strict=True)]  # fmt: skip
    fp8 = _own(gpu, precision="fp8")["7b"]["tokens_per_second"] / own["7b"]["tokens_per_second"]
    curve, least = gpu["fp8_curve"]["largest_difference"], min(_of_step(gpu, r) for r in gpu["train"])
    goals += [
        ("fp8 at 7b at least 1.2 times bf16", f"{fp8:.2f}", fp8 >= 1.2),
        ("fp8 at 125m within 1% of bf16 over 300 steps", f"{curve:.2%}", curve <= 0.01),
        ("1b at microbatch 16 in at most 74.7 GiB", f"{own['1b']['memory_gib']} GiB", own["1b"]["memory_gib"] <= 74.7),
        ("7b with fp32 weights and Adam on one card", f"{own['7b']['memory_gib']} GiB", True),
        ("`ingot train` at 97% of the step alone", f"at least {least:.1%}", least >= 0.97),
        ("1b to the first step in 30 s, warm cache", f"{train['1b']['seconds_to_first_step']} s",
         train["1b"]["seconds_to_first_step"] <= 30),
    ]  # fmt: skip
    return table(["goal", "result", ""], [[goal, found, "met" if met else "missed"] for goal, found, met in goals])


def profile_table(gpu: Any) -> str:
    runs = gpu["profile"]
    names = [
        f"{r['model']}{' ALiBi' if r['positions'] == 'alibi' else ''}{' fp8' if r['precision'] == 'fp8' else ''}"
        for r in runs
    ]
    rows: list[list[object]] = []
    for kind in runs[0]["milliseconds"]:
        shares = [r["milliseconds"][kind] / sum(r["milliseconds"].values()) for r in runs]
        rows.append([kind, *(f"{share:.1%}" for share in shares)])
    rows.append(["step, ms", *(f"{sum(r['milliseconds'].values()):,.0f}" for r in runs)])
    rows.append(["clock, MHz", *(f"{r['sm_mhz']:.0f}" for r in runs)])
    rows.append(["power, W", *(f"{r['watts']:.0f}" for r in runs)])
    return table(["", *names], rows)


def kernel_table(kernels: Any) -> str:
    rows: list[list[object]] = [
        [f"{r['model']}: {r['kernel']}", f"{r['ms']:.2f}", "" if r["peer_ms"] is None else f"{r['peer_ms']:.2f}", f"{r['of_limit']:.0%}"]
        for r in kernels["rows"]
    ]  # fmt: skip
    return table(["kernel, forward and backward", "ms", "what it replaces, ms", "of the hardware limit"], rows)


def loss_table(losses: Any) -> str:
    """The last loss of each run against fp32 with the same seed."""
    references = {r["seed"]: r["losses"] for r in losses["rows"] if r["system"] == "reference"}
    rows: list[list[object]] = []
    for r in losses["rows"]:
        if r["system"] != "reference":
            apart = [own / other - 1 for own, other in zip(r["losses"], references[r["seed"]], strict=True)]
            rows.append([f"{r['system']}, seed {r['seed']}", f"{apart[-1]:+.2%}", f"{max(apart, key=abs):+.2%}"])
    return table(["model of 7b in bf16", "last of 20 steps, against fp32", "largest difference"], sorted(rows, key=str))


def memory_table(gpu: Any) -> str:
    rows: list[list[object]] = [
        [r["budget"], f"{r['tokens_per_second']:,}", r["memory_gib"]] for r in reversed(gpu["budget"])
    ]
    return table(["`activation_checkpointing`", "tokens/s", "memory, GiB"], rows)


def memory_chart(gpu: Any) -> str:
    runs = list(reversed(gpu["budget"]))
    labels = [f"{r['budget']}: {r['memory_gib']} GiB" for r in runs]
    return bars(labels, [r["tokens_per_second"] for r in runs], "tokens per second, by fraction kept", peers=False)


def graph_chart(graphs: Any) -> str:
    labels = [f"{r['model']}, microbatch {r['microbatch']}" for r in graphs["rows"]]
    ratios = [r["graph"] / r["launched"] for r in graphs["rows"]]
    return bars(labels, ratios, "speed with a CUDA graph, relative to without", peers=False)


def graph_table(graphs: Any) -> str:
    rows: list[list[object]] = [
        [r["model"], r["microbatch"], f"{r['launched']:,}", f"{r['graph']:,}", f"{r['graph'] / r['launched']:.2f}"]
        for r in graphs["rows"]
    ]
    return table(
        ["model", "microbatch", "tokens/s, kernels launched one by one", "tokens/s, CUDA graph", "ratio"], rows
    )


# --- data


def prepare_table(data: Any) -> str:
    rows = [r for section in ("prepare", "prepare-peers") for r in data["sections"][section]["rows"]]
    body: list[list[object]] = [
        [r["what"], f"{r['mb']:,.0f}", f"{r['mb_per_s']:,.0f}" if r["mb_per_s"] > 10 else f"{r['mb_per_s']:.1f}", f"{r['pss_mb']:,.0f}"]
        for r in rows
    ]  # fmt: skip
    return table(["text to shards, whole command", "input, MB", "MB/s", "memory, MB"], body)


def prepare_chart(data: Any) -> str:
    ours = [r for r in data["sections"]["prepare"]["rows"] if r["what"] in
            ("ingot prepare, jsonl to mds, 2 workers", "ingot prepare, jsonl to indexed, 2 workers")]  # fmt: skip
    rows = ours + data["sections"]["prepare-peers"]["rows"]
    return bars(
        [r["what"].split(" (")[0] for r in rows], [r["mb_per_s"] for r in rows], "MB of text per second", log=True
    )


def loading_table(data: Any) -> str:
    rows = [r for section in ("loading", "loading-peers") for r in data["sections"][section]["rows"]]
    body: list[list[object]] = []
    for r in rows:
        first, resumed = (f"{1000 * r[key]:,.1f}" if key in r else "" for key in ("first_batch_s", "resumed_s"))
        body.append([r["what"], f"{r['samples_per_s']:,.0f}" if "samples_per_s" in r else "", first, resumed])
    return table(["shuffled samples of 2,048 tokens", "samples/s", "first batch, ms", "resumed, ms"], body)


def loading_chart(data: Any) -> str:
    rows = [r for section in ("loading", "loading-peers") for r in data["sections"][section]["rows"]]
    rows = [r for r in rows if "samples_per_s" in r and "batch 8" in r["what"] and "memmap" not in r["what"]]
    return bars([r["what"].removesuffix(", batch 8") for r in rows], [r["samples_per_s"] for r in rows],
                "samples of 2,048 tokens per second, batches of 8", log=True)  # fmt: skip


def streaming_table(data: Any) -> str:
    rows: list[list[object]] = [
        [r["what"], f"{r['mb_per_s']:,.0f}", f"{r['share_of_plain']:.0%}"]
        for r in data["sections"]["streaming"]["rows"]
    ]
    return table(["from an object store on loopback", "MB/s", "of plain downloads"], rows)


def streaming_chart(data: Any) -> str:
    rows = data["sections"]["streaming"]["rows"]
    labels = [" of ".join(reversed(r["what"].split(": ", 1))) for r in rows]
    return bars(labels, [r["mb_per_s"] for r in rows], "MB per second")


# --- downstream tasks


def evaluation_table(runs: Any) -> str:
    """ingot against lm-evaluation-harness's own `hf` model, on the same questions."""
    rows: list[list[object]] = []
    for name, run in runs.items():
        for what, key in (("scoring", "scoring"), ("scoring, CPU time", "scoring_cpu"), ("whole command", "whole")):
            own, peer = run["ingot_seconds"][key], run["hf_seconds"][key]
            rows.append([f"{name}: {what}", f"{run['requests']:,}", f"{own:.1f}", f"{peer:.1f}", f"{peer / own:.1f}"])
    differences = max(run["largest_log_likelihood_difference"] for run in runs.values())
    same = all(run["accuracies"]["ingot"] == run["accuracies"]["hf"] for run in runs.values())
    return table(["", "requests", "ingot, s", "`hf` model, s", "ratio"], rows) + (
        f"\nAccuracies are {'equal' if same else 'not all equal'}; log-likelihoods differ by at most {differences:.1g}.\n"
    )


def evaluation_chart(runs: Any) -> str:
    seconds = {
        f"{system}, {name}": run[f"{key}_seconds"]["scoring_cpu"]
        for name, run in runs.items()
        for system, key in (("ingot", "ingot"), ("lm-evaluation-harness", "hf"))
    }
    return bars(list(seconds), list(seconds.values()), "seconds of CPU time for scoring")


# --- checkpoints and recovery


def _stalls(saves: Any) -> list[tuple[str, dict[str, float]]]:
    found = []
    for run in saves:
        device = (
            "H200"
            if run["device"] != "cpu"
            else f"CPU, {run['processes']} process{'es' if run['processes'] > 1 else ''}"
        )
        times = {name: value["median"] for name, value in run["seconds"].items() if isinstance(value, dict)}
        found.append((f"{device}, {run['state_bytes'] / 1e9:.1f} GB", times))
    return found


def checkpoint_table(saves: Any) -> str:
    names = ["torch.save, stall", "dcp.save, stall", "dcp.async_save, stall", "ingot, stall", "ingot, total"]
    rows: list[list[object]] = [
        [where, *(f"{1000 * times[name]:,.1f}" if name in times else "" for name in names)]
        for where, times in _stalls(saves)
    ]
    return table(["milliseconds", *names], rows)


def checkpoint_chart(saves: Any) -> str:
    where, times = _stalls(saves)[-1]
    names = [
        name
        for name in ("torch.save, stall", "dcp.save, stall", "dcp.async_save, stall", "ingot, stall")
        if name in times
    ]
    return bars(
        names, [1000 * times[name] for name in names], f"milliseconds that training stops per save ({where})", log=True
    )


def _recovery(faults: Any, launch: Any) -> dict[str, float]:
    """Seconds, by from what to what."""
    seconds = launch["seconds"]
    return {
        "killed process detected": faults["detection_seconds"]["median"],
        "killed process to training again, one machine": faults["back_seconds"]["median"],
        "`sbatch` to the first step, Slurm": seconds["submit_to_first_step"],
        "rank dies to training again, inside the allocation": seconds["rank_death_to_stepping_inside_the_allocation"],
        "job dies to training again, next job of the chain": seconds["job_death_to_stepping_in_the_next_of_the_chain"],
        "requeue to training again": seconds["requeue_to_stepping"],
    }


def recovery_table(faults: Any, launch: Any) -> str:
    rows: list[list[object]] = [[what, f"{value:.2g}"] for what, value in _recovery(faults, launch).items()]
    return table(["from what to what", "seconds"], rows)


def recovery_chart(faults: Any, launch: Any) -> str:
    seconds = _recovery(faults, launch)
    return bars([what.replace("`", "") for what in seconds], list(seconds.values()), "seconds", peers=False)


def restart_table(found: Any) -> str:
    rows: list[list[object]] = [
        [failure, "host memory" if run["from_host_memory"] else "checkpoint or start", f"{run['detected']:.0f}",
         f"{run['back']:.0f}", f"{run['steps_lost']:.0f}"]
        for failure, run in found["measured"].items()
    ]  # fmt: skip
    return table(["failure", "continues from", "seconds to the judgment", "seconds to the next step", "steps repeated"],
                 rows)  # fmt: skip


def restart_estimate(found: Any) -> str:
    now, before = found["computed"]["at_1024_nodes"], found["computed"]["at_1024_nodes_before"]
    rows: list[list[object]] = [
        [failure, now[failure]["formula"], *(f"{side[failure][part]:,}" for part in ("seconds_away", "seconds_repeated")
                                             for side in (now, before))]
        for failure in now
    ]  # fmt: skip
    return table(["failure", "formula: away; repeated", "away, s", "before", "repeated, s", "before"], rows)
