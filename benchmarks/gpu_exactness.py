"""Is training on this GPU exact, and what does exactness cost?

    python benchmarks/gpu_exactness.py [--tiny]        under three minutes on an H200; --tiny: a check on a CPU

Repeatability: models of full width, most of them of 4 layers, train 20 steps twice from the same start with
`deterministic=true`, and once more with a save and a load after 10 steps; weights must be equal to the bit, also
between two processes. Some of these processes run at the same time. Then, alone on the card: our attention kernel
against the formula on odd shapes, dropout's losses for several microbatch sizes, and the time of a step with and
without `deterministic=true`, and with and without dropout.

No data and no network: tokens are random. A section that fails is reported and the next one runs. With `$OUT` set, all
results are written to `$OUT/gpu_exactness.json`.
"""

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.model.attention import alibi_slopes, causal_bias
from ingot.model.dropout import attention_keys, dropout, sequence_keys
from ingot.parallel.executors import build
from ingot.parallel.executors.device import choose_device, make_deterministic
from ingot.parallel.layout import Layout
from ingot.parallel.rank_env import RankEnv
from ingot.parallel.rendezvous import World, join_world
from ingot.training.loss_scale import LossScale
from ingot.training.optimizer import Optimizer
from ingot.training.step import train_step

STEPS, ROWS, MICRO = 20, 4, 2
AT_ONCE = 5  # up to 19 GiB each
EVERYWHERE = [f"model.{kind}_pdrop=0.1" for kind in ("resid", "emb", "attn")]
ALIBI = ["mpt-1b", "model.positions=alibi"]
DOCUMENTS = ["model.eos_token_id=5", "model.document_mask=true"]
CASES = {  # what takes longest first
    "llama, all layers": ["llama-1b", "max_seq_len=2048"],
    "mpt, all layers": ["mpt-1b", "model.positions=learned"],
    "llama": ["llama-1b"],  # with its 8192 tokens
    "mpt": ["mpt-1b", "model.positions=learned"],
    "mpt alibi": ALIBI,
    "mpt alibi, fp8": [*ALIBI, "precision=fp8"],
    "mpt alibi, not compiled": [*ALIBI, "compile=false"],
    "mpt, dropout": ["mpt-1b", "model.positions=learned", *EVERYWHERE],
    "mpt, wrapped by FSDP2": ["mpt-1b", "model.positions=learned", "parallel.shard=1"],
    "llama, documents": ["llama-1b", *DOCUMENTS],
    "llama, window": ["llama-1b", "model.sliding_window=500"],
    "llama, dropout": ["llama-1b", *EVERYWHERE],
}
AGAIN = ["mpt, dropout", "llama"]  # in a second process, too
TINY = ["model.d_model=64", "model.n_heads=4", "model.n_kv_heads=4", "model.ffn_hidden_size=128",
        "model.vocab_size=97", "max_seq_len=64", "compile=false", "precision=bf16", "device=cpu"]  # fmt: skip


