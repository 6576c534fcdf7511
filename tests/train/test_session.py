"""A process's hold on its run folder."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TINY

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import DiskError
from ingot.training.runtime.session import RunSession


@pytest.mark.parametrize(("more", "bytes_per_weight"), [([], 12), (["save_weights_only=true"], 4)])
def test_a_run_begins_only_where_one_of_its_checkpoints_fits(
    more: list[str], bytes_per_weight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(RunConfig, [*TINY, "data=x", f"save_folder={tmp_path}", *more])
    needed = bytes_per_weight * config.model.parameters
    for free in (needed, needed - 1):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        with closing(RunSession(config, 0)) as session:
            if free == needed:
                session.open(fresh=False)
            else:
                with pytest.raises(DiskError, match="one checkpoint takes"):
                    session.open(fresh=False)
