"""Reading Megatron's .bin/.idx pairs, and refusing damaged ones."""

import struct
from pathlib import Path

import numpy as np
import pytest

from ingot.config.data import SourceConfig
from ingot.data.loading.open_dataset import open_dataset
from ingot.errors import DataError

FIXTURE = Path(__file__).parents[3] / "shared/data/megatron_fixture"
CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_pair(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16", modes: bool = False) -> Path:
    """Documents of sequences of tokens, as Megatron lays them out."""
    sequences = [s for document in documents for s in document]
    lengths = np.array([len(s) for s in sequences], "<i4")
    pointers = ((np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize).astype("<i8")
    ends = np.cumsum([0, *map(len, documents)]).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sequences), len(ends))
    tail = bytes(len(sequences)) if modes else b""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + ends.tobytes() + tail)
    Path(f"{prefix}.bin").write_bytes(np.array([t for s in sequences for t in s], dtype).tobytes())
    return prefix


DOCUMENTS = [[[1, 2, 3]], [[4]], [], [[5, 6], [7, 8, 9]], [[10] * 20]]
FLAT = [1, 2, 3, 4, 5, 6, 7, 8, 9, *[10] * 20]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("modes", [False, True])
def test_every_token_type_reads_back(tmp_path: Path, dtype: str, modes: bool) -> None:
    prefix = write_pair(tmp_path / "some_text_document", DOCUMENTS, dtype, modes)
    dataset = open_dataset(SourceConfig(path=str(prefix)), 4)
    tokens, labels = dataset.gather(np.arange(dataset.samples))
    assert dataset.tokens == len(FLAT)
    assert [*tokens[0, :1], *labels.ravel()[: len(FLAT) - 1]] == FLAT


@pytest.mark.parametrize(
    "source",
    [
        {"path": "data/web_text_document"}, {"path": "data/web_text_document.idx"}, {"path": "data"},
        {"path": "data/web_text_document.bin"}, {"path": "data", "split": "web"}, {"path": ".", "split": "data"},
    ],
)  # fmt: skip
def test_a_pair_is_found_by_prefix_file_folder_or_split(tmp_path: Path, source: dict[str, str]) -> None:
    write_pair(tmp_path / "data/web_text_document", DOCUMENTS)
    dataset = open_dataset(SourceConfig(**source | {"path": str(tmp_path / source["path"])}), 4)
    assert dataset.tokens == len(FLAT)


def test_several_pairs_in_a_folder_are_named(tmp_path: Path) -> None:
    for name in ("a_document", "b_document"):
        write_pair(tmp_path / name, DOCUMENTS)
    with pytest.raises(DataError, match="a_document, b_document"):
        open_dataset(SourceConfig(path=str(tmp_path)), 4)


def test_an_idx_without_its_bin_is_refused(tmp_path: Path) -> None:
    Path(f"{write_pair(tmp_path / 'x', DOCUMENTS)}.bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin does not"):
        open_dataset(SourceConfig(path=str(tmp_path)), 4)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"TNTIDX\0\0\0", "does not start like a Megatron index"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x06", "dtype code 6"),
        (17, b"\x04", "pointers that do not match"),
        (18, struct.pack("<Q", 7), "but 7 sequences"),
        (18, struct.pack("<Q", 2**63), "sequences"),
        (26, struct.pack("<Q", 3), "document entries"),
        (34, struct.pack("<i", 99), "pointers that do not match"),
        (34, struct.pack("<i", -1), "negative length"),
        (34 + 5 * 4, struct.pack("<q", 2), "do not start at 0"),
        (34 + 5 * 4 + 8, struct.pack("<q", 2), "pointers that do not match"),
        (34 + 5 * 12, struct.pack("<q", 1), "do not cover"),
        (34 + 5 * 12 + 8, struct.pack("<q", 4), "out of order"),
    ],
)
def test_a_damaged_idx_is_one_clear_sentence(tmp_path: Path, at: int, value: bytes, message: str) -> None:
    path = Path(f"{write_pair(tmp_path / 'x', DOCUMENTS)}.idx")
    content = bytearray(path.read_bytes())
    content[at : at + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_dataset(SourceConfig(path=str(tmp_path / "x")), 4)


@pytest.mark.parametrize("suffix", ["idx", "bin"])
@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, suffix: str, keep: int) -> None:
    path = Path(f"{write_pair(tmp_path / 'x', DOCUMENTS)}.{suffix}")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=f"x.{suffix}"):
        open_dataset(SourceConfig(path=str(tmp_path / "x")), 4)


def test_a_terabyte_opens_and_seeks_without_an_index_of_its_own(tmp_path: Path) -> None:
    """500 million samples of 2,048 tokens, in a file with holes."""
    sequences, length = 1000, 2**20 * 1000
    lengths = np.full(sequences, length, "<i4")
    pointers = np.arange(sequences, dtype="<i8") * length * 2
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, sequences, sequences + 1)
    documents = np.arange(sequences + 1, dtype="<i8")
    (tmp_path / "x.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + documents.tobytes())
    with (tmp_path / "x.bin").open("wb") as file:
        try:
            file.truncate(sequences * length * 2)
        except OSError as error:
            pytest.skip(f"no file with holes of 2 TB here: {error.strerror}")
        file.seek(2 * 2048 * 400_000_000)
        file.write(np.arange(2049, dtype=np.uint16).tobytes())
    dataset = open_dataset(SourceConfig(path=str(tmp_path / "x")), 2048)
    assert dataset.samples == 512_000_000
    tokens, labels = dataset.gather(np.array([400_000_000]))
    assert tokens[0].tolist() == list(range(2048)) and labels[0, -1] == 2048
    assert dataset.order(1, True).take(np.array([3 * 10**8])).shape == (1,)


@pytest.mark.skipif(not FIXTURE.is_dir(), reason="Megatron's own files are not at hand")
def test_a_real_pair_of_megatron_reads_as_numpy_sees_it() -> None:
    for path in sorted(FIXTURE.glob("*.bin")):
        dataset = open_dataset(SourceConfig(path=str(path.with_suffix(""))), 512)
        width = path.stat().st_size // dataset.tokens
        expected = np.fromfile(path, {2: "<u2", 4: "<i4", 8: "<i8"}[width])
        tokens, labels = dataset.gather(np.arange(dataset.samples))
        assert (np.concatenate([tokens[0, :1], labels.ravel()[: dataset.tokens - 1]]) == expected).all()
