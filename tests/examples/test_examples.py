"""The five walk-throughs: their small forms run from end to end, and their full forms are commands that ingot takes."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from shell_check import shellcheck

from ingot.data.loading.inspect import describe, find_splits
from ingot.launch.monitor.status import Status
from ingot.launch.spec import read_spec
from ingot.launch.supervisor.state_file import now
from ingot.migrate import load_run_config
from ingot.report.metrics_file import read_rows

__all__ = ["cluster"]
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
REAL_DATA = EXAMPLES.parent.parent / "shared" / "data"
NAMES = sorted(path.parent.name for path in EXAMPLES.glob("*/run.sh"))
PYTHIA = {"14M": "14m", "31M": "31m", "70M": "70m", "160M": "160m", "410M": "410m", "1B": "1b", "1-4B": "1.4b",
          "2-8B": "2.8b", "6-9B": "6.9b", "12B": "12b"}  # fmt: skip
# What each small form leaves behind: datasets as `ingot inspect` takes them, and runs.
LEFT = {
    "aws-mpt": (["c4-dataset"], ["mpt-small"]),
    "azure-mpt": (["my-copy-c4"], ["mpt-small"]),
    "megatron-gpt3": (["gpt2/my-gpt2_text_document"], ["gpt3-small"]),
    "mosaic-gpt": (["my-copy-c4"], ["one-node", "by-arguments", "by-variables"]),
    "neox-pythia": (["pile/pile_text_document"], ["pythia-14M"]),
}
FAKE = """#!{python}
# Stands for `ingot` where the full form needs a network and a cluster: every command line is checked by the real one.
import sys
from pathlib import Path
import typer
from ingot.cli.main import app, main
from ingot.launch import build_spec

build_spec.check_data = lambda *_: []  # nothing was downloaded or prepared
with Path({log!r}).open("a") as log:
    print(*sys.argv[1:], file=log)
verb = sys.argv[1]
if sys.argv[1:3] == ["launch", "slurm"]:
    sys.argv.append("--dry-run")
    main()
elif verb == "config":
    main()
elif verb == "status":
    print("state: finished")
else:
    typer.main.get_command(app).commands[verb].make_context(verb, sys.argv[2:])
"""


def run_script(name: str, folder: Path, first: Path | None = None, **variables: str) -> str:
    """Run a walk-through, with `ingot` from this environment; gives all that it said."""
    path = os.pathsep.join([*([str(first)] if first else []), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path} | variables
    done = subprocess.run([EXAMPLES / name / "run.sh", folder], env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


SAYING = """#!{python}
# Stands for `ingot status` at several moments.
import sys
from pathlib import Path

left = Path({states!r})
if sys.argv[1] != "status":
    sys.exit(f"said {{sys.argv[1:]}}")
first, *others = left.read_text().splitlines()
left.write_text("\\n".join(others))
print(first)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("finished", 0), ("halted: no such file", 1), ("stopped", 1), ("not running", 1)]
)
def test_the_walkthroughs_wait_through_every_state_of_a_job_and_take_its_end(
    tmp_path: Path, end: str, code: int
) -> None:
    """As `ingot status` writes it for people: with a reason, and since when."""
    waiting = ["queued", "unknown: the cluster does not answer", "held", "suspended", "starting", "running",
               "waiting: a disk is full", "restarting", "stopping", "ending: job 7 is being cleaned up by Slurm"]  # fmt: skip
    (tmp_path / "states").write_text("\n".join(Status(state, now()).lines()[0] for state in [*waiting, end]) + "\n\n")
    (tmp_path / "ingot").write_text(SAYING.format(python=sys.executable, states=str(tmp_path / "states")))
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("ingot", "sleep"):
        (tmp_path / name).chmod(0o755)
    script = f"set -euo pipefail; source {EXAMPLES}/common.sh {tmp_path}/out; await run"
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "states").read_text() == "", "no state was taken for the end"
    assert code == 0 or "said ['logs', '--errors', 'run']" in done.stderr


def check_results(name: str, folder: Path) -> None:
    """Datasets verify; runs have finished, with a loss that fell."""
    data_sets, runs = LEFT[name]
    for place in data_sets:
        splits = find_splits(str(folder / place), None)
        assert splits and all(list(describe(str(folder / place), split, None, verify=True)) for split in splits)
    for run in runs:
        losses = [row["loss/train/total"] for row in read_rows(folder / run) if "loss/train/total" in row]
        assert (folder / run / "FINISHED").exists()
        assert losses[-1] < losses[0] - 0.5, (run, losses)


def readme_commands(name: str, language: str) -> list[str]:
    readme = (EXAMPLES / name / "README.md").read_text()
    blocks = re.findall(rf"^```{language}\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").strip().splitlines()]


