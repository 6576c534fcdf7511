"""One model in several variants on one GPU, in one process: which is faster, and what each needs.

`gpu_check.py` runs this as a process for each of its sections. Variants are builds of one recipe (plain, wrapped by
FSDP2, with dropout, deterministic ...) through the trainer's own functions. Where two fit on the card together, they
are timed in turn, some steps each, three times: `ratio` is the base's time over the variant's, the median of the three.
Where they do not fit (7b), one follows the other.

A process that is given `--wait` imports what it needs, then waits for a line before it touches the GPU, so that the
next section's imports happen while this one's are timed.

`causal_rate` is the FLOP/s of a step, half of the attention counted, over those of a large bf16 product in the same
process. `full_rate` counts the whole square of the attention, 6 N + 12 L d S per token as MFU does and as goals do.
`memory_gib` is the peak of a variant's tensors, `reserved_gib` what the process held for all of its variants, and
`allocation_retries` how often memory had to be given back to the driver first, each of which stops the card.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch.distributed as dist
from gpu_distributed import START, Steps, matmul_tflops
from gpu_profile import profile_step
from gpu_table import add_row, wait_for_turn
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import IngotError
from ingot.launch.agent.rank_main import prepare_torch
from ingot.parallel.executors import build, distributed
from ingot.parallel.executors.device import choose_device, make_deterministic
from ingot.parallel.layout import Layout
from ingot.parallel.rank_env import RankEnv
from ingot.parallel.rendezvous import World, join_world
from ingot.training.loss_scale import LossScale
from ingot.training.microbatch_search import choose_microbatch
from ingot.training.optimizer import Optimizer
from ingot.training.runtime.stop import start_compilers

WRAPPED = "parallel.shard=1"
DEVICE = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
GIB = 2**30


@dataclass(frozen=True)
class Section:
    """What one process measures."""

    name: str
    recipe: str
    variants: list[tuple[str, list[str]]]
    """Names and overrides, in order. The first is the base of ratios."""
    batch: int
    steps: int
    overrides: list[str] = field(default_factory=list)
    micro: int | None = None
    """Sequences per microbatch, so that variants fit on the card together; None: alone, as `auto` chooses."""
    rounds: int = 3
    """How often the second variant is timed in turn with the base; the others one time less."""
    seconds: float = 100.0
    """No variant starts later than this, on a GPU."""
    decide: bool = False
    """Also what `auto` chooses for the first two variants, each alone on the card."""
    quick: bool = False
    """One timed step after the first, without a warm-up."""
    profile: list[str] = field(default_factory=list)
    """Of which variants also where the time of a step goes, by kind of kernel, if each is alone on the card."""


class Built:
    """A variant, ready to train."""

    def __init__(self, section: Section, name: str, overrides: list[str], micro: int | None):
        start = time.time()
        before = allocated()
        self.name, self.notes, self.times = name, [], []
        with tempfile.TemporaryDirectory() as folder:
            self.config = load_config(RunConfig, [
                section.recipe, f"global_train_batch_size={section.batch}", "data=none", "data.eval=null",
                f"save_folder={folder}", *section.overrides, *overrides,
            ])  # fmt: skip
            ranks = self.config.parallel.shard
            ranks = ranks if isinstance(ranks, int) else 0
            self.device, _ = choose_device(self.config)
            compiled = self.device.type == "cuda" and self.config.compile is not False
            make_deterministic(self.config, self.device, compiled)
            self.wrapped = ranks > 0
            if self.wrapped:
                world = alone(self.device) if ranks == 1 else simulated(ranks)
                # this rank's part is as large as the batch of one process
                self.config = self.config.model_copy(update={"global_train_batch_size": section.batch * ranks})
                self.executor: Any = build.build_distributed(
                    self.config, Layout(shard=ranks), world, self.device, compiled, self
                )
                for module in distributed.fsdp.sharded_modules(self.executor.roots) if ranks > 1 else ():
                    module.set_custom_reduce_scatter(OwnPart())
            else:
                self.executor = build.build_single(self.config, self.device, compiled, self)
            optimizer = Optimizer(self.config.optimizer, {p.tensor: p.name for p in self.executor.parameters})
            self.executor.weights_changed()
            self.seconds_to_build = time.time() - start
            if micro is None:
                for decision in choose_microbatch(self.config, self.executor, Path(folder)):
                    self.note(decision)
            else:
                self.executor.microbatch = micro
                self.executor.hold_weights(max(self.executor.hold_choices))
        self.seconds_to_choose = time.time() - start - self.seconds_to_build
        self.steps = Steps(self.config, self.executor, optimizer, LossScale(self.device, enabled=False))
        self.rows, self.before, self.quick = section.batch, before, section.quick

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"  [{time.time() - START:5.1f} s] {self.name}: {text}", flush=True)

    warn = note

    def start(self) -> None:
        """The steps that compile and decide, and the memory of the next one."""
        begin = time.time()
        self.losses = [float(self.steps.step(self.rows)[0])]
        self.seconds_to_compile = time.time() - begin
        self.losses += [float(self.steps.step(self.rows)[0]) for _ in range(0 if self.quick else 1)]
        self.own = allocated() - self.before
        others = allocated() - self.own
        self.retries = allocation_retries(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.time()
        self.losses.append(float(self.steps.step(self.rows)[0]))
        self.times += [time.time() - begin] if self.quick else []
        self.peak = (torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else others) - others
        print(f"  [{time.time() - START:5.1f} s] {self.name}: ready, losses {self.losses}", flush=True)

    def time(self, count: int) -> float:
        """The median seconds of some steps, after one more."""
        if self.quick:
            return self.times[0]
        self.steps.times_of(1, self.rows)
        own = self.steps.times_of(count, self.rows)
        self.times += own
        return statistics.median(own)


@cache
def alone(device: torch.device) -> World:
    return join_world(RankEnv(), device, 60.0)


@cache
def simulated(ranks: int) -> World:
    """A world of which only rank 0 exists: torch's fake process group, whose all-gather repeats this rank's part."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return World(RankEnv(0, ranks), store, timedelta(seconds=10))


