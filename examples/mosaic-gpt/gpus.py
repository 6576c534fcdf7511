"""How many GPUs does a model need at least? By the arithmetic with which `ingot train` chooses a layout.

Prints the table of README.md: for each recipe what weights, gradients and optimizer take over all GPUs together, and
the smallest power of two of GPUs on which a step fits, one sequence at a time, everything sharded over all of them.
"""

from itertools import takewhile

from ingot.config.recipes import recipe_names
from ingot.config.run import RunConfig
from ingot.migrate import load_run_config
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import USABLE, StepShape, estimate_memory

DEVICES = {"40 GB (A100)": 40, "80 GB (A100, H100)": 80, "141 GB (H200)": 141}


def fewest_gpus(config: RunConfig, memory: float) -> int:
    def too_few(gpus: int) -> bool:
        needs = estimate_memory(config.model, Layout(shard=gpus), config.parallel, StepShape.of(config))
        return needs.total > USABLE * memory

    return 2 ** len(list(takewhile(too_few, (2**n for n in range(12)))))


def main() -> None:
    print("| model | parameters | state of all GPUs | " + " | ".join(DEVICES) + " |")
    print("|---|---:|---:|" + "---:|" * len(DEVICES))
    for name in (name for name in recipe_names() if name.startswith("mosaic_gpt-")):
        config = load_run_config([name])
        needs = estimate_memory(config.model, Layout(), config.parallel, StepShape.of(config))
        state = (needs.weights + needs.gradients + needs.optimizer) / 1e9
        counts = [str(fewest_gpus(config, gigabytes * 1e9)) for gigabytes in DEVICES.values()]
        print(f"| {name} | {config.model.parameters:,} | {state:,.0f} GB | " + " | ".join(counts) + " |")


if __name__ == "__main__":
    main()
