"""A data set: one long sequence of tokens, cut into windows when training starts.

Window i is tokens[i*S : i*S + S + 1]: the first S are the input, the last S the labels, so neighbours share one token
and every token but the very first is predicted once. The sequence length is thus not baked into the files: samples
stored in any length are split or joined. The last window may be short: its rest is token 0, with labels IGNORE.
"""

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ingot.data.cache import Cache, Forbidden, Remote, Wanted
from ingot.data.config import PlaceConfig, SourceConfig
from ingot.data.indexed import FlatShard, IndexFile
from ingot.data.mds import MdsShard, ShardFile, read_index, tokens_by_index
from ingot.data.order import Order
from ingot.errors import DataError

IGNORE = -100  # the label of a position without a next token
OPEN_SHARDS = 256  # memory maps kept open; each holds a file descriptor
CHUNK_BYTES = 1 << 26  # the part of a .bin that counts as a shard, for the order and for fetching
MAX_BLOCK_SAMPLES = 1 << 16


class Shard(Protocol):
    """Tokens in one file."""

    tokens: int

    def read(self, start: int, out: np.ndarray) -> None: ...


@dataclass(frozen=True)
class Meta:
    """What `prepare` left in meta.json; all unknown for data of other tools."""

    tokens: int | None = None
    bytes: int | None = None
    max_token: int | None = None
    eos_id: int | None = None
    shard_tokens: tuple[int, ...] | None = None


