"""Small configs in the peers' words, each with what it becomes here, or the words of its refusal.

A case of `cases/*.yaml` has a `base` of the same file, `keys` over it (or a whole `text`), `arguments` after the file, and
one of `becomes` and `refused`; `warns` lists parts of the warnings. Facts are the peers' own, not ingot's answers.
"""

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from migration_case import check_case

HERE = Path(__file__).parent / "cases"
CASES = [
    pytest.param(name, {"bases": content["bases"], **case}, id=f"{path.stem}: {name}")
    for path in sorted(HERE.glob("*.yaml"))
    for content in [yaml.safe_load(path.read_text())]
    for name, case in content["cases"].items()
]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {key for key in base.keys() & over.keys() if isinstance(base[key], dict) and isinstance(over[key], dict)}
    return {**base, **over, **{key: merged(base[key], over[key]) for key in both}}


def written(case: dict[str, Any], folder: Path) -> list[str]:
    """The files of a case, and its arguments."""
    for name, text in case.get("files", {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if "base" in case:
        keys = merged(case["bases"][case["base"]], case.get("keys", {}))
        keys = case["inside"] | {case["section"]: keys} if "section" in case else keys
        (folder / "run.yaml").write_text(yaml.safe_dump(keys))
        return ["run.yaml", *map(str, case.get("arguments", []))]
    return [str(argument) for argument in case["arguments"]]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_config_of_a_peer_means_the_same_here_or_is_refused(
    name: str, case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    check_case(case, written(case, tmp_path))
