"""The checks of `ingot doctor --cluster`, led from one of the nodes like those of a job from its first node, with the
same server, agents and tests: `python -m ingot.launch.preflight.lead_checks --spec FILE --nodes NAME,...`.

It prints the result as one line of JSON; other lines are what agents and Slurm say.
"""

import argparse
import asyncio
import json
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ingot.errors import EXIT_USER_ERROR, IngotError
from ingot.launch.messages import ADDRESS_VARIABLE, START_VARIABLE, TOKEN_VARIABLE, Leave
from ingot.launch.preflight.diagnosis import FAIL, OK, PreflightResult, Problem
from ingot.launch.slurm.allocation import SlurmCluster
from ingot.launch.spec import LaunchSpec, read_spec
from ingot.launch.supervisor.attempt import AttemptRun, Times
from ingot.launch.supervisor.cluster import Cluster
from ingot.launch.supervisor.node_tests import NodeTests
from ingot.launch.supervisor.progress import StopFlag
from ingot.launch.supervisor.records import Opened
from ingot.launch.supervisor.server import AgentServer
from ingot.launch.supervisor.state_file import now


async def check_together(spec: LaunchSpec, cluster: Cluster, nodes: Sequence[str]) -> PreflightResult:
    """Start an agent on each node and test those that report, as before an attempt of a job."""
    start = f"{cluster.job}.{cluster.restart}.0"
    server = AgentServer(spec.run_folder, start, secrets.token_hex(32), nodes)
    address = f"{cluster.host}:{await server.listen()}"
    env = {ADDRESS_VARIABLE: address, TOKEN_VARIABLE: server.token, START_VARIABLE: start}
    times = Times()
    try:
        failed = {lost.node: lost.reason for lost in await cluster.lost_nodes(nodes) if not lost.is_drained}
        for node, why in (await cluster.stage() if spec.stage is not None else {}).items():
            failed.setdefault(node, f"cannot copy {spec.image} to {spec.stage}: {why}")
        problems = [Problem(f"{node}: {why}", node) for node, why in failed.items()]
        usable = [node for node in nodes if node not in failed]
        opened = Opened(time=now(), epoch=1, attempt=start, nodes=tuple(usable), step=0)
        attempt = AttemptRun(opened, spec, server, cluster, StopFlag(), lambda phase, detail, copied: None, times)
        if usable and await attempt.hello((), env) is not None:
            problems += _missing(usable, server, attempt.ended)
        return await _test(spec, server, [node for node in usable if node in server.links], problems)
    finally:
        await server.request_all(dict.fromkeys(list(server.links), Leave()), times.leave)
        await server.close()
        await cluster.end_agents()


def _missing(nodes: Sequence[str], server: AgentServer, ended: Mapping[str, str]) -> list[Problem]:
    """The nodes whose agent has not reported, each with what Slurm or the server says of it."""
    refused = f"the checks refuse it: {server.refused[-1]}" if server.refused else ""
    why = refused or f"it hangs, or cannot reach this port on {nodes[0]}"
    return [Problem(f"{node}: its agent has not reported: {ended.get(node, why)}", node)
            for node in nodes if node not in server.links]  # fmt: skip


async def _test(
    spec: LaunchSpec, server: AgentServer, nodes: Sequence[str], problems: list[Problem]
) -> PreflightResult:
    agents = {"agent": FAIL if problems else OK}
    if not nodes:
        return PreflightResult(problems, checks=agents)
    tests = NodeTests(server, spec, nodes)
    result = await tests.run()
    lost = [Problem(reason, node) for node, reason in tests.lost.items()]
    return PreflightResult([*problems, *lost, *result.problems], result.notes, agents | result.checks)


async def _lead(path: Path, nodes: Sequence[str]) -> PreflightResult:
    """The same, until a signal says to stop: the agents are told to leave first."""
    spec, task = read_spec(path), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await check_together(spec, SlurmCluster(spec, keeps_output=False), nodes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--nodes", required=True, help="names of the nodes to check, separated by commas")
    options = parser.parse_args()
    try:
        result = asyncio.run(_lead(options.spec, options.nodes.split(",")))
    except IngotError as error:
        print(f"error: {error}; does this node share the run folder?", file=sys.stderr)
        return EXIT_USER_ERROR
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    print(json.dumps(asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