def fake_programs(folder: Path) -> Path:
    """Programs to go first on the path: an `ingot` that checks and records, and a `curl` that does nothing."""
    folder.mkdir()
    (folder / "ingot").write_text(FAKE.format(python=sys.executable, log=str(folder / "log")))
    (folder / "curl").write_text("#!/bin/sh\n")
    for program in ("ingot", "curl"):
        (folder / program).chmod(0o755)
    return folder


def test_there_are_five_walk_throughs_and_all_are_listed() -> None:
    assert set(NAMES) == set(LEFT)
    page = (EXAMPLES.parent / "docs" / "guides" / "walk-throughs.md").read_text()
    assert all(f"(../../examples/{name}/README.md)" in page for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_scripts_stop_at_the_first_failure(name: str) -> None:
    script = (EXAMPLES / name / "run.sh").read_text()
    assert "\nset -euo pipefail\n" in script
    assert "SIZE=${SIZE:-small} # the one line to change: full\n" in script
    assert not re.search(r"(^|[;&|]\s*)eval\s|sh -c", script + (EXAMPLES / "common.sh").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_scripts_pass_shellcheck(name: str) -> None:
    assert shellcheck(EXAMPLES / name / "run.sh", EXAMPLES / "common.sh") == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_full_form_is_taken_by_ingot_and_launched_on_its_cluster(name: str, tmp_path: Path) -> None:
    fake = fake_programs(tmp_path / "bin")
    out = run_script(name, tmp_path / "out", fake, SIZE="full")
    said = (fake / "log").read_text()
    assert re.search(r"prepare .*(allenai/c4|oscar-1GB|pile-uncopyrighted)", said)
    if name == "mosaic-gpt":  # its two nodes are two commands, without Slurm
        machine = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
        run_script(name, tmp_path / "out", fake, SIZE="full", **machine)
        assert "--nproc 8 --world_size 16 --node_rank 1 --master_addr 10.0.0.1" in (fake / "log").read_text()
        return
    assert f"#SBATCH --nodes={16 if name == 'azure-mpt' else 2}\n" in out
    assert "#SBATCH --gpus-per-node=8\n" in out and "--container-image=" in out
    network = {"azure-mpt": "UCX_TLS"}.get(name, "FI_EFA_USE_HUGE_PAGE")
    assert network in out, "the profile's variables go into the container"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_readme_says_about_the_full_form_is_taken_by_ingot(name: str, tmp_path: Path) -> None:
    path = f"{fake_programs(tmp_path / 'bin')}:{os.environ['PATH']}"
    commands = [line.removeprefix("$ ") for line in readme_commands(name, "console") if line.startswith("$ ")]
    assert len(commands) >= 2
    for command in commands:
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=EXAMPLES.parent, check=True,
                       stdout=subprocess.DEVNULL, env=os.environ | {"PATH": path})  # fmt: skip


@pytest.mark.slow  # `make examples`
@pytest.mark.parametrize("name", NAMES)
def test_the_small_form_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    """And so does every command of its README, in the folder that it leaves."""
    folder = tmp_path / "out"
    said = run_script(name, folder, SLURM_CONF="/dev/null")
    check_results(name, folder)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    commands = readme_commands(name, "bash")
    assert commands
    for command in commands:
        if f"examples/{name}/run.sh" not in command:
            subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=env, check=True)
    if name != "mosaic-gpt":
        assert "#SBATCH --nodes=" in (folder / "job.sh").read_text()
        assert "No Slurm answers here" in said
    check = globals().get(f"check_{name.replace('-', '_')}")
    if check is not None:
        check(folder, said)


def check_aws_mpt(folder: Path, said: str) -> None:
    assert {p.name for p in (folder / "c4-dataset").iterdir()} >= {"train_small", "val_small"}
    assert "[batch=20/20] loss" in said and "FI_EFA_USE_HUGE_PAGE=0" in said


def check_azure_mpt(folder: Path, said: str) -> None:
    kept = sorted(int(p.name) for p in (folder / "mpt-small" / "checkpoints").iterdir())
    assert kept == list(range(6, 25, 2)), "ten are kept"
    config = load_run_config([str(folder / "mpt-small" / "config.yaml")])
    assert config.state_dict_type == "sharded"
    newest = folder / "mpt-small" / "checkpoints" / "24"
    assert len(list(newest.glob("*.safetensors"))) == 2, "one file from each process"
    shards = list((folder / "nvme").rglob("shard.*.mds"))
    assert shards, "the data was streamed into the node's folder"


def check_megatron_gpt3(folder: Path, said: str) -> None:
    assert "tensor=2 pipeline=2" in said
    assert "train on it: ingot train mpt-125m data=gpt2/my-gpt2_text_document\n" in said
    assert re.search(r"[0-9,]+ docs/s, [0-9.]+ MB/s", said)
    assert (folder / "gpt2" / "my-gpt2_text_document.bin").stat().st_size > 1_000_000


