"""The architecture page names only what exists, and every key of a run."""

import re
from pathlib import Path

from ingot.config.run import RunConfig

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|sh))?)`", PAGE))
    assert len(named) > 30
    outside = {"src/ingot/", "checkpoints/", "logs/"}  # the root, and folders of a run
    roots = ROOT / "src" / "ingot", ROOT  # tests are named from the repository
    assert not [name for name in named - outside if not any((root / name).exists() for root in roots)]


def test_every_key_of_a_run_is_mathematics_or_execution() -> None:
    section = PAGE.partition("## 7.")[2].partition("## 8.")[0]
    patterns = re.findall(r"`([a-z_]+(?:\.?\*)?)`", section)
    covered = [re.compile(pattern.removesuffix(".*").replace("*", ".*")) for pattern in patterns]
    assert not [key for key in RunConfig.model_fields if not any(pattern.fullmatch(key) for pattern in covered)]
