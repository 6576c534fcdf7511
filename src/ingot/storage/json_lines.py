"""Files of one JSON object per line, which several processes append to and a crash may cut off."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects in a file, or in its last bytes, without a line that is cut off; none if there is no file."""
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                file.seek(max(0, path.stat().st_size - last_bytes))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                found.append(content)
    return found
