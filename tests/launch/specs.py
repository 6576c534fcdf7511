"""A launch spec for tests, and a fake program that records how it was called."""

import os
import sys
from pathlib import Path
from typing import Any

from ingot.launch.spec import LaunchSpec, make_spec

VALUES: dict[str, Any] = {
    "name": "golden", "run_folder": "/data/runs/golden", "workdir": "/data", "nodes": 2, "profile": "cpu",
    "image": "registry.example/ingot:0.1.0", "claims": ["shared:/data"],
    "arguments": ["--", "mpt-125m", "data=/data/c4", "save_folder=/data/runs/golden"],
}  # fmt: skip
LAUNCH = "0abc12"

RECORDER = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
{body}
"""


def spec(**changes: Any) -> LaunchSpec:
    return make_spec(VALUES | changes)


def put_on_path(monkeypatch: Any, folder: Path, name: str, body: str = "") -> Path:
    """Put an executable called `name` first on the PATH; returns the file that records its arguments, a line per call."""
    folder.mkdir(exist_ok=True)
    log = folder / f"{name}.calls"
    program = folder / name
    program.write_text(RECORDER.format(python=sys.executable, log=str(log), body=body))
    program.chmod(0o755)
    path = os.environ.get("PATH", "")
    if not path.startswith(str(folder)):
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{path}")
    return log
