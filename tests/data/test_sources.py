"""Documents out of every kind of file, and one clear sentence about every kind of bad one."""

import bz2
import csv
import functools
import gzip
import http.server
import io
import json
import lzma
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from ingot.cli.prepare_options import NEOX_DATASETS, read_request
from ingot.data.prepare.options import PrepareOptions
from ingot.data.sources import documents, hub, input_files
from ingot.data.sources import pieces as sources
from ingot.data.sources.documents import TextBlock
from ingot.data.sources.input_files import SourceFile, find_files
from ingot.data.sources.pieces import plan_pieces, read_piece
from ingot.errors import DataError

TEXTS = [f"Document {i}: naïve “quotes”, tab\t, newline\n, nul-free, 坩堝 {'x' * (i % 90)}" for i in range(200)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1000)


def jsonl(texts: list[str], ascii: bool = False) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": t}, ensure_ascii=ascii).encode() + b"\n" for t in texts)


def write(folder: Path, kind: str) -> Path:
    path = folder / f"data.{kind}"
    packers = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}
    base, _, compression = kind.partition(".")
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/1.jsonl", jsonl(TEXTS[:50]))
            archive.writestr("a/2.json", json.dumps([{"text": t} for t in TEXTS[50:]]))
            archive.writestr("a/readme.pdf", "not data")
        return path
    if base == "parquet":
        pq.write_table(pa.table({"n": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=30)
        return path
    if base == "json":
        data = json.dumps([{"text": t} for t in TEXTS], indent=1).encode()
    elif base == "csv":
        buffer = io.StringIO(newline="")
        csv.writer(buffer).writerows([["id", "text"], *([str(i), t] for i, t in enumerate(TEXTS))])
        data = buffer.getvalue().encode()
    else:
        data = jsonl(TEXTS, ascii=kind == "jsonl.gz")
    path.write_bytes(packers[compression](data) if compression else data)
    return path


def blocks(*inputs: Path | str, whole: bool = False, **options: object) -> list[TextBlock]:
    read = PrepareOptions(**options)  # type: ignore[arg-type]
    return [
        block
        for piece in plan_pieces(find_files(inputs), whole, read)
        for block in read_piece(piece, read, lambda text, low, high: None)
    ]


def texts(*inputs: Path | str, **options: object) -> list[str]:
    found = blocks(*inputs, **options)
    assert not [b.bad for b in found if b.bad]
    return [text.decode() for block in found for text in block.texts]


def test_small_files_share_a_piece_up_to_its_size(tmp_path: Path) -> None:
    files = [SourceFile(f"{number}.txt", sources.PIECE_BYTES * 2 // 5, 0, "text", None) for number in range(5)]
    found = list(plan_pieces(files, False, PrepareOptions()))
    assert [[file.path for file in piece.files] for piece in found] == [
        ["0.txt", "1.txt"],
        ["2.txt", "3.txt"],
        ["4.txt"],
    ]
    assert [piece.size for piece in found] == [2 * files[0].size, 2 * files[0].size, files[0].size]


def problems(*inputs: Path | str, **options: object) -> list[tuple[int, str]]:
    return [(record + 1, problem) for block in blocks(*inputs, **options) for record, problem in block.bad]


KINDS = [
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "jsonl.xz",
    "jsonl.bz2",
    "json",
    "json.gz",
    "csv",
    "csv.zst",
    "parquet",
    "zip",
]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_documents(kind: str, whole: bool, tmp_path: Path) -> None:
    assert texts(write(tmp_path, kind), whole=whole) == TEXTS


def test_a_mix_of_files_keeps_the_order_given(tmp_path: Path) -> None:
    mixed = [write(tmp_path, kind) for kind in KINDS]
    assert texts(*mixed) == TEXTS * len(KINDS)


def test_a_folder_and_a_glob_are_sorted(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    assert texts(tmp_path) == ["text a", "text b", "text c"]
    assert texts(str(tmp_path / "[bc].txt")) == ["text b", "text c"]


def test_a_named_file_of_unknown_ending_is_text(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("print('x')\n")
    assert texts(tmp_path / "tool.py") == ["print('x')\n"]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 500, 100_000])
def test_lines_are_neither_lost_nor_doubled_at_the_borders_of_pieces(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", size)
    lines = ["", "a", "bb", "", "c" * 70, "d"] * 3
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(b"\r\n" if not t else jsonl([t]) for t in lines)[:-1])  # no newline at the end
    assert texts(path) == [t for t in lines if t]


def test_pieces_of_a_parquet_file_add_up_to_its_size(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["x" * 300] * 40}), path, row_group_size=4)
    pieces = list(plan_pieces(find_files([path]), False, PrepareOptions()))
    assert len(pieces) > 2 and 0.9 < sum(piece.size for piece in pieces) / path.stat().st_size <= 1


def test_one_huge_row_group_is_divided_into_blocks(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path)
    pieces = list(plan_pieces(find_files([path]), False, PrepareOptions()))
    assert {piece.how for piece in pieces} == {"texts"}
    assert texts(path) == TEXTS


def test_a_huge_text_is_cut_where_the_caller_says(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("word " * 300_000)
    options = PrepareOptions()
    piece, *rest = plan_pieces(find_files([path]), False, options)
    assert not rest
    found = list(read_piece(piece, options, lambda text, low, high: text.rfind(" ", low, high)))
    assert len(found) > 1
    assert [b.ends for b in found] == [False] * (len(found) - 1) + [True]
    assert b"".join(t for b in found for t in b.texts).decode() == "word " * 300_000


# ---- bad input ----


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "cut', "not valid JSON"),
        (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
        (b'{"title": "a", "url": "b"}', "no field 'text' (fields: 'title', 'url')"),
        (b'{"text": null}', "field 'text' is a null, not text"),
        (b'{"text": 5}', "field 'text' is a number, not text"),
        (b"[1, 2]", "a JSON array where an object with 'text' is expected"),
        (b'{"text": "a\xff"}', "invalid UTF-8 at byte 12 of the line"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": "a\x00b"}', "not valid JSON"),
        (b"\x00\x00\x00", "not valid JSON"),
        (b'{"text": ' + b"[" * 3000, "not valid JSON"),
        (b'{"text": "' + b"x" * 5000 + b'"}', "more than max_document_bytes"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst"])
def test_a_bad_line_is_named_with_its_number(kind: str, line: bytes, problem: str, tmp_path: Path) -> None:
    data = jsonl(TEXTS[:120]) + line + b"\n" + jsonl(TEXTS[120:])
    path = tmp_path / f"x.{kind}"
    path.write_bytes(zstandard.compress(data) if "zst" in kind else data)
    ((number, message),) = problems(path, max_document_bytes=4000)
    assert number == 121
    assert problem in message
    assert [t.decode() for b in blocks(path, max_document_bytes=4000) for t in b.texts] == TEXTS


def test_what_only_pythons_parser_accepts_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "bom"}\n{"text": "nan", "score": NaN}\n{"text": "nul \\u0000"}\n')
    assert texts(path) == ["bom", "nan", "nul \0"]


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("x.txt", b"text \xff", "invalid UTF-8"),
        ("x.txt", b"a\0b", "NUL bytes"),
        ("x.csv", b"id,text\n1,a\n2\n", "1 columns, but the header has 2"),
        ("x.csv", b"id,text\n1,a\n2,b,c\n", "3 columns, but the header has 2"),
        ("x.json", b'[{"text": "a"}, {"txt": "b"}]', "no field 'text'"),
        ("x.csv", b"id,body\n1,a\n", "no column 'text' (columns: id, body); --json_keys names another"),
        ("x.json", b"[" * 100_000, "not valid JSON"),
        ("x.json", b"{ // a comment\n}", "not valid JSON"),
    ],
)
def test_a_bad_record_of_another_format_is_counted_too(name: str, data: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    ((_, message),) = problems(tmp_path / name)
    assert problem in message


def test_parquet_rows_that_are_not_text_are_counted(tmp_path: Path) -> None:
    broken = pa.array([b"ok", b"\xff", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), tmp_path / "bytes.parquet")
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "null.parquet")
    assert problems(tmp_path / "bytes.parquet") == [(2, "invalid UTF-8 at byte 1")]
    assert problems(tmp_path / "null.parquet") == [(2, "null, not text")]
    assert [t for b in blocks(tmp_path / "null.parquet") for t in b.texts] == [b"a", b"b"]


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "jsonl.xz", "jsonl.bz2", "zip", "parquet"])
def test_an_archive_that_was_cut_short_is_an_error_not_a_shorter_dataset(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"cut short|not a readable"):
        blocks(path)


@pytest.mark.parametrize("kind", ["gz", "zst", "bz2", "xz", "zip"])
def test_a_decompression_bomb_is_stopped(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "_BOMB_FREE", 1 << 20)
    path = tmp_path / (f"x.jsonl.{kind}" if kind != "zip" else "x.zip")
    bomb = b'{"text": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}\n' * 200_000
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", bomb)
    else:
        pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}[kind]
        path.write_bytes(pack(bomb))
    with pytest.raises(DataError, match="looks like a decompression bomb"):
        blocks(path, max_expansion=10)
    assert len(texts(path, max_expansion=100_000)) == 200_000


