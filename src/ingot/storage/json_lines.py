"""Files of one JSON object per line, which several processes append to and a crash may cut off."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.errors import DataError
from ingot.storage.small_files import OddFile, move_away, read_bytes


def read_json_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects in a file, or in its last bytes, without a line that is cut off; none if there is no file."""
    try:
        lines = read_bytes(path, math.inf, last_bytes).splitlines()
    except FileNotFoundError:
        return []
    except OddFile as error:
        raise DataError(f"cannot read {path}: {error.strerror}; move it away with `{move_away(path)}`") from None
    found = []
    for line in lines:
        with suppress(ValueError):
            content = json.loads(line)
            if isinstance(content, dict):
                found.append(content)
    return found