class OwnPart(ReduceScatter):
    """Keeps this rank's part of a gradient where a fake process group would leave memory as it is."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        output_tensor.copy_(input_tensor[: output_tensor.numel()])


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def reserved_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def allocation_retries(device: torch.device) -> int:
    """How often this process has given memory back to the driver to get some."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Report:
    """Rows of a section, written as soon as each is known."""

    def __init__(self, section: Section, out: Path):
        self.section, self.out, self.matmul = section, out, 0.0

    def add(self, built: Built, **more: Any) -> None:
        config, executor, model = built.config, built.executor, built.config.model
        median = statistics.median(built.times)
        rate = built.rows * config.max_seq_len / median
        rates = {
            f"{kind}_rate": round(rate * model.flops_per_token(config.max_seq_len, causal) / self.matmul / 1e12, 4)
            for kind, causal in (("causal", True), ("full", False))
        }
        self.write({
            "section": self.section.name, "variant": built.name, "model": self.section.recipe, "family": model.family,
            "execution": "fsdp" if built.wrapped else "plain", "precision": config.precision,
            "deterministic": config.deterministic is True, "seq_len": config.max_seq_len,
            "tokens_per_second": round(rate), "step_ms": round(median * 1e3, 1),
            "spread": round((max(built.times) - min(built.times)) / median, 4),
            **rates, "matmul_tflops": self.matmul, "memory_gib": round(built.peak / GIB, 2),
            "reserved_gib": round(reserved_peak(built.device) / GIB, 2),
            "allocation_retries": allocation_retries(built.device) - built.retries, "microbatch": executor.microbatch,
            "holds_weights": getattr(executor, "holds_weights", None),
            "sequences_per_step": built.rows, "recompute": executor.recompute,
            "seconds_to_build": round(built.seconds_to_build, 1),
            "seconds_to_choose": round(built.seconds_to_choose, 1),
            "seconds_to_compile": round(built.seconds_to_compile, 1),
            "torch": torch.__version__, "losses": built.losses, "notes": built.notes, **more,
        })  # fmt: skip

    def fail(self, variant: str, error: Exception) -> None:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:1500]}"
        self.write({"section": self.section.name, "variant": variant, "error": said})
        if not isinstance(error, IngotError):
            import traceback

            traceback.print_exception(error)

    def write(self, row: dict[str, Any]) -> None:
        add_row(self.out, row | {"device": DEVICE})

    def late(self) -> bool:
        return torch.cuda.is_available() and time.time() - START > self.section.seconds


