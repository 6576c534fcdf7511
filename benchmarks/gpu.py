"""Training speed on one GPU: ingot and its peers, one after the other in one process.

    python benchmarks/gpu.py DATA --models 125m 1b --out benchmarks/results/gpu.json
    python benchmarks/gpu.py DATA --models 125m 1b --profile --out ...       and where the time of a step goes
    python benchmarks/gpu.py DATA --models 125m 1b --train --out ...         the same through `ingot train`
    python benchmarks/gpu.py DATA --models 1b --budgets 1 0.5 0 --out ...    memory against speed
    python benchmarks/gpu.py benchmarks/results/gpu.json                     print the results as tables

Each call adds to the file of results, so the whole may be measured in parts; a reference that is in the file is not
trained again for the same batches.

Same initial weights, same batches of real text, same tokens per optimizer step: the recipe's global batch cut to what a
few seconds allow, which each row tells. Ingot's figures are of the trainer's own step (`train_step`, its optimizer, its
microbatches), not of a loop of their own. A row counts only if the loss after 20 steps is within 1% of a reference that
trains in fp32 (whose matrix products are in TF32 on a GPU, since true fp32 ones would take minutes). These steps
have the learning rates of the recipe's warmup, less by the square root of the part of its global batch that they train
on: at the recipe's peak, meant for up to 500 times the sequences, the first step takes 7b from a loss of 11.5 to 30,
and bf16 ends 5% from fp32. docs/explanation/gpu-step.md has what other rates gave.

`mfu_full` is tokens per second x (6 N + 12 L d S) / peak, `mfu_causal` counts half of the attention, as it is computed;
both by the peak of bf16, also for fp8. Our ALiBi kernel skips what it proves negligible, yet the formulas count it, as
they count the upper triangle that nobody computes. `spread` is the range of the timed steps over their median.
`product_flops` is what a large matrix product alone reaches for a second beforehand: cards of one kind differ by some
percent in what their power limit lets them do.
"""

import argparse
import gc
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from gpu_peers import PEERS, PeerStep, build_peer
from gpu_profile import event_times, profile_step, run_header, tables
from gpu_train import run_train

from ingot.config.durations import BatchClock
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch, BatchLoader
from ingot.data.loading.open_dataset import open_dataset
from ingot.model.init import build_model
from ingot.parallel.executors.base import NoMessages
from ingot.parallel.executors.build import build_single
from ingot.parallel.executors.device import peak_flops
from ingot.parallel.executors.single import SingleProcess
from ingot.training.loss_scale import LossScale
from ingot.training.optimizer import Optimizer
from ingot.training.schedule import lr_multiplier
from ingot.training.step import train_step

CHECKED, TOLERANCE = 20, 0.01  # steps of one microbatch each, whose last loss may be so far from the reference's


@dataclass(frozen=True)
class Size:
    """How a model is run here."""

    micro: int  # sequences per microbatch, the fastest measured
    microbatches: int  # per optimizer step
    recomputed: bool = False  # whether the reference must recompute to fit on a card
    overrides: tuple[str, ...] = ()


