"""Hostile values in every field: refused, or rendered so that nothing but the value changes."""

import itertools
import json
import re
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, get_origin

import pytest
import yaml
from manifests import manifest_problems
from shell_check import shellcheck
from specs import LAUNCH, VALUES

from ingot.errors import ConfigError
from ingot.launch.kubernetes.objects import render as render_manifest
from ingot.launch.slurm.script import render_scripts, script_body, srun_options
from ingot.launch.spec import LaunchSpec, make_spec

TOUCH = "touch CANARY"
PAYLOADS = [
    f"\n{TOUCH}\n", f"$({TOUCH})", f"`{TOUCH}`", f"; {TOUCH};", f"' ; {TOUCH}; '", f'" ; {TOUCH}; "', f"| {TOUCH} #",
    f"&& {TOUCH}", "$(touch${IFS}CANARY)", "\r\n#SBATCH --wrap=x", "\n---\nkind: Pod\n", ": {a: b}", "{{x}}", "*a", "&a x",
    "ünï\u2028\u0085\ufeffcode", "\U0001f525", "x\x00y", "\x1b[31m", "\\", " ", "", "~", "null", "1e3", "0x1f", "x" * 100_000,
    "$(INGOT_RESTART)", "--wrap=x", "-n", "../../etc", "a,b:/c:/d",
]  # fmt: skip
FRONTS = ("", "a", "1", "/a", "/a:/b", "a:/b", "A=")
OPTIONS = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "mem", "wait-all-nodes",
    "requeue", "open-mode", "output", "time", "signal", "array", "no-kill", "partition", "account", "qos",
    "reservation", "constraint", "exclude", "mail-user", "mail-type",
}  # fmt: skip
SHOW = 'printf "%s\\0" "$SUPERVISOR_PYTHON" "$SPEC_FILE"'


def put(field: str, value: str) -> Iterator[dict[str, Any]]:
    """A field with a value in it, in each place where the field can hold one."""
    kind = get_origin(LaunchSpec.model_fields[field].annotation)
    if kind is list:
        yield {field: [value]}
    elif kind is dict:
        yield {field: {value: "x"}}
        yield {field: {"NAME": value}}
    else:
        yield {field: value}


def accepted(field: str, values: list[str]) -> list[LaunchSpec]:
    """Those specs that are not refused in the way of a user's error."""
    found = []
    base = VALUES | ({"image": "/apps/ingot.sqsh"} if field == "stage" else {})
    for value in values:
        for changes in put(field, value):
            try:
                found.append(make_spec(base | changes))
            except ConfigError:
                continue
    return found


def rendered(spec: LaunchSpec, turn: int) -> Iterator[tuple[str, str]]:
    """What Slurm and, by turns, one kind of Kubernetes make of it, unless they refuse."""
    with suppress(ConfigError):
        for text in render_scripts(spec.model_copy(update={"verb": ("train", "prepare")[turn % 2]})).values():
            yield "slurm", text
    kind = ("jobset", "trainjob", "pytorchjob")[turn % 3]
    with suppress(ConfigError):
        yield kind, render_manifest(spec, kind, LAUNCH)  # type: ignore[arg-type]


def check_script(spec: LaunchSpec, text: str, folder: Path) -> None:
    """Options, then values, then a packaged file as it is; the shell reads back the same values; nothing else happens."""
    body = script_body("job.sh")
    assert text.endswith(body)
    head = text.removesuffix(body)
    lines = head.splitlines()
    values = [line for line in lines if re.match("[A-Z_]+=", line)]
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert all(line.startswith("#SBATCH --") for line in options)
    assert lines[2 : 2 + len(options)] == options
    names = [line.removeprefix("#SBATCH --").partition("=")[0] for line in options]
    own = {option.removeprefix("--").partition("=")[0] for option in spec.sbatch_args}
    assert len(set(names)) == len(names) and set(names) <= OPTIONS | own
    assert len(lines) == 2 + len(options) + len(values), head
    assert [line.partition("=")[0] for line in values] == ["SUPERVISOR_PYTHON", "SPEC_FILE"]
    assert "\r" not in head
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    run = subprocess.run(["bash", "-c", head + SHOW], cwd=folder, capture_output=True, text=True, check=True)
    assert run.stdout.split("\0")[:-1] == [sys.executable, str(Path(spec.run_folder) / "launch" / "spec.json")]
    srun = srun_options(spec)  # never read by a shell
    if spec.image is not None:
        assert (f"--container-image={spec.image}" in srun) == (spec.stage is None)
        (mounts,) = [option.removeprefix("--container-mounts=") for option in srun if "mounts=" in option]
        folder = spec.run_folder if spec.verb == "train" else str(Path(spec.run_folder).parent)
        expected = [f"{folder}:{folder}", f"{spec.workdir}:{spec.workdir}", *spec.mounts]
        assert mounts.split(",") == list(dict.fromkeys(expected))


