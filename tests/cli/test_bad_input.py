"""Bad input: one clear sentence, a non-zero exit code, no stack trace, nothing half-written."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from conftest import SENTENCES, TINY, Ingot

from ingot.data.tokenizer_training import train_tokenizer


def refused(ingot: Ingot, *arguments: str, **options: object) -> str:
    """Run a command that must fail with a user error; returns its message."""
    done = ingot(*arguments, check=False, **options)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "command",
    ["train no-such-recipe data=x", "generate nowhere --prompt x", "export nowhere --to hf out", "eval nowhere",
     "launch local --dry-run no-such-recipe data=x", "prepare --path nowhere --out_root out --tokenizer x",
     "inspect nowhere"],
)  # fmt: skip
def test_each_command_ends_with_the_exit_code_of_a_user_error(ingot: Ingot, command: str) -> None:
    """In a process of its own; the other refusals run in this process."""
    refused(ingot, *command.split())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.d_modle=3", "unknown key model.d_modle; did you mean model.d_model?"),
        ("seed=many", "seed = 'many': must be a whole number"),
        ("model.n_heads=5", "5 heads do not divide d_model 32"),
        ("device_train_microbatch_size=3", "does not divide global_train_batch_size 8"),
        ("max_duration=12", "12 has no unit"),
        ("device=cuda", "no GPU"),
        ("data.train.path=nowhere", "nowhere"),
        ("data.train.split=test", "test"),
        ("model.vocab_size=100", "set model.vocab_size to at least 320"),
        ("load_path=nowhere", "no such run or checkpoint: nowhere"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(
    ingot_here: Ingot, data: Path, tmp_path: Path, override: str, words: str
) -> None:
    message = refused(ingot_here, "train", *TINY, f"data={data}", f"save_folder={tmp_path / 'run'}", override)
    assert words in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", [["train"], ["launch", "slurm", "--dry-run"], ["launch", "local", "--dry-run"]])
def test_a_name_that_leads_out_of_runs_is_refused(
    verb: list[str], ingot_here: Ingot, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    options = [*TINY, f"data={data}", "name=../../escaped", "save_folder=null"]
    message = refused(ingot_here, *verb, *options, cwd=tmp_path / "here")
    assert "name = '../../escaped': must be one plain name" in message
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_a_v0_1_name_with_a_slash_is_refused_with_the_settings_that_continue_the_run(ingot_here: Ingot) -> None:
    message = refused(ingot_here, "train", *TINY, "data=data", "name=group/first")
    assert "to continue a v0.1 run of this name, set name=group-first save_folder=runs/group/first" in message


def test_an_empty_data_folder_is_refused(ingot_here: Ingot, tmp_path: Path) -> None:
    (tmp_path / "empty" / "train").mkdir(parents=True)
    message = refused(ingot_here, "train", *TINY, "data.train.path=empty", "data.train.split=train", "save_folder=run")
    assert "empty" in message and not (tmp_path / "run").exists()


def test_token_ids_beyond_the_vocabulary_are_refused(ingot_here: Ingot, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "train", tmp_path / "bad")  # without its tokenizer, and with one id damaged
    (tmp_path / "bad" / "meta.json").unlink(missing_ok=True)
    shard = next((tmp_path / "bad").glob("*.mds"))
    content = bytearray(shard.read_bytes())
    content[-2:] = struct.pack("<H", 60000)
    shard.write_bytes(content)
    index = json.loads((tmp_path / "bad" / "index.json").read_text())
    index["shards"][0]["raw_data"]["hashes"] = {}
    (tmp_path / "bad" / "index.json").write_text(json.dumps(index))
    message = refused(ingot_here, "train", *TINY, "data.train.path=bad", "max_duration=1ep", "save_folder=run")
    assert "60000" in message and "320" in message


def test_an_unwritable_folder_is_named(ingot: Ingot, data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    done = ingot("train", *TINY, f"data={data}", "save_folder=file/run", check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: cannot write the run folder file/run: Not a directory")


def test_too_little_disk_space_is_found_before_the_first_step(data: Path, tmp_path: Path) -> None:
    from ingot.errors import DiskError
    from ingot.training.runtime.run_folder import check_disk_space

    free = shutil.disk_usage(tmp_path).free
    check_disk_space(tmp_path, free // 2)
    with pytest.raises(DiskError, match="one checkpoint takes"):
        check_disk_space(tmp_path, free * 2)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ingot.api import train
    from ingot.config.load import load_config
    from ingot.config.run import RunConfig

    folder = tmp_path_factory.mktemp("trained") / "run"
    train(load_config(RunConfig, [*TINY, "max_duration=2ba", f"data={data}", f"save_folder={folder}"]))
    return folder


@pytest.mark.parametrize(
    ("how", "words"),
    [("flip", "is corrupt"), ("truncate", "is truncated"), ("remove", "is incomplete"), ("foreign", "not the manifest"),
     ("torn manifest", "is damaged"), ("newer", "format version 99"), ("escape", "outside its folder")],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["generate", "export"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_exported(
    ingot_here: Ingot, trained: Path, tmp_path: Path, how: str, words: str, verb: str
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "2"
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    content = json.loads(manifest.read_text())
    match how:
        case "flip":
            data = bytearray(weights.read_bytes())
            data[-5] ^= 255
            weights.write_bytes(data)
        case "truncate":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "remove":
            weights.unlink()
        case "foreign":
            manifest.write_text(json.dumps({"weight_map": {}}))
        case "torn manifest":
            manifest.write_text(manifest.read_text()[:-40])
        case "newer":
            manifest.write_text(json.dumps(content | {"version": 99}))
        case "escape":
            files = {"../../../secret": content["files"]["model.safetensors"]}
            manifest.write_text(json.dumps(content | {"files": files}))
    arguments = ["generate", "run", "--prompt", "x"] if verb == "generate" else ["export", "run", "--to", "hf", "out"]
    assert words in refused(ingot_here, *arguments)
    assert not (tmp_path / "out").exists()


def test_a_path_that_is_not_a_model_is_refused(ingot_here: Ingot, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "holds no checkpoint" in refused(ingot_here, "generate", "folder", "--prompt", "x")
    assert "no such run or checkpoint" in refused(ingot_here, "export", "nowhere", "--to", "hf", "out")
    np.savez(tmp_path / "folder" / "weights.npz", a=np.zeros(3))
    assert "holds no checkpoint" in refused(ingot_here, "eval", "folder")


def test_a_checkpoint_of_another_shape_cannot_be_the_start(
    ingot_here: Ingot, trained: Path, data: Path, tmp_path: Path
) -> None:
    message = refused(
        ingot_here, "train", *TINY, "model.d_model=64", f"load_path={trained}", f"data={data}", "save_folder=run"
    )
    assert "has shape [" in message and ", and in this model [" in message and not (tmp_path / "run").exists()


def test_a_tokenizer_too_large_for_the_model_is_refused(ingot_here: Ingot, data: Path, tmp_path: Path) -> None:
    train_tokenizer(SENTENCES, 400, tmp_path / "large")
    message = refused(ingot_here, "train", *TINY, f"data={data}", "tokenizer=large", "save_folder=run")
    assert "tokens, model.vocab_size is 320; set model.vocab_size=" in message


def test_debug_writes_the_stack_trace_to_a_file_and_not_to_the_screen(ingot: Ingot, tmp_path: Path) -> None:
    done = ingot("train", "no-such-recipe", "data=x", "--debug", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "ConfigError" in (tmp_path / "ingot-debug.log").read_text()


def test_wrong_options_are_refused_by_name(ingot: Ingot) -> None:
    done = ingot("train", "demo", "--frehs", check=False)
    assert done.returncode == 2 and "--frehs" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", [("train",), ("launch", "local", "--profile", "cpu"), ("launch", "slurm", "-N", "1")])
def test_a_run_without_a_recipe_is_refused_and_the_recipes_are_named(
    ingot_here: Ingot, data: Path, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    message = refused(ingot_here, *verb, f"data={data}", "save_folder=run", "max_duration=1ba")
    assert "names no recipe" in message and "mpt-125m" in message and "pythia-14m" in message
    assert not (tmp_path / "run").exists()


def test_a_config_file_counts_as_a_recipe(ingot: Ingot, data: Path, tmp_path: Path) -> None:
    (tmp_path / "own=1.yaml").write_text("model: {d_model: 32, n_heads: 4, n_layers: 2, vocab_size: 320}\n")
    rest = [text for text in TINY if not text.startswith("model.")]
    ingot("train", "own=1.yaml", *rest, f"data={data}", "save_folder=run", "max_duration=1ba", "scheduler.t_warmup=0ba")
    assert (tmp_path / "run" / "FINISHED").exists()
