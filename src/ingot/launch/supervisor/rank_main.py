"""The process of one rank: trains, and records why it failed before it exits.

The supervisor starts it with `train [--fresh] [--dialect NAME] -- ARGUMENTS`, or without options `train ARGUMENTS`. It
is not in `training`, since the console and the records of failures are above that layer.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from ingot.config.secrets import redact
from ingot.errors import EXIT_CONTINUE, EXIT_FAULT, IngotError
from ingot.launch.supervisor.failure import record_failure


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
    return exit_code_of(lambda: train_rank(rest, options.dialect, options.fresh))


def train_rank(arguments: Sequence[str], dialect: str | None, fresh: bool) -> int:
    """Train with a recipe, config files and overrides, in this process alone. Return the exit code."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # torch's newer name for the same
        # before torch is loaded: a model that fills a GPU has no room for fragments
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    from ingot.migrate import load_run_config
    from ingot.parallel.rank_env import find_rank_env
    from ingot.report.listeners import make_listeners
    from ingot.training.runtime.heartbeat import dump_stacks_on_request

    config = load_run_config(arguments, dialect)
    dump_stacks_on_request()
    from ingot.training.trainer import train  # torch loads after the config has been checked

    rank = find_rank_env().rank
    result = train(config, make_listeners(config, rank), fresh)
    if rank == 0:
        print(f"run folder: {result.folder}")
        if result.stopped:
            print("the same command continues", file=sys.stderr)
    return EXIT_CONTINUE if result.stopped else 0


def exit_code_of(action: Callable[[], int]) -> int:
    """Run something. A failure is recorded and printed as one sentence."""
    try:
        return action()
    except IngotError as error:
        return fail(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        return fail("interrupted; the same command continues from the last checkpoint", 130)
    except Exception as error:
        return fail(f"internal error: {type(error).__name__}: {error}", EXIT_FAULT)


def fail(message: str, code: int) -> int:
    """Record and print why this process fails. Return its exit code."""
    # First the record: standard error may be on a full disk, and this process may be killed while it prints.
    recorded = record_failure(message.removeprefix("error: "), code, sys.exc_info()[1])
    print(redact(message), file=sys.stderr)
    if recorded:  # standard error is this process's log; the launcher prints the sentence
        print(redact(traceback.format_exc()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