def test_the_members_of_a_zip_share_one_limit_of_expansion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "_BOMB_FREE", 1 << 20)
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(f"{number}.jsonl", b'{"text": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}\n' * 10_000)
    with pytest.raises(DataError, match=r"2\.jsonl.* looks like a decompression bomb"):
        blocks(tmp_path / "x.zip", max_expansion=10)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.csv", b'text\n"open', "not valid CSV"),
        ("x.json", b'[{"text": "a"}, {"text"', "record 2: not valid JSON"),
        ("x.json", b'[{"text": "a"},', "does not end after record 1; the file is truncated"),
        ("x.parquet", b"PAR1 nonsense", "not a readable parquet file"),
        ("x.zip", b"PK nonsense", "not a readable zip archive"),
        ("x.jsonl.zst", b"nonsense", "damaged or cut short"),
        ("x.parquet.gz", b"", "parquet inside a compressed file cannot be read; unpack it first"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_one_sentence(
    name: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        blocks(tmp_path / name)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst"])
@pytest.mark.parametrize("ends", [True, False])
def test_an_overlong_line_is_one_bad_record_and_is_never_held_whole(kind: str, ends: bool, tmp_path: Path) -> None:
    path = tmp_path / f"x.{kind}"
    after = b"\n" + jsonl(TEXTS[50:]) if ends else b""
    data = jsonl(TEXTS[:50]) + b'{"text": "' + b"x" * 3_000_000 + after
    path.write_bytes(zstandard.compress(data) if "zst" in kind else data)
    ((number, message),) = problems(path, max_document_bytes=100_000, max_expansion=100_000)
    assert (number, "more than max_document_bytes=100,000" in message) == (51, True)
    found = blocks(path, max_document_bytes=100_000, max_expansion=100_000)
    assert [t.decode() for b in found for t in b.texts] == (TEXTS if ends else TEXTS[:50])
    read = PrepareOptions(max_document_bytes=100_000, max_expansion=100_000)
    assert max(len(piece.lines) for piece in plan_pieces(find_files([path]), False, read)) < 150_000


def test_a_bad_record_counts_as_a_record_of_its_block(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": 1}\n{"text": "b"}\n')
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": 1}, {"text": "b"}]')
    for name in ("x.jsonl", "x.json"):
        (block,) = blocks(tmp_path / name)
        assert block.record_count == 3 and [record for record, _ in block.bad] == [1], name


def test_a_parquet_file_without_the_column_or_without_text_in_it_is_one_sentence(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"body": ["a"], "text": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"no column 'content' \(columns: body, text\)"):
        blocks(tmp_path / "x.parquet", json_keys=["content"])
    with pytest.raises(DataError, match="column 'text' holds int64, not text"):
        blocks(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["absent.jsonl", "*.jsonl", "empty"])
def test_missing_input_is_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no such file|no text, JSON, CSV or Parquet file in this folder, it is empty"):
        find_files([tmp_path / name])


def test_a_folder_yields_every_kind_of_text_and_the_rest_is_counted_by_suffix(tmp_path: Path) -> None:
    read = ["LICENSE", "a.txt", "b.md", "e.rst.gz", "sub/c.HTML", "sub/d.py", "x/f.jsonl"]
    for name in (*read, "a.pdf", "b.PDF", "c.png", "data", ".git/config.py", ".hidden.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    said: list[str] = []
    assert [str(Path(f.path).relative_to(tmp_path)) for f in find_files([tmp_path], said.append)] == read
    (line,) = said
    assert line.startswith("skipped 6 files: 2 .pdf, 1 hidden folder, 1 hidden, 1 .png, 1 without a suffix (no suffix")
    for quiet in tmp_path / "a.pdf", tmp_path / "*.pdf", tmp_path / "x":  # named, or nothing skipped
        find_files([quiet], said.append)
    assert len(said) == 1
    find_files([tmp_path / "sub" / "*", tmp_path / "x", tmp_path], said.append)  # one line for all inputs
    assert len(said) == 2


def test_links_that_lead_back_yield_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "self.txt").symlink_to(tmp_path / "a" / "self.txt")
    for given in (tmp_path, tmp_path / "a" / "**" / "*.txt"):
        assert [f.path for f in find_files([given])] == [str(tmp_path / "a" / "x.txt")]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt: not a file but a pipe"):
        find_files([tmp_path / "pipe.txt"])
    with pytest.raises(DataError, match="no text, JSON, CSV or Parquet file in this folder"):
        find_files([tmp_path])


def test_many_suffixes_are_one_short_line(tmp_path: Path) -> None:
    for name in ("a.txt", "bad.\x1b[31m", *(f"{n}.s{n}" for n in range(30))):
        (tmp_path / name).write_text("text")
    said: list[str] = []
    find_files([tmp_path], said.append)
    assert "skipped 31 files" in said[0] and "23 with 23 other suffixes" in said[0] and "\x1b" not in said[0]


def test_a_folder_without_readable_files_says_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.pdf", "b.pdf", "c.png"):
        (tmp_path / name).write_text("text")
    with pytest.raises(DataError, match=r"no text, .* in this folder: it holds 2 \.pdf, 1 \.png; a glob such as"):
        find_files([tmp_path])


def test_members_of_a_zip_that_are_not_read_are_counted_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in ("a.txt", "b.pdf", "c.txt.gz", "d/"):
            archive.writestr(name, "text")
    said: list[str] = []
    find_files([tmp_path / "data.zip"], said.append)
    assert said[0].startswith("skipped 2 files: 1 .pdf, 1 .txt.gz (no suffix")
    (tmp_path / "broken.zip").write_bytes(b"PK")
    find_files([tmp_path / "broken.zip"], said.append)  # said when it is read
    assert len(said) == 1


# ---- other places ----


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The folder over HTTP on loopback, with the ranges that a reader asks for."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            file = tmp_path / self.path.lstrip("/")
            if not file.is_file():
                self.send_error(404)
                return
            data, whole = file.read_bytes(), file.stat().st_size
            if spec := self.headers.get("Range"):
                first, last = (int(n) for n in spec.removeprefix("bytes=").split("-"))
                data = data[first : last + 1]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{whole}")
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "csv", "parquet", "zip"])
def test_files_behind_a_url_give_the_same_documents(kind: str, server: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    assert texts(f"{server}/data.{kind}") == TEXTS


def test_neoxs_datasets_are_fetched_by_name(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", "<mediawiki> A page.")
    write(tmp_path, "jsonl.zst")
    for name, url in {"enwik8": f"{server}/enwik8.zip", "pile_subset": f"{server}/data.jsonl.zst"}.items():
        monkeypatch.setitem(NEOX_DATASETS, name, [url])
        request = read_request({"dataset": name, "out_root": str(tmp_path / name)})
        assert texts(*request.splits[0].input) == (["<mediawiki> A page."] if name == "enwik8" else TEXTS)


def test_without_a_network_the_message_names_the_url_of_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEOX_DATASETS, "enwik8", [url := "http://127.0.0.1:9/enwik8.zip"])
    monkeypatch.setattr(input_files, "Remote", functools.partial(input_files.Remote, retries=0))
    with pytest.raises(DataError, match=url):
        find_files(read_request({"dataset": "enwik8", "out_root": "x"}).splits[0].input)


def test_a_url_without_an_object_is_one_sentence(server: str) -> None:
    with pytest.raises(DataError, match="no such object"):
        find_files([f"{server}/absent.jsonl"])


def test_a_throttled_hub_is_asked_again_after_the_last_document() -> None:
    pauses: list[float] = []
    opened: list[int] = []

    def open_at(done: int) -> Iterator[dict[str, str]]:
        opened.append(done)
        for i, text in enumerate(TEXTS[done:], done):
            if i in (50, 51, 130) and opened.count(i) < 3:
                raise ConnectionError("429 Too Many Requests")
            yield {"text": text}

    found = [t.decode() for b in hub.read_records(open_at, "hf://x", PrepareOptions(), pauses.append) for t in b.texts]
    assert found == TEXTS
    assert opened[0] == 0 and 50 in opened and 130 in opened
    assert pauses[:2] == [1.0, 2.0]


def test_an_unreachable_hub_is_one_sentence() -> None:
    def open_at(done: int) -> Iterator[dict[str, str]]:
        raise ConnectionError("503")

    with pytest.raises(DataError, match="failed 9 times after record 0: 503"):
        list(hub.read_records(open_at, "hf://x", PrepareOptions(), lambda seconds: None))
