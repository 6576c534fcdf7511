"""What shellcheck says of scripts; it is installed with ingot's development packages, next to this Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path


def shellcheck(*files: Path) -> str:
    """Its findings; nothing if there are none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("shellcheck", path=path)
    assert program is not None, "shellcheck is not installed; run `make setup`"
    done = subprocess.run([program, "--external-sources", *map(str, files)], capture_output=True, text=True)
    return done.stdout + done.stderr
