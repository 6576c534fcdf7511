"""Trackers hold each step exactly once with its last value, whatever is killed; and they never hold up a run."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import urlopen

import pytest
import tracker_readers as read
from conftest import TINY, Ingot
from runs import BATCHES, Run, ranks, weights, whole

from ingot.config.training import LoggersConfig
from ingot.errors import ConfigError
from ingot.report.metrics_file import read_rows
from ingot.report.trackers.base import TrackedRun, Tracker
from ingot.report.trackers.feed import Feed
from ingot.report.trackers.registry import TRACKERS, check_logins, check_trackers, make_tracker

__all__ = ["ranks", "whole"]
SLOW_STEPS = {"kind": "slow", "rank": 0, "batch": 1, "seconds": 0.1, "attempts": "all"}
OFFLINE = ["loggers.tensorboard={}", "loggers.wandb.mode=offline", "loggers.comet.mode=offline", "loggers.trackio={}"]
ALL = list(range(1, BATCHES + 1))


@pytest.fixture(scope="module", autouse=True)
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Trackio reads the variable once per process, so it is the same for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder := tmp_path_factory.mktemp("trackio")))
        patch.setenv("INGOT_TRACKER_DEADLINE", "120")  # the machine may be busy
        yield folder


def steps(points: read.Points) -> list[int]:
    return [step for step, _ in points]


def expected(folder: Path) -> list[float]:
    return [row[read.LOSS] for row in read_rows(folder)]


def sidecars(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ingot.report.trackers.sidecar" in words and str(folder).encode() in words:
            found.append(int(path.parent.name))
    return found


def kill_run(run: Run, and_sidecar: bool) -> None:
    victims = [*run.ranks().values(), run.process.pid, *(sidecars(run.folder) if and_sidecar else [])]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    run.process.communicate()
    while sidecars(run.folder):  # without a kill, it sends the rest by itself
        time.sleep(0.05)


def test_the_steps_of_a_killed_run_are_in_each_tracker_once(data: Path, tmp_path: Path, trackio_folder: Path) -> None:
    run = Run(data, tmp_path / "run", *OFFLINE, nproc=1, **SLOW_STEPS).start()
    run.wait_for_batch(7)
    kill_run(run, and_sidecar=True)
    run.start().wait_for_batch(14)
    kill_run(run, and_sidecar=False)
    Run(data, run.folder, *OFFLINE, nproc=1).run()

    losses = expected(run.folder)
    for name, points in {
        "tensorboard": read.tensorboard(run.folder), "wandb": read.wandb(run.folder), "comet": read.comet(run.folder),
        "trackio": read.trackio(trackio_folder),
    }.items():  # fmt: skip
        assert steps(points) == ALL, name
        assert [value for _, value in points] == pytest.approx(losses), name
    assert len(read.wandb_runs(run.folder)) == 1 and len(read.comet_keys(run.folder)) == 1  # continued, not begun again
    assert not sidecars(run.folder)


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[str]:
    """A real MLflow server on this machine, with its own database."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
               "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]  # fmt: skip
    log = (folder / "server.log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=folder,
                              env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline and server.poll() is None, (folder / "server.log").read_text()
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=30):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
        log.close()


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_a_real_mlflow_server_holds_each_step_once_though_it_and_the_run_are_killed(
    ingot: Ingot, data: Path, tmp_path: Path
) -> None:
    port = free_port()
    address = f"loggers.mlflow.tracking_uri=http://127.0.0.1:{port}"
    run = Run(data, tmp_path / "run", address, nproc=1, **SLOW_STEPS)
    with mlflow_server(tmp_path, port):
        run.start().wait_for_batch(7)
        kill_run(run, and_sidecar=True)
        run.start().wait_for_batch(14)
    run.process.send_signal(signal.SIGTERM)  # the server is gone; the run saves and stops all the same
    run.process.communicate(timeout=200)
    with mlflow_server(tmp_path, port) as uri:
        Run(data, run.folder, address, nproc=1).run()
        ingot("sync", str(run.folder), "--to", "mlflow")  # what a busy machine has not sent in time
        (points,) = read.mlflow(uri).values()
    assert steps(points) == ALL and [value for _, value in points] == pytest.approx(expected(run.folder))


