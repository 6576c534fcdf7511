"""Profiles and defaults; and what each back end renders for each profile, byte for byte. Of a job script that is the
head; the rest is a packaged file.

golden/BACK_END.txt is the text for one profile, golden/PROFILE.diff the differences for another. After an intended
change: INGOT_UPDATE_GOLDEN=1 pytest tests/launch/test_profiles.py, and review the diff.
"""

import difflib
import os
import re
import sys
from pathlib import Path

import pytest
from specs import LAUNCH, spec

from ingot.errors import ConfigError
from ingot.launch.build_spec import training_spec
from ingot.launch.kubernetes.objects import render as render_manifest
from ingot.launch.profiles import DEFAULTS_VARIABLE, find_profile, profile_names
from ingot.launch.slurm.script import render_scripts, script_body, srun_options
from ingot.launch.spec import LaunchSpec

GOLDEN = Path(__file__).parent / "golden"
BACK_ENDS = ("slurm", "prepare", "jobset", "trainjob", "pytorchjob")
BASE = "tcp"
OTHERS = [name for name in profile_names() if name != BASE]
NEEDED = ("aws-p4d", "aws-p5", "aws-p5en", "aws-g6", "azure-ndv4", "azure-ndv5", "infiniband", "tcp", "cpu")
RUN = ["mpt-125m", "data=/data/c4", "save_folder=/data/runs/x"]


def rendered(profile: str, back_end: str) -> str:
    chosen = spec(profile=profile, gpus_per_node=find_profile(profile).gpus_per_node, env={"NCCL_DEBUG": "INFO"})
    if back_end == "slurm":
        squash = {"image": "/apps/ingot.sqsh", "mounts": ["/data:/data"], "partition": "gpu", "chain": 3, "spares": 1}
        return script_heads(chosen.model_copy(update=squash))
    if back_end == "prepare":
        changes = {"verb": "prepare", "gpus_per_node": 0, "image": "/apps/ingot.sqsh", "stage": "/nvme/images"}
        return script_heads(chosen.model_copy(update=changes))
    return render_manifest(chosen, back_end, LAUNCH, token="0123")  # type: ignore[arg-type]


def script_heads(chosen: LaunchSpec) -> str:
    body = script_body("job.sh")
    texts = render_scripts(chosen).values()
    assert all(text.endswith(body) for text in texts)
    heads = [text.removesuffix(body).replace(sys.executable, "/venv/bin/python") for text in texts]
    return "\n".join([*heads, " ".join(srun_options(chosen)), ""])


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("INGOT_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8", newline="")
    with path.open(encoding="utf-8", newline="") as file:
        assert text == file.read(), f"{path} differs; see the top of this file"


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_every_back_end_renders_its_golden_text(back_end: str) -> None:
    assert_golden(f"{back_end}.txt", rendered(BASE, back_end))


@pytest.mark.parametrize("profile", OTHERS)
def test_every_other_profile_differs_from_it_by_its_golden_lines(profile: str) -> None:
    """Without context, but with line numbers: together with the text of the base they determine every byte."""
    differences = [
        line
        for back_end in BACK_ENDS
        for line in difflib.unified_diff(
            rendered(BASE, back_end).splitlines(keepends=True),
            rendered(profile, back_end).splitlines(keepends=True),
            f"{back_end} {BASE}",
            f"{back_end} {profile}",
            n=0,
        )
    ]
    assert_golden(f"{profile}.diff", "".join(differences))


@pytest.mark.parametrize("profile", profile_names())
def test_a_container_is_told_every_variable_that_is_set(profile: str) -> None:
    """All that the supervisor, profile, user and secrets set; otherwise the image's own values win."""
    chosen = spec(profile=profile, image="/apps/ingot.sqsh", env={"MY_OWN": "1"}, secrets=["HF_TOKEN"])
    options = srun_options(chosen)
    (names,) = re.findall(r"--container-env=([A-Za-z0-9_,]+)", " ".join(options))
    passed = {"INGOT_SUPERVISOR", "INGOT_JOB_TOKEN", "INGOT_JOB_START"}
    assert set(names.split(",")) == passed | {"MY_OWN", "HF_TOKEN"} | set(find_profile(profile).variables)


def test_no_golden_file_is_left_without_its_profile() -> None:
    expected = {f"{back_end}.txt" for back_end in BACK_ENDS} | {f"{profile}.diff" for profile in OTHERS}
    assert {path.name for path in GOLDEN.iterdir()} == expected


def test_the_promised_profiles_are_there_and_give_a_reason_for_each_variable() -> None:
    assert set(NEEDED) <= set(profile_names())
    for name in profile_names():
        profile = find_profile(name)
        assert profile.transport in ("efa", "ib", "socket", "gloo")
        assert all(variable.reason.strip() for variable in profile.env.values())
        assert (profile.gpus_per_node == 0) == (profile.transport == "gloo")
        spec(profile=name, mounts=profile.mounts, env=profile.variables)  # passes the spec's own rules


@pytest.mark.parametrize("name", ["azure-ndv6", "../profiles/cpu", "", "x\ny"])
def test_an_unknown_profile_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no profile"):
        find_profile(name)


def test_a_defaults_file_sets_what_the_command_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text("partition: gpu\nprofile: aws-p5\nnodes: 2\nclaims: [shared:/data]\nqueue: research\n")
    monkeypatch.setenv(DEFAULTS_VARIABLE, str(path))
    placed, notes = training_spec(RUN, {"nodes": 4, "partition": None, "mounts": []})
    assert (placed.partition, placed.nodes, placed.gpus_per_node, placed.queue) == ("gpu", 4, 8, "research")
    assert any(str(path) in note for note in notes)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("partitoin: gpu", "did you mean partition"), ("- gpu", "one per line"), ("name: x", "not an option of")],
)
def test_a_wrong_defaults_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, reason: str
) -> None:
    path = tmp_path / "launch.yaml"
    path.write_text(content)
    monkeypatch.setenv(DEFAULTS_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=reason):
        training_spec(RUN, {})
    monkeypatch.setenv(DEFAULTS_VARIABLE, str(tmp_path / "absent.yaml"))
    with pytest.raises(ConfigError, match="which does not exist"):
        training_spec(RUN, {})
