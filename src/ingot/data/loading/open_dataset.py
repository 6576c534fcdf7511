"""Which data a config names: found, checked and opened, in either format, here or elsewhere.

MDS is a folder with an index.json, Megatron's format a pair PREFIX.bin and PREFIX.idx; which of them lies at a place is
seen, not asked. Data of another place passes through a `Cache`; so do compressed shards, which are unpacked on use.

What is fetched or unpacked is verified by its hashes on arrival. Of shards that lie here only the size is compared when
they are opened: hashing would read all of them before the first step. `ingot inspect` does that when asked.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ingot.config.data import PARTS, PlaceConfig, SourceConfig
from ingot.data.formats.indexed_reader import FlatShard, IndexFile, split_edges
from ingot.data.formats.mds_reader import MdsShard, ShardFile, read_index, token_dtype, tokens_by_index
from ingot.data.loading.mixture import Mixture
from ingot.data.loading.shard_cache import Cache, Wanted
from ingot.data.loading.token_dataset import IGNORE as IGNORE
from ingot.data.loading.token_dataset import Dataset, Meta, TokenDataset
from ingot.data.prepare.progress import follow
from ingot.errors import DataError
from ingot.storage.object_store import Forbidden, Remote

CHUNK_BYTES = 1 << 26  # the part of a .bin that counts as a shard, for the order and for fetching


def open_dataset(
    source: SourceConfig, seq_len: int, vocab_size: int | None = None, unscored: int | None = None
) -> Dataset:
    """The data that a source names: one data set in whichever format it is, or a mixture of several.

    What follows a token `unscored` has no label.
    """
    places: Mapping[str, PlaceConfig] = source.mix or {"": source}
    datasets = {name: _open_place(place, seq_len, vocab_size) for name, place in places.items()}
    for windows in datasets.values():
        windows.unscored = unscored
    if not source.mix:
        return datasets[""]
    weights = {name: place.weight for name, place in source.mix.items() if place.weight is not None}
    return Mixture(datasets, weights, source.mix_order)


def _open_place(place: PlaceConfig, seq_len: int, vocab_size: int | None) -> TokenDataset:
    path = Path(place.path)
    if place.remote is not None:
        kind, path, cache = fetch_index(place.remote, path, place.split, place.cache_limit)
    else:
        (kind, path), cache = locate(path, place.split), None
    if kind == "indexed":
        return _open_indexed(path, place, cache, seq_len, vocab_size)
    if place.documents is not None:
        raise DataError(f"{path} is MDS, which does not say where documents end; documents.split needs a .bin and .idx")
    return _open_mds(path, place, cache, seq_len, vocab_size)


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
    names = store.names()
    prefixes = [name.removesuffix(".idx") for name in names if name.endswith(".idx")]
    if len(prefixes) == 1:
        name = prefixes[0]
    elif not prefixes and (above := _parent(url)):  # it may be a prefix itself
        folder, (url, name) = path, above
        store = Remote(url)
    elif not prefixes:
        raise refusal or _nothing_at(remote, split)
    else:
        raise DataError(f"{url} holds several data sets: {', '.join(prefixes)}; name one with remote={url}/NAME")
    size = None
    with suppress(Forbidden):
        size = store.size(f"{name}.idx")
    if size is None:
        raise refusal or _nothing_at(remote, split)
    cache = Cache(folder, store, limit)
    file = ShardFile(f"{name}.idx", size, {})
    cache.ensure(Wanted(file, file))
    _keep(cache, f"{name}.meta.json", _read_optional(store, f"{name}.meta.json")[0])
    _fetch_tokenizer(cache, url)
    return "indexed", folder / name, cache


def _nothing_at(remote: str, split: str | None) -> DataError:
    names = [name for name in Remote(remote).names() if "." not in name and name != "tokenizer"]
    if names:
        return DataError(f"{remote} has no split '{split}'; it has {', '.join(names)}" if split else
                         f"{remote} holds the splits {', '.join(names)}; name one with split=...")  # fmt: skip
    where = f"{remote}/{split}" if split else remote
    return DataError(
        f"{where} holds no index.json (MDS), and there is no {where}.idx (Megatron); check remote and split"
    )


def _parent(url: str) -> tuple[str, str] | None:
    """The folder above, and the name in it; a bucket or host has none."""
    scheme, mark, rest = url.rpartition("://")
    head, slash, name = rest.rpartition("/")
    if mark:
        return (f"{scheme}{mark}{head}", name) if head else None
    return head or ("/" if slash else "."), name


def _read_optional(store: Remote, name: str) -> tuple[bytes | None, Forbidden | None]:
    """A small file that need not be there. A store that may not be listed says "forbidden" instead of "not found"."""
    try:
        return store.read(name), None
    except Forbidden as refusal:
        return None, refusal


def _keep(cache: Cache, name: str, content: bytes | None) -> None:
    """Put a small file of the remote into the cache, unless the cache belongs to other data."""
    if content is None:
        return
    path = cache.folder / name
    try:
        found = path.read_bytes()  # one look: between two, another process may put it there
    except FileNotFoundError:
        cache.put(name, content)
        return
    if found != content:
        raise DataError(
            f"{path} is not that of {cache.remote.url}: the folder holds other data; set path to another one"
        )


def _fetch_tokenizer(cache: Cache, url: str) -> None:
    """The tokenizer lies beside the splits, or in them."""
    above = _parent(url)
    for place in (url, above[0]) if above else (url,):
        store = Remote(f"{place}/tokenizer")
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
    prefixes = [base] if Path(f"{base}.idx").is_file() else []
    if not prefixes and base.is_dir():
        prefixes = [p.with_suffix("") for p in sorted(base.glob("*.idx"))]
    if not prefixes and split and path.is_dir():
        prefixes = [p.with_suffix("") for p in sorted(path.glob(f"{split}*.idx"))]
    if len(prefixes) > 1:
        names = ", ".join(p.name for p in prefixes)
        raise DataError(f"{base} holds several data sets: {names}; name one of them with path={base}/NAME")
    if prefixes:
        if not Path(f"{prefixes[0]}.bin").is_file():
            raise DataError(f"{prefixes[0]}.idx is there but {prefixes[0].name}.bin is not; copy both")
        return "indexed", prefixes[0]
    splits = sorted(split_folders(path) | {p.stem for p in path.glob("*.idx")})
    if split and splits:
        raise DataError(f"{path} has no split '{split}'; it has {', '.join(splits)}")
    if splits:
        raise DataError(f"{path} holds the splits {', '.join(splits)}; name one with split=...")
    if not path.exists():
        raise DataError(f"{path} does not exist; write a data set there with `ingot prepare`")
    raise DataError(f"{base} holds neither an index.json (MDS) nor a .idx file (Megatron); see `ingot prepare`")


def split_folders(path: Path) -> set[str]:
    """The folders right below that hold data."""
    return {p.parent.name for p in (*path.glob("*/index.json"), *path.glob("*/*.idx"))}


def _open_mds(
    folder: Path, place: PlaceConfig, cache: Cache | None, seq_len: int, vocab_size: int | None
) -> TokenDataset:
    infos = read_index(folder / "index.json")
    meta = read_meta(folder / "meta.json")
    raw_type = place.token_encoding_type
    if cache is None and any(info.packed and not (folder / info.raw.basename).exists() for info in infos):
        # Compressed shards are unpacked beside themselves.
        cache = Cache(folder, Remote(str(folder)), place.cache_limit)
    if cache is not None:
        _check_limit(cache, max((info.raw.bytes for info in infos), default=0))

    def wanted(number: int) -> Wanted:
        info = infos[number]
        return Wanted(info.raw, info.packed or info.raw, info.compression)

    def open_shard(number: int) -> MdsShard:
        opener = partial(MdsShard, info=infos[number], raw_type=raw_type)
        return cache.open(wanted(number), opener) if cache else opener(folder / infos[number].raw.basename)

    fetch_ahead = _fetch_ahead(cache, wanted) if cache else None
    tokens = tokens_by_index(infos, raw_type) if cache else None
    if meta.shard_tokens:
        if list(meta.shard_tokens) != [info.raw.basename for info in infos]:
            raise DataError(
                f"{folder}/meta.json describes other shards than index.json; delete it to have them counted"
            )
        tokens = list(meta.shard_tokens.values())
    if tokens is None:  # data of other tools that is not cut to one length: all shards are opened
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
        "MDS", place.remote or str(folder), [info.raw.basename for info in infos], tokens, open_shard, seq_len,
        vocab_size,
        dtype=token_dtype(infos, raw_type),
        identity=[[s.raw.basename, s.raw.bytes, s.raw.hashes, t] for s, t in zip(infos, tokens, strict=True)],
        block_tokens=sum(tokens) // max(1, len(tokens)),
        meta=meta,
        tokenizer_folder=tokenizer_folder(folder, folder.parent),
        fetch_ahead=fetch_ahead,
    )  # fmt: skip


def _open_indexed(
    prefix: Path, place: PlaceConfig, cache: Cache | None, seq_len: int, vocab_size: int | None
) -> TokenDataset:
    index = IndexFile(Path(f"{prefix}.idx"))
    bin_path = Path(f"{prefix}.bin")
    found = (cache.remote.size(bin_path.name) or 0) if cache else bin_path.stat().st_size
    expected = index.tokens * index.dtype.itemsize
    if found != expected:
        raise DataError(f"{bin_path} has {found:,} bytes where its .idx says {expected:,}; copy or prepare it again")
    if cache is not None:
        _check_limit(cache, min(CHUNK_BYTES, expected))
    span, where = (0, index.tokens), f"{cache.remote.url}/{prefix.name}" if cache else str(prefix)
    if (part := place.documents) is not None:
        edges = split_edges(part.split, len(index.lengths), part.rule)
        low, high = edges[PARTS.index(part.part) :][:2]
        if high <= low:
            raise DataError(f"{where}: of its {len(index.lengths):,} documents none is {part.part} by {part.split}")
        span, where = (index.token_at(low), index.token_at(high)), f"{where} documents {low:,} to {high:,}"
    chunk = CHUNK_BYTES // index.dtype.itemsize
    sizes = [min(chunk, index.tokens - begin) for begin in range(0, index.tokens, chunk)] if cache else [index.tokens]

    def wanted(number: int) -> Wanted:
        part = ShardFile(f"{bin_path.name}.{number:06}", sizes[number] * index.dtype.itemsize, {})
        return Wanted(part, ShardFile(bin_path.name, part.bytes, {}), begin=number * CHUNK_BYTES)

    def open_shard(number: int) -> FlatShard:
        opener = partial(FlatShard, dtype=index.dtype, tokens=sizes[number])
        return cache.open(wanted(number), opener) if cache else opener(bin_path)

    return TokenDataset(
        "indexed", where, [bin_path.name] * len(sizes), sizes, open_shard, seq_len, vocab_size,
        dtype=index.dtype,
        identity=[prefix.name, index.tokens, index.digest(), *([span] if place.documents else [])],
        block_tokens=min(chunk, index.tokens),
        span=span,
        meta=read_meta(Path(f"{prefix}.meta.json")),
        tokenizer_folder=tokenizer_folder(*prefix.parents[:2]),
        index=index,
        fetch_ahead=_fetch_ahead(cache, wanted) if cache else None,
    )  # fmt: skip


def _fetch_ahead(cache: Cache, wanted: Callable[[int], Wanted]) -> Callable[[list[int], list[int]], None]:
    return lambda now, soon: cache.announce([wanted(i) for i in now], [wanted(i) for i in soon])


def _check_limit(cache: Cache, largest: int) -> None:
    if cache.limit is not None and cache.limit < 2 * largest:
        raise DataError(f"cache_limit {cache.limit:,} is too small: two shards of {largest:,} bytes must fit")


def read_meta(path: Path) -> Meta:
    """The facts in a meta.json, if there is one."""
    try:
        content = json.loads(path.read_bytes())
        shards = content.get("shards") or []
        tokens = {str(shard["basename"]): int(shard["tokens"]) for shard in shards}
        return Meta(content.get("bytes"), content.get("max_token"), content.get("eos_id"), tokens)
    except FileNotFoundError:
        return Meta()
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it to have the shards counted instead") from None


def tokenizer_folder(*places: Path) -> Path | None:
    """The first of some folders in which a tokenizer came along."""
    return next((p / "tokenizer" for p in places if (p / "tokenizer" / "tokenizer.json").is_file()), None)
