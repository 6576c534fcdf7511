"""How fast a model is scored on downstream tasks: ingot against lm-evaluation-harness's own `hf` model.

    python benchmarks/evaluation.py --icl FOLDER --tokenizer TOKENIZER.json
    python benchmarks/evaluation.py --icl FOLDER --tokenizer TOKENIZER.json --recipe pythia-1b --device cuda

Both score the same weights (random, in the shape of a recipe) on the same tasks on the same machine: arc_challenge
3-shot, piqa 10-shot and lambada, converted to task files of the harness, the first --limit documents of each. Both run
in `lm_eval.simple_evaluate`, which reads, draws examples and counts alike for both; models are loaded before. The
harness's model runs with each of --batch-size on a few documents, and goes on with the fastest. Then the two take
turns, and the median of --repeats counts. Log-likelihoods are compared: in fp32 they agree to 1e-4.

Reported are seconds of the whole call, and of scoring alone (from texts to log-likelihoods, tokenizing included), by
the clock and of CPU time. The row is stored under its recipe and device in benchmarks/results/evaluation.json.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import torch
import yaml
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from ingot.checkpoint.hf.folder import export_hf
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.tokenizer import load_tokenizer
from ingot.evaluation.lm_eval.model import IngotLM
from ingot.model.init import build_model

RESULTS = Path(__file__).parent / "results" / "evaluation.json"
MEAN = {"aggregation": "mean", "higher_is_better": True}
CHOICE = {
    "output_type": "multiple_choice", "doc_to_text": "{{query}}\nAnswer:", "doc_to_choice": "choices",
    "doc_to_target": "gold", "fewshot_delimiter": "\n", "metric_list": [{"metric": "acc", **MEAN}],
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "arc_challenge": {**CHOICE, "num_fewshot": 3},
    "piqa": {**CHOICE, "num_fewshot": 10},
    "lambada_openai": {
        "output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": " {{continuation}}",
        "num_fewshot": 0, "metric_list": [{"metric": "acc", **MEAN}],
    },
}  # fmt: skip


@dataclass
class Contender:
    """A model in the harness, and what its runs took."""

    name: str
    model: LM
    whole: list[float] = field(default_factory=list)
    scoring: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # CPU time of scoring, all threads
    likelihoods: dict[str, list[float]] = field(default_factory=dict)
    accuracies: dict[str, float] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop the times so far."""
        for times in (self.whole, self.scoring, self.cpu):
            times.clear()

    def seconds(self) -> dict[str, Any]:
        """Medians, and all times."""
        found: dict[str, Any] = {}
        for name, times in (("scoring", self.scoring), ("whole", self.whole), ("scoring_cpu", self.cpu)):
            found |= {name: statistics.median(times), f"all_{name}": list(times)}
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--icl", type=Path, required=True, help="folder with the three .jsonl files of LLM Foundry")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--recipe", default="pythia-14m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8], help="tried with the harness's model")
    parser.add_argument("--try-on", type=int, default=8, help="documents of each task to try batch sizes on")
    parser.add_argument("--compile", action="store_true", help="compile ingot's blocks for a fixed set of shapes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    args = parser.parse_args()
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = write_tasks(folder, args.icl)
        export_model(args.recipe, args.tokenizer, folder / "model")
        ours, theirs = open_models(folder / "model", args.device, dtype, args.compile)
        manager = TaskManager(include_defaults=False)
        for contender in (ours, theirs):  # reads the files, and warms up a GPU
            run(contender, files, manager, args.try_on)
        trials = {}
        for size in args.batch_size:
            theirs.model.batch_size_per_gpu = size
            run(theirs, files, manager, args.try_on)
            trials[size] = theirs.scoring[-1]
        theirs.model.batch_size_per_gpu = min(trials, key=trials.__getitem__)
        print(f"batch sizes of hf: {trials}", flush=True)
        for contender in (ours, theirs):
            contender.forget()
        for _ in range(args.repeats):
            for contender in (ours, theirs):
                run(contender, files, manager, args.limit)
                print(
                    f"{contender.name}: {contender.whole[-1]:.1f} s, scoring {contender.scoring[-1]:.1f} s", flush=True
                )
            report(ours, theirs, trials, args)


def write_tasks(folder: Path, icl: Path) -> list[str]:
    """The harness's task files."""
    files = []
    for name, values in TASKS.items():
        sources = {"data_files": {"test": str((icl / f"{name}.jsonl").resolve())}, "cache_dir": str(folder / "cache")}
        data = {"dataset_path": "json", "dataset_kwargs": sources}
        task = {"task": f"{name}_local", **data, "test_split": "test", "fewshot_split": "test", **values}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
        files.append(str(folder / f"{name}.yaml"))
    return files


def export_model(recipe: str, tokenizer: Path, out: Path) -> None:
    """A Hugging Face folder with random weights."""
    config = load_config(RunConfig, [recipe, "data=x", "data.eval=null"]).model
    model = build_model(config, 0, torch.device("cpu"))
    load_tokenizer(tokenizer).save(out.parent / "tokenizer")
    export_hf(Tensors(model), config, out, tokenizer=out.parent / "tokenizer")


class Tensors:
    """The weights of a model, as an exporter reads them."""

    def __init__(self, model: torch.nn.Module):
        self.tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}

    def names(self) -> list[str]:
        return list(self.tensors)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def open_models(folder: Path, device: str, dtype: str, compiled: bool) -> tuple[Contender, Contender]:
    ours = IngotLM(folder, device=device, precision="fp32" if dtype == "float32" else "bf16")
    if compiled:
        ours.scorer.compile()
    return Contender("ingot", ours), Contender("hf", HFLM(pretrained=str(folder), device=device, dtype=dtype))


