"""The process of one rank: trains, and records why it failed before it exits.

The supervisor starts it with `train [--fresh] [--dialect NAME] -- ARGUMENTS`, or without options `train ARGUMENTS`. It
is not in `training`, since the console and the records of failures are above that layer.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from ingot.config.run import RunConfig
from ingot.errors import EXIT_CONTINUE
from ingot.launch.agent.failure import exit_code_of
from ingot.migrate import load_run_config
from ingot.parallel.rank_env import find_rank_env
from ingot.report.listeners import make_listeners
from ingot.training.runtime.heartbeat import dump_stacks_on_request


def main(arguments: Sequence[str]) -> int:
    """Train as one rank. Return the exit code."""
    parser = argparse.ArgumentParser(prog="ingot train")
    parser.add_argument("verb", choices=["train"])
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--dialect")
    # divided by hand: argparse takes no list of arguments after options
    end = arguments.index("--") if "--" in arguments else 1
    options = parser.parse_args(arguments[:end])
    rest = arguments[end + 1 :] if "--" in arguments else arguments[end:]
    return exit_code_of(lambda: train_rank(load_run_config(rest, options.dialect), options.fresh))


def train_rank(config: RunConfig, fresh: bool) -> int:
    """Train in this process alone. Return the exit code."""
    prepare_torch()
    dump_stacks_on_request()
    from ingot.training.trainer import train  # torch loads after the config has been checked

    rank = find_rank_env().rank
    result = train(config, make_listeners(config, rank), fresh)
    if rank == 0:
        print(f"run folder: {result.folder}")
        if result.stopped:
            print("the same command continues", file=sys.stderr)
    return EXIT_CONTINUE if result.stopped else 0


def prepare_torch() -> None:
    """Settings that torch reads when it is loaded."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # torch's newer name for the same
        # a model that fills a GPU has no room for fragments
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler otherwise writes its progress to the terminal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
