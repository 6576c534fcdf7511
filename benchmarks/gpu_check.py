"""Everything that only a GPU can show, in one call of ten minutes: tests, exactness, speed, memory, decisions.

    python benchmarks/gpu_check.py --seconds 570 --out FOLDER      all of it, the most valuable first
    python benchmarks/gpu_check.py --only 7b 125m --out FOLDER     some sections, in this order
    python benchmarks/gpu_check.py --tiny --out FOLDER             tiny models on a CPU: checks this script
    python benchmarks/gpu_check.py --print FOLDER [FOLDER ...]     the table of calls before
    python benchmarks/gpu_check.py --print FOLDER [FOLDER ...] --into benchmarks/results/gpu.json

Tests and repeatability run first and at the same time, since no time is measured there; then each section has the card
to itself, in a process of its own that may fail alone. Rows are in `FOLDER/rows.jsonl` as soon as they are known, what
processes say is in `FOLDER/log.txt`, what tests say in `FOLDER/tests.txt`. No data and no network: tokens are random.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_table import PROCESS, add_row, keep, merge, read_rows, table
from gpu_variants import WRAPPED, Section

START = time.time()
HERE = Path(__file__).parent
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # torch looks once, at the first product of a process
TESTS = ["tests/model/test_gpu_kernels.py", "tests/train/test_gpu.py", "tests/faults/test_gpu_host_copies.py"]
TEST_PROCESSES = 6  # which share the card's memory with the cases of repeatability
EVERYWHERE = [f"model.{kind}_pdrop=0.1" for kind in ("resid", "emb", "attn")]
PLAIN, WRAPPING = ("plain", ["cuda_graphs=false"]), ("wrapped", [WRAPPED])
DETERMINISTIC = ("deterministic", ["cuda_graphs=false", "deterministic=true"])
DROPOUT = ("dropout", ["cuda_graphs=false", *EVERYWHERE])
RESIDUAL = ("dropout but for attention", ["cuda_graphs=false", *EVERYWHERE[:2]])
LEARNED = ["model.positions=learned"]
FP8 = "precision=fp8"
WRAPPED_FP8, PLAIN_FP8 = ("wrapped fp8", [WRAPPED, FP8]), ("plain fp8", [FP8])
FP8_VARIANTS = [WRAPPING, WRAPPED_FP8, PLAIN_FP8]
GRAPHS = [("one by one", ["cuda_graphs=false"]), ("graph", ["cuda_graphs=true"]), WRAPPING,
          ("wrapped graph", [WRAPPED, "cuda_graphs=true"])]  # fmt: skip

SECTIONS = [
    Section("7b", "mpt-7b", [PLAIN, WRAPPING, WRAPPED_FP8, PLAIN_FP8], 16, 3, LEARNED, seconds=130,
            profile=["plain", "wrapped fp8"]),
    Section("125m", "mpt-125m", [PLAIN, WRAPPING, DETERMINISTIC, DROPOUT, RESIDUAL], 128, 3, LEARNED, micro=32,
            seconds=75, decide=True),
    Section("llama-8b", "llama-8b", [PLAIN, WRAPPING], 8, 1, ["max_seq_len=2048"], seconds=40),
    Section("1b", "mpt-1b", [PLAIN, WRAPPING, DETERMINISTIC], 32, 2, LEARNED, micro=16, seconds=70, decide=True),
    Section("llama-1b-32k", "llama-1b", [PLAIN, WRAPPING], 2, 1, ["max_seq_len=32768"], seconds=60,
            profile=["plain"]),
    Section("llama-1b", "llama-1b", [PLAIN, WRAPPING, DETERMINISTIC], 4, 2, micro=2, seconds=50),
    Section("pythia-14m", "pythia-14m", GRAPHS, 32, 4, micro=4, seconds=35),
    Section("1b-dropout", "mpt-1b", [PLAIN, DROPOUT, RESIDUAL], 32, 2, LEARNED, micro=16, rounds=2, seconds=60),
    Section("1b-two-ranks", "mpt-1b", [PLAIN, ("one of two ranks", ["parallel.shard=2"])], 32, 2, LEARNED, micro=16,
            seconds=40),
    Section("125m-small", "mpt-125m", GRAPHS, 32, 4, LEARNED, micro=4, seconds=35),
    Section("llama-1b-128k", "llama-1b", [PLAIN], 1, 1, ["max_seq_len=131072"], seconds=100, quick=True),
    Section("llama-8b-8k", "llama-8b", [PLAIN], 4, 1, seconds=30),
    Section("llama-1b-fp8", "llama-1b", FP8_VARIANTS, 32, 2, ["max_seq_len=2048"], micro=8, seconds=50),
    Section("pythia-2.8b-fp8", "pythia-2.8b", FP8_VARIANTS, 32, 2, seconds=60),
]  # fmt: skip


@dataclass(frozen=True)
class Script:
    """A section that is a script of its own, which adds its rows to the file after `--rows`."""

    name: str
    command: list[str]
    seconds: float


PEERS = ["125m", "1b", "llama-1b", "pythia-1b", "350m", "760m", "pythia-2.8b", "3b"]
SCRIPTS = [
    *(Script(f"peers-{size}", ["gpu_against_peers.py", size], 45) for size in PEERS),
    Script("fp8-300", ["gpu_fp8.py"], 120),
    Script("checkpoint", ["checkpoint.py", "--card"], 120),
    Script("trees", ["compare_steps.py", "--old", ".carry/old.tar.gz", "--seconds", "130"], 170),
]
PEERS_ALL = [f"peers-{size}" for size in PEERS]
NAMES = ["tests", "repeatable", *(section.name for section in [*SECTIONS, *SCRIPTS])]
TINY = ["model.d_model=64", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=512", "max_seq_len=32",
        "device=cpu", "precision=bf16"]  # fmt: skip


def tiny(section: Section) -> Section:
    """The same on a CPU."""
    overrides = [*section.overrides, *TINY, *(["model.n_kv_heads=2"] if "llama" in section.recipe else [])]
    variants = [(name, [o for o in more if o != "cuda_graphs=true"]) for name, more in section.variants]
    return replace(section, overrides=overrides, variants=variants, batch=8, micro=section.micro and 4, steps=1)


class Call:
    """The time, the output and the processes of one call."""

    def __init__(self, out: Path, seconds: float, is_tiny: bool):
        self.out, self.end, self.is_tiny = out, START + seconds, is_tiny
        self.rows, self.log = out / "rows.jsonl", out / "log.txt"
        self.lock = threading.Lock()
        self.cases: list[str] = []  # of repeatability; none: all

    def left(self) -> float:
        return self.end - time.time()

    def say(self, text: str) -> None:
        line = f"[{time.time() - START:5.1f} s] {text}"
        print(line, flush=True)
        with self.lock, self.log.open("a") as file:
            file.write(line + "\n")

    def add(self, row: dict[str, Any]) -> None:
        with self.lock:
            add_row(self.rows, row, printed=False)

    def run(self, command: list[str], seconds: float, log: Path, **environment: str) -> int | str:
        """The exit code of a process whose output goes to a file, or why it was ended."""
        with log.open("a") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, cwd=HERE.parent,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            )  # fmt: skip
            try:
                return process.wait(timeout=max(1.0, seconds))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest tells of the failures so far
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=8)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with its compilers
                process.wait()
                return f"ended after {seconds:.0f} s"


def run_tests(call: Call, seconds: float) -> None:
    log = call.out / "tests.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "slow or not slow", "--tb=short", "-p", "no:cacheprovider"]
    if not call.is_tiny:
        command += ["-n", str(TEST_PROCESSES)]
    result = call.run([*command, *TESTS], seconds, log, OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="2")
    said = log.read_text(errors="replace")
    # with several processes a line has the result first, with one process last
    outcomes = re.findall(r"\] (PASSED|FAILED|ERROR|SKIPPED) (tests/\S.*)", said)
    last = re.findall(r"(?m)^(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", said)
    outcomes += [(outcome, name) for name, outcome in last]
    counts = {kind: sum(found == kind for found, _ in outcomes) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    failed = sorted(name.strip() for found, name in outcomes if found in ("FAILED", "ERROR"))
    call.add({"section": "tests", "result": result, **counts, "failed": failed})
    call.say(f"tests: {counts}, result {result}, failed: {failed}")


def run_repeatability(call: Call, seconds: float) -> None:
    import gpu_exactness

    names = call.cases or [*gpu_exactness.CASES, *gpu_exactness.AGAIN][: 2 if call.is_tiny else None]
    for row in gpu_exactness.all_cases(call.is_tiny, names, seconds):
        call.add({"section": "repeatable", **row})
        call.say(f"repeatable: {json.dumps({k: v for k, v in row.items() if k != 'notes'})}")


class Waiting:
    """The process of a section, which imports what it needs and waits for its turn."""

    def __init__(self, call: Call, section: Section | Script, folder: Path):
        self.call, self.section = call, section
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / section.name / "inductor"),
                  "TRITON_CACHE_DIR": str(folder / section.name / "triton")}  # fmt: skip
        if isinstance(section, Script):
            script, *more = [*section.command, "--rows", str(call.rows), *(["--tiny"] if call.is_tiny else [])]
        else:
            shown = tiny(section) if call.is_tiny else section
            script, *more = ["gpu_variants.py", json.dumps(asdict(shown)), str(call.rows)]
        command = [sys.executable, str(HERE / script), *more, "--wait"]
        with call.log.open("a") as file:
            own = {"PYTHONUNBUFFERED": "1", "BENCHMARK_START": str(time.time())}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | caches | CUBLAS | own, text=True,
            )  # fmt: skip

    def go(self) -> None:
        section, limit = self.section, self.call.left() - 3
        if limit < 15 and not self.call.is_tiny:
            self.call.say(f"=== {section.name}: skipped, no time")
            self.end()
            return
        self.call.say(f"=== {section.name}")
        problem = None
        try:
            most = None if self.call.is_tiny else min(limit, 1.5 * section.seconds + 20)
            self.process.communicate("go\n", timeout=most)
            problem = f"exit code {self.process.returncode}" if self.process.returncode else None
        except subprocess.TimeoutExpired:
            problem = "out of time"
            self.end()
        if problem:
            self.call.add({"section": section.name, "variant": PROCESS, "error": problem})
            self.call.say(f"{section.name}: {problem}")

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # with its compilers
        self.process.wait()


def card() -> str:
    """The card and its driver, as nvidia-smi has them."""
    fields = "name,driver_version,memory.total,power.limit,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except OSError:
        return "no nvidia-smi"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=570, help="end before so much time has passed")
    parser.add_argument("--out", type=Path, help="a folder for rows and logs, or $OUT")
    parser.add_argument("--only", nargs="+", help=", ".join(["peers", *NAMES]))
    parser.add_argument("--cases", nargs="+", default=[], help="which cases of repeatability")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--print", type=Path, nargs="+", dest="earlier", help="print the table of folders of results")
    parser.add_argument("--into", type=Path, help="also put these rows among the `executions` of a JSON file")
    arguments = parser.parse_args()
    if arguments.earlier:
        rows = merge(read_rows(*arguments.earlier))
        if arguments.into:
            keep(rows, arguments.into)
        print(table(rows))
        return
    os.environ["BENCHMARK_COMMAND"] = shlex.join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]])
    call = Call(arguments.out or Path(os.environ["OUT"]), arguments.seconds, arguments.tiny)
    call.cases = arguments.cases
    call.out.mkdir(parents=True, exist_ok=True)
    asked = [name for given in arguments.only or NAMES for name in (PEERS_ALL if given == "peers" else [given])]
    if unknown := set(asked) - set(NAMES):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    together = [run for name, run in (("tests", run_tests), ("repeatable", run_repeatability)) if name in asked]
    with tempfile.TemporaryDirectory() as folder:
        call.say(card())
        known = {section.name: section for section in [*SECTIONS, *SCRIPTS]}
        waiting = [known[name] for name in asked if name in known]
        following = Waiting(call, waiting[0], Path(folder)) if waiting else None
        threads = [threading.Thread(target=run, args=(call, min(150.0, call.left() - 20))) for run in together]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for section in [*waiting[1:], None][: len(waiting)]:
            now, following = following, Waiting(call, section, Path(folder)) if section else None
            assert now is not None
            now.go()
    call.say("done")
    print(table(read_rows(call.out)))


if __name__ == "__main__":
    main()