def check_back(spec: LaunchSpec, text: str) -> None:
    """Another reader finds the spec as it was, and only the objects that belong there."""
    documents = list(yaml.safe_load_all(text))
    assert not manifest_problems(text)
    assert len({document["kind"] for document in documents}) == len(documents)
    assert make_spec(json.loads(documents[0]["stringData"]["spec.json"])) == spec
    claims = [claim.partition(":")[0] for claim in spec.claims]
    assert all(f"claimName: {claim}\n" in text or f'claimName: "{claim}"\n' in text for claim in claims)


@pytest.mark.parametrize("field", list(LaunchSpec.model_fields))
def test_a_hostile_value_is_refused_or_stays_a_value(field: str, tmp_path: Path) -> None:
    fronts = ("a",) if field in ("arguments", "env") else FRONTS  # these two take nearly everything
    values = [front + payload for front, payload in itertools.product(fronts, PAYLOADS)]
    seen: set[str] = set()
    for turn, spec in enumerate(accepted(field, values)):
        for kind, text in rendered(spec, turn):
            if kind != "slurm":
                check_back(spec, text)
            elif text not in seen:
                seen.add(text)
                check_script(spec, text, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", list(LaunchSpec.model_fields))
def test_each_character_that_a_field_takes_reaches_the_shell_as_itself(field: str, tmp_path: Path) -> None:
    values = [f"{front}{c}{back}" for front, c, back in itertools.product(FRONTS, string.printable, ("", "b"))]
    seen: set[str] = set()
    for spec in accepted(field, values):
        text = render_scripts(spec)["job.sh"] if spec.profile == "cpu" and spec.verb == "train" else ""
        if text and text not in seen and len(seen) < 60:
            seen.add(text)
            check_script(spec, text, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fields_that_name_things_take_nothing_that_a_shell_could_read() -> None:
    for field in ("name", "partition", "account", "qos", "reservation", "exclude", "run_folder", "python", "image"):
        for value in (front + payload for front, payload in itertools.product(FRONTS, PAYLOADS)):
            for spec in accepted(field, [value]):
                assert not set("\n\r\0 ;'\"`$\\&|<>(){}!*?~") & set(value), (field, value)
                assert spec.name


def test_arguments_and_variables_take_any_text_and_leave_the_script_as_it_is() -> None:
    plain = render_scripts(make_spec(VALUES | {"env": {"NAME": "x"}}))
    for payload in PAYLOADS:
        if "\0" not in payload:
            assert render_scripts(make_spec(VALUES | {"arguments": [payload], "env": {"NAME": "x"}})) == plain
    with pytest.raises(ConfigError, match="NUL"):
        make_spec(VALUES | {"arguments": ["x\0y"]})
    for wrong in ("a\nb", "a\0b", "a\x1bb"):
        with pytest.raises(ConfigError, match="control character"):
            make_spec(VALUES | {"env": {"NAME": wrong}})


def test_shellcheck_finds_nothing_in_the_packaged_scripts() -> None:
    files = sorted(Path(str(resources.files("ingot.launch.slurm"))).glob("*.sh"))
    assert [path.name for path in files] == ["job.sh", "stage_image.sh"]
    assert shellcheck(*files) == ""


def test_shellcheck_finds_nothing_with_every_character_that_is_allowed(tmp_path: Path) -> None:
    odd = {
        "run_folder": "/d_.+@=-/r", "workdir": "/w_.+@=-", "image": "registry.example:5000/a_b.c+d@sha256:ab#c-d",
        "mounts": ["/s_.+@=-:/t_.+@=-:ro"], "partition": "p_.+:@=,/[]%-", "account": "a%", "qos": "q[1]",
        "reservation": "r@", "constraint": "a&b|[c*2]", "exclude": ["n[1-3],m"], "python": "/p_.+@=-/python3",
        "env": {"A": "$(x) `y` \"'"}, "secrets": ["HF_TOKEN"], "cpus_per_task": 8, "gpus_per_node": 8, "chain": 3, "spares": 1,
    }  # fmt: skip
    staged = {"image": "/i_.+@-.sqsh", "stage": "/s_.+@=-"}
    files: list[Path] = []
    for name, changes in {"odd": odd, "staged": staged, "plain": {"image": None, "gpus_per_node": 0}}.items():
        for verb in ("train", "prepare"):
            for script, text in render_scripts(make_spec(VALUES | changes | {"verb": verb})).items():
                files.append(tmp_path / f"{name}-{script}")
                files[-1].write_text(text)
    assert len(files) == 9 and shellcheck(*files) == ""
