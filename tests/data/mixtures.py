"""Mixtures of small datasets, for tests."""

from pathlib import Path
from typing import Any

from mds_bytes import random_shards, write_mds

from ingot.config.data import SourceConfig
from ingot.data.loading.mixture import Mixture
from ingot.data.loading.open_dataset import open_dataset


def open_mix(tmp_path: Path, options: dict[str, Any] | None = None, /, **weights: float | None) -> Mixture:
    """Sources of 30 samples per letter of their name, with these weights."""
    mix = {}
    for name, weight in weights.items():
        folder = tmp_path / name
        if not folder.exists():
            write_mds(folder, random_shards(seed=len(name), shards=4, samples=30 * len(name)))
        mix[name] = {"path": str(folder)} | ({"weight": weight} if weight else {})
    mixture = open_dataset(SourceConfig(mix=mix, **(options or {})), 4)
    assert isinstance(mixture, Mixture)
    return mixture