SIZES = {
    "125m": Size(32, 8), "350m": Size(32, 8), "760m": Size(16, 8), "1b": Size(16, 4), "3b": Size(8, 8, True),
    "7b": Size(2, 16, True),
    "tiny": Size(2, 2, True, overrides=(
        "model.d_model=64", "model.n_heads=2", "model.n_layers=2", "model.vocab_size=512",
        "max_seq_len=32")),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a prepared folder; or results of before, to print as a table")
    parser.add_argument("--models", nargs="+", default=["125m", "1b"], choices=SIZES)
    parser.add_argument("--systems", nargs="+", default=["ingot", *PEERS], choices=["ingot", *PEERS])
    parser.add_argument("--positions", nargs="+", default=["learned", "alibi"], choices=["learned", "alibi", "rotary"])
    parser.add_argument("--precisions", nargs="+", default=["bf16"], choices=["bf16", "fp8"])
    parser.add_argument("--optimizers", nargs="+", choices=["adamw", "muon"], help="ingot's, in place of the recipe's")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    parser.add_argument("--profile", action="store_true", help="also ingot's time of a step by kind of kernel")
    parser.add_argument("--budgets", nargs="+", type=float, help="no rows, but memory and speed of activation budgets")
    parser.add_argument("--train", action="store_true", help="no rows, but the speed and start of `ingot train`")
    parser.add_argument("--curve", type=int, default=0, help="train 125m in bf16 and fp8 for so many steps and compare")
    parser.add_argument("--out", type=Path, help="a JSON file; rows that it has of other variants are kept")
    arguments = parser.parse_args()
    if arguments.data.suffix == ".json":
        found = json.loads(arguments.data.read_text())
        print(table(found), *tables(found), sep="\n\n")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    if arguments.out is not None and arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    found |= run_header(device, found.get("command", ""))
    wrong = 0
    for model in arguments.models:
        for positions in arguments.positions:
            rows = partial(measure, references=found.setdefault("references", []))
            examine = measure_train if arguments.train else measure_budgets if arguments.budgets else rows
            for section, row in examine(arguments, model, positions, device):
                print(section, json.dumps(row), flush=True)
                if "loss" in row and abs(row["loss"] / row["reference_loss"] - 1) > TOLERANCE:
                    print(f"the loss of {row['system']} is wrong, so it has no figure", file=sys.stderr)
                    wrong += 1
                    continue
                known = found.setdefault(section, [])
                known[:] = sorted([*(other for other in known if key(other) != key(row)), row], key=key)
                write(found, arguments.out)
    if arguments.curve:
        found["fp8_curve"] = fp8_curve(arguments, device)
        print(json.dumps(found["fp8_curve"]))
        write(found, arguments.out)
    sys.exit(1 if wrong else 0)


def table(found: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = ["| model | positions | precision | system | tokens/s | MFU | MFU, causal | GiB | loss, against fp32 |",
             "|---|---|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    sizes = list(SIZES)
    order = lambda row: (sizes.index(row["model"]), *key(row)[1:3], -row["tokens_per_second"])  # noqa: E731
    for row in sorted(found["rows"], key=order):
        apart = row["loss"] / row["reference_loss"] - 1
        lines.append(
            f"| {row['model']} | {row['positions']} | {row['precision']} "
            f"| {row['system']}{', ' + row['optimizer'] if 'optimizer' in row else ''} "
            f"| {row['tokens_per_second']:,} | {row['mfu_full']:.1%} | {row['mfu_causal']:.1%} "
            f"| {row['memory_gib']} | {apart:+.2%} |"
        )
    return "\n".join(lines)


def write(found: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    named = (row[field] for field in ("model", "positions", "precision", "system"))
    return *named, row.get("optimizer", ""), row.get("budget", 1.0)


def measure(
    arguments: argparse.Namespace, model: str, positions: str, device: torch.device, references: list[dict[str, Any]]
) -> Iterator[tuple]:
    """A row for each system that has this variant, and our profile."""
    size = SIZES[model]
    config = run_config(arguments.data, model, positions)
    batches = read_batches(config, CHECKED * size.micro + size.micro * size.microbatches * 2)
    few = [cut(batches, step * size.micro, size.micro) for step in range(CHECKED)]
    large = [
        cut(batches, (CHECKED + step * size.microbatches) * size.micro, size.micro * size.microbatches)
        for step in range(2)
    ]
    for precision, optimizer in product(arguments.precisions, arguments.optimizers or [None]):
        named: dict[str, Any] = {"optimizer": optimizer} if optimizer else {}
        if optimizer:
            config = run_config(arguments.data, model, positions, f"optimizer.name={optimizer}")
        digest = hashlib.sha256(b"".join(batch.tokens.tobytes() for batch in few)).hexdigest()[:16]
        wanted = {"system": "reference", "model": model, "positions": positions, "precision": "fp32", **named,
                  "batches": digest, "seed": config.seed}  # fmt: skip
        known = (row["fp32_loss"] for row in references if row == wanted | {"fp32_loss": row["fp32_loss"]})
        reference = next(known, None) or train_reference(config, few, size.recomputed, device)[-1]
        yield "references", wanted | {"fp32_loss": reference}
        limit = product_flops(device)
        for system in arguments.systems:
            if system != "ingot" and (positions != "learned" or precision != "bf16" or optimizer):
                continue  # the peers have no other form
            start = time.perf_counter()
            step, times = None, []
            try:
                step = build(system, config.model_copy(update={"precision": precision}), size, device)
                loss = learn(config, step, few)[-1]
                ready = time.perf_counter() - start
                times = step_times(step, large, arguments.steps, device)
            except torch.OutOfMemoryError:
                print(f"{system} does not fit at {model} with a microbatch of {size.micro}: no row", flush=True)
            if not times:  # only here does nothing hold the tensors of the failed attempt
                del step
                clean(device)
                continue
            memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
            tokens, seconds = large[0].tokens.size, statistics.median(times)
            peak = peak_flops(device, "bf16")[0]
            rate = tokens / seconds
            who = {"system": system, "model": model, "positions": positions, "precision": precision, **named,
                   "family": config.model.family, "execution": "plain", "deterministic": False,
                   "microbatch": size.micro, "sequences_per_step": len(large[0].tokens)}  # fmt: skip
            yield "rows", {
                **who, "tokens_per_second": round(rate),
                "mfu_full": round(rate * config.model.flops_per_token(config.max_seq_len) / peak, 4),
                "mfu_causal": round(rate * config.model.flops_per_token(config.max_seq_len, causal=True) / peak, 4),
                "memory_gib": round(memory, 1), "spread": round((max(times) - min(times)) / seconds, 4),
                "product_flops": limit, "loss": loss, "reference_loss": reference, "seconds_to_ready": round(ready, 1),
            }  # fmt: skip
            if arguments.profile and system == "ingot":
                yield "profile", who | profile_step(partial(timed, step, large[0], device))
            del step
            clean(device)


def measure_budgets(arguments: argparse.Namespace, model: str, positions: str, device: torch.device) -> Iterator[tuple]:
    """The memory and speed of budgets for activations."""
    size = SIZES[model]
    config = run_config(arguments.data, model, positions)
    batch = read_batches(config, size.micro * min(2, size.microbatches))
    for precision, budget in product(arguments.precisions, arguments.budgets):
        functorch.activation_memory_budget = budget
        step = build("ingot", config.model_copy(update={"precision": precision}), size, device)
        timed(step, batch, device)
        times = step_times(step, [batch], arguments.steps, device)
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
        yield "budget", {
            "system": "ingot", "model": model, "positions": positions, "precision": precision, "budget": budget,
            "microbatch": size.micro, "sequences_per_step": len(batch.tokens),
            "tokens_per_second": round(batch.tokens.size / statistics.median(times)), "memory_gib": round(memory, 1),
        }  # fmt: skip
        del step
        clean(device)
    functorch.activation_memory_budget = 1.0


def measure_train(arguments: argparse.Namespace, model: str, positions: str, device: torch.device) -> Iterator[tuple]:
    """The speed of `ingot train` with the same batches, and the time until its first step. What it decides by itself,
    such as the microbatch and what is recomputed, is left to it."""
    size = SIZES[model]
    for precision in arguments.precisions:
        more = [f"global_train_batch_size={size.micro * size.microbatches}", f"precision={precision}"]
        found = run_train([*run_arguments(arguments.data, model, positions), *more], 2 * arguments.steps)
        named = {"system": "ingot", "model": model, "positions": positions, "precision": precision}
        yield "train", named | found


def run_arguments(data: Path, model: str, positions: str) -> list[str]:
    """What `ingot train` would be given."""
    recipe = "mpt-125m" if model == "tiny" else f"mpt-{model}"
    return [recipe, *SIZES[model].overrides, f"model.positions={positions}", f"data={data}", "precision=bf16"]


def run_config(data: Path, model: str, positions: str, *more: str) -> RunConfig:
    return load_config(RunConfig, [*run_arguments(data, model, positions), *more])


def read_batches(config: RunConfig, rows: int) -> Batch:
    """The first sequences of the run's own order."""
    data = open_dataset(config.sources.train, config.max_seq_len, config.model.vocab_size)
    return next(islice(BatchLoader(data, rows, seed=config.seed, shuffle=True).batches(), 1))


def cut(batch: Batch, start: int, rows: int) -> Batch:
    part = slice(start, start + rows)
    return Batch(batch.tokens[part], batch.labels[part], batch.samples[part])


class IngotStep:
    """The trainer's own step on one process."""

    def __init__(self, config: RunConfig, executor: SingleProcess, micro: int):
        self.config, self.executor, self.model = config, executor, executor.model
        executor.microbatch = micro
        executor.set_recompute(config.recompute)
        executor.weights_changed()
        self.optimizer = Optimizer(config.optimizer, {p.tensor: p.name for p in executor.parameters})
        self.scaler = LossScale(executor.device, enabled=config.precision == "fp16")
        self.steps = 0

    def run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        self.executor.begin_step(self.steps)
        self.steps += 1
        result = train_step(self.executor, self.optimizer, self.scaler, batch, self.config.gradient_clipping)
        return result.loss_share, result.grad_norm


def build(system: str, config: RunConfig, size: Size, device: torch.device) -> IngotStep | PeerStep:
    """A system ready to train, from the same weights as every other."""
    compile = device.type == "cuda"
    if system == "ingot":
        plain = config.model_copy(update={"cuda_graphs": False})
        return IngotStep(plain, build_single(plain, device, compile, NoMessages()), size.micro)
    model: Any = build_model(config.model, config.seed, device)
    model = build_peer(system, config, dict(model.named_parameters()), device)
    return PeerStep(config, torch.compile(model, dynamic=False) if compile else model, device, size.micro)


def learn(config: RunConfig, step: IngotStep | PeerStep, batches: list[Batch], highest: bool = False) -> list[float]:
    """The losses of some steps, by the schedule of the recipe or at its highest rate. Since a step has but a part of
    the recipe's batch, the learning rate of the schedule is scaled by the square root of that part."""
    clock = BatchClock(config.global_train_batch_size, config.max_seq_len, len(batches), config.max_duration)
    scale = math.sqrt(len(batches[0].tokens) / config.global_train_batch_size)
    set_lr = step.set_lr if isinstance(step, PeerStep) else step.optimizer.set_lr
    losses = []
    for done, batch in enumerate(batches):
        set_lr(1.0 if highest else scale * lr_multiplier(config.scheduler, clock, done))
        losses.append(step.run(batch)[0])
    return [float(loss) for loss in losses]


def train_reference(
    config: RunConfig, batches: list[Batch], recomputed: bool, device: torch.device, highest: bool = False
) -> list[float]:
    """The losses of the same steps in fp32, neither compiled nor with our kernels."""
    exact = config.model_copy(update={"precision": "fp32", "cuda_graphs": False})
    executor = build_single(exact, device, compiled=False, messages=NoMessages())
    step = IngotStep(exact, executor, max(1, len(batches[0].tokens) // 4))
    executor.set_recompute("full" if recomputed else None)
    torch.backends.cuda.matmul.allow_tf32 = True
    result = learn(exact, step, batches, highest)
    torch.backends.cuda.matmul.allow_tf32 = False
    del step, executor
    clean(device)
    return result


def fp8_curve(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The losses of the same run in bf16 and in fp8: their means over tenths of it, and how far apart they are."""
    losses = {}
    name = arguments.models[0] if "tiny" in arguments.models else "125m"
    size = Size(min(16, SIZES[name].micro), 1)
    for precision in ("bf16", "fp8"):
        config = run_config(arguments.data, name, "learned").model_copy(update={"precision": precision})
        data = open_dataset(config.sources.train, config.max_seq_len, config.model.vocab_size)
        step = build("ingot", config, size, device)
        batches = BatchLoader(data, size.micro, seed=1, shuffle=True).batches()
        found = torch.stack([step.run(batch)[0] for batch in islice(batches, arguments.curve)])
        losses[precision] = [round(float(part.mean()), 4) for part in found.chunk(10)]
        del step
        clean(device)
    apart = [abs(b / a - 1) for a, b in zip(losses["bf16"], losses["fp8"], strict=True)]
    return {"model": name, "steps": arguments.curve, "sequences_per_step": size.micro, **losses,
            "largest_difference": round(max(apart), 5)}  # fmt: skip


def timed(step: IngotStep | PeerStep, batch: Batch, device: torch.device) -> float:
    start = time.perf_counter()
    float(step.run(batch)[0])  # waits for the device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def step_times(step: IngotStep | PeerStep, batches: list[Batch], steps: int, device: torch.device) -> list[float]:
    """Seconds of each step after the first, one upon the other without waiting for the device, as a trainer runs."""
    if device.type == "cpu":
        return [timed(step, batches[n % len(batches)], device) for n in range(steps + 1)][1:]
    turns = cycle(batches)
    step.run(next(turns))
    return event_times(lambda: step.run(next(turns)), steps)


def product_flops(device: torch.device) -> float:
    """The rate of a large matrix product over a second, so that the card is as warm as in training."""
    size, times = (8192, 700) if device.type == "cuda" else (256, 2)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    float((a @ b)[0, 0])
    start = time.perf_counter()
    for _ in range(times):
        product = a @ b
    float(product[0, 0])  # waits for the device
    return round(times * 2 * size**3 / (time.perf_counter() - start))


def clean(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    main()
