"""How far bf16 and fp8 part from fp32 where that is hardest: at the recipe's highest learning rate from the first step.

    python benchmarks/gpu_losses.py DATA --models 7b --seeds 17 18 19 --out benchmarks/results/gpu_losses.json
    python benchmarks/gpu_losses.py benchmarks/results/gpu_losses.json     print the results

benchmarks/gpu.py checks a row under the learning rates of the recipe's warmup. Here the same 20 steps have the highest
rate, meant for hundreds of times the sequences, so that the loss jumps and rounding grows. What grows is then a matter
of bf16 or of our kernels: so nanoGPT's model is trained too, under torch's autocast, not compiled, without our kernels,
from the same weights; its residual stream in fp32, as autocast leaves it, or (`nanogpt-bf16`) in bf16, as
ingot's is. Every loss is kept; the table has the last ones. A reference that is in the file is not trained again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpu import CHECKED, SIZES, build, clean, cut, learn, read_batches, run_config, train_reference, write
from gpu_peers import PeerStep, build_peer
from gpu_profile import run_header

from ingot.config.run import RunConfig
from ingot.model.init import build_model

SYSTEMS = ["ingot", "nanogpt", "nanogpt-bf16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a prepared folder; or results of before, to print as a table")
    parser.add_argument("--models", nargs="+", default=["7b"], choices=SIZES)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--precisions", nargs="+", default=["bf16"], choices=["bf16", "fp8"], help="of ingot")
    parser.add_argument("--seeds", nargs="+", type=int, default=[17], help="of initial weights and order of samples")
    parser.add_argument("--out", type=Path, help="a JSON file; rows that it has of other runs are kept")
    arguments = parser.parse_args()
    if arguments.data.suffix == ".json":
        print(table(json.loads(arguments.data.read_text())["rows"]))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {"rows": []}
    if arguments.out is not None and arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    found |= run_header(device, found.get("command", ""))
    for model in arguments.models:
        for seed in arguments.seeds:
            for row in train_all(arguments, model, seed, device, found["rows"]):
                print(json.dumps(row), flush=True)
                found["rows"] = [*(other for other in found["rows"] if key(other) != key(row)), row]
                write(found, arguments.out)
    print(table(found["rows"]))


def train_all(arguments: argparse.Namespace, model: str, seed: int, device: torch.device, known: list[Any]) -> Any:
    """The losses of the reference, then of each system, from the same weights on the same batches."""
    size = SIZES[model]
    config = run_config(arguments.data, model, "learned", f"seed={seed}")
    batches = read_batches(config, CHECKED * size.micro)
    few = [cut(batches, step * size.micro, size.micro) for step in range(CHECKED)]
    named = {"model": model, "seed": seed, "sequences_per_step": size.micro}
    reference = named | {"system": "reference", "precision": "fp32"}
    if key(reference) not in map(key, known):
        yield reference | {"losses": train_reference(config, few, size.recomputed, device, highest=True)}
    for system in arguments.systems:
        for precision in arguments.precisions if system == "ingot" else ["bf16"]:
            narrow = config.model_copy(update={"precision": precision})
            stream = torch.bfloat16 if system == "nanogpt-bf16" else torch.float32
            step = (
                build("ingot", narrow, size, device) if system == "ingot" else plain_step(narrow, size, device, stream)
            )
            yield {**named, "system": system, "precision": precision, "losses": learn(config, step, few, highest=True)}
            del step
            clean(device)


def plain_step(config: RunConfig, size: Any, device: torch.device, stream: torch.dtype) -> PeerStep:
    """The peer as torch runs it by itself, recomputing where the reference does."""
    model = build_peer(
        "nanogpt", config, dict(build_model(config.model, config.seed, device).named_parameters()), device
    )
    model.recomputed, model.stream = size.recomputed, stream  # type: ignore[assignment]
    return PeerStep(config, model, device, size.micro)


def table(rows: list[dict[str, Any]]) -> str:
    """The last loss of each run and how far it is from that of fp32."""
    references = {(row["model"], row["seed"]): row["losses"] for row in rows if row["system"] == "reference"}
    lines = ["| model | seed | highest loss, fp32 | last loss, fp32 | system | precision | last loss | largest of 20 |",
             "|---|---:|---:|---:|---|---|---:|---:|"]  # fmt: skip
    for row in sorted(rows, key=key):
        if row["system"] != "reference":
            reference = references[row["model"], row["seed"]]
            apart = [own / other - 1 for own, other in zip(row["losses"], reference, strict=True)]
            lines.append(
                f"| {row['model']} | {row['seed']} | {max(reference):.2f} | {reference[-1]:.3f} | {row['system']} "
                f"| {row['precision']} | {apart[-1]:+.2%} | {max(apart, key=abs):+.2%} |"
            )
    return "\n".join(lines)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["seed"], row["system"], row["precision"]


if __name__ == "__main__":
    main()
