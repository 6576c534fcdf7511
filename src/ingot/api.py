"""The Python API's `train`: what `ingot train` runs in one process, with everything that listens to a run."""

import os
from pathlib import Path

from ingot.config.run import RunConfig
from ingot.parallel.rank_env import ATTEMPT, find_rank_env
from ingot.report.listeners import make_listeners
from ingot.training import trainer
from ingot.training.runtime.lease import clear_stop_request


def train(config: RunConfig, fresh: bool = False) -> trainer.Result:
    """Train a run to its end, continuing it if its folder holds a checkpoint, or over again if `fresh`."""
    rank = find_rank_env().rank
    if rank == 0 and ATTEMPT not in os.environ:  # otherwise the launcher did it before it started this process
        clear_stop_request(Path(config.run_folder))
    return trainer.train(config, make_listeners(config, rank), fresh)
