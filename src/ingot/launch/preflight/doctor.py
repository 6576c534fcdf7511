"""`ingot doctor --cluster`: the checks that come before each attempt, on every node of the current Slurm allocation or
on this machine alone; for a launched run, or for a profile."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.launch.agent.local_ranks import count_gpus
from ingot.launch.build_spec import with_defaults
from ingot.launch.preflight.diagnosis import FAIL, PreflightResult, Problem
from ingot.launch.preflight.lead_checks import check_together
from ingot.launch.protocol import LaunchFolder
from ingot.launch.slurm.allocation import TASK_ENDED
from ingot.launch.slurm.commands import host_names
from ingot.launch.spec import LaunchSpec, make_spec, read_spec
from ingot.launch.supervisor.cluster import ThisMachine
from ingot.launch.supervisor.failure_log import node_name

LEAD = "ingot.launch.preflight.lead_checks"


def check_nodes(run: Path | None, profile: str | None) -> PreflightResult:
    """What the checks find on all nodes."""
    spec = read_spec(LaunchFolder(run).spec_file) if run is not None else _plain_spec(profile)
    allocation = os.environ.get("SLURM_JOB_NODELIST")
    nodes = host_names(allocation) if allocation else [node_name()]
    # in the run folder, or here: all nodes must see it
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=spec.run_folder) as folder:
        # the allocation may be smaller than a job's, and has no node to spare
        changes = {"nodes": len(nodes), "spares": 0, "cpus_per_task": None, "run_folder": folder}
        spec = spec.model_copy(update=changes)
        spec_file = spec.write()
        if allocation:
            return _check_allocation(spec_file, nodes)
        return asyncio.run(check_together(spec, ThisMachine(spec_file, "doctor", 0, nodes[0]), nodes))


def _check_allocation(spec_file: Path, nodes: Sequence[str]) -> PreflightResult:
    """Have the first node that can do it check itself and those after it."""
    unusable: list[Problem] = []
    for number, node in enumerate(nodes):
        found = _lead_from(node, spec_file, nodes[number:])
        if isinstance(found, PreflightResult):
            checks = found.checks | ({"agent": FAIL} if unusable else {})
            return PreflightResult([*unusable, *found.problems], found.notes, checks)
        unusable.append(Problem(f"{node}: cannot check the nodes from here: {found}", node))
    return PreflightResult(unusable, checks={"agent": FAIL})


def _lead_from(node: str, spec_file: Path, nodes: Sequence[str]) -> PreflightResult | str:
    """What the checks that this node leads find, or why it cannot lead them."""
    command = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", sys.executable, "-m", LEAD,
               "--spec", str(spec_file), "--nodes", ",".join(nodes)]  # fmt: skip
    result, ended, reason = None, "", ""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if (found := _result_of(line)) is not None:
                    result = found
                else:
                    print(line, end="", file=sys.stderr, flush=True)
                    if TASK_ENDED.match(line):
                        ended = line.strip()
                    elif "error" in line:
                        reason = line.strip()
        except BaseException:
            process.terminate()  # srun passes it on
            raise
    return result or reason or ended or f"srun ended with exit code {process.returncode}"


def _result_of(line: str) -> PreflightResult | None:
    try:
        content: Any = json.loads(line)
        problems = [Problem(**problem) for problem in content["problems"]]
        return PreflightResult(problems, content["notes"], content["checks"])
    except (ValueError, TypeError, KeyError):
        return None


def _plain_spec(profile: str | None) -> LaunchSpec:
    """Nodes as the profile describes them; without one, like this machine."""
    gpus = count_gpus()
    values, _ = with_defaults({"profile": profile})
    if profile is None and values["profile"] == "tcp":
        values |= {"profile": "tcp" if gpus else "cpu", "gpus_per_node": gpus}
    known = {key: values[key] for key in ("profile", "gpus_per_node")}
    return make_spec({"name": "doctor", "run_folder": os.getcwd(), "workdir": os.getcwd(), **known})
