"""What is wrong with a command is said before torch is loaded, with the command or key that fixes it."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import TINY, Ingot
from disks import mounted

from ingot.api import train
from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.prepare.prepare import prepare

WATCHED = (
    "import sys\nfrom ingot.cli.main import main\n"
    "try:\n    main()\nfinally:\n    print('torch loaded:', 'torch' in sys.modules, file=sys.stderr)"
)
HUGE = "model.d_model=16384 model.n_heads=128 model.n_layers=96"


@pytest.fixture(scope="module")
def place(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, an export, data with and without tokens, and text that is not prepared."""
    from ingot.checkpoint.hf.transfer import export_run

    root = tmp_path_factory.mktemp("early")
    (root / "data").symlink_to(data)
    (root / "texts" / "deep").mkdir(parents=True)
    (root / "texts" / "a.txt").write_text("The miller sang.\n")
    (root / "texts" / "deep" / "b.md").write_text("# Notes\n")
    (root / "empty").mkdir()
    prepare(root / "texts" / "a.txt", root / "text-only", split="train", tokenizer=None)
    train(load_config(RunConfig, [*TINY, "max_duration=2ba", f"data={data}", f"save_folder={root / 'run'}"]))
    export_run(root / "run", root / "hf")
    return root


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train TINY data=nowhere", "nowhere does not exist; write a dataset there with `ingot prepare`"),
        ("train TINY data=texts", "texts holds 1 .txt, 1 .md, but no dataset"),
        ("train TINY data=texts", "`ingot prepare texts --out_root my-data --tokenizer TOKENIZER`"),
        ("train TINY data=texts/a.txt", "texts/a.txt is a file, not a dataset; prepare it first: `ingot prepare texts/a"),
        ("train TINY data=empty", "empty is empty; write a dataset there"),
        ("train TINY data=text-only", "prepared without a tokenizer"),
        ("train TINY data=text-only", "again with --tokenizer TOKENIZER --reprocess"),
        ("train TINY data.train.path=data/val data.train.split=x", "is a dataset itself and has no split 'x'"),
        ("train TINY data=data model.vocab_size=100", "set model.vocab_size to at least 320"),
        ("train TINY data=data save_folder=texts/a.txt/run", "cannot write the run folder texts/a.txt/run"),
        ("train TINY data=data load_path=nowhere", "no such run or checkpoint: nowhere"),
        ("train TINY data=data save_folder=run model.n_layers=3 model.d_model=64",
         "(model.d_model was 32 and is now 64; model.n_layers was 2 and is now 3)"),
        (f"train TINY data=data device=cpu {HUGE}", "GiB are available; choose a smaller recipe: the largest that fits is"),
        (f"train TINY data=data device=cpu {HUGE} --nproc 2", "for 2 processes here"),
        ("train gpt2 data=data", "did you mean one of gpt3-125m"),
        ("train mtp-125m data=data", "did you mean mpt-125m?"),
        ("train data=data", "add a recipe such as demo"),
        ("eval run data.eval.path=texts/a.txt", "texts/a.txt is a file, not a dataset; prepare it first"),
        ("eval hf", "name it with data.eval.path=FOLDER"),
        ("eval run --step 7", "has no checkpoint of step 7; it has 2"),
        ("export nowhere -o out", "no such run or checkpoint: nowhere"),
        ("export run", "add -o FOLDER"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_fix_before_torch_loads(place: Path, command: str, words: str) -> None:
    arguments = [part for word in command.split() for part in (TINY if word == "TINY" else [word])]
    if not any(word.startswith("save_folder=") for word in arguments) and arguments[0] == "train":
        arguments.append("save_folder=new")
    done = subprocess.run([sys.executable, "-c", WATCHED, *arguments], cwd=place, capture_output=True, text=True)
    said, loaded = done.stderr.splitlines()
    assert done.returncode in (1, 2) and said.startswith("error: ") and words in said, said
    assert loaded == "torch loaded: False"
    assert not (place / "new").exists() and done.stdout == ""


@pytest.mark.parametrize(
    "named",
    [["data.eval.path=data", "data.eval.split=val"], ["data.eval.path=data/val"], ["data=data"]],
)
def test_an_export_is_evaluated_on_the_data_that_is_named(ingot_here: Ingot, place: Path, named: list[str]) -> None:
    loss = json.loads(ingot_here("eval", "hf", *named, "--json", cwd=place).stdout)["metrics/eval/LanguageCrossEntropy"]
    own = json.loads(ingot_here("eval", "run", *named, "--json", cwd=place).stdout)["metrics/eval/LanguageCrossEntropy"]
    assert loss == pytest.approx(own, rel=1e-3)


def test_a_model_that_no_memory_holds_is_not_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ingot.checkpoint.load import load_model
    from ingot.errors import CheckpointError

    monkeypatch.setattr("ingot.checkpoint.load.available_memory", lambda: 100_000)
    with pytest.raises(CheckpointError, match=r"36,736 parameters: 0.0 GiB in fp32, and 0.0 GiB are available"):
        load_model(place / "run")


def test_too_long_sequences_are_refused_with_a_length_that_fits() -> None:
    from ingot.errors import ConfigError
    from ingot.parallel.layout import Layout
    from ingot.training.runtime.memory_check import check_host_memory, least_memory

    config = load_config(RunConfig, ["pythia-14m", "max_seq_len=65536", "activation_checkpointing=none"])
    parts = least_memory(config, Layout(), 1)
    with pytest.raises(ConfigError, match="; max_seq_len=16384 would fit, or use more machines") as refused:
        check_host_memory(config, Layout(), 1, int(sum(parts.values()) - 0.7 * parts["activations"]))
    assert "activations" in str(refused.value)


def test_a_folder_is_only_probed(tmp_path: Path) -> None:
    from ingot.errors import DiskError
    from ingot.training.runtime.early_checks import check_writable

    check_writable(tmp_path / "a" / "b" / "c")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Not a directory; choose another folder"):
        check_writable(tmp_path / "file")
    (tmp_path / "closed").mkdir(mode=0o500)
    # root may write anywhere but to what is mounted read-only
    closed = mounted(tmp_path / "closed", "ro,size=64k") if os.geteuid() == 0 else nullcontext()
    with closed, pytest.raises(DiskError, match=r"Read-only|choose a folder that you may write to"):
        check_writable(tmp_path / "closed")
