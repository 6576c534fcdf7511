"""Finds, checks and opens the data that a config names, in either format, local or remote.

MDS is a folder with an index.json, Megatron's format a pair PREFIX.bin and PREFIX.idx; the format is detected. Remote
data and compressed shards go through a `ShardCache`.

Fetched and decompressed shards are verified by their hashes on arrival. For local shards only the size is compared when
they are opened, since hashing would read all of them before the first step; `ingot inspect` verifies their hashes.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ingot.config.data import PARTS, DatasetConfig, SourceConfig
from ingot.data.formats.indexed_reader import FlatShard, IndexFile, split_edges
from ingot.data.formats.mds_reader import MdsShard, ShardFile, read_index, token_dtype, tokens_by_index
from ingot.data.loading.mixture import Mixture
from ingot.data.loading.shard_cache import CachedFile, ShardCache
from ingot.data.loading.token_dataset import Dataset, Meta, SampleSpec, TokenDataset, check_vocabulary
from ingot.data.prepare.progress import follow
from ingot.data.sources.suffixes import count_by_suffix
from ingot.errors import DataError
from ingot.storage.object_store import Forbidden, Remote

CHUNK_BYTES = 1 << 26  # a .bin counts as shards of this size, for the order and for fetching


def open_dataset(
    source: SourceConfig, seq_len: int, vocab_size: int | None = None, no_loss_after_token: int | None = None
) -> Dataset:
    """The data that a source names: one dataset in either format, or a mixture. Positions after `no_loss_after_token`
    have no label."""
    configs: Mapping[str, DatasetConfig] = source.mix or {"": source}
    samples = SampleSpec(seq_len, vocab_size, no_loss_after_token)
    datasets = {name: _open_one(config, samples) for name, config in configs.items()}
    if not source.mix:
        return datasets[""]
    weights = {name: config.weight for name, config in source.mix.items() if config.weight is not None}
    return Mixture(datasets, weights, source.mix_order)


def _open_one(config: DatasetConfig, samples: SampleSpec) -> TokenDataset:
    path = Path(config.path)
    if config.remote is not None:
        kind, path, cache = fetch_index(config.remote, path, config.split, config.cache_limit)
    else:
        (kind, path), cache = locate(path, config.split), None
    if kind == "indexed":
        return _open_indexed(path, config, cache, samples)
    if config.documents is not None:
        raise DataError(f"{path} is MDS, which does not store document boundaries; documents.split needs .bin and .idx")
    return _open_mds(path, config, cache, samples)


def fetch_index(remote: str, path: Path, split: str | None, limit: int | None) -> tuple[str, Path, ShardCache]:
    """Fetch the index of remote data; returns what `locate` does for local data, and the cache for its shards."""
    folder, url = (path / split, f"{remote.rstrip('/')}/{split}") if split else (path, remote.rstrip("/"))
    store = Remote(url)
    index, refusal = _read_optional(store, "index.json")
    if index is not None:
        cache = ShardCache(folder, store, limit)
        _store_small_file(cache, "index.json", index)
        _store_small_file(cache, "meta.json", _read_optional(store, "meta.json")[0])
        _fetch_tokenizer(cache, url)
        return "mds", folder, cache
    names = store.names()
    prefixes = [name.removesuffix(".idx") for name in names if name.endswith(".idx")]
    if len(prefixes) == 1:
        name = prefixes[0]
    elif not prefixes and (above := _parent(url)):  # the URL may be a prefix
        folder, (url, name) = path, above
        store = Remote(url)
    elif not prefixes:
        raise refusal or _no_data_error(remote, split)
    else:
        raise DataError(f"{url} holds several datasets: {', '.join(prefixes)}; name one with remote={url}/NAME")
    size = None
    with suppress(Forbidden):
        size = store.size(f"{name}.idx")
    if size is None:
        raise refusal or _no_data_error(remote, split)
    cache = ShardCache(folder, store, limit)
    file = ShardFile(f"{name}.idx", size, {})
    cache.ensure(CachedFile(file, file))
    _store_small_file(cache, f"{name}.meta.json", _read_optional(store, f"{name}.meta.json")[0])
    _fetch_tokenizer(cache, url)
    return "indexed", folder / name, cache


def _no_data_error(remote: str, split: str | None) -> DataError:
    names = [name for name in Remote(remote).names() if "." not in name and name != "tokenizer"]
    if names:
        return DataError(f"{remote} has no split '{split}'; it has {', '.join(names)}" if split else
                         f"{remote} holds the splits {', '.join(names)}; name one with split=...")  # fmt: skip
    where = f"{remote}/{split}" if split else remote
    return DataError(
        f"{where} holds no index.json (MDS), and there is no {where}.idx (Megatron); check remote and split"
    )


def _parent(url: str) -> tuple[str, str] | None:
    """The parent folder and the name in it; a bucket or host has none."""
    scheme, mark, rest = url.rpartition("://")
    head, slash, name = rest.rpartition("/")
    if mark:
        return (f"{scheme}{mark}{head}", name) if head else None
    return head or ("/" if slash else "."), name


def _read_optional(store: Remote, name: str) -> tuple[bytes | None, Forbidden | None]:
    """A small file that may be missing. Stores that forbid listing answer "forbidden" instead of "not found"."""
    try:
        return store.read(name), None
    except Forbidden as refusal:
        return None, refusal


def _store_small_file(cache: ShardCache, name: str, content: bytes | None) -> None:
    """Put a small remote file into the cache; an error if the cache holds other data."""
    if content is None:
        return
    path = cache.folder / name
    try:
        found = path.read_bytes()  # a single call: another process may be writing it
    except FileNotFoundError:
        cache.put(name, content)
        return
    if found != content:
        raise DataError(
            f"{path} differs from the file at {cache.remote.url}: it holds other data; set path to another folder"
        )


def _fetch_tokenizer(cache: ShardCache, url: str) -> None:
    """Fetch the tokenizer, which is next to the splits or inside them."""
    above = _parent(url)
    for folder in (url, above[0]) if above else (url,):
        store = Remote(f"{folder}/tokenizer")
        if (content := _read_optional(store, "tokenizer.json")[0]) is not None:
            _store_small_file(cache, "tokenizer/tokenizer.json", content)
            config, _ = _read_optional(store, "tokenizer_config.json")
            _store_small_file(cache, "tokenizer/tokenizer_config.json", config)
            return


def locate(path: Path, split: str | None) -> tuple[str, Path]:
    """The format and path of local data: ("mds", folder) or ("indexed", prefix)."""
    base = path / split if split else path
    if base.suffix in (".bin", ".idx"):
        base = base.with_suffix("")
    if (base / "index.json").is_file():
        return "mds", base
    prefixes = [base] if Path(f"{base}.idx").is_file() else []
    if not prefixes and base.is_dir():
        prefixes = [p.with_suffix("") for p in sorted(base.glob("*.idx"))]
    if not prefixes and split and path.is_dir():
        prefixes = [p.with_suffix("") for p in sorted(path.glob(f"{split}*.idx"))]
    if len(prefixes) > 1:
        names = ", ".join(p.name for p in prefixes)
        raise DataError(f"{base} holds several datasets: {names}; name one with path={base}/NAME")
    if prefixes:
        if not Path(f"{prefixes[0]}.bin").is_file():
            raise DataError(f"{prefixes[0]}.idx exists but {prefixes[0].name}.bin does not; copy both")
        return "indexed", prefixes[0]
    splits = sorted(split_folders(path) | {p.stem for p in path.glob("*.idx")})
    if split and splits:
        raise DataError(f"{path} has no split '{split}'; it has {', '.join(splits)}")
    if splits:
        raise DataError(f"{path} holds the splits {', '.join(splits)}; name one with split=...")
    if not path.exists():
        raise DataError(f"{path} does not exist; write a dataset there with `ingot prepare`")
    raise _not_prepared_error(path, split)


def _not_prepared_error(path: Path, split: str | None) -> DataError:
    """What is at a path that holds no dataset, and what to do with it."""
    prepare = f"`ingot prepare {path} --out_root my-data --tokenizer TOKENIZER`"
    if path.is_file():
        return DataError(f"{path} is a file, not a dataset; prepare it first: {prepare}")
    if split and ((path / "index.json").is_file() or any(path.glob("*.idx"))):
        return DataError(f"{path} is a dataset itself and has no split '{split}'; set split to null for it")
    files = sorted(p.name for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
    if not files:
        return DataError(f"{path} is empty; write a dataset there with `ingot prepare`")
    return DataError(
        f"{path} holds {count_by_suffix(files)}, but no dataset (no index.json, no .idx); prepare it first: {prepare}"
    )


def check_local(source: SourceConfig, vocab_size: int) -> None:
    """Refuse data that is missing, not prepared, without tokens or of a larger vocabulary, from small files alone and
    without fetching anything."""
    configs: Mapping[str, DatasetConfig] = source.mix or {"": source}
    for config in configs.values():
        if config.remote is None:
            kind, path = locate(Path(config.path), config.split)
            if kind == "mds":
                read_index(path / "index.json")
            meta = read_meta(path / "meta.json" if kind == "mds" else Path(f"{path}.meta.json"))
            check_vocabulary(str(path), meta.max_token, vocab_size)


def split_folders(path: Path) -> set[str]:
    """The direct subfolders that hold data."""
    return {p.parent.name for p in (*path.glob("*/index.json"), *path.glob("*/*.idx"))}


def _open_mds(folder: Path, config: DatasetConfig, cache: ShardCache | None, samples: SampleSpec) -> TokenDataset:
    infos = read_index(folder / "index.json")
    meta = read_meta(folder / "meta.json")
    raw_type = config.token_encoding_type
    if cache is None and any(info.packed and not (folder / info.raw.basename).exists() for info in infos):
        # Compressed shards are decompressed in their own folder.
        cache = ShardCache(folder, Remote(str(folder)), config.cache_limit)
    if cache is not None:
        _check_limit(cache, max((info.raw.bytes for info in infos), default=0))

    def cached_file(number: int) -> CachedFile:
        info = infos[number]
        return CachedFile(info.raw, info.packed or info.raw, info.compression)

    def open_shard(number: int) -> MdsShard:
        opener = partial(MdsShard, info=infos[number], raw_type=raw_type)
        return cache.open(cached_file(number), opener) if cache else opener(folder / infos[number].raw.basename)

    fetch_ahead = _fetch_ahead(cache, cached_file) if cache else None
    tokens = tokens_by_index(infos, raw_type) if cache else None
    if meta.shard_tokens:
        if list(meta.shard_tokens) != [info.raw.basename for info in infos]:
            raise DataError(f"{folder}/meta.json lists other shards than index.json; delete it to have them counted")
        tokens = list(meta.shard_tokens.values())
    if tokens is None:  # from another tool, with samples of different lengths: open all shards
        numbers = range(len(infos))
        try:
            if fetch_ahead:
                fetch_ahead([], list(numbers))
            tokens = [open_shard(i).tokens for i in follow("counting the tokens of all shards", numbers)]
        except BaseException:
            if cache is not None:
                cache.close()
            raise
    return TokenDataset(
        "MDS", config.remote or str(folder), [info.raw.basename for info in infos], tokens, open_shard, samples,
        dtype=token_dtype(infos, raw_type),
        identity=[[s.raw.basename, s.raw.bytes, s.raw.hashes, t] for s, t in zip(infos, tokens, strict=True)],
        block_tokens=sum(tokens) // max(1, len(tokens)),
        meta=meta,
        tokenizer_folder=tokenizer_folder(folder, folder.parent),
        fetch_ahead=fetch_ahead,
    )  # fmt: skip


def _open_indexed(prefix: Path, config: DatasetConfig, cache: ShardCache | None, samples: SampleSpec) -> TokenDataset:
    index = IndexFile(Path(f"{prefix}.idx"))
    bin_path = Path(f"{prefix}.bin")
    found = (cache.remote.size(bin_path.name) or 0) if cache else bin_path.stat().st_size
    expected = index.tokens * index.dtype.itemsize
    if found != expected:
        raise DataError(f"{bin_path} has {found:,} bytes, but its .idx says {expected:,}; copy or prepare it again")
    if cache is not None:
        _check_limit(cache, min(CHUNK_BYTES, expected))
    span, where = (0, index.tokens), f"{cache.remote.url}/{prefix.name}" if cache else str(prefix)
    if (part := config.documents) is not None:
        edges = split_edges(part.split, len(index.lengths), part.rule)
        low, high = edges[PARTS.index(part.part) :][:2]
        if high <= low:
            raise DataError(f"{where}: none of its {len(index.lengths):,} documents is {part.part} by {part.split}")
        span, where = (index.token_at(low), index.token_at(high)), f"{where} documents {low:,} to {high:,}"
    chunk = CHUNK_BYTES // index.dtype.itemsize
    sizes = [min(chunk, index.tokens - begin) for begin in range(0, index.tokens, chunk)] if cache else [index.tokens]

    def cached_file(number: int) -> CachedFile:
        part = ShardFile(f"{bin_path.name}.{number:06}", sizes[number] * index.dtype.itemsize, {})
        return CachedFile(part, ShardFile(bin_path.name, part.bytes, {}), begin=number * CHUNK_BYTES)

    def open_shard(number: int) -> FlatShard:
        opener = partial(FlatShard, dtype=index.dtype, tokens=sizes[number])
        return cache.open(cached_file(number), opener) if cache else opener(bin_path)

    return TokenDataset(
        "indexed", where, [bin_path.name] * len(sizes), sizes, open_shard, samples,
        dtype=index.dtype,
        identity=[prefix.name, index.tokens, index.digest(), *([span] if config.documents else [])],
        block_tokens=min(chunk, index.tokens),
        span=span,
        meta=read_meta(Path(f"{prefix}.meta.json")),
        tokenizer_folder=tokenizer_folder(*prefix.parents[:2]),
        fetch_ahead=_fetch_ahead(cache, cached_file) if cache else None,
    )  # fmt: skip


def _fetch_ahead(cache: ShardCache, cached_file: Callable[[int], CachedFile]) -> Callable[[list[int], list[int]], None]:
    return lambda now, soon: cache.announce([cached_file(i) for i in now], [cached_file(i) for i in soon])


def _check_limit(cache: ShardCache, largest: int) -> None:
    if cache.limit is not None and cache.limit < 2 * largest:
        raise DataError(f"cache_limit {cache.limit:,} is too small: two shards of {largest:,} bytes must fit")


def read_meta(path: Path) -> Meta:
    """The contents of a meta.json, if there is one."""
    try:
        content = json.loads(path.read_bytes())
        shards = content.get("shards") or []
        tokens = {str(shard["basename"]): int(shard["tokens"]) for shard in shards}
        return Meta(content.get("bytes"), content.get("max_token"), tokens)
    except FileNotFoundError:
        return Meta()
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it to have the shards counted") from None


def tokenizer_folder(*parents: Path) -> Path | None:
    """The tokenizer folder in the first of these folders that has one."""
    return next((p / "tokenizer" for p in parents if (p / "tokenizer" / "tokenizer.json").is_file()), None)
