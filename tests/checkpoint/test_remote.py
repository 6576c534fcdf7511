"""Checkpoints at a URL: uploaded behind the loop, manifest last, and found again on another machine."""

import os
import shutil
import threading
from pathlib import Path

import obstore
import pytest
from conftest import TINY, Ingot
from object_store import bucket
from test_saver import assert_equal, read, state

import ingot.storage.object_store as remote_module
from ingot.api import train
from ingot.checkpoint.location import CheckpointLocation, find_checkpoints
from ingot.checkpoint.manifest import MODEL, steps_in
from ingot.checkpoint.remote_copy import Uploader, newest_good
from ingot.checkpoint.store import save_checkpoint
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import CheckpointError, ConfigError, DiskError
from ingot.parallel.coordinator import LocalCoordinator
from ingot.report.metrics_file import read_rows
from ingot.storage.object_store import Remote

RUN = [*TINY, "save_interval=4ba", "model.resid_pdrop=0.1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remote.__init__, "__defaults__", (2, (0.001, 0.01)))


@pytest.fixture
def store(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    return s3


def run(data: Path, *arguments: str, fresh: bool = False) -> None:
    train(load_config(RunConfig, [*RUN, f"data={data}", *arguments]), fresh)


def remote_steps(url: str) -> list[int]:
    return [place.step for place in find_checkpoints(url)]


def test_a_run_at_a_url_continues_on_another_machine(
    data: Path, tmp_path: Path, store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
    run(data, f"save_folder={tmp_path / 'whole'}")
    monkeypatch.chdir(tmp_path / "one")
    run(data, "save_folder=s3://test/moved", "max_duration=8ba", "scheduler.t_max=12ba", "name=first")
    assert remote_steps("s3://test/moved")[-1] == 8
    assert steps_in(Path("runs/first/checkpoints")) == [8]  # here only the newest
    monkeypatch.chdir(tmp_path / "two")  # nothing is here
    run(data, "save_folder=s3://test/moved", "name=first")
    ends = [tmp_path / "whole" / "checkpoints" / "12", Path("runs/first/checkpoints/12")]
    assert_equal(read(ends[0]), read(ends[1]))
    assert remote_steps("s3://test/moved")[-1] == 12
    assert [row["time/batch"] for row in read_rows("runs/first")] == list(range(1, 13))


def test_weights_are_loaded_from_a_url_and_starting_over_forgets_what_is_there(
    data: Path, tmp_path: Path, store: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(data, "save_folder=s3://test/weights", "max_duration=4ba", "name=a")
    still = ["max_duration=1ba", "scheduler.t_warmup=10ba"]  # learning rate 0: weights as they were loaded
    run(data, "load_path=s3://test/weights", *still, "save_folder=b")
    weights = [read(Path(p))[MODEL] for p in ("runs/a/checkpoints/4", "b/checkpoints/1")]
    assert_equal({MODEL: weights[0]}, {MODEL: weights[1]})
    assert not list(Path("b/checkpoints").glob(".*"))
    run(data, "save_folder=s3://test/weights", "max_duration=2ba", "name=a", fresh=True)
    assert remote_steps("s3://test/weights") == [2]


def test_loading_from_a_url_without_a_checkpoint_is_a_user_error(
    ingot: Ingot, data: Path, store: dict[str, str]
) -> None:
    done = ingot("train", *RUN, f"data={data}", "load_path=s3://test/nothing", "save_folder=run", check=False)
    assert done.returncode == 2 and done.stderr == "error: s3://test/nothing holds no checkpoint\n"


def test_two_tiers_copy_fewer_checkpoints_and_each_keeps_its_own(data: Path, tmp_path: Path) -> None:
    run(data, f"save_folder={tmp_path / 'near'}", f"remote_save_folder={tmp_path / 'far'}", "save_interval=2ba",
        "remote_save_interval=5ba", "save_num_checkpoints_to_keep=2", "save_keep_every=4ba")  # fmt: skip
    near, far = steps_in(tmp_path / "near" / "checkpoints"), steps_in(tmp_path / "far" / "checkpoints")
    assert near == [4, 8, 10, 12]
    assert far[-1] == 12 and set(far) <= {6, 8, 10, 12} and len(far) < 4
    assert (tmp_path / "far" / "config.yaml").is_file() and (tmp_path / "far" / "tokenizer/tokenizer.json").is_file()
    shutil.rmtree(tmp_path / "near" / "checkpoints")
    manifest, _ = newest_good(tmp_path / "near", LocalCoordinator(), Remote(str(tmp_path / "far")))
    assert manifest is not None and manifest.folder == tmp_path / "near" / "checkpoints" / "12"
    assert_equal(read(manifest.folder), read(tmp_path / "far" / "checkpoints" / "12"))


def test_a_damaged_local_checkpoint_is_replaced_by_its_remote_copy(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        save_checkpoint(folder, 1, state(1), {})
        save_checkpoint(folder, 2, state(2), {})
    os.truncate(here / "checkpoints/2/model.safetensors", 40)
    manifest, problems = newest_good(here, LocalCoordinator(), Remote(str(there)))
    assert manifest is not None and manifest.step == 2 and "is truncated" in problems[0]
    assert float(read(here / "checkpoints" / "2")[MODEL]["a"][0, 0]) == 2


def test_an_upload_without_its_manifest_is_not_a_checkpoint(tmp_path: Path, store: dict[str, str]) -> None:
    for step in (1, 2):
        path = save_checkpoint(tmp_path / "run", step, state(step), {})
        for file in path.iterdir():
            if step == 1 or file.name != "manifest.json":  # the second was cut off
                obstore.put(bucket(store), f"torn/checkpoints/{step}/{file.name}", file.read_bytes())
    assert remote_steps("s3://test/torn") == [1]
    manifest, problems = newest_good(tmp_path / "new", LocalCoordinator(), Remote("s3://test/torn"))
    assert manifest is not None and manifest.step == 1 and problems == []


def test_a_bit_flipped_at_the_url_is_found_before_anything_is_loaded(tmp_path: Path, store: dict[str, str]) -> None:
    path = save_checkpoint(tmp_path / "run", 1, state(), {})
    for file in path.iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= file.name == "optimizer.safetensors"
        obstore.put(bucket(store), f"flipped/checkpoints/1/{file.name}", bytes(content))
    with pytest.raises(CheckpointError, match=r"s3://test/flipped/checkpoints/1/optimizer.safetensors is corrupt"):
        newest_good(tmp_path / "new", LocalCoordinator(), Remote("s3://test/flipped"))
    assert steps_in(tmp_path / "new" / "checkpoints") == []


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: dict[str, str]
) -> None:
    for name, value in (s3 | {"AWS_ENDPOINT": "http://127.0.0.1:9"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DiskError, match="cannot be listed"):
        newest_good(tmp_path, LocalCoordinator(), Remote("s3://test/run"))


def test_a_failed_upload_warns_and_the_next_one_is_tried(data: Path, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "run", 1, state(), {})
    (tmp_path / "far").write_text("in the way")
    uploader = Uploader(str(tmp_path / "far"), tmp_path / "run", LocalCoordinator(), lambda steps: [])
    uploader.start(path)
    uploader.wait()
    assert uploader.problem and uploader.news[-1][1] and uploader.step is None
    (tmp_path / "far").unlink()
    uploader.start(path)
    uploader.wait()
    assert not uploader.problem and steps_in(tmp_path / "far" / "checkpoints") == [1]


def test_the_manifest_goes_up_after_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: dict[str, str]
) -> None:
    order: list[str] = []
    put, lock = Remote.put, threading.Lock()

    def record(self: Remote, name: str, source: Path) -> None:
        put(self, name, source)
        with lock:
            order.append(name)

    monkeypatch.setattr(remote_module.Remote, "put", record)
    path = save_checkpoint(tmp_path / "run", 7, state(), {})
    uploader = Uploader("s3://test/order", tmp_path / "run", LocalCoordinator(), lambda steps: [])
    uploader.start(path)
    uploader.wait()
    assert order[-1] == "checkpoints/7/manifest.json" and len(order) == 3
    place = find_checkpoints("s3://test/order")[-1]
    for name, file in place.manifest().files.items():
        place.check(name, file)


def test_two_urls_are_refused() -> None:
    with pytest.raises(ConfigError, match="save_folder is already a URL"):
        load_config(RunConfig, ["save_folder=s3://a/b", "remote_save_folder=s3://c/d"])


def test_weights_only_checkpoints_are_small_and_cannot_be_continued(data: Path, tmp_path: Path) -> None:
    folder = f"save_folder={tmp_path / 'run'}"
    run(data, folder, "save_weights_only=true", "max_duration=4ba")
    assert sorted(os.listdir(tmp_path / "run/checkpoints/4")) == ["manifest.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match="saved with save_weights_only"):
        run(data, folder)
    run(data, f"load_path={tmp_path / 'run'}", f"save_folder={tmp_path / 'on'}", "max_duration=1ba")


# --- ingot checkpoint


def test_checkpoints_are_listed_shown_verified_copied_and_consolidated(
    ingot: Ingot, data: Path, tmp_path: Path, store: dict[str, str]
) -> None:
    run(data, f"save_folder={tmp_path / 'run'}")
    lines = ingot("checkpoint", "list", "run").stdout.splitlines()
    assert lines[0].startswith("step\ttokens\tsize") and [line.split("\t")[0] for line in lines[1:]] == ["4", "8", "12"]
    shown = ingot("checkpoint", "show", "run", "--step", "8", "--tensors").stdout
    assert "36,736 parameters" in shown and "exp_avg/wte.weight" in shown and "model.safetensors" in shown
    assert "s3://test/copied/checkpoints/12" in ingot("checkpoint", "copy", "run", "s3://test/copied").stdout
    ingot("checkpoint", "copy", "s3://test/copied", "back")
    assert_equal(read(tmp_path / "run/checkpoints/12"), read(tmp_path / "back/checkpoints/12"))
    assert "all intact" in ingot("checkpoint", "verify", "s3://test/copied").stdout
    ingot("checkpoint", "consolidate", "run", "whole", "--weights-only")
    assert os.listdir(tmp_path / "whole/checkpoints/12").count("model.safetensors") == 1

    file = tmp_path / "run/checkpoints/8/optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    done = ingot("checkpoint", "verify", "run", check=False)
    assert done.returncode == 2 and "optimizer.safetensors is corrupt" in done.stderr
    assert done.stdout.count("all intact") == 2 and "DAMAGED" in done.stdout
    for arguments, words in (
        (["list", "nowhere"], "no such run or checkpoint"),
        (["show", "run", "--step", "5"], "has no checkpoint of step 5"),
        (["consolidate", "run", "whole"], "already exists"),
        (["list", "s3://test/nothing"], "holds no checkpoint"),
    ):
        done = ingot("checkpoint", *arguments, check=False)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


def test_a_checkpoint_in_a_folder_reads_like_one_at_a_url(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 3, state(), {})
    assert find_checkpoints(str(path))[0].manifest().step == 3
    assert CheckpointLocation(Remote(str(tmp_path)), "checkpoints/3/").step == 3
