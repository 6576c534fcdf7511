"""A data set: one long sequence of tokens, cut into windows when training starts.

Window i is tokens[i*S : i*S + S + 1]: the first S are the input, the last S the labels, so neighbours share one token
and every token but the very first is predicted once. The sequence length is thus not baked into the files: samples
stored in any length are split or joined. The last window may be short: its rest is token 0, with labels IGNORE.
"""

import hashlib
import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ingot.data.config import SourceConfig
from ingot.data.indexed import FlatShard, IndexFile
from ingot.data.mds import MdsShard, MdsShardInfo, read_index
from ingot.data.order import BLOCK_SAMPLES, Order
from ingot.errors import DataError

IGNORE = -100  # the label of a position without a next token
OPEN_SHARDS = 256  # memory maps kept open; each holds a file descriptor
MAX_BLOCK_BYTES = 1 << 26  # the part of a file without shards that counts as one for the order


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


class Dataset:
    """Windows of `seq_len` tokens over shards that are opened when first read."""

    def __init__(
        self,
        kind: str,
        where: str,
        names: Sequence[str],
        shard_tokens: Sequence[int],
        open_shard: Callable[[int], Shard],
        seq_len: int,
        identity: Any,
        vocab_size: int | None = None,
        meta: Meta | None = None,
        tokenizer_folder: Path | None = None,
        index: IndexFile | None = None,
    ):
        self.kind, self.where, self.seq_len, self.vocab_size = kind, where, seq_len, vocab_size
        self.tokens = int(sum(shard_tokens))
        if self.tokens < 2:
            raise DataError(f"{where} is empty: {self.tokens} tokens, and training needs at least 2; prepare it again")
        self.samples = -(-(self.tokens - 1) // seq_len)
        self.meta = meta or Meta()
        self.tokenizer_folder = tokenizer_folder
        self.bytes_per_token = self.meta.bytes / self.tokens if self.meta.bytes else None
        self._names = names
        self._first = np.concatenate([[0], np.cumsum(np.asarray(shard_tokens, np.int64))]).tolist()  # token of shard
        self._open_shard = open_shard
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()
        self._identity = identity
        self._index = index
        if vocab_size is not None and self.meta.max_token is not None and self.meta.max_token >= vocab_size:
            raise DataError(
                f"{where} holds token ids up to {self.meta.max_token}, beyond the model's vocabulary of {vocab_size}; "
                f"set model.vocab_size to at least {self.meta.max_token + 1} or prepare it with the model's tokenizer"
            )

    def describe(self) -> str:
        """One line for the console."""
        shards = f"{len(self._names):,} shard{'s' * (len(self._names) != 1)}"
        return (
            f"{self.kind} {self.where}: {self.tokens:,} tokens in {shards}, {self.samples:,} samples of {self.seq_len}"
        )

    def fingerprint(self) -> str:
        """A short hash of what the data is: names, sizes, hashes, token counts, and how it is cut."""
        text = json.dumps([self.kind, self.seq_len, self._identity], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def order(self, seed: int, shuffle: bool) -> Order:
        """The order of this data set, in blocks of about a shard."""
        block = max(1, min(self.samples // len(self._names), MAX_BLOCK_BYTES // (2 * self.seq_len)) or 1)
        return Order(self.samples, seed, shuffle, min(block, BLOCK_SAMPLES * 16))

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Windows by id [n] -> tokens and labels, int64 [n, S] each."""
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
        """Where documents begin in the inputs of windows [n] -> bool [n, S]; a window's first position always does."""
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
            f"{self.where}: sample {ids[k]} holds token id {rows[k, column]} (in {name}), outside the model's vocabulary "
            f"of {self.vocab_size}; prepare the data with the model's tokenizer or set model.vocab_size"
        )


def open_dataset(source: SourceConfig, seq_len: int, vocab_size: int | None = None) -> Dataset:
    """The data set that a source names, in whichever format it is."""
    kind, path = locate(Path(source.path), source.split)
    if kind == "mds":
        return _open_mds(path, source, seq_len, vocab_size)
    return _open_indexed(path, seq_len, vocab_size)


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


def _open_mds(folder: Path, source: SourceConfig, seq_len: int, vocab_size: int | None) -> Dataset:
    infos = read_index(folder / "index.json")
    meta = read_meta(folder)
    raw_type = source.token_encoding_type

    def open_shard(number: int) -> MdsShard:
        return MdsShard(folder / infos[number].raw.basename, infos[number], raw_type)

    if meta.shard_tokens is not None and len(meta.shard_tokens) == len(infos):
        tokens = list(meta.shard_tokens)
    else:
        tokens = [open_shard(i).tokens for i in range(len(infos))]
    identity = [[s.raw.basename, s.raw.bytes, s.raw.hashes, t] for s, t in zip(infos, tokens, strict=True)]
    names = [s.raw.basename for s in infos]
    return Dataset(
        "MDS", str(folder), names, tokens, open_shard, seq_len, identity, vocab_size, meta, _tokenizer_folder(folder)
    )


def _open_indexed(prefix: Path, seq_len: int, vocab_size: int | None) -> Dataset:
    index = IndexFile(_with(prefix, ".idx"))
    bin_path = _with(prefix, ".bin")
    found, expected = bin_path.stat().st_size, index.tokens * index.dtype.itemsize
    if found != expected:
        raise DataError(f"{bin_path} has {found:,} bytes where its .idx says {expected:,}; copy or prepare it again")

    def open_shard(number: int) -> FlatShard:
        return FlatShard(bin_path, index.dtype, index.tokens)

    identity = [prefix.name, index.dtype.name, index.tokens, len(index.lengths), len(index.documents)]
    folder = prefix.parent
    return Dataset(
        "indexed", str(prefix), [bin_path.name], [index.tokens], open_shard, seq_len, identity, vocab_size,
        read_meta(folder), _tokenizer_folder(folder), index,
    )  # fmt: skip


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