def check_mosaic_gpt(folder: Path, said: str) -> None:
    """Two nodes give the losses of one, however they were told of each other."""
    losses = {run: [row["loss/train/total"] for row in read_rows(folder / run)] for run in LEFT["mosaic-gpt"][1]}
    for two in ("by-arguments", "by-variables"):
        assert losses[two] == pytest.approx(losses["one-node"], rel=1e-4)
        assert (folder / two / "logs").is_dir()
    assert "2 processes, shard=2" in said
    assert any((folder / "cache").rglob("index.json")), "the streamed dataset was fetched"


def check_neox_pythia(folder: Path, said: str) -> None:
    from transformers import AutoTokenizer, GPTNeoXForCausalLM

    model = GPTNeoXForCausalLM.from_pretrained(folder / "pythia-14M-hf")
    assert model.config.num_hidden_layers == 6 and model.config.use_parallel_residual
    tokens = AutoTokenizer.from_pretrained(folder / "pythia-14M-hf")("import os", return_tensors="pt")
    assert model(tokens["input_ids"]).logits.shape[-1] == model.config.vocab_size


@pytest.mark.slow
def test_on_slurm_the_small_form_is_two_nodes_of_a_job(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    said = run_script("aws-mpt", folder, SLURM_CONF=cluster.env["SLURM_CONF"])
    check_results("aws-mpt", folder)
    assert "No Slurm answers here" not in said and "job " in said
    spec = read_spec(folder / "mpt-small" / "launch" / "spec.json")
    assert spec.nodes == 2 and spec.profile == "cpu"
    assert "on n1,n2" in said, "the job's own log"


@pytest.mark.slow
@pytest.mark.skipif(
    not REAL_DATA.is_dir(), reason="../shared/data, with a piece of C4 and the real tokenizers, is absent"
)
def test_real_text_and_the_real_tokenizers_take_the_same_path(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run_script("neox-pythia", folder, SLURM_CONF="/dev/null", INGOT_EXAMPLE_DATA=str(REAL_DATA))
    check_results("neox-pythia", folder)
    model = load_run_config([str(folder / "pythia-14M" / "config.yaml")]).model
    assert model.vocab_size == 50304 and model.parameters == 14_067_712, "Pythia 14M, to the last parameter"


@pytest.mark.parametrize(("file", "recipe"), PYTHIA.items())
def test_the_json_files_of_pythia_say_what_the_recipes_say(file: str, recipe: str, tmp_path: Path) -> None:
    configs = EXAMPLES / "neox-pythia" / "configs"
    found = load_run_config([str(configs / f"{file}.json"), str(configs / "common.json")], dialect="neox")
    native = load_run_config([f"pythia-{recipe}"])
    own = {"vocab_size", "vocab_multiple", "ffn_hidden_size", "norm_bias"}  # said here, and left to defaults there
    assert found.model.model_dump(exclude=own) == native.model.model_dump(exclude=own)
    assert found.model.parameters == native.model.parameters
    assert f"| {native.model.parameters:,} |" in (EXAMPLES / "neox-pythia" / "README.md").read_text()
    for key in ("optimizer", "global_train_batch_size", "max_seq_len", "max_duration", "gradient_clipping"):
        assert getattr(found, key) == getattr(native, key), key
    assert found.save_folder == f"pythia-{file}", "each size saves to a place of its own"


def test_checkpoint_sizes_of_the_azure_guide_are_reproduced(ingot, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The guide's figures are those of `du -h`, which rounds up, for 12 bytes per parameter and some file headers."""
    rows = [line.split("\t") for line in ingot("checkpoint", "size", "mpt-30b", "mpt-70b").stdout.splitlines()[1:]]
    assert [(row[0], row[3]) for row in rows] == [("mpt-30b", "335.0 GiB"), ("mpt-70b", "724.9 GiB")]
    headers = 2**20
    sizes = [math.ceil((12 * int(row[1].replace(",", "")) + headers) / 2**30) for row in rows]
    assert sizes == [336, 725]


def test_a_real_checkpoint_is_as_large_as_was_calculated(ingot, tiny: list[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from ingot.parallel.layout import Layout
    from ingot.parallel.memory_estimate import StepShape, estimate_memory

    ingot("train", *tiny)
    config = load_run_config(tiny)
    expected = estimate_memory(config.model, Layout(), config.parallel, StepShape.of(config)).saved
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "12" / "manifest.json").read_text())
    size = sum(file["bytes"] for file in manifest["files"].values())
    assert 0 < size - expected < 20_000, "but for headers and small counters"


def test_the_table_of_gpus_is_the_one_that_its_script_prints() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "mosaic-gpt" / "gpus.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout in (EXAMPLES / "mosaic-gpt" / "README.md").read_text()
