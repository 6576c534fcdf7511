"""How fast text becomes shards: `ingot prepare` on all kinds of input, and its peers, side by side in one run.

    python benchmarks/prepare.py --tokenizer TOKENIZER.json --text FILE [FILE ...] [--megabytes 484] [--runs 3]

The corpus is made of the sentences of the given texts (jsonl with `text`, or txt), shuffled into documents of C4-like
lengths; a word in forty sentences out of a hundred is replaced by a made-up one, so that the tail of rare words, on
which tokenizers' caches live or die, is there too. Whole commands are timed, start-up included; the median of the runs
counts. Memory is the largest sum of the proportional set sizes (PSS) of all processes of the command.

Peers run in an environment of their own, which the script makes with pip; those that no registry has stand as a
faithful loop of their code, and are named so. They are slow, and get the first 30 MB.
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PEER_PACKAGES = ("mosaicml-streaming==0.13.0", "numpy<2.2", "tokenizers", "gigatoken==0.10.0")

# LLM Foundry's convert_dataset_json: one tokenizer call per document, ConcatTokensDataset's loop, one MDSWriter.
FOUNDRY = """
import json, os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import numpy as np
from streaming import MDSWriter
from tokenizers import Tokenizer
source, tokenizer, out = sys.argv[1:]
tokenizer = Tokenizer.from_file(tokenizer)
eos = [tokenizer.token_to_id("<|endoftext|>")]
with MDSWriter(columns={"tokens": "ndarray:int32"}, out=out) as writer:
    buffer = []
    for line in open(source, encoding="utf-8"):
        buffer = buffer + tokenizer.encode(json.loads(line)["text"]).ids + eos
        while len(buffer) >= 2048:
            writer.write({"tokens": np.asarray(buffer[:2048], dtype=np.int32)})
            buffer = buffer[2048:]
"""
# Megatron's and NeoX's preprocess_data.py: a pool that encodes line by line, and one process that writes.
MEGATRON = """
import json, multiprocessing, os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import numpy as np
from tokenizers import Tokenizer
source, path, out = sys.argv[1:]
def start():
    global tokenizer, eos
    tokenizer = Tokenizer.from_file(path)
    eos = tokenizer.token_to_id("<|endoftext|>")
def encode(line):
    return tokenizer.encode(json.loads(line)["text"]).ids + [eos]
if __name__ == "__main__":
    os.makedirs(out)
    lengths = []
    with multiprocessing.Pool(2, initializer=start) as pool, open(out + "/x.bin", "wb") as file:
        for ids in pool.imap(encode, open(source, encoding="utf-8"), 32):
            file.write(np.array(ids, dtype=np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
    np.array(lengths, dtype=np.int32).tofile(out + "/x.idx")
"""
# The core of Megatron's newest path: gigatoken reads the jsonl itself, one process writes.
GIGATOKEN = """
import os, sys
import gigatoken, numpy as np
source, path, out = sys.argv[1:]
os.makedirs(out)
tokens = gigatoken.Tokenizer(path).encode_files(gigatoken.JsonlFileSource([source], "text"))
np.asarray(tokens.layout.content.data).astype(np.uint16).tofile(out + "/x.bin")
np.diff(np.asarray(tokens.layout.offsets)).astype(np.int32).tofile(out + "/x.idx")
"""


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json with <|endoftext|>")
    parser.add_argument("--text", nargs="+", required=True, help="real text to make the corpus of")
    parser.add_argument("--megabytes", type=int, default=484)
    parser.add_argument("--folder", type=Path, help="keep the inputs here, and use those of an earlier run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder for the peers' environment; without it they are left out")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "prepare.json")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="ingot-prepare-") as name:
        folder = options.folder or Path(name)
        if not (folder / "one_group.parquet").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_inputs(folder, options.text, options.megabytes * 10**6)
        inputs = {p.name: p for p in folder.iterdir()}
        rows = measure_ours(folder, inputs, options.tokenizer, options.runs)
        if options.peers:
            rows += measure_peers(folder, inputs, options.tokenizer, options.runs, options.peers)
    for row in rows:
        rates = f"{row['mb']:>5.0f} MB {row['seconds']:>7.2f} s {row['mb_per_s']:>7.1f} MB/s"
        print(f"{row['what']:<70} {rates} {row['cpu_seconds']:>6.1f} s of CPU {row['pss_mb']:>6.0f} MB")
    result = {
        "command": " ".join(["python", "benchmarks/prepare.py", *(Path(a).name for a in sys.argv[1:])]),
        "machine": f"{os.cpu_count()} cores, {cpu_name()}, Python {platform.python_version()}",
        "load_average_before_and_after": [load, os.getloadavg()[0]],
        "versions": {p: version(p) for p in ("gigatoken", "tokenizers", "msgspec", "pyarrow", "numpy")},
        "rows": rows,
    }
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def make_inputs(folder: Path, texts: list[str], size: int) -> None:
    """The corpus as jsonl, zst, gz and parquet, and its first 30 MB."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    rng = random.Random(1)
    documents: list[str] = []
    for name in texts:
        whole = Path(name).read_text(encoding="utf-8")
        documents += [json.loads(line)["text"] for line in whole.splitlines()] if name.endswith("l") else [whole]
    sentences = [s for d in documents for s in re.split(r"(?<=[.!?\n])(?= |\w)", d) if s.strip()]
    syllables = [
        a + b + c for a in "bcdfgklmnprstvwz" for b in "aeiou" for c in ("", "n", "r", "s", "l", "t", "ck", "nd")
    ]
    print(f"{len(sentences):,} sentences of {len(documents):,} real texts", file=sys.stderr)
    written, made = 0, []
    path = folder / "corpus.jsonl"
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            parts, length, wanted = [], 0, rng.lognormvariate(7.1, 1.0)
            while length < wanted:
                words = rng.choice(sentences).split(" ")
                if rng.random() < 0.4:
                    words[rng.randrange(len(words))] = "".join(rng.choices(syllables, k=rng.randint(2, 3)))
                parts.append(" ".join(words))
                length += len(parts[-1])
            made.append("".join(parts))
            line = json.dumps(
                {"text": made[-1], "url": f"https://example.com/{written}"}, ensure_ascii=rng.random() < 0.5
            )
            written += file.write(line + "\n")
    data = path.read_bytes()
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.compress(data))
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(data, 6))
    (folder / "small.jsonl").write_bytes(data[: data.rfind(b"\n", 0, 30 * 10**6) + 1])
    pq.write_table(pa.table({"text": made}), folder / "corpus.parquet", row_group_size=10_000)
    pq.write_table(pa.table({"text": made}), folder / "one_group.parquet", row_group_size=1 << 30)