class Refuse(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(500)
        self.end_headers()

    do_POST = do_PATCH = do_GET

    def log_message(self, *arguments: object) -> None: ...


@contextmanager
def server_that_refuses() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@contextmanager
def server_that_never_answers() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as server:
        yield server.getsockname()[1]


@contextmanager
def no_server() -> Iterator[int]:
    yield free_port()


@pytest.mark.parametrize(
    "server",
    [
        server_that_never_answers,
        *(pytest.param(server, marks=pytest.mark.slow) for server in (server_that_refuses, no_server)),
    ],
)
def test_a_server_that_fails_costs_one_warning_and_nothing_else(
    ingot: Ingot, tiny: list[str], data: Path, tmp_path: Path, server: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_TRACKER_DEADLINE", "1")
    plain = tmp_path / "plain"
    ingot("train", *TINY, f"data={data}", f"save_folder={plain}")
    with server() as port:
        done = ingot("train", *tiny, f"loggers.mlflow.tracking_uri=http://127.0.0.1:{port}")
    (warning,) = (line for line in done.stdout.splitlines() if "rows were not sent" in line)
    assert "12 rows were not sent to mlflow; `ingot sync" in warning
    assert done.stdout.count("warning: loggers.mlflow:") <= 1
    one, two = weights(tmp_path / "run"), weights(plain)
    assert all((one[name] == two[name]).all() for name in two)
    assert not sidecars(tmp_path / "run")

    database = f"sqlite:///{tmp_path}/mlflow.db"
    done = ingot("sync", str(tmp_path / "run"), "--to", "mlflow", f"tracking_uri={database}")
    assert "sent 12 rows" in done.stdout
    (points,) = read.mlflow(database).values()
    assert steps(points) == list(range(1, 13))
    assert "sent 0 rows" in ingot("sync", str(tmp_path / "run"), "--to", "mlflow", f"tracking_uri={database}").stdout


def write_run(folder: Path, rows: dict[int, float], guards: list[dict] | None = None) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"time/batch": step, read.LOSS: value}) for step, value in rows.items()]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "guards.jsonl").write_text("".join(json.dumps(line) + "\n" for line in guards or []))


ROLLBACK = {"batch": 5, "what": "the loss jumped", "action": "back to batch 3", "samples": [], "back_to": 3}


@pytest.mark.parametrize("is_reopened", [False, True], ids=["in one process", "across a kill"])
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "comet", "mlflow", "trackio"])
def test_after_a_rollback_the_repeated_steps_have_their_new_values(
    tmp_path: Path, trackio_folder: Path, name: str, is_reopened: bool
) -> None:
    folder, database, project = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db", f"rollback{is_reopened:d}"
    section: dict[str, object] = {"wandb": {"mode": "offline"}, "comet": {"mode": "offline"},
                                  "mlflow": {"tracking_uri": database},
                                  "trackio": {"project": project}}.get(name, {})  # fmt: skip
    loggers = LoggersConfig.model_validate({name: section})
    run = TrackedRun("first", folder, {}, id=None, group="first", forked_from=None)
    write_run(folder, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    feed = Feed(name, make_tracker(loggers, name), run)
    feed.open()
    feed.send()
    if is_reopened:
        feed.close(crashed=False)
        feed = Feed(name, make_tracker(loggers, name), run)
    write_run(folder, {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 6: 60.0}, [ROLLBACK])
    if is_reopened:
        feed.open()
    feed.send()
    feed.close(crashed=False)

    new = [(4, 40.0), (6, 60.0)]
    if name == "tensorboard":
        assert read.tensorboard(folder) == [(1, 1.0), (2, 2.0), (3, 3.0), *new]
    elif name == "wandb":
        assert [p for p in read.wandb(folder) if p in new] == new
        assert {group for _, group in read.wandb_runs(folder)} == {"first"} and len(read.wandb_runs(folder)) == 2
    elif name == "comet":
        assert [p for p in read.comet(folder) if p in new] == new and len(read.comet_keys(folder)) == 2
    elif name == "mlflow":
        assert read.mlflow(database)["first-rollback-1"] == new
        assert steps(read.mlflow(database)["first"]) == [1, 2, 3, 4]
    else:
        assert [p for p in read.trackio(trackio_folder, project) if p in new] == new


def generated(batch: int, text: str = "upon a time") -> str:
    return json.dumps({"batch": batch, "texts": [{"prompt": "Once", "text": text}]}) + "\n"


def test_generated_texts_are_sent_once_at_their_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, {1: 1.0, 2: 2.0, 4: 4.0})
    (folder / "generated.jsonl").write_text(generated(2) + generated(3, "<b>|x|") + generated(6))
    run = TrackedRun("r", folder, {}, id=None, group="r", forked_from=None)
    for _ in range(2):  # the second time all is known
        feed = Feed("tensorboard", make_tracker(LoggersConfig.model_validate({"tensorboard": {}}), "tensorboard"), run)
        feed.open()
        feed.send()
        feed.close(crashed=False)
    texts = read.tensorboard_texts(folder, "generated")
    assert [step for step, _ in texts] == [2, 3, 6] and "| 2 | Once | upon a time |" in texts[0][1]
    assert r"\<b\>\|x\|" in texts[1][1]


