"""The architecture page names only what exists, and every key of a run."""

import re
from pathlib import Path

from ingot.config.run import RunConfig

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|sh))?)`", PAGE))
    assert len(named) > 30
    outside = {"src/ingot/", "checkpoints/", "logs/", "trackers/"}  # the root, and folders of a run
    roots = ROOT / "src" / "ingot", ROOT  # tests are named from the repository
    assert not [name for name in named - outside if not any((root / name).exists() for root in roots)]


def test_every_key_of_a_run_is_mathematics_or_execution() -> None:
    """And the description of a key of execution says so."""
    section = PAGE.partition("## 7.")[2].partition("## 8.")[0]
    columns = [[], []]
    for row in re.findall(r"^\| (`.+) \| (.+) \|$", section, re.MULTILINE):
        for column, cell in zip(columns, row, strict=True):
            patterns = re.findall(r"`([a-z_]+(?:\.?\*)?)`", cell)
            column += [re.compile(pattern.removesuffix(".*").replace("*", ".*")) for pattern in patterns]
    for key, field in RunConfig.model_fields.items():
        is_execution = (field.description or "").startswith("Execution: ")
        matches = [any(pattern.fullmatch(key) for pattern in column) for column in columns]
        assert matches == [not is_execution, is_execution], key
