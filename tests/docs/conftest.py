"""The generators of the reference pages are scripts in tools/docs; tests import them from there."""

import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parents[2] / "tools" / "docs"),
    str(Path(__file__).parents[2] / "tools"),
]
