"""Reports over folders that are damaged, huge, or made to harm, and requests that ask for more than the report."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report_page import LOSS, data_in, write_run
from warm_process import WarmProcess

from ingot.errors import ConfigError
from ingot.report.page.live import LivePages, LiveServer, find_runs
from ingot.report.page.page import build_page
from ingot.report.page.run_data import read_run

ROW = {"time/batch": 1, LOSS: 1.0}


def test_a_line_of_gigabytes_is_left_out_and_takes_no_memory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [ROW])
    with (run / "metrics.jsonl").open("r+b") as file:
        file.seek(300 << 20)  # a hole: one line of zeros
        file.write(b"\n" + json.dumps({"time/batch": 2, LOSS: 2.0}).encode() + b"\n")
    tracemalloc.start()
    assert read_run(run)["series"][LOSS] == ([1, 2], [1.0, 2.0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_rows_of_other_programs_keep_their_finite_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [])
    rows = ['{"time/batch": 1, "loss/train/total": NaN, "x": 3}', '{"time/batch": 2, "loss/train/total": -Infinity}',
            '{"time/batch": 3, "loss/train/total": 3.5, "note": "text", "on": true, "list": [1]}',
            '{"time/batch": 4, "loss/train/total": ' + "9" * 400 + "}", '{"time/batch": "5", "loss/train/total": 1}',
            '{"time/batch": -1, "loss/train/total": 1}', "[1, 2]", "[" * 100_000, "null", "\\x00\\xff", '{"a": 1}']  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    found = read_run(run)
    assert found["series"][LOSS] == ([3], [3.5]) and found["series"]["x"] == ([1], [3.0])
    assert found["last"]["time/batch"] == 4 and "NaN" not in build_page({"runs": [found]})


@pytest.mark.parametrize(
    "config",
    ["", "- a\n- b\n", "model: text\ndata: text\nmax_seq_len: many\nglobal_train_batch_size: -4\n", "name: {a: [1, {b: 2}]}\n",
     "a: " + "[" * 5000, "\x00\x01", "model: {family: mpt, d_model: .nan}\nmax_seq_len: .inf\n", "? [a]\n: b\n",
     "name: !!python/object/apply:os.system ['touch hacked']\n", "data: {train: {mix: {a: {path: x}, b: {path: y}}}}\n"],
)  # fmt: skip
def test_any_config_is_shown_as_far_as_possible(tmp_path: Path, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", [ROW], config)
    assert build_page({"runs": [read_run(run)]}) and not (tmp_path / "hacked").exists()


def test_a_few_lines_of_aliases_do_not_become_gigabytes(tmp_path: Path) -> None:
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
    began = time.monotonic()
    assert read_run(write_run(tmp_path / "run", [ROW], laughs))["config"] == {}
    assert time.monotonic() - began < 10


def test_files_that_cannot_be_read_leave_the_rest(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [ROW])
    for name in ("guards.jsonl", "failures.jsonl", "generated.jsonl", "owner.json"):
        (run / name).mkdir()
    for name in ("checkpoints", "logs", "profile"):
        (run / name).write_text("not a folder")
    assert read_run(run)["marks"] == [] and read_run(run)["checkpoints"] == []


def test_events_of_any_kind_are_marks_or_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [ROW])
    odd: list[Any] = [
        {"batch": "x", "what": ["<b>"]},
        {"batch": 1e400},
        {"batch": 10**30},
        {},
        5,
        None,
        {"texts": 5, "batch": 1},
    ]
    for name in ("guards.jsonl", "failures.jsonl", "generated.jsonl"):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in odd))
    (run / "logs").mkdir()
    (run / "logs" / "train.log").write_text(
        "2026-01-01T00:00:00 resumed from x at batch 7 of 9\nresumed from y at batch 8 of 9\n"
    )
    found = read_run(run)
    assert [mark[:2] for mark in found["marks"] if mark[1] == "restart"] == [[7, "restart"]]
    assert build_page({"runs": [found]})


def test_links_out_of_a_run_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("api: of somebody else\n")
    run = write_run(tmp_path / "runs" / "run", [ROW])
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(secret)
    (run / "guards.jsonl").symlink_to(run / "guards.jsonl")  # a loop
    assert "somebody" not in json.dumps(read_run(run))
    private = write_run(tmp_path / "private", [ROW])
    (tmp_path / "runs" / "outside").symlink_to(private)
    (tmp_path / "runs" / "inside").symlink_to(run)
    (tmp_path / "runs" / "pipe").mkdir()
    os.mkfifo(tmp_path / "runs" / "pipe" / "metrics.jsonl")
    assert [found.name for found in find_runs(tmp_path / "runs")] == ["inside", "run"]
    with pytest.raises(ConfigError, match="is not a run folder with metrics"):
        read_run(tmp_path / "runs" / "pipe")
    assert read_run(tmp_path / "runs" / "outside")["name"]  # named by its user


def test_two_reports_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"time/batch": n, LOSS: 1.0} for n in range(1, 2000)])
    command = [sys.executable, "-m", "ingot.cli.main", "report", str(run)]
    both = [WarmProcess(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert data_in(run / "report.html")["runs"][0]["last"]["time/batch"] == 1999
    assert not list(run.glob(".*tmp"))


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LiveServer]:
    write_run(tmp_path / "runs" / "a", [ROW])
    with LiveServer(LivePages([tmp_path / "runs"]), request.param, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server: LiveServer, path: str, host: str | None = None, method: str = "GET") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host.replace("PORT", str(server.server_port)))
    connection.endheaders()
    return connection.getresponse().status


@pytest.mark.parametrize(
    ("host", "loopback", "any_address"),
    [("127.0.0.1:PORT", 200, 200), ("localhost:PORT", 200, 200), ("LOCALHOST", 200, 200), ("[::1]:PORT", 200, 200),
     ("evil.example:PORT", 403, 403), ("127.0.0.1.evil.example:PORT", 403, 403), ("localhost:1", 403, 403),
     ("localhost@evil.example", 403, 403), ("", 403, 403), (None, 403, 403), ("192.168.1.7:PORT", 403, 200),
     (f"{os.uname().nodename}:PORT", 403, 200)],
)  # fmt: skip
def test_only_a_name_of_this_machine_is_answered(
    server: LiveServer, host: str | None, loopback: int, any_address: int
) -> None:
    assert ask(server, "/data.json", host) == (loopback if server.host == "127.0.0.1" else any_address)


@pytest.mark.parametrize(
    "path", ["/run/a/../../runs/", "/run/%00/", "/run/" + "a" * 5000 + "/", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
             "/run/a/config.yaml", "/run/a", "/run/A/"],
)  # fmt: skip
def test_no_other_path_is_answered(server: LiveServer, path: str) -> None:
    assert ask(server, path, "localhost") == 404


def test_nothing_can_be_changed_and_a_broken_run_breaks_nothing_else(server: LiveServer, tmp_path: Path) -> None:
    assert ask(server, "/", "localhost", "POST") == 501 and ask(server, "/", "localhost", "DELETE") == 501
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("garbage\n")
    assert ask(server, "/run/a/", "localhost") == 503 and ask(server, "/", "localhost") == 200