class Dataset(ABC):
    """Samples by number: what a loader reads from."""

    samples: int  # windows of seq_len tokens; the last may be short
    tokens: int
    seq_len: int
    tokenizer_folder: Path | None  # that of the tokenizer which made the data, where it came along
    bytes_per_token: float | None  # of text, where known

    @abstractmethod
    def describe(self) -> str:
        """One line for the console."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of what the data is and how it is cut, the same on every machine."""

    @abstractmethod
    def order(self, seed: int, shuffle: bool) -> Order:
        """The order of its samples."""

    @abstractmethod
    def announce(self, order: Order, position: int) -> None:
        """Say where reading stands, so that shards from elsewhere are fetched before they are needed."""

    @abstractmethod
    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples by id [n] -> tokens and labels, int64 [n, S] each."""

    @abstractmethod
    def document_starts(self, ids: np.ndarray) -> np.ndarray:
        """Where documents begin in the inputs of samples [n] -> bool [n, S]; each first position counts as one."""


class Windows(Dataset):
    """Windows of `seq_len` tokens over shards that are opened when first read."""

    def __init__(
        self,
        kind: str,
        where: str,
        names: Sequence[str],
        shard_tokens: Sequence[int],
        open_shard: Callable[[int], Shard],
        seq_len: int,
        vocab_size: int | None,
        *,
        identity: Any,  # what distinguishes this data from other data
        block_tokens: int,  # about the tokens of a shard
        meta: Meta,
        tokenizer_folder: Path | None = None,
        index: IndexFile | None = None,
        fetch_ahead: Callable[[list[int], list[int]], None] | None = None,  # shards needed now and soon
    ):
        self.kind, self.where, self.seq_len, self.vocab_size = kind, where, seq_len, vocab_size
        self.tokens = int(sum(shard_tokens))
        if self.tokens < 2:
            raise DataError(f"{where} is empty: {self.tokens} tokens, and training needs at least 2; prepare it again")
        self.samples = -(-(self.tokens - 1) // seq_len)
        self.meta = meta
        self.tokenizer_folder = tokenizer_folder
        self.bytes_per_token = self.meta.bytes / self.tokens if self.meta.bytes else None
        self._names = names
        self._first = np.concatenate([[0], np.cumsum(np.asarray(shard_tokens, np.int64))]).tolist()  # token of shard
        self._open_shard = open_shard
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()
        self._identity, self._index, self._block_tokens = identity, index, block_tokens
        self._fetch_ahead = fetch_ahead
        self._announced = range(0)
        if vocab_size is not None and self.meta.max_token is not None and self.meta.max_token >= vocab_size:
            raise DataError(
                f"{where} holds token ids up to {self.meta.max_token}, beyond the model's vocabulary of {vocab_size}; "
                f"set model.vocab_size to at least {self.meta.max_token + 1} or prepare it with the model's tokenizer"
            )

    def describe(self) -> str:
        shards = f"{len(self._names):,} shard{'s' * (len(self._names) != 1)}"
        return (
            f"{self.kind} {self.where}: {self.tokens:,} tokens in {shards}, {self.samples:,} samples of {self.seq_len}"
        )

    def fingerprint(self) -> str:
        text = json.dumps([self.kind, self.seq_len, self._identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def order(self, seed: int, shuffle: bool) -> Order:
        # In blocks of about a shard.
        block = min(max(1, self._block_tokens // self.seq_len), MAX_BLOCK_SAMPLES)
        return Order(self.samples, seed, shuffle, block)

    def announce(self, order: Order, position: int) -> None:
        if self._fetch_ahead is None or position in self._announced:
            return
        spans, end = order.window_at(position)
        self._announced = range(position, end)
        now, soon = self._shards_of(spans), self._shards_of(order.window_at(end)[0])
        with self._lock:  # a map of an evicted file would still occupy the disk
            for number in set(self._open) - set(now) - set(soon):
                del self._open[number]
        self._fetch_ahead(now, [number for number in soon if number not in now])

    def _shards_of(self, spans: list[tuple[int, int]]) -> list[int]:
        """The shards that hold the samples [first, end) of each span, each once, in the order of the spans."""
        numbers: dict[int, None] = {}
        for first, end in spans:
            last = min(end * self.seq_len, self.tokens - 1)  # a window ends with the first token of the next
            begin = bisect_right(self._first, first * self.seq_len) - 1
            numbers |= dict.fromkeys(range(begin, bisect_right(self._first, last)))
        return list(numbers)

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        n, length = len(ids), self.seq_len
        rows = np.zeros((n, length + 1), np.int64)  # [n, S+1]
        short: list[tuple[int, int]] = []
        for k, i in enumerate(ids.tolist()):
            start = i * length
            if not 0 <= i < self.samples:
                raise IndexError(f"sample {i} of {self.samples}")
            count = min(length + 1, self.tokens - start)
            if count <= length:
                short.append((k, count))
            self._read(start, rows[k, :count])
        if self.vocab_size is not None and rows.size and int(rows.view(np.uint64).max()) >= self.vocab_size:
            self._refuse_token(ids, rows)
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        for k, count in short:
            labels[k, count - 1 :] = IGNORE
        return tokens, labels

    def document_starts(self, ids: np.ndarray) -> np.ndarray:
        starts = np.zeros((len(ids), self.seq_len), bool)
        starts[:, 0] = True
        if self._index is not None:
            for k, i in enumerate(ids.tolist()):
                first = i * self.seq_len
                starts[k, self._index.starts_between(first, min(first + self.seq_len, self.tokens)) - first] = True
        elif self.meta.eos_id is not None:
            tokens, _ = self.gather(ids)
            starts[:, 1:] |= tokens[:, :-1] == self.meta.eos_id
        else:
            raise DataError(f"{self.where} does not say where documents end: its meta.json has no eos_id")
        return starts

    def _read(self, start: int, out: np.ndarray) -> None:
        """Copy tokens from a global position on, across shards, into all of `out`."""
        number = bisect_right(self._first, start) - 1
        done = 0
        while done < len(out):
            inside = start + done - self._first[number]
            taken = min(self._first[number + 1] - self._first[number] - inside, len(out) - done)
            if taken:
                self._shard(number).read(inside, out[done : done + taken])
            done, number = done + taken, number + 1

    def _shard(self, number: int) -> Shard:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
            else:
                shard = self._open_shard(number)
                expected = self._first[number + 1] - self._first[number]
                if shard.tokens != expected:
                    raise DataError(
                        f"{self.where}: {self._names[number]} has {shard.tokens:,} tokens where {expected:,} were "
                        "counted before; prepare or copy the data again"
                    )
                self._open[number] = shard
                while len(self._open) > OPEN_SHARDS:
                    self._open.popitem(last=False)
            return self._open[number]

    def _refuse_token(self, ids: np.ndarray, rows: np.ndarray) -> None:
        k, column = np.argwhere((rows < 0) | (rows >= self.vocab_size))[0]
        place = int(ids[k]) * self.seq_len + int(column)
        name = self._names[bisect_right(self._first, place) - 1]
        raise DataError(
            f"{self.where}: sample {ids[k]} holds token id {rows[k, column]} (in {name}), outside the model's "
            f"vocabulary of {self.vocab_size}; prepare the data with the model's tokenizer or set model.vocab_size"
        )


def open_dataset(source: SourceConfig, seq_len: int, vocab_size: int | None = None) -> Dataset:
    """The data that a source names: one data set in whichever format it is, or a mixture of several."""
    if not source.mix:
        return _open_place(source, seq_len, vocab_size)
    from ingot.data.mixture import Mixture  # which is made of data sets

    datasets = {name: _open_place(place, seq_len, vocab_size) for name, place in source.mix.items()}
    return Mixture(datasets, {name: place.weight for name, place in source.mix.items() if place.weight is not None})


def _open_place(place: PlaceConfig, seq_len: int, vocab_size: int | None) -> Windows:
    path = Path(place.path)
    if place.remote is not None:
        kind, path, cache = fetch_index(place.remote, path, place.split, place.cache_limit)
    else:
        (kind, path), cache = locate(path, place.split), None
    if kind == "mds":
        return _open_mds(path, place, cache, seq_len, vocab_size)
    return _open_indexed(path, cache, seq_len, vocab_size)


def fetch_index(remote: str, path: Path, split: str | None, limit: int | None) -> tuple[str, Path, Cache]:
    """Fetch what says which shards there are; `locate` for data that is elsewhere."""
    folder, url = (path / split, f"{remote.rstrip('/')}/{split}") if split else (path, remote.rstrip("/"))
    store = Remote(url)
    index, refusal = _read_optional(store, "index.json")
    if index is not None:
        cache = Cache(folder, store, limit)
        _keep(cache, "index.json", index)
        _keep(cache, "meta.json", _read_optional(store, "meta.json")[0])
        _fetch_tokenizer(cache, url)
        return "mds", folder, cache
    parent, _, name = url.rpartition("/")
    store = Remote(parent)
    size = None
    with suppress(Forbidden):
        size = store.size(f"{name}.idx")
    if size is None:
        raise refusal or DataError(
            f"{url} holds no index.json (MDS), and there is no {url}.idx (Megatron); check remote and split"
        )
    cache = Cache(path, store, limit)
    file = ShardFile(f"{name}.idx", size, {})
    cache.ensure(Wanted(file, file))
    return "indexed", path / name, cache


def _read_optional(store: Remote, name: str) -> tuple[bytes | None, Forbidden | None]:
    """A small file that need not be there. A store that may not be listed says "forbidden" instead of "not found"."""
    try:
        return store.read(name), None
    except Forbidden as refusal:
        return None, refusal


def _keep(cache: Cache, name: str, content: bytes | None) -> None:
    """Put a small file of the remote into the cache, unless the cache belongs to other data."""
    path = cache.folder / name
    if content is None or (path.exists() and path.read_bytes() == content):
        return
    if path.exists():
        raise DataError(
            f"{path} is not that of {cache.remote.url}: the folder holds other data; set path to another one"
        )
    cache.put(name, content)


def _fetch_tokenizer(cache: Cache, url: str) -> None:
    """The tokenizer lies beside the splits, or in them."""
    for place in (f"{url}/tokenizer", f"{url.rpartition('/')[0]}/tokenizer"):
        store = Remote(place)
        if (content := _read_optional(store, "tokenizer.json")[0]) is not None:
            _keep(cache, "tokenizer/tokenizer.json", content)
            _keep(cache, "tokenizer/tokenizer_config.json", _read_optional(store, "tokenizer_config.json")[0])
            return


def locate(path: Path, split: str | None) -> tuple[str, Path]:
    """Which format lies where: ("mds", folder) or ("indexed", prefix)."""
    base = path / split if split else path
    if base.suffix in (".bin", ".idx"):
        base = base.with_suffix("")
    if (base / "index.json").is_file():
        return "mds", base
    prefixes = [base] if _with(base, ".idx").is_file() else []
    if not prefixes and base.is_dir():
        prefixes = [p.with_suffix("") for p in sorted(base.glob("*.idx"))]
    if not prefixes and split and path.is_dir():
        prefixes = [p.with_suffix("") for p in sorted(path.glob(f"{split}*.idx"))]
    if len(prefixes) > 1:
        names = ", ".join(p.name for p in prefixes)
        raise DataError(f"{base} holds several data sets: {names}; name one of them with path={base}/NAME")
    if prefixes:
        if not _with(prefixes[0], ".bin").is_file():
            raise DataError(f"{prefixes[0]}.idx is there but {prefixes[0].name}.bin is not; copy both")
        return "indexed", prefixes[0]
    splits = _splits(path)
    if split and splits:
        raise DataError(f"{path} has no split '{split}'; it has {', '.join(splits)}")
    if splits:
        raise DataError(f"{path} holds the splits {', '.join(splits)}; name one with split=...")
    if not path.exists():
        raise DataError(f"{path} does not exist; write a data set there with `ingot prepare`")
    raise DataError(f"{base} holds neither an index.json (MDS) nor a .idx file (Megatron); see `ingot prepare`")


def _splits(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    folders = [p.parent.name for p in path.glob("*/index.json")] + [p.parent.name for p in path.glob("*/*.idx")]
    return sorted(set(folders) | {p.stem for p in path.glob("*.idx")})


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _open_mds(folder: Path, place: PlaceConfig, cache: Cache | None, seq_len: int, vocab_size: int | None) -> Windows:
    infos = read_index(folder / "index.json")
    meta = read_meta(folder)
    raw_type = place.token_encoding_type
    if cache is None and any(info.packed and not (folder / info.raw.basename).exists() for info in infos):
        cache = Cache(
            folder, Remote(str(folder)), place.cache_limit
        )  # compressed shards are unpacked beside themselves
    if cache is not None:
        _check_limit(cache, max((info.raw.bytes for info in infos), default=0))

    def wanted(number: int) -> Wanted:
        info = infos[number]
        return Wanted(info.raw, info.packed or info.raw, info.compression)

    def open_shard(number: int) -> MdsShard:
        def opener(path: Path) -> MdsShard:
            return MdsShard(path, infos[number], raw_type)

        return cache.open(wanted(number), opener) if cache else opener(folder / infos[number].raw.basename)

    def fetch_ahead(now: list[int], soon: list[int]) -> None:
        if cache is not None:
            cache.announce([wanted(i) for i in now], [wanted(i) for i in soon])

    tokens = tokens_by_index(infos, raw_type) if cache else None
    if meta.shard_tokens is not None and len(meta.shard_tokens) == len(infos):
        tokens = list(meta.shard_tokens)
    if tokens is None:
        fetch_ahead([], list(range(len(infos))))
        try:
            tokens = [open_shard(i).tokens for i in range(len(infos))]
        except BaseException:
            if cache is not None:
                cache.close()
            raise
    return Windows(
        "MDS", place.remote or str(folder), [info.raw.basename for info in infos], tokens, open_shard, seq_len,
        vocab_size,
        identity=[[s.raw.basename, s.raw.bytes, s.raw.hashes, t] for s, t in zip(infos, tokens, strict=True)],
        block_tokens=sum(tokens) // max(1, len(tokens)),
        meta=meta,
        tokenizer_folder=_tokenizer_folder(folder),
        fetch_ahead=fetch_ahead if cache else None,
    )  # fmt: skip


def _open_indexed(prefix: Path, cache: Cache | None, seq_len: int, vocab_size: int | None) -> Windows:
    index = IndexFile(_with(prefix, ".idx"))
    bin_path = _with(prefix, ".bin")
    found = cache.remote.size(bin_path.name) if cache else bin_path.stat().st_size
    expected = index.tokens * index.dtype.itemsize
    if found != expected:
        raise DataError(f"{bin_path} has {found:,} bytes where its .idx says {expected:,}; copy or prepare it again")
    if cache is not None:
        _check_limit(cache, min(CHUNK_BYTES, expected))
    chunk = CHUNK_BYTES // index.dtype.itemsize
    sizes = [min(chunk, index.tokens - begin) for begin in range(0, index.tokens, chunk)] if cache else [index.tokens]

    def wanted(number: int) -> Wanted:
        part = ShardFile(f"{bin_path.name}.{number:06}", sizes[number] * index.dtype.itemsize, {})
        return Wanted(part, ShardFile(bin_path.name, part.bytes, {}), begin=number * CHUNK_BYTES)

    def open_shard(number: int) -> FlatShard:
        def opener(path: Path) -> FlatShard:
            return FlatShard(path, index.dtype, sizes[number])

        return cache.open(wanted(number), opener) if cache else opener(bin_path)

    def fetch_ahead(now: list[int], soon: list[int]) -> None:
        if cache is not None:
            cache.announce([wanted(i) for i in now], [wanted(i) for i in soon])

    return Windows(
        "indexed", f"{cache.remote.url}/{prefix.name}" if cache else str(prefix), [bin_path.name] * len(sizes), sizes,
        open_shard, seq_len, vocab_size,
        identity=[prefix.name, index.dtype.name, index.tokens, len(index.lengths), len(index.documents)],
        block_tokens=min(chunk, index.tokens),
        meta=read_meta(prefix.parent),
        tokenizer_folder=_tokenizer_folder(prefix.parent),
        index=index,
        fetch_ahead=fetch_ahead if cache else None,
    )  # fmt: skip


def _check_limit(cache: Cache, largest: int) -> None:
    if cache.limit is not None and cache.limit < 2 * largest:
        raise DataError(f"cache_limit {cache.limit:,} is too small: two shards of {largest:,} bytes must fit")


def read_meta(folder: Path) -> Meta:
    """The facts in a split's meta.json, if there is one."""
    path = folder / "meta.json"
    try:
        content = json.loads(path.read_bytes())
        shards = content.get("shards")
        return Meta(
            content.get("tokens"), content.get("bytes"), content.get("max_token"), content.get("eos_id"),
            tuple(int(s["tokens"]) for s in shards) if shards is not None else None,
        )  # fmt: skip
    except FileNotFoundError:
        return Meta()
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it to have the shards counted instead") from None


def _tokenizer_folder(folder: Path) -> Path | None:
    places = [folder / "tokenizer", folder.parent / "tokenizer"]
    return next((p for p in places if (p / "tokenizer.json").is_file()), None)