class Notes:
    """Collects what an executor reports."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    warn = note


class Training:
    """A model and its optimizer, trained on random tokens."""

    def __init__(self, arguments: list[str], micro: int = MICRO, rows: int = ROWS):
        self.config = load_config(RunConfig, [*arguments, "data.train.path=x", f"global_train_batch_size={rows}"])
        self.device, _ = choose_device(self.config)
        compiled = self.config.compile in (True, "auto") and self.device.type == "cuda"
        make_deterministic(self.config, self.device, compiled)
        self.notes = Notes()
        if self.config.parallel.shard == 1:
            world = alone(self.device)
            self.executor: Any = build.build_distributed(
                self.config, Layout(), world, self.device, compiled, self.notes
            )
        else:
            self.executor = build.build_single(self.config, self.device, compiled, self.notes)
        self.executor.microbatch = micro
        self.executor.weights_changed()
        names = {p.tensor: p.name for p in self.executor.parameters}
        self.optimizer = Optimizer(self.config.optimizer, names)
        self.scaler = LossScale(self.device, enabled=False)

    def run(self, steps: range) -> list[float]:
        losses = []
        for number in steps:
            tokens = np.random.default_rng(number).integers(
                0, self.config.model.vocab_size, (self.config.global_train_batch_size, self.config.max_seq_len + 1)
            )
            batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(len(tokens)))
            self.executor.begin_step(number)
            losses.append(train_step(self.executor, self.optimizer, self.scaler, batch, 1.0).loss_share)
        return [float(loss) for loss in losses]

    def state(self) -> dict[str, torch.Tensor]:
        named = {p.name: p.tensor.detach() for p in self.executor.parameters} | self.optimizer.state_tensors()
        return {name: (t.to_local() if hasattr(t, "to_local") else t).clone() for name, t in named.items()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for p in self.executor.parameters:
                target = p.tensor.to_local() if hasattr(p.tensor, "to_local") else p.tensor
                target.copy_(state[p.name])
            slots = self.optimizer.state_slots([(n, t.dtype, tuple(t.shape)) for n, t in state.items() if "/" in n])
            for name, slot in slots:
                (slot.to_local() if hasattr(slot, "to_local") else slot).copy_(state[name])
        self.executor.weights_changed()


@cache
def alone(device: torch.device) -> World:
    return join_world(RankEnv(), device, 60.0)


def arguments_of(name: str, tiny: bool) -> list[str]:
    """A case at full width, and unless it is of all layers with four of them."""
    small = [] if "all layers" in name else ["model.n_layers=4", "model.vocab_size=8192"]
    return [*CASES[name], *small, "deterministic=true", *(TINY if tiny else [])]


def repeatability(name: str, tiny: bool) -> dict[str, Any]:
    """Whether the weights of a case are the same in two runs, and after a save and a load."""
    start, ends, first = time.perf_counter(), [], None
    steps = 4 if tiny else STEPS
    for resumed in (False, False, True):
        training = Training(arguments_of(name, tiny))
        first = first or training.notes.said
        if resumed:
            training.run(range(steps // 2))
            saved = training.state()
            del training
            clean()
            training = Training(arguments_of(name, tiny))
            training.load(saved)
            losses = training.run(range(steps // 2, steps))
        else:
            losses = training.run(range(steps))
        ends.append({name: fingerprint(tensor) for name, tensor in training.state().items()})
        del training
        clean()
    equal = [[ends[0][n] == end[n] for n in ends[0]] for end in ends[1:]]
    digest = hashlib.sha256(json.dumps(ends[0]).encode())
    return {"case": name, "equal": all(equal[0]), "equal_resumed": all(equal[1]), "tensors": len(ends[0]),
            "differing": [n for n, a, b in zip(ends[0], *equal, strict=True) if not (a and b)][:4],
            "loss": losses[-1], "digest": digest.hexdigest()[:16], "seconds": round(time.perf_counter() - start, 1),
            "notes": first}  # fmt: skip


def fingerprint(tensor: torch.Tensor) -> int:
    """A sum of all bits of a tensor, each word weighted by its place."""
    words = tensor.contiguous().flatten().view(torch.int32)
    return sum(
        int((part.long() * (torch.arange(len(part), device=part.device) * 2 + 1)).sum()) * (2 * number + 1)
        for number, part in enumerate(words.split(1 << 24))
    )


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def all_cases(tiny: bool, names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Every case in a process of its own, on a GPU as many at the same time as fit into its memory."""
    end = time.perf_counter() + seconds

    def run(name: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--case", name, *(["--tiny"] if tiny else [])]
        more = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | more
        )
        said = ""
        try:
            said, _ = process.communicate(timeout=max(1.0, end - time.perf_counter()))
            return json.loads(said.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            return {"case": name, "error": "out of time"}
        except (ValueError, IndexError):
            return {"case": name, "error": said.strip()[-1500:]}

    with ThreadPoolExecutor(1 if tiny else AT_ONCE) as pool:
        yield from pool.map(run, names)


def attention_parity(tiny: bool) -> list[dict[str, Any]]:
    """Our kernel with dropout, against the formula in fp64, on random odd shapes."""
    if tiny or not torch.cuda.is_available():
        return []
    from ingot.model.kernels.alibi_attention import alibi_attention
    from ingot.model.kernels.fused_attention import visible_span

    rng, rows = np.random.default_rng(), []
    for _ in range(12):
        batch, time_, groups, members = (int(rng.integers(*r)) for r in ((1, 4), (1, 700), (1, 4), (1, 5)))
        width, window = int(rng.integers(2, 129)), int(rng.integers(1, 300)) if rng.random() < 0.5 else None
        pdrop, heads = float(rng.choice([0.0, 0.1, 0.5])), groups * members
        slopes = alibi_slopes(heads, 8).cuda() * float(rng.random() < 0.5)
        documents = (torch.rand(batch, time_, device="cuda") < 0.02).cumsum(1) if rng.random() < 0.5 else None
        qkv = torch.randn(batch, time_, groups, members + 2, width, device="cuda").bfloat16()
        slope = torch.randn(batch, time_, heads, width, device="cuda").bfloat16()
        keys = attention_keys(sequence_keys(1, 2, 3, batch, qkv.device), 0, heads, 0, time_)
        exact, fast = qkv.double().requires_grad_(), qkv.clone().requires_grad_()
        q = exact[:, :, :, :members].flatten(2, 3).transpose(1, 2)
        k, v = (exact[:, :, :, members + i].repeat_interleave(members, 2).transpose(1, 2) for i in (0, 1))
        scores = q @ k.mT / width**0.5 + causal_bias(slopes, time_, time_, qkv.device, window).double()
        if documents is not None:
            scores = scores.masked_fill(documents[:, None, :, None] != documents[:, None, None, :], float("-inf"))
        expected = (dropout(scores.softmax(-1), keys, pdrop) @ v).transpose(1, 2)
        expected.backward(slope.double())
        span = visible_span(time_, window, documents, qkv.device)
        found = alibi_attention(fast, slopes, width**-0.5, span, None, keys if pdrop else None, pdrop)[0]
        found.backward(slope)
        assert exact.grad is not None and fast.grad is not None
        rows.append({"shape": [batch, time_, groups, members, width], "window": window, "dropout": pdrop,
                     "documents": documents is not None, "out": apart(found, expected),
                     "gradient": apart(fast.grad, exact.grad)})  # fmt: skip
    return rows


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return round(float((found.double() - expected).norm() / expected.norm()), 5)


def dropout_losses(tiny: bool) -> list[dict[str, Any]]:
    """The loss and the gradient norm of a step with dropout everywhere, for several microbatch sizes."""
    rows = []
    for micro in (4, 2, 1):
        training = Training([*arguments_of("mpt, dropout", tiny), "compile=false", "deterministic=false"], micro)
        losses = training.run(range(3))
        rows.append({"microbatch": micro, "losses": losses, "attention": training.notes.said[0]})
        del training
        clean()
    return rows


def step_seconds(arguments: list[str], micro: int, steps: int) -> float:
    training = Training(arguments, micro, rows=micro)
    training.run(range(3))
    times = []
    for number in range(3, 3 + steps):
        wait()
        start = time.perf_counter()
        training.run(range(number, number + 1))
        wait()
        times.append(time.perf_counter() - start)
    del training
    clean()
    torch._dynamo.reset()
    return statistics.median(times)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


TIMED = {  # what is timed, its microbatch, and with which options
    "mpt-125m": (["mpt-125m", "model.positions=learned"], 32, ("deterministic", "dropout", "residual dropout")),
    "mpt-1b": (["mpt-1b", "model.positions=learned"], 8, ("deterministic", "dropout", "residual dropout")),
    "llama-1b": (["llama-1b"], 8, ("deterministic",)),
    "llama-1b at 8192": (["llama-1b", "max_seq_len=8192"], 2, ("deterministic",)),
}
OPTIONS = {
    "deterministic": ["deterministic=true"],
    "dropout": EVERYWHERE,
    "residual dropout": EVERYWHERE[:2],
}


def costs(tiny: bool, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """The time of a step with an option over that without."""
    for model, (arguments, micro, options) in TIMED.items():
        given = [*arguments, *(TINY if tiny else [])]
        plain = None
        for option in (None, *options):
            if left() < 12:
                yield {"model": model, "option": option, "error": "no time left"}
                continue
            try:
                seconds = step_seconds([*given, *(OPTIONS[option] if option else [])], micro, 3 if tiny else 7)
            except Exception as error:
                yield {"model": model, "option": option, "error": f"{type(error).__name__}: {str(error)[:300]}"}
                clean()
                continue
            plain = plain or seconds
            yield {"model": model, "option": option, "ms": round(1e3 * seconds, 2), "ratio": round(seconds / plain, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models: checks this script on a CPU")
    parser.add_argument("--case", choices=list(CASES), help="one case of repeatability, as JSON")
    parser.add_argument("--seconds", type=float, default=170, help="stop before this much time has passed")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(repeatability(arguments.case, arguments.tiny)), flush=True)
        return
    end = time.perf_counter() + arguments.seconds
    left = lambda: end - time.perf_counter()  # noqa: E731
    found: dict[str, Any] = {"torch": torch.__version__, "tiny": arguments.tiny}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    names = [*arguments.cases, *(name for name in AGAIN if name in arguments.cases)]
    sections: dict[str, Callable[[], Any]] = {
        "repeatable": lambda: all_cases(arguments.tiny, names, left() - 60),
        "attention_parity": lambda: attention_parity(arguments.tiny),
        "dropout_losses": lambda: dropout_losses(arguments.tiny),
        "costs": lambda: costs(arguments.tiny, left),
    }
    for section, measure in sections.items():
        print(f"--- {section} ({left():.0f} s left)", flush=True)
        rows = found.setdefault(section, [])
        try:
            for row in measure():
                rows.append(row)
                print(json.dumps(row), flush=True)
        except Exception:
            rows.append({"error": traceback.format_exc()[-1500:]})
            print(rows[-1]["error"], flush=True)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "gpu_exactness.json").write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    lines = ["", "| case | two runs equal | equal after resume | seconds |", "|---|---|---|---:|"]
    digests: dict[str, set[str]] = {}
    for row in found["repeatable"]:
        if "error" in row:
            lines.append(f"| {row.get('case')} | failed | | |")
            continue
        digests.setdefault(row["case"], set()).add(row["digest"])
        lines.append(f"| {row['case']} | {row['equal']} | {row['equal_resumed']} | {row['seconds']} |")
    lines.append(f"| two processes: {', '.join(AGAIN)} | {[len(digests.get(n, ())) == 1 for n in AGAIN]} | | |")
    lines += ["", "| model | option | ms | ratio |", "|---|---|---:|---:|"]
    lines += [f"| {r['model']} | {r['option']} | {r.get('ms', 'failed')} | {r.get('ratio', '')} |"
              for r in found["costs"] if "model" in r]  # fmt: skip
    parity = [row for row in found["attention_parity"] if "out" in row]
    if parity:
        lines.append(f"\nattention, {len(parity)} odd shapes: out {max(r['out'] for r in parity)}, gradient "
                     f"{max(r['gradient'] for r in parity)} apart at most")  # fmt: skip
    losses = [row["losses"] for row in found["dropout_losses"] if "losses" in row]
    if losses:
        worst = max(abs(x / y - 1) for row in losses for x, y in zip(row, losses[0], strict=True))
        lines.append(f"losses with dropout, by microbatch size: {worst:.1e} apart at most")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