def measure_ours(folder: Path, inputs: dict[str, Path], tokenizer: str, runs: int) -> list[dict[str, Any]]:
    """Both formats with one and two workers, then the other kinds of input."""
    size = inputs["corpus.jsonl"].stat().st_size
    cases = [("corpus.jsonl", format, workers) for format in ("mds", "indexed") for workers in (1, 2)]
    cases += [
        (name, "mds", 2) for name in ("corpus.parquet", "one_group.parquet", "corpus.jsonl.zst", "corpus.jsonl.gz")
    ]
    rows = []
    for name, format, workers in cases:
        command = [
            sys.executable,
            "-m",
            "ingot.cli.main",
            "prepare",
            "--path",
            str(inputs[name]),
            "--tokenizer",
            tokenizer,
        ]
        command += ["--format", format, "--num_workers", str(workers), "--out_root", str(folder / "out")]
        kind = name.partition(".")[2] + (" of one row group" if "one" in name else "")
        title = f"ingot prepare, {kind} to {format}, {workers} workers"
        rows.append(measure(title, command, folder / "out", size, runs))
    command = [sys.executable, "-m", "ingot.cli.main", "prepare", "--path", str(inputs["small.jsonl"])]
    command += ["--tokenizer", tokenizer, "--engine", "hf", "--num_workers", "2", "--out_root", str(folder / "out")]
    small = inputs["small.jsonl"].stat().st_size
    rows.append(measure("ingot prepare, jsonl to mds, 2 workers, engine hf", command, folder / "out", small, 1))
    return rows


def measure_peers(folder: Path, inputs: dict[str, Path], tokenizer: str, runs: int, home: Path) -> list[dict[str, Any]]:
    """Peers in an environment of their own."""
    python = home / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEER_PACKAGES], check=True)
    cases = [
        ("LLM Foundry's converter (a loop of its code) + mosaicml-streaming's MDSWriter", FOUNDRY, "small.jsonl", 1),
        ("Megatron's and NeoX's preprocess_data (a loop of its code), 2 workers", MEGATRON, "small.jsonl", 1),
        ("gigatoken's own file reader, 2 threads, one writer (a loop)", GIGATOKEN, "corpus.jsonl", runs),
    ]
    rows = []
    for title, code, name, count in cases:
        script = folder / "peer.py"
        script.write_text(code)
        command = [str(python), str(script), str(inputs[name]), tokenizer, str(folder / "out")]
        rows.append(measure(title, command, folder / "out", inputs[name].stat().st_size, count))
    return rows


def measure(title: str, command: list[str], out: Path, size: int, runs: int) -> dict[str, Any]:
    """Run a command several times into an empty folder: median time, largest memory."""
    seconds, memory, cpu = [], [], []
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        peak = [0]
        watcher = threading.Thread(target=watch_memory, args=(process, peak))
        watcher.start()
        before = os.times()
        error = process.communicate()[1]
        seconds.append(time.perf_counter() - started)
        after = os.times()
        cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
        watcher.join()
        memory.append(peak[0])
        if process.returncode:
            raise SystemExit(f"{title} failed:\n{error}")
    middle = statistics.median(seconds)
    row = {"what": title, "mb": size / 1e6, "seconds": middle, "all_seconds": seconds, "mb_per_s": size / 1e6 / middle}
    print(title, seconds, f"{row['mb_per_s']:.1f} MB/s", file=sys.stderr)
    return {**row, "pss_mb": max(memory) / 1e6, "cpu_seconds": statistics.median(cpu)}


def watch_memory(process: "subprocess.Popen[str]", peak: list[int]) -> None:
    """Sample the sum of PSS over a process and all below it, until it ends."""
    while process.poll() is None:
        peak[0] = max(peak[0], sum(pss(pid) for pid in descendants(process.pid)))
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [p for child in task.read_text().split() for p in descendants(int(child))]
        except OSError:
            continue
    return found


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) * 1024  # type: ignore[index]
    except (OSError, TypeError):
        return 0


def cpu_name() -> str:
    """The processor's model."""
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


if __name__ == "__main__":
    main()
