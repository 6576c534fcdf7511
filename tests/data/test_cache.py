"""Shards from elsewhere: retried, verified, shared, evicted; nothing half done is ever seen."""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import obstore.store
import pytest
import tokenizers
from mds_bytes import edit_index, flatten, random_shards, random_tokens, write_mds
from object_store import bucket, free_ports
from test_indexed import DOCUMENTS, FLAT, write_pair

import ingot.data.loading.shard_cache as cache_module
import ingot.storage.object_store as remote_module
from ingot.config.data import SourceConfig
from ingot.data.formats.mds_reader import ShardFile
from ingot.data.loading.batch_loader import BatchLoader
from ingot.data.loading.open_dataset import open_dataset
from ingot.data.loading.shard_cache import CachedFile, ShardCache
from ingot.data.loading.token_dataset import Dataset
from ingot.data.tokenizer import Tokenizer
from ingot.errors import DataError
from ingot.storage.object_store import Remote

QUICK = (0.001, 0.01)  # seconds between attempts


class Server:
    """Serves a folder over HTTP on loopback; `faults` are answers to give before the right one."""

    def __init__(self, folder: Path):
        self.folder, self.requests = folder, []
        self.faults: Callable[[str, int], str | int | None] = lambda name, earlier: None
        self.gate = threading.Event()
        self.gate.set()
        self.stopped = threading.Event()  # set when a "stall" was reached
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def do_HEAD(self) -> None:
                outer.answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name = urllib.parse.unquote(handler.path.lstrip("/"))
        fault = self.faults(name, self.requests.count(name))
        self.requests.append(name)
        path = self.folder / name
        if isinstance(fault, int):
            handler.send_error(fault)
            return
        if not path.is_file():
            handler.send_error(404)
            return
        content = path.read_bytes()
        status, whole = 200, len(content)
        if asked := handler.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            content, status = content[int(first) : int(last) + 1], 206
        handler.send_response(status)
        if status == 206:
            handler.send_header("Content-Range", f"bytes {first}-{last}/{whole}")
        handler.send_header("Content-Length", str(len(content)))
        handler.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        handler.send_header("ETag", '"one"')
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if fault == "short":
            content = content[:-7]
            handler.close_connection = True
        elif fault == "corrupt":
            content = content[:-1] + bytes([content[-1] ^ 1])
        elif fault == "stall":
            handler.wfile.write(content[: len(content) // 2])
            handler.wfile.flush()
            self.stopped.set()
            self.gate.wait()
            content = content[len(content) // 2 :]
        handler.wfile.write(content)

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "remote").mkdir()
    server = Server(tmp_path / "remote")
    yield server
    server.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remote.__init__, "__defaults__", (4, QUICK))


SHARDS = random_shards(shards=6, longest=200)


def stream(server: Server, cache: Path, **options: object) -> Dataset:
    return open_dataset(SourceConfig(path=str(cache), remote=f"{server.url}/data", **options), 16)


def all_tokens(dataset: Dataset) -> np.ndarray:
    tokens, labels = dataset.gather(np.arange(dataset.samples))
    return np.concatenate([tokens[0, :1], labels.ravel()[: dataset.tokens - 1]])


def leftovers(cache: Path) -> list[str]:
    return [p.name for p in cache.rglob("*") if p.suffix in (".part", ".tmp")]


def wanted(path: Path) -> CachedFile:
    content = path.read_bytes()
    file = ShardFile(path.name, len(content), {"sha256": hashlib.sha256(content).hexdigest()})
    return CachedFile(file, file)


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", ["http", "folder"])
def test_remote_data_reads_as_local_data_does(
    tmp_path: Path, server: Server, compression: str | None, kind: str
) -> None:
    local = write_mds(server.folder / "data/train", SHARDS, compression=compression)
    (server.folder / "data/tokenizer").mkdir()
    (server.folder / "data/tokenizer/tokenizer.json").write_text("{}")
    remote = f"{server.url}/data" if kind == "http" else str(server.folder / "data")
    dataset = open_dataset(SourceConfig(path=str(tmp_path / "cache"), remote=remote, split="train"), 16)
    assert (all_tokens(dataset) == flatten(SHARDS)).all()
    assert dataset.tokenizer_folder == tmp_path / "cache/train/tokenizer"
    again = open_dataset(SourceConfig(path=str(shutil.copytree(local, tmp_path / "copy"))), 16)
    assert again.fingerprint() == dataset.fingerprint()
    assert (again.order(1, True).take(np.arange(50)) == dataset.order(1, True).take(np.arange(50))).all()
    assert leftovers(tmp_path) == []


def test_remote_pairs_of_megatron_are_fetched_in_pieces(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.data.loading.open_dataset.CHUNK_BYTES", 16)
    write_pair(server.folder / "data/web_document", DOCUMENTS)
    source = SourceConfig(path=str(tmp_path / "cache"), remote=f"{server.url}/data/web_document")
    dataset = open_dataset(source, 4)
    assert all_tokens(dataset).tolist() == FLAT
    assert len(list((tmp_path / "cache").glob("web_document.bin.*"))) == 4
    local = open_dataset(SourceConfig(path=str(server.folder / "data/web_document")), 4)
    assert local.fingerprint() == dataset.fingerprint()
    assert (local.order(1, True).take(np.arange(30)) == dataset.order(1, True).take(np.arange(30))).all()


def test_a_remote_pair_without_its_bin_is_refused(tmp_path: Path, server: Server) -> None:
    write_pair(server.folder / "data/web_document", DOCUMENTS)
    (server.folder / "data/web_document.bin").unlink()
    source = SourceConfig(path=str(tmp_path / "cache"), remote=f"{server.url}/data/web_document")
    with pytest.raises(DataError, match=r"web_document\.bin has 0 bytes, but its \.idx says 58"):
        open_dataset(source, 4)


def test_only_needed_shards_are_fetched_and_each_once(tmp_path: Path, server: Server) -> None:
    rows = random_tokens(5 * 4 * 64).reshape(5, 4, 64)
    write_mds(server.folder / "data", [list(samples) for samples in rows])
    dataset = stream(server, tmp_path / "cache")
    assert not any(name.endswith(".mds") for name in server.requests)  # counts follow from the index alone
    dataset.gather(np.array([1, 2, 1]))
    assert [name for name in server.requests if name.endswith(".mds")] == ["data/shard.00000.mds"]
    batches = BatchLoader(dataset, 8, seed=1, shuffle=True).batches()
    for _ in range(30):
        next(batches)
    batches.close()
    assert sorted(name for name in server.requests if name.endswith(".mds")) == [
        f"data/shard.{i:05}.mds" for i in range(5)
    ]


@pytest.mark.parametrize("fault", [429, 500, 503, "short", "corrupt"])
def test_passing_faults_are_retried(tmp_path: Path, server: Server, fault: int | str) -> None:
    write_mds(server.folder / "data", SHARDS)
    server.faults = lambda name, earlier: fault if earlier < 2 and name.endswith(".mds") else None
    assert (all_tokens(stream(server, tmp_path / "cache")) == flatten(SHARDS)).all()
    assert server.requests.count("data/shard.00003.mds") == 3
    assert leftovers(tmp_path) == []


def test_a_silent_server_is_given_up_and_asked_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "READ_TIMEOUT", "200ms")
    write_mds(server.folder / "data", SHARDS)
    server.gate.clear()
    server.faults = lambda name, earlier: "stall" if earlier == 0 and name.endswith("00002.mds") else None
    assert (all_tokens(stream(server, tmp_path / "cache")) == flatten(SHARDS)).all()
    assert server.stopped.is_set()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (503, r"shard\.00000\.mds could not be fetched in 5 attempts"),
        ("short", "could not be fetched in 5 attempts"),
        ("corrupt", "could not be fetched in 5 attempts: its sha1 is .*, but the index says"),
        (404, r"shard\.00000\.mds does not exist, but the index lists it"),
        (403, "is forbidden"),
    ],
)
def test_lasting_faults_are_one_clear_sentence_and_leave_nothing(
    tmp_path: Path, server: Server, fault: int | str, message: str
) -> None:
    write_mds(server.folder / "data", SHARDS)
    server.faults = lambda name, earlier: fault if name.endswith(".mds") else None
    with pytest.raises(DataError, match=message):
        all_tokens(stream(server, tmp_path / "cache"))
    assert leftovers(tmp_path) == [] and list((tmp_path / "cache").glob("*.mds")) == []


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        ("http://127.0.0.1:9/data", "could not be fetched in 5 attempts"),
        ("ftp://somewhere/data", "cannot be opened"),
        ("SERVER/nowhere", r"holds no index\.json"),
        ("/nowhere/at/all", r"holds no index\.json"),
    ],
)
def test_a_missing_remote_is_named(tmp_path: Path, server: Server, remote: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(SourceConfig(path=str(tmp_path / "c"), remote=remote.replace("SERVER", server.url)), 16)


def test_a_corrupt_compressed_shard_is_refused(tmp_path: Path) -> None:
    for compression in ("zstd", "gz", "bz2"):
        folder = write_mds(tmp_path / compression, SHARDS, compression=compression)
        packed = folder / f"shard.00001.mds.{compression}"
        content = bytearray(packed.read_bytes())
        content[len(content) // 2] ^= 1
        packed.write_bytes(content)
        with pytest.raises(DataError, match=r"shard\.00001"):
            all_tokens(open_dataset(SourceConfig(path=str(folder)), 16))
        assert not (folder / "shard.00001.mds").exists() and leftovers(folder) == []


def test_a_server_that_calls_missing_files_forbidden_is_read(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    server.faults = lambda name, earlier: None if (server.folder / name).is_file() else 403
    assert (all_tokens(stream(server, tmp_path / "cache")) == flatten(SHARDS)).all()


def test_splits_of_a_remote_folder_are_listed(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_mds(tmp_path / "remote" / split, SHARDS)
    (tmp_path / "remote/tokenizer").mkdir()
    for split, message in (("test", "no split 'test'; it has train, val"), (None, "holds the splits train, val")):
        with pytest.raises(DataError, match=message):
            source = SourceConfig(path=str(tmp_path / "cache"), remote=str(tmp_path / "remote"), split=split)
            open_dataset(source, 16)


def test_a_pair_in_a_remote_folder_is_found_with_what_prepare_wrote_next_to_it(tmp_path: Path) -> None:
    write_pair(tmp_path / "remote/train/train_text_document", DOCUMENTS)
    (tmp_path / "remote/train/train_text_document.meta.json").write_text('{"bytes": 87, "max_token": 10}')
    (tmp_path / "remote/tokenizer").mkdir()
    (tmp_path / "remote/tokenizer/tokenizer.json").write_text("{}")
    whole = SourceConfig(path=str(tmp_path / "other"), remote=str(tmp_path / "remote/train"))
    assert open_dataset(whole, 4).tokenizer_folder == tmp_path / "other/tokenizer"  # next to the folder that is named
    source = SourceConfig(path=str(tmp_path / "cache"), remote=str(tmp_path / "remote"), split="train")
    dataset = open_dataset(source, 4)
    assert all_tokens(dataset).tolist() == FLAT
    assert dataset.bytes_per_token == 3.0 and dataset.tokenizer_folder == tmp_path / "cache/train/tokenizer"
    with pytest.raises(DataError, match="token ids up to 10"):
        open_dataset(source, 4, vocab_size=10)


def test_a_file_of_another_size_in_the_cache_is_not_overwritten(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    (tmp_path / "cache").mkdir()
    mine = tmp_path / "cache/shard.00000.mds"
    mine.write_bytes(b"something of the user")
    with pytest.raises(DataError, match=r"shard\.00000\.mds has 21 bytes, but"):
        all_tokens(stream(server, tmp_path / "cache"))
    assert mine.read_bytes() == b"something of the user"


def test_a_compressed_shard_that_unpacks_to_more_than_it_says_is_stopped(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", SHARDS, compression="zstd")
    edit_index(folder, lambda index: index["shards"][0]["raw_data"].update(bytes=100, hashes={}))
    with pytest.raises(DataError, match="more than the 100 bytes"):
        all_tokens(open_dataset(SourceConfig(path=str(folder)), 16))


def test_an_unknown_compression_is_named(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", SHARDS, compression="zstd")
    edit_index(folder, lambda index: [s.update(compression="snappy") for s in index["shards"]])
    with pytest.raises(DataError, match="'snappy' are not supported; use zstd, gz, bz2"):
        all_tokens(open_dataset(SourceConfig(path=str(folder)), 16))


def test_a_hash_of_an_unknown_type_is_named(tmp_path: Path, server: Server) -> None:
    folder = write_mds(server.folder / "data", SHARDS)
    edit_index(folder, lambda index: [s["raw_data"].update(hashes={"shake_128": "0"}) for s in index["shards"]])
    with pytest.raises(DataError, match="hashes of the unknown type 'shake_128'; prepare the data again"):
        all_tokens(stream(server, tmp_path / "cache"))


def test_a_cache_of_other_data_is_refused(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    write_mds(tmp_path / "cache", random_shards(seed=5))
    with pytest.raises(DataError, match="holds other data"):
        stream(server, tmp_path / "cache")


def test_the_limit_evicts_what_was_used_longest_ago_and_only_our_own(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", [[random_tokens(64, seed=i)] for i in range(8)])
    size = (server.folder / "data/shard.00000.mds").stat().st_size
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copy(server.folder / "data/shard.00000.mds", cache)  # the user's own
    dataset = stream(server, cache, cache_limit=3 * size)
    for i in range(8):
        dataset.gather(np.array([4 * i]))
    kept = sorted(p.name for p in cache.glob("*.mds"))
    assert kept == ["shard.00000.mds", "shard.00005.mds", "shard.00006.mds", "shard.00007.mds"]


def test_a_file_that_replaced_ours_is_not_evicted(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", [[random_tokens(64, seed=i)] for i in range(6)])
    size = (server.folder / "data/shard.00000.mds").stat().st_size
    cache = tmp_path / "cache"
    dataset = stream(server, cache, cache_limit=2 * size)
    dataset.gather(np.array([0]))
    mine = cache / "shard.00000.mds"
    mine.unlink()
    mine.write_bytes(b"something of the user")
    for i in range(1, 6):
        dataset.gather(np.array([4 * i]))
    assert mine.read_bytes() == b"something of the user"


def test_after_a_crash_of_the_machine_fetched_shards_are_verified_again(tmp_path: Path, server: Server) -> None:
    rows = random_tokens(4 * 4 * 64).reshape(4, 4, 64)
    write_mds(server.folder / "data", [list(samples) for samples in rows])
    cache = tmp_path / "cache"
    whole = np.arange(64)  # windows of 16 tokens
    expected = stream(server, cache).gather(whole)
    *shards, _ = sorted(cache.glob("*.mds"))  # the last is whole
    for path in sorted(cache.glob("*.mds"), reverse=True):
        own = cache / f".ingot/{path.name}.own"
        own.write_text(json.dumps({**json.loads(own.read_text()), "boots": ["before the crash"]}))
    (cache / f".ingot/{shards[2].name}.own").write_text("")
    for path, left in zip(shards, (shards[0].stat().st_size, 0, 0), strict=True):  # what was written but not stored
        time_written = path.stat().st_mtime_ns
        with path.open("r+b") as file:
            file.write(bytes(left))
            file.truncate(left)
        os.utime(path, ns=(time_written, time_written))
    server.requests.clear()
    assert all(map(np.array_equal, stream(server, cache).gather(whole), expected))
    fetched = [f"data/{path.name}" for path in shards]
    assert [name for name in server.requests if name.endswith(".mds")] == fetched
    stream(server, cache).gather(whole)
    assert [name for name in server.requests if name.endswith(".mds")] == fetched


def test_a_small_cache_reads_everything_and_stays_within_its_limit(tmp_path: Path, server: Server) -> None:
    rows = random_tokens(20 * 4 * 64).reshape(20, 4, 64)
    write_mds(server.folder / "data", [list(samples) for samples in rows])
    size = (server.folder / "data/shard.00000.mds").stat().st_size
    cache = tmp_path / "cache"
    dataset = stream(server, cache, cache_limit=4 * size)
    ids = []
    for batch in (batches := BatchLoader(dataset, 16, seed=1, shuffle=True).batches()):
        ids += batch.samples.tolist()
        assert (batch.tokens == rows.ravel()[batch.samples[:, None] * 16 + np.arange(16)]).all()
        held = 0
        for path in cache.glob("*.mds"):
            with contextlib.suppress(FileNotFoundError):  # evicted by the thread that reads ahead
                held += path.stat().st_size
        assert held <= 4 * size
        if len(ids) >= dataset.samples:
            batches.close()
            break
    assert set(ids) == set(range(dataset.samples))


def test_a_limit_below_two_shards_is_refused(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    with pytest.raises(DataError, match="cache_limit 1,000 is too small"):
        stream(server, tmp_path / "cache", cache_limit=1000)


def test_shards_are_fetched_before_they_are_needed(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    cache = ShardCache(tmp_path / "cache", Remote(f"{server.url}/data"))
    files = [wanted(path) for path in sorted((server.folder / "data").glob("*.mds"))]
    cache.announce(files[:2], files[2:])
    with cache._changed:
        assert cache._changed.wait_for(lambda: cache._running == 0, timeout=60)
    before = len(server.requests)
    assert all(cache.ensure(file).is_file() for file in files)
    assert len(server.requests) == before == 6


def test_the_loader_has_shards_fetched_long_before_it_needs_them(tmp_path: Path, server: Server) -> None:
    rows = random_tokens(5 * 40 * 64).reshape(5, 40, 64)
    write_mds(server.folder / "data", [list(samples) for samples in rows])
    asked = threading.Event()
    server.faults = lambda name, earlier: asked.set() if name.endswith("00004.mds") else None
    batches = BatchLoader(stream(server, tmp_path / "cache"), 2, seed=1, shuffle=False, prefetch=1).batches()
    next(batches)  # of the first shard
    assert asked.wait(60)
    batches.close()


def test_announced_shards_do_not_push_out_those_in_use(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", [[random_tokens(64, seed=i)] for i in range(6)])
    files = [wanted(path) for path in sorted((server.folder / "data").glob("*.mds"))]
    cache = ShardCache(tmp_path / "cache", Remote(f"{server.url}/data"), limit=3 * files[0].target.bytes)
    for file in files[:3]:
        cache.ensure(file)
    cache.announce(files[:3], files[3:])
    with cache._changed:
        assert cache._changed.wait_for(lambda: cache._running == 0, timeout=60)
    assert sorted(p.name for p in cache.folder.glob("*.mds")) == [f.target.basename for f in files[:3]]


def test_many_threads_fetch_a_shard_once(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    file = wanted(server.folder / "data/shard.00000.mds")
    server.faults = lambda name, earlier: "stall"
    server.gate.clear()
    caches = [ShardCache(tmp_path / "cache", Remote(f"{server.url}/data")) for _ in range(6)]
    found: list[Path] = []
    threads = [threading.Thread(target=lambda c=c: found.append(c.ensure(file))) for c in caches]
    for thread in threads:
        thread.start()
    assert server.stopped.wait(60)
    assert not (tmp_path / "cache/shard.00000.mds").exists()  # half of it is there, under another name
    server.gate.set()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(server.requests) == 1


def test_a_download_that_pauses_is_left_alone_for_the_length_of_a_lease(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mds(server.folder / "data", SHARDS)
    file = wanted(server.folder / "data/shard.00000.mds")
    server.faults = lambda name, earlier: "stall"
    server.gate.clear()
    first, second = (ShardCache(tmp_path / "cache", Remote(f"{server.url}/data")) for _ in range(2))
    fetching = threading.Thread(target=first.ensure, args=(file,))
    fetching.start()
    assert server.stopped.wait(60)
    asked, enough, attempt = [], threading.Event(), ShardCache._try

    def counted(cache: ShardCache, *arguments: Any, **options: Any) -> bool:
        asked.append(cache)
        if len(asked) == 5:
            enough.set()
        return attempt(cache, *arguments, **options)

    monkeypatch.setattr(ShardCache, "_try", counted)
    waiting = threading.Thread(target=second.ensure, args=(file,))
    waiting.start()
    assert enough.wait(60)
    server.gate.set()
    fetching.join()
    waiting.join()
    assert len(server.requests) == 1


@pytest.mark.parametrize(("boot", "hashes", "synced"), [("id", True, False), ("id", False, True), ("", True, True)])
def test_a_fetched_file_is_synced_unless_a_later_start_can_verify_it(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, boot: str, hashes: bool, synced: bool
) -> None:
    """A crash may leave it torn: found by its hash, if the machine tells that it was rebooted."""
    write_mds(server.folder / "data", SHARDS)
    file = wanted(server.folder / "data/shard.00000.mds")
    if not hashes:
        plain = ShardFile(file.target.basename, file.target.bytes, {})
        file = CachedFile(plain, plain)
    found: list[int] = []
    monkeypatch.setattr(cache_module, "BOOT", boot)
    monkeypatch.setattr("ingot.data.loading.shard_cache.os.fsync", found.append)
    ShardCache(tmp_path / "cache", Remote(f"{server.url}/data")).ensure(file)
    assert bool(found) == synced


def test_readers_that_start_together_accept_each_others_index(tmp_path: Path) -> None:
    """A file that appears between two checks is the neighbor's, not other data."""
    remote = write_mds(tmp_path / "data", SHARDS)
    Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE())).save(remote / "tokenizer")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads meet anywhere
    try:
        with ThreadPoolExecutor(4) as pool:
            for i in range(40):
                config = SourceConfig(path=str(tmp_path / f"cache-{i}"), remote=str(remote))
                for opened in [pool.submit(open_dataset, config, 16) for _ in range(4)]:
                    assert opened.result().samples > 0
    finally:
        sys.setswitchinterval(interval)


def test_processes_that_start_together_after_a_kill_clean_up_side_by_side(tmp_path: Path) -> None:
    state = tmp_path / "cache/.ingot"
    state.mkdir(parents=True)
    for _ in range(20):
        for i in range(40):
            (state / f"shard.{i:05}.mds.own").write_text("{}")  # marks of files that are gone
        with ThreadPoolExecutor(4) as pool:
            for opened in [pool.submit(ShardCache, tmp_path / "cache", Remote(str(tmp_path))) for _ in range(4)]:
                opened.result()
        assert not list(state.glob("*.own"))


PROGRAM = """
import sys
import numpy as np
from ingot.config.data import SourceConfig
from ingot.data.loading.open_dataset import open_dataset
dataset = open_dataset(SourceConfig(path=sys.argv[1], remote=sys.argv[2]), 16)
tokens, labels = dataset.gather(np.arange(dataset.samples))
print(int(tokens.sum()), int(labels.sum()))
"""


@contextlib.contextmanager
def reader(cache: Path, server: Server) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", PROGRAM, str(cache), f"{server.url}/data"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONWARNINGS": "error"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_processes_share_a_cache_and_fetch_each_shard_once(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    cache = tmp_path / "cache"
    with reader(cache, server) as one, reader(cache, server) as two:
        answers = {one.communicate(timeout=120)[0], two.communicate(timeout=120)[0]}
    tokens, labels = open_dataset(SourceConfig(path=str(server.folder / "data")), 16).gather(
        np.arange(-(-(len(flatten(SHARDS)) - 1) // 16))
    )
    assert answers == {f"{tokens.sum()} {labels.sum()}\n"}
    for i in range(6):
        assert server.requests.count(f"data/shard.{i:05}.mds") == 1
    assert leftovers(cache) == []


def test_a_process_killed_in_a_download_blocks_nobody_and_leaves_nothing(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    cache = tmp_path / "cache"
    server.gate.clear()
    server.faults = lambda name, earlier: "stall" if earlier == 0 and name.endswith("00000.mds") else None
    with reader(cache, server) as process:
        assert server.stopped.wait(60)
        assert leftovers(cache) != []
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (cache / "shard.00000.mds").exists()
    ShardCache(cache, Remote(f"{server.url}/data"))  # the next start
    assert leftovers(cache) == []
    dataset = stream(server, cache)
    assert (all_tokens(dataset) == flatten(SHARDS)).all()
    assert leftovers(cache) == []


def test_a_living_process_takes_over_the_download_of_a_dead_one(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", [SHARDS[0]])
    cache = tmp_path / "cache"
    server.gate.clear()
    server.faults = lambda name, earlier: "stall" if earlier == 0 and name.endswith("00000.mds") else None
    with reader(cache, server) as first:
        assert server.stopped.wait(60)
        with reader(cache, server) as second:
            first.kill()
            assert second.communicate(timeout=120)[0]
    assert server.requests.count("data/shard.00000.mds") == 2
    assert leftovers(cache) == []


def test_a_process_that_hangs_in_a_download_loses_it_and_does_no_harm_when_it_wakes(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mds(server.folder / "data", [SHARDS[0]])
    cache = tmp_path / "cache"
    server.gate.clear()
    server.faults = lambda name, earlier: "stall" if earlier == 0 and name.endswith("00000.mds") else None
    with reader(cache, server) as first:
        assert server.stopped.wait(60)
        first.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(cache_module, "LEASE_SECONDS", 0.1)
        tokens, labels = open_dataset(SourceConfig(path=str(cache), remote=f"{server.url}/data"), 16).gather(
            np.arange(-(-(len(flatten(SHARDS[:1])) - 1) // 16))
        )
        finished = (cache / "shard.00000.mds").stat().st_ino
        server.gate.set()
        first.send_signal(signal.SIGCONT)
        assert first.communicate(timeout=120)[0] == f"{tokens.sum()} {labels.sum()}\n"
    assert (cache / "shard.00000.mds").stat().st_ino == finished
    assert leftovers(cache) == []


def test_a_closed_cache_stops_its_downloads_and_removes_incomplete_files(tmp_path: Path, server: Server) -> None:
    write_mds(server.folder / "data", SHARDS)
    server.gate.clear()
    server.faults = lambda name, earlier: "stall"
    cache = ShardCache(tmp_path / "cache", Remote(f"{server.url}/data"), threads=1)
    cache.announce([wanted(server.folder / "data/shard.00000.mds")], [])
    assert server.stopped.wait(60)
    closing = threading.Thread(target=cache.close)
    closing.start()
    server.gate.set()
    closing.join()
    assert leftovers(cache.folder) == [] and not list(cache.folder.glob("*.mds"))


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "data", SHARDS, compression="zstd")
    (folder / ".ingot").write_text("in the way")
    with pytest.raises(DataError, match="set path to a writable folder, and remote"):
        open_dataset(SourceConfig(path=str(folder)), 16)


def upload(environment: dict[str, str], folder: Path, prefix: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(bucket(environment), f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_data_in_an_object_store_reads_as_local_data_does(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    upload(s3, write_mds(tmp_path / "local/train", SHARDS, compression=compression).parent, f"data-{compression}")
    remote = f"s3://test/data-{compression}"
    dataset = open_dataset(SourceConfig(path=str(tmp_path / "cache"), remote=remote, split="train"), 16)
    batches = BatchLoader(dataset, 4, seed=1, shuffle=True).batches()
    for batch in itertools.islice(batches, 20):
        tokens = flatten(SHARDS)[np.minimum(batch.samples[:, None] * 16 + np.arange(16), dataset.tokens - 1)]
        inside = batch.samples[:, None] * 16 + np.arange(16) < dataset.tokens
        assert (batch.tokens == np.where(inside, tokens, 0)).all()
    batches.close()
    assert leftovers(tmp_path) == []


def test_pairs_of_megatron_in_an_object_store_are_read_in_pieces(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ingot.data.loading.open_dataset.CHUNK_BYTES", 16)
    upload(s3, write_pair(tmp_path / "local/web_document", DOCUMENTS).parent, "pairs")
    source = SourceConfig(path=str(tmp_path / "cache"), remote="s3://test/pairs/web_document")
    assert all_tokens(open_dataset(source, 4)).tolist() == FLAT


def test_a_wrong_key_and_a_missing_object_are_told_apart(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=r"s3://test/nowhere holds no index\.json"):
        open_dataset(SourceConfig(path=str(tmp_path / "cache"), remote="s3://test/nowhere"), 16)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DataError, match=r"is forbidden.*credentials come from the environment"):
        open_dataset(SourceConfig(path=str(tmp_path / "cache"), remote="s3://test/nowhere"), 16)


class GoogleServer(Server):
    """As much of Google's XML API as reading needs, for whoever has the token."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        place, _, query = handler.path.partition("?")
        if handler.headers.get("Authorization") != "Bearer secret":
            handler.send_error(401)
        elif "list-type=2" not in query:
            super().answer(handler)
        else:
            prefix = urllib.parse.parse_qs(query)["prefix"][0]
            found = sorted((self.folder / place.lstrip("/") / prefix).iterdir())
            folders = [f"<CommonPrefixes><Prefix>{prefix}{p.name}/</Prefix></CommonPrefixes>" for p in found]
            content = f"<ListBucketResult>{''.join(folders)}</ListBucketResult>".encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)


def test_data_at_google_reads_as_local_data_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mds(tmp_path / "remote/bucket/data/train", SHARDS)
    server = GoogleServer(tmp_path / "remote")
    try:
        monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "secret")
        source = SourceConfig(path=str(tmp_path / "cache"), remote="gs://bucket/data", split="train")
        assert (all_tokens(open_dataset(source, 16)) == flatten(SHARDS)).all()
        assert "bucket/data/train/shard.00000.mds" in server.requests
        with pytest.raises(DataError, match="no split 'val'; it has train"):
            open_dataset(source.model_copy(update={"split": "val"}), 16)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "wrong")
        with pytest.raises(DataError, match=r"gs://bucket/data/train/index.json is forbidden.*GOOGLE_"):
            open_dataset(source, 16)
    finally:
        server.close()


AZURITE_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ingot-tests" / "azurite"
AZURITE = shutil.which("azurite-blob", path=f"{AZURITE_FOLDER}/node_modules/.bin{os.pathsep}{os.environ['PATH']}")


def install_azurite() -> str:
    """Microsoft's own server, from npm into a folder that later runs find."""
    if shutil.which("npm") is None:
        pytest.skip("no Azure blob server here, and no npm to install it with: npm install azurite")
    AZURITE_FOLDER.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", str(AZURITE_FOLDER), "--no-audit", "--no-fund", "azurite"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"azurite cannot be installed here: {done.stderr[-300:]}")
    return str(AZURITE_FOLDER / "node_modules/.bin/azurite-blob")


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of an Azure blob server on loopback with a container `test`."""
    program = AZURITE or install_azurite()
    folder, account, port = tmp_path_factory.mktemp("azurite"), "devstoreaccount1", free_ports()
    key = base64.b64encode(bytes(range(64))).decode()
    url = f"http://127.0.0.1:{port}/{account}"
    command = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
    command += ["--disableTelemetry", "--skipApiVersionCheck"]
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}"}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
        try:
            make_container(url, account, key, process)
            yield {
                "AZURE_STORAGE_ACCOUNT_NAME": account, "AZURE_STORAGE_ACCOUNT_KEY": key, "AZURE_STORAGE_ENDPOINT": url,
            }  # fmt: skip
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder)


def make_container(url: str, account: str, key: str, process: subprocess.Popen) -> None:
    """A signed request, since the client cannot make containers."""
    date = email.utils.formatdate(usegmt=True)
    version = "2021-08-06"
    text = f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n/{account}/{account}/test\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(key), text.encode(), "sha256")).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0"}
    headers["Authorization"] = f"SharedKey {account}:{signature}"
    request = urllib.request.Request(f"{url}/test?restype=container", method="PUT", headers=headers)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(request).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
    pytest.fail("the Azure blob server did not start")


@(pytest.mark.slow if AZURITE is None else lambda test: test)  # the installation takes minutes
def test_data_in_azure_reads_as_local_data_does(
    tmp_path: Path, azure: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in azure.items():
        monkeypatch.setenv(name, value)
    store = obstore.store.from_url("az://test/data", client_options={"allow_http": True})
    folder = write_mds(tmp_path / "local", SHARDS, compression="zstd")
    for path in folder.iterdir():
        obstore.put(store, f"train/{path.name}", path.read_bytes())
    source = SourceConfig(path=str(tmp_path / "cache"), remote="az://test/data", split="train")
    assert (all_tokens(open_dataset(source, 16)) == flatten(SHARDS)).all()
    with pytest.raises(DataError, match="no split 'val'; it has train"):
        open_dataset(source.model_copy(update={"split": "val"}), 16)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
    with pytest.raises(DataError, match="is forbidden"):
        open_dataset(source, 16)