def run(contender: Contender, files: list[str], manager: TaskManager, limit: int) -> None:
    model = contender.model
    spent, cpu = 0.0, 0.0
    score = type(model).loglikelihood

    def timed(requests: Any, disable_tqdm: bool = True) -> Any:
        nonlocal spent, cpu
        synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        found = score(model, requests, disable_tqdm=True)
        synchronize()
        spent += time.perf_counter() - start
        cpu += time.process_time() - cpu_start
        return found

    model.loglikelihood = timed  # type: ignore[method-assign]
    start = time.perf_counter()
    results = lm_eval.simple_evaluate(
        model, tasks=files, limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    contender.whole.append(time.perf_counter() - start)
    contender.scoring.append(spent)
    contender.cpu.append(cpu)
    for task, samples in results["samples"].items():
        contender.likelihoods[task] = [float(resp[0][0]) for sample in samples for resp in sample["resps"]]
        contender.accuracies[task] = results["results"][task]["acc,none"]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(ours: Contender, theirs: Contender, trials: dict[int, float], args: argparse.Namespace) -> None:
    differences = [
        abs(a - b)
        for task, values in ours.likelihoods.items()
        for a, b in zip(values, theirs.likelihoods[task], strict=True)
    ]
    mine, other = ours.seconds(), theirs.seconds()
    row = {
        "command": f"python benchmarks/evaluation.py {' '.join(sys.argv[1:])}",
        "recipe": args.recipe, "device": device_name(args.device), "precision": ours.model.precision,
        "limit": args.limit, "threads": torch.get_num_threads(), "requests": len(differences),
        "ingot_seconds": mine, "hf_seconds": other, "hf_batch_size": theirs.model.batch_size_per_gpu,
        "hf_batch_sizes_tried": trials,
        **{f"ratio_{name}": other[name] / mine[name] for name in ("scoring", "whole", "scoring_cpu")},
        "largest_log_likelihood_difference": max(differences),
        "accuracies": {c.name: c.accuracies for c in (ours, theirs)},
        "versions": {"python": platform.python_version()}
        | {p: version(p) for p in ("ingot-llm", "torch", "lm_eval", "transformers", "datasets", "tokenizers")},
    }  # fmt: skip
    assert ours.model.precision != "fp32" or max(differences) < 1e-3, f"log-likelihoods differ by {max(differences)}"
    stored = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    stored[f"{args.recipe}, {'cpu' if args.device == 'cpu' else 'gpu'}"] = row
    RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    print(json.dumps(row, indent=1), flush=True)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device != "cpu" else f"{platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
