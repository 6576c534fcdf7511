"""The report: what it holds, what it refuses, and that nothing of a run becomes markup or a path."""

import http.client
import json
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Ingot, Shared
from warm_process import run_warm

from ingot.config.load import load_config, to_yaml
from ingot.config.model import ModelConfig
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.report.page.downsample import downsample
from ingot.report.page.live import serve
from ingot.report.page.run_data import read_run
from ingot.version import __version__

LOSS = "loss/train/total"
NASTY = "</script><script>window.hacked=1</script>\"'&\n\u202eabc"


def write_run(folder: Path, rows: list[dict], config: str = "name: first\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(config)
    return folder


def data_in(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found
    return dict(json.loads(found[1]))


@pytest.fixture(scope="module")
def run(shared: Shared, data: Path) -> Path:
    """A real run with an evaluation, a failure and an anomaly."""
    from conftest import TINY

    def fill(folder: Path) -> None:
        run_warm(
            [sys.executable, "-m", "ingot.cli.main", "train", *TINY, f"data={data}", f"save_folder={folder / 'run'}",
             "save_interval=6ba", "eval_interval=6ba"], check=True, capture_output=True,
        )  # fmt: skip
        (folder / "run" / "guards.jsonl").write_text('{"batch": 5, "what": "the loss jumped", "action": "skipped"}\n')
        failure = {
            "time": "2026-01-01T00:00:00",
            "kind": "died",
            "message": "killed",
            "rank": 1,
            "host": "n2",
            "batch": 7,
        }
        (folder / "run" / "failures.jsonl").write_text(json.dumps(failure) + "\n")

    return shared("reported", fill) / "run"


def test_the_page_holds_the_values_of_the_metrics_and_needs_no_network(
    ingot_here: Ingot, run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    ingot_here("report", str(run), "-o", str(page))
    (shown,) = data_in(page)["runs"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps, losses = shown["series"][LOSS]
    assert steps == list(range(1, 13)) and losses == pytest.approx([row[LOSS] for row in rows], rel=1e-6)
    assert shown["series"]["metrics/eval/LanguageCrossEntropy"][0] == [6, 12]
    assert [mark[:2] for mark in shown["marks"]] == [[5, "anomaly"], [7, "failure"]]
    assert [row[0] for row in shown["checkpoints"]] == [6, 12]
    assert shown["tokens_per_step"] == 8 * 32 and shown["state"] == "finished" and shown["total"] == 12
    assert shown["changed"]["keys"]["model.d_model"] == ["2048", "32"]
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(""", page.read_text())


def test_the_summary_says_what_was_trained_on_what_and_how_it_ended(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    values = yaml.safe_load((run / "config.yaml").read_text())
    model = ModelConfig.model_validate(values["model"])
    validation = [row[name] for row in rows if (name := "metrics/eval/LanguageCrossEntropy") in row]
    shown = read_run(run)
    flops = model.flops_per_token(32) * 8 * 32
    assert shown["flops_per_step"] == flops > 0
    summary = {
        "model": f"{model.family}, {model.parameters:,} parameters", "steps": "12", "tokens": "3,072",
        "training FLOPs": f"{12 * flops:.3g}", "batch": "8 sequences of 32 tokens",
        "data": values["data"]["train"]["path"], "precision": "fp32",
        "validation loss": f"{validation[-1]:.4f} (best {min(validation):.4f})",
        "training loss": f"{rows[-1][LOSS]:.4f}", "ingot version": __version__, "layout": "one process",
    }  # fmt: skip
    assert {name: shown["summary"].get(name) for name in summary} == summary
    assert [size for _, size, _ in shown["checkpoints"]] == [
        f"{sum(f.stat().st_size for f in (run / 'checkpoints' / step).iterdir()) / 1e6:,.1f} MB" for step in ("6", "12")
    ]


@pytest.mark.parametrize(("hours", "shown"), [(0.5, "0.5 h of 2 h since the first start (25%)"), (3.0, "3 h")])
def test_the_time_in_training_is_a_share_of_the_time_since_the_first_start(
    tmp_path: Path, hours: float, shown: str
) -> None:
    run = write_run(tmp_path / "run", [{"time/batch": 1, LOSS: 1.0, "time/train": hours}])
    (run / "logs").mkdir()
    lines = [f"2026-01-01T0{hour}:30:00 [batch={hour}/9] loss 1.0" for hour in (1, 2, 3)]
    (run / "logs" / "train.log").write_text("\n".join(lines))
    found = read_run(run)
    assert found["summary"]["time in training"] == shown and found["total"] == 9


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    from ingot.report.page.page import build_page

    run = write_run(tmp_path / "run", [{"time/batch": 1, LOSS: 1.0}], json.dumps({"name": NASTY, "x": "y" * 10_000}))
    page = build_page({"runs": [read_run(run)]})
    assert "window.hacked" in page and "<script>window" not in page
    (tmp_path / "page.html").write_text(page)
    assert data_in(tmp_path / "page.html")["runs"][0]["name"] == NASTY


def test_generated_texts_and_profiles_are_tables(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"time/batch": 1, LOSS: 1.0}])
    lines = [{"batch": n, "texts": [{"prompt": "Once", "text": f"{NASTY}{n}"}]} for n in (4, 8)]
    (run / "generated.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"batch": 9, "texts": [1'
    )
    (run / "profile").mkdir()
    table = {"steps": [3, 5], "rank": 0, "on_gpu": True, "milliseconds_per_step": {"idle": 2.0, "copies": 0.5, "optimizer": 1.5},
             "total_milliseconds_per_step": 4.0, "trace": "t.gz"}  # fmt: skip
    (run / "profile" / "steps-3-5-rank-0.json").write_text(json.dumps(table))
    (run / "profile" / "steps-7-9-rank-0.json").write_text("cut of")
    found = read_run(run)
    assert found["generated"] == [[8, "Once", f"{NASTY}8"], [4, "Once", f"{NASTY}4"]]
    (profile,) = found["profiles"]
    assert profile["title"] == "Where the time of steps 3 to 5 went on the GPU"
    assert profile["rows"] == [
        ["optimizer", "1.5 ms", "37.5%"], ["copies", "0.5 ms", "12.5%"], ["idle", "2.0 ms", "50.0%"]]  # fmt: skip


def test_a_spike_of_one_step_survives_downsampling() -> None:
    values = [1.0] * 100_000
    values[54_321], values[54_322] = 9.0, -9.0
    steps, kept = downsample(range(100_000), values)
    assert len(kept) <= 1600 and steps[0] == 0 and steps[-1] == 99_999 and steps == sorted(set(steps))
    assert (54_321, 9.0) in zip(steps, kept, strict=True) and (54_322, -9.0) in zip(steps, kept, strict=True)


def test_missing_values_and_a_line_cut_off_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"time/batch": 1, LOSS: None}, {"time/batch": 2, LOSS: 2.0}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"time/batch": 3, "loss/tr')
    assert read_run(run)["series"][LOSS] == ([2], [2.0])


def test_runs_of_other_versions_are_shown_as_far_as_possible(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [{"time/batch": 1, LOSS: 1.0}], "model: {unknown_key: 1}\nname: old\n")
    assert read_run(run)["summary"]["model"] == "unknown"


def test_several_runs_are_in_one_page(ingot_here: Ingot, tmp_path: Path) -> None:
    for name in "ab":
        write_run(tmp_path / name, [{"time/batch": 1, LOSS: 1.0}], f"name: {name}\nseed: {ord(name)}\n")
    done = ingot_here("report", "a", "b", check=False)
    assert done.returncode == 2 and "-o report.html" in done.stderr
    ingot_here("report", "a", "b", "-o", "both.html")
    assert [run["config"]["seed"] for run in data_in(tmp_path / "both.html")["runs"]] == ["97", "98"]


@pytest.mark.parametrize(
    ("arguments", "recipe"),
    [(["mpt-125m", "name=mine", "optimizer.lr=0.5"], "the recipe mpt-125m"), (["pythia-70m"], "the recipe pythia-70m"),
     (["mpt-125m", "name=mine", "model.n_layers=3", "optimizer.lr=0.5"], "the defaults"),
     (["mpt-125m", "model.n_layers=3", "optimizer.lr=0.5"], "the recipe mpt-125m")],
)  # fmt: skip
def test_a_config_is_compared_with_its_recipe_under_any_name(tmp_path: Path, arguments: list[str], recipe: str) -> None:
    config = to_yaml(load_config(RunConfig, arguments))
    changed = read_run(write_run(tmp_path / "run", [{"time/batch": 1, LOSS: 1.0}], config))["changed"]
    assert changed["of"] == recipe and ("optimizer.lr" in changed["keys"]) == ("optimizer.lr=0.5" in arguments)


def test_runs_of_the_same_name_are_told_apart(ingot_here: Ingot, tmp_path: Path) -> None:
    for name in ("a", "b", "x/b", "c"):
        write_run(tmp_path / name, [{"time/batch": 1, LOSS: 1.0}], f"name: {'other' if name == 'c' else 'run'}\n")
    ingot_here("report", "a", "b", "x/b", "c", "-o", "all.html")
    names = [run["name"] for run in data_in(tmp_path / "all.html")["runs"]]
    assert names == ["run (a)", "run (b)", "run (x/b)", "other"]


@pytest.mark.parametrize("target", ["/", "folder"])
def test_a_folder_as_the_name_of_a_report_is_refused(ingot_here: Ingot, tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    write_run(tmp_path / "a", [{"time/batch": 1, LOSS: 1.0}])
    done = ingot_here("report", "a", "-o", target, check=False)
    assert done.returncode == 2 and "is a folder; name a file" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda folder: None, "is not a run folder with metrics"),
        (lambda folder: folder.mkdir(), "is not a run folder with metrics"),
        (lambda folder: write_run(folder, []), "holds no metrics yet"),
    ],
)
def test_what_is_not_a_run_is_refused_in_one_sentence(
    ingot_here: Ingot, tmp_path: Path, prepare: Any, sentence: str
) -> None:
    prepare(tmp_path / "run")
    done = ingot_here("report", "run", check=False)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_report_that_cannot_be_written_is_one_sentence(ingot_here: Ingot, tmp_path: Path) -> None:
    write_run(tmp_path / "run", [{"time/batch": 1, LOSS: 1.0}])
    done = ingot_here("report", "run", "-o", "no/such/folder.html", check=False)
    assert done.returncode != 0 and "cannot write no/such/folder.html" in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture
def live(tmp_path: Path) -> Iterator[int]:
    """A live page over a folder with two runs; its port."""
    for name in ("a", "b <&"):
        write_run(tmp_path / "runs" / name, [{"time/batch": 1, LOSS: 1.0}], f"name: {json.dumps(name)}\n")
    (tmp_path / "secret.txt").write_text("secret")
    address: list[str] = []
    ready = threading.Event()
    thread = threading.Thread(
        target=serve,
        args=([tmp_path / "runs"], "127.0.0.1", 0, lambda a: (address.append(a), ready.set())),
        daemon=True,
    )
    thread.start()
    assert ready.wait(10)
    yield int(address[0].rstrip("/").rpartition(":")[2])


def get(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_live_page_lists_runs_and_follows_them(live: int, tmp_path: Path) -> None:
    code, text = get(live, "/data.json")
    assert code == 200 and [run["name"] for run in json.loads(text)["list"]] == ["a", "b <&"]
    link = json.loads(text)["list"][1]["link"]
    assert get(live, f"/{link}")[0] == 200
    with (tmp_path / "runs" / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"time/batch": 2, LOSS: 0.5}) + "\n")
    assert json.loads(get(live, "/run/a/data.json")[1])["runs"][0]["series"][LOSS] == [[1, 2], [1.0, 0.5]]


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "/run/../../secret.txt", "/run/%2e%2e/data.json", "/etc/passwd", "/run/c/"]
)
def test_the_live_page_serves_nothing_else(live: int, path: str) -> None:
    code, text = get(live, path)
    assert code == 404 and "secret" not in text


def test_the_live_page_answers_only_to_its_own_name(live: int) -> None:
    assert get(live, "/data.json", host="evil.example")[0] == 403
    assert get(live, "/data.json", host=f"localhost:{live}")[0] == 200


def test_a_port_in_use_is_one_sentence(live: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"cannot serve at 127.0.0.1:{live}: .*--port"):
        serve([tmp_path / "runs"], "127.0.0.1", live, lambda address: None)


@pytest.mark.slow
def test_a_browser_draws_zooms_and_switches_without_an_error(ingot_here: Ingot, run: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", "chromium"], capture_output=True)
        chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed and apt-get could not install it")
    from playwright.sync_api import sync_playwright

    other = tmp_path / "other"
    shutil.copytree(run, other)
    page_file = tmp_path / "report.html"
    ingot_here("report", str(run), str(other), "-o", str(page_file))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync"]
    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=chromium, args=flags)
        for width in (1200, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            problems: list[str] = []
            requests: list[str] = []
            page.on(
                "console", lambda message, to=problems: to.append(message.text) if message.type == "error" else None
            )
            page.on("pageerror", lambda error, to=problems: to.append(str(error)))
            page.on("request", lambda request, to=requests: to.append(request.url))
            page.goto(page_file.as_uri())
            chart = page.locator(".uplot[data-title=Loss] .u-over")
            box = chart.bounding_box()
            assert box and box["width"] > 200
            chart.hover(position={"x": box["width"] - 1, "y": 20})
            legend = page.locator(".uplot[data-title=Loss] .u-legend").inner_text()
            assert f"{rows[-1][LOSS]:.5g}" in legend
            page.mouse.move(box["x"] + 20, box["y"] + 30)
            page.mouse.down()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 30)
            page.mouse.up()
            highest = page.evaluate("plots[0][0].scales.x.max")
            assert 1 < highest < 12  # zoomed
            page.locator("select").select_option("tokens")
            page.locator("input[type=checkbox]").check()
            page.locator("input[type=range]").fill("0.5")
            assert page.evaluate("plots[0][0].scales.x.max") == 12 * 8 * 32
            page.locator(".uplot[data-title=Loss] .u-series .u-label").nth(1).click()
            assert page.evaluate("plots[0][0].series[1].show") is False
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert problems == [] and requests == [page_file.as_uri()]
        browser.close()


@pytest.mark.slow
def test_a_browser_follows_a_run_from_the_list_of_runs(live: int, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    problems: list[str] = []
    requests: list[str] = []
    with sync_playwright() as tools:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync"]
        browser = tools.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(f"http://127.0.0.1:{live}/")
        assert page.locator("a").all_inner_texts() == ["a", "b <&"] and page.locator("canvas.small").count() == 2
        page.locator("a").nth(1).click()
        page.wait_for_selector(".uplot[data-title=Loss]")
        with (tmp_path / "runs" / "b <&" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"time/batch": 2, LOSS: 0.5}) + "\n")
        for _ in range(100):  # the page's own rules forbid a function that waits inside it
            if page.evaluate("plots.length && plots[0][0].data[0].length") == 2:
                break
            page.wait_for_timeout(200)
        assert page.evaluate("plots[0][0].data[1]") == [1.0, 0.5]
        browser.close()
    assert problems == [] and all(url.startswith(f"http://127.0.0.1:{live}/") for url in requests)


def test_a_long_run_makes_a_small_page(tmp_path: Path) -> None:
    generator = random.Random(1)
    names = [LOSS, "l2_norm/grad/global", *(f"throughput/device/m{i}" for i in range(8))]
    rows = [{"time/batch": n, **{name: generator.random() for name in names}} for n in range(1, 20_001)]
    run = write_run(tmp_path / "run", rows)
    assert all(len(values) <= 1600 for _, values in read_run(run)["series"].values())