class Broken(Tracker):
    """Holds what it is given in memory, and fails once in the middle."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.tables: list[tuple[int, str]] = []

    def open(self, run: TrackedRun, after: int) -> str:
        return "x"

    def log(self, step: int, values: dict) -> None:
        self.steps.append(step)

    def table(self, step: int, name: str, columns: list, rows: list) -> None:
        self.tables.append((step, name))
        if len(self.tables) == 1:
            raise ConnectionError("the server is gone")


def test_rows_read_before_a_failure_are_sent_after_it_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    score = {"metrics/copa/0-shot/InContextLearningMultipleChoiceAccuracy": 0.5}
    rows = [{"time/batch": 1}, {"time/batch": 2, **score}, {"time/batch": 3}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracker = Broken()
    feed = Feed("broken", tracker, TrackedRun("r", folder, {}, id=None, group="r", forked_from=None))
    feed.open()
    with pytest.raises(ConnectionError):
        feed.send()
    feed.send()
    assert tracker.steps == [1, 2, 3] and tracker.tables == [(2, "evaluation")] * 2 and feed.state.sent == 3


@pytest.mark.parametrize("forked_from", [None, "runs/base"])
def test_comet_is_told_where_a_run_is_what_it_comes_from_and_how_it_ended(
    tmp_path: Path, forked_from: str | None
) -> None:
    folder = tmp_path / "run"
    loggers = LoggersConfig.model_validate({"comet": {"mode": "offline"}})
    write_run(folder, {1: 1.0, 2: 2.0})
    run = TrackedRun("second", folder, {}, id=None, group="first", forked_from=forked_from)
    feed = Feed("comet", make_tracker(loggers, "comet"), run)
    feed.open()
    feed.send()
    feed.close(crashed=True)
    others = read.comet_others(folder)
    assert (others["group"], others["folder"], others["state"], others["batch"]) == (
        "first",
        str(folder),
        "crashed",
        "2",
    )
    assert others.get("forked from") == forked_from


def test_a_line_without_end_and_odd_lines_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / "metrics.jsonl").open("wb") as file:
        file.write(b'{"time/batch": 1}\n[1]\nnull\n{"x": 1}\n')
        file.seek(9 << 20)  # a hole: one line of zeros
        file.write(b'\n{"time/batch": 2}\n')
    tracker = Broken()
    feed = Feed("broken", tracker, TrackedRun("r", folder, {}, id=None, group="r", forked_from=None))
    feed.open()
    while feed.behind or feed.rows.offset < 9 << 20:
        feed.send()
    assert tracker.steps == [1, 2]


def test_a_restart_is_an_event_and_a_first_start_is_none(ingot: Ingot, tiny: list[str], tmp_path: Path) -> None:
    for batches in (2, 4):
        ingot("train", *tiny, "loggers.tensorboard={}", f"max_duration={batches}ba")
        found = read.tensorboard_tags(tmp_path / "run")
        assert ("events/restart" in found) == (batches == 4)
    assert read.tensorboard_texts(tmp_path / "run", "events/restart")[0][0] == 2


@pytest.mark.slow
def test_each_tracker_goes_on_over_a_change_of_the_layout(data: Path, tmp_path: Path, trackio_folder: Path) -> None:
    project = ["loggers.trackio.project=layouts"]
    first = Run(data, tmp_path / "run", *OFFLINE, *project, nproc=1, **SLOW_STEPS).start()
    first.wait_for_batch(9)
    kill_run(first, and_sidecar=True)
    Run(data, first.folder, *OFFLINE, *project, "parallel.tensor=2", nproc=2).run()
    for name, points in {
        "tensorboard": read.tensorboard(first.folder), "wandb": read.wandb(first.folder),
        "comet": read.comet(first.folder), "trackio": read.trackio(trackio_folder, "layouts"),
    }.items():  # fmt: skip
        assert steps(points) == ALL, name
    assert len(read.wandb_runs(first.folder)) == 1 and len(read.comet_keys(first.folder)) == 1


def test_tensorboard_shows_the_config_the_fork_and_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, {1: 1.0, 2: 2.0})
    run = TrackedRun(
        "r", folder, {"model": {"n_layers": 7}, "name": "a|b"}, id=None, group="r", forked_from="runs/before"
    )
    for _ in range(2):
        feed = Feed("tensorboard", make_tracker(LoggersConfig.model_validate({"tensorboard": {}}), "tensorboard"), run)
        feed.open()
        feed.send()
        feed.close(crashed=False)
    ((step, text),) = read.tensorboard_texts(folder, "config")
    assert step == 0 and "| starts from | runs/before |" in text and r"| model.n\_layers | 7 |" in text
    assert "stopped at batch 2" in read.tensorboard_texts(folder, "events/state")[-1][1]


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"time/batch": 1, "loss/train/total": null, "l2_norm/grad/global": 2.0}\n')
    loggers = LoggersConfig.model_validate({"tensorboard": {}})
    run = TrackedRun("r", folder, {}, id=None, group="r", forked_from=None)
    feed = Feed("tensorboard", make_tracker(loggers, "tensorboard"), run)
    feed.open()
    feed.send()
    feed.close(crashed=False)
    with pytest.raises(KeyError):
        read.tensorboard(folder)
    assert feed.state.sent == 1


@pytest.mark.parametrize(
    ("name", "section", "variable"),
    [("wandb", {}, "WANDB_API_KEY"), ("comet", {}, "COMET_API_KEY"), ("trackio", {"space_id": "a/b"}, "HF_TOKEN")],
)
def test_a_missing_login_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, section: dict, variable: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    loggers = LoggersConfig.model_validate({name: section})
    with pytest.raises(ConfigError, match=f"loggers.{name}: the run will not be logged in.*{variable}"):
        check_trackers(loggers, [])
    check_trackers(loggers, [variable])
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x")
    (tmp_path / ".comet.config").touch()
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").touch()
    check_logins(loggers, [])
    with pytest.raises(ConfigError):  # in a container
        check_logins(loggers, [], has_home=False)
    if name != "trackio":
        check_trackers(LoggersConfig.model_validate({name: {"mode": "offline"}}), [])


def test_a_launch_without_a_login_is_refused_before_it_is_queued(
    ingot_here: Ingot, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_API_KEY", "of this shell, not of the job")
    command = ["launch", "slurm", *tiny, "loggers.wandb={}", "-N", "1", "--profile", "cpu", "--dry-run"]
    done = ingot_here(*command, check=False)
    assert done.returncode == 2 and "--secret WANDB_API_KEY" in done.stderr
    assert "of this shell" not in ingot_here(*command, "--secret", "WANDB_API_KEY").stdout


def test_no_tracker_is_named_that_the_config_does_not_know() -> None:
    assert set(TRACKERS) == set(LoggersConfig.model_fields) - {"samples"}


def test_cometml_is_another_name_of_comet() -> None:
    assert LoggersConfig.model_validate({"cometml": {"project": "x"}}).comet.project == "x"  # type: ignore[union-attr]


def test_fresh_begins_a_new_run_at_the_tracker(ingot: Ingot, tiny: list[str], tmp_path: Path) -> None:
    ingot("train", *tiny, "loggers.tensorboard={}", "max_duration=2ba")
    assert json.loads((tmp_path / "run/trackers/tensorboard.json").read_text())["sent"] == 2
    shutil.rmtree(tmp_path / "run" / "tensorboard")
    ingot("train", *tiny, "loggers.tensorboard={}", "max_duration=3ba", "--fresh")
    assert steps(read.tensorboard(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("folder", "name", "sentence"),
    [
        ("nothing", "wandb", "nothing is not a run folder with metrics"),
        ("run", "wandbb", "--to wandbb: not a tracker; choose one of tensorboard, wandb"),
    ],
)
def test_sync_refuses_in_one_sentence(ingot_here: Ingot, tmp_path: Path, folder: str, name: str, sentence: str) -> None:
    done = ingot_here("sync", folder, "--to", name, check=False)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1
