"""Checks for `ingot doctor --cluster`: `python -m ingot.launch.agent.node_agent --check --spec FILE` on each
node. The nodes find out together, through files of the run folder, whether they are fit; nothing runs.
What leads the ranks of a job is `cluster_agent`.
"""

import argparse
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import EXIT_FAULT, ConfigError, IngotError
from ingot.launch.agent.environment import enter_environment
from ingot.launch.protocol import ATTEMPT_VARIABLE, NODE_RANK_VARIABLES, NODES_VARIABLE
from ingot.launch.spec import LaunchSpec, read_spec


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--check", action="store_true", required=True, help="check whether the nodes are fit")
    options = parser.parse_args()
    try:
        if not options.spec.exists() and "," in os.environ.get(NODES_VARIABLE, ""):
            reason = f"{options.spec} is not there: this node does not share the run folder"
            return _wait_as_unusable_node(reason)
        return check(read_spec(options.spec), os.environ)
    except IngotError as error:
        print(f"{socket.gethostname()}: error: {error}", file=sys.stderr)
        return error.exit_code


def check(spec: LaunchSpec, env: Mapping[str, str]) -> int:
    """Check whether the nodes are fit; the first to know prints the result."""
    from ingot.launch.preflight.preflight import Preflight, PreflightResult

    attempt = env.get(ATTEMPT_VARIABLE, "1")
    if not re.fullmatch(r"[A-Za-z0-9.-]+", attempt):
        raise ConfigError(f"{ATTEMPT_VARIABLE}={attempt!r} is not a valid attempt name")
    rank = int(next((env[name] for name in NODE_RANK_VARIABLES if name in env), "0"))

    def print_result(result: PreflightResult) -> None:
        print("\n".join([*(f"FAIL  {problem.message}" for problem in result.problems), *result.notes]), flush=True)

    result = Preflight(spec, attempt, rank, enter_environment(spec, env)).run(print_result)
    return result.exit_code if result.problems else 0


def _wait_as_unusable_node(reason: str) -> int:
    """This node cannot tell the others that it is unusable. It stays until they have found out: its exit would end
    them first."""
    from ingot.launch.preflight.preflight import report_limit

    print(f"{socket.gethostname()}: error: {reason}", file=sys.stderr, flush=True)
    time.sleep(2 * report_limit(None))  # the others may start that much later; their exit ends this node's process
    return EXIT_FAULT


if __name__ == "__main__":
    sys.exit(main())