def run(section: Section, out: Path, imported: float) -> None:
    report = Report(section, out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        start_compilers()
        torch._dynamo.config.recompile_limit = 64  # variants share the code of their blocks
    report.matmul = matmul_tflops(device)
    if section.micro is None:
        for name, overrides in section.variants:
            one_alone(section, report, name, overrides, imported)
    else:
        together(section, report, imported)
    print(f"  [{time.time() - START:5.1f} s] product at the end: {matmul_tflops(device)} TFLOP/s", flush=True)


def one_alone(section: Section, report: Report, name: str, overrides: list[str], imported: float) -> None:
    if report.late():
        print(f"  {name}: skipped, no time", flush=True)
        return
    try:
        built = Built(section, name, overrides, None)
        built.start()
        built.time(section.steps)
        more = {"host_syncs": host_syncs(built)}
        if name in section.profile:
            more |= profile_step(lambda: float(built.steps.step(built.rows)[0]))
        report.add(built, seconds_to_import=imported, **more)
    except Exception as error:
        report.fail(name, error)
    built = None  # type: ignore[assignment]
    torch._dynamo.reset()
    clean()


def together(section: Section, report: Report, imported: float) -> None:
    """The base stays on the card, and one variant after the other is timed in turn with it."""
    (name, overrides), *others = section.variants
    decisions = {other: decide(section, other, more) for other, more in others[:1] if section.decide}
    base = Built(section, name, overrides, None if section.decide else section.micro)
    base.executor.microbatch = section.micro
    base.start()
    base.time(section.steps)
    total = imported + base.seconds_to_build + base.seconds_to_choose + base.seconds_to_compile
    report.add(base, seconds_to_import=imported, seconds_to_first_step=round(total, 1), host_syncs=host_syncs(base))
    for name, overrides in others:
        if report.late():
            print(f"  {name}: skipped, no time", flush=True)
            continue
        try:
            built = Built(section, name, overrides, section.micro)
            built.start()
            ratios = []
            for _ in range(section.rounds - (name != others[0][0])):
                if ratios and report.late():
                    break
                make_deterministic(base.config, base.device, base.device.type == "cuda")
                own = base.time(section.steps)
                make_deterministic(built.config, built.device, built.device.type == "cuda")
                ratios.append(round(own / built.time(section.steps), 4))
            more = {"ratio": round(statistics.median(ratios), 4), "ratios": ratios, "base": base.name,
                    "memory_over_base": round((built.peak - base.peak) / GIB, 2)}  # fmt: skip
            report.add(built, **more, host_syncs=host_syncs(built), decided_alone=decisions.get(name))
        except Exception as error:
            report.fail(name, error)
        built = None  # type: ignore[assignment]
        make_deterministic(base.config, base.device, base.device.type == "cuda")
        clean()


def decide(section: Section, name: str, overrides: list[str]) -> list[str]:
    """What `auto` chooses for a variant that is alone on the card."""
    try:
        built = Built(section, name, overrides, None)
        said = built.notes[-2:]
        del built
    except Exception as error:
        said = [f"{type(error).__name__}: {error}"]
    clean()
    return said


def host_syncs(built: Built) -> list[str]:
    """Where a step waits for the device."""
    if built.device.type != "cuda":
        return []
    with warnings.catch_warnings():
        return built.steps.host_syncs(built.rows)


def main() -> None:
    global START
    prepare_torch()  # as `ingot train` does
    imported = round(time.time() - START, 1)
    if not wait_for_turn():
        return  # nobody wants it any more
    START = time.time()
    given = json.loads(sys.argv[1])
    given["variants"] = [tuple(variant) for variant in given["variants"]]
    run(Section(**given), Path(sys.argv[2]), imported)
    sys.stdout.flush()
    os._exit(0)  # nothing is left to save, and leaving the process group waits for nobody


if __name__ == "__main__":
    main()
