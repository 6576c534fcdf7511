"""`ingot doctor --cluster`: the checks that come before each attempt, on every node of the current Slurm allocation or
on this machine alone; for a launched run, or for a profile."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ingot.launch.agent.local_ranks import count_gpus
from ingot.launch.build_spec import with_defaults
from ingot.launch.protocol import ATTEMPT_VARIABLE, NODE_AGENT, NODES_VARIABLE, RENDEZVOUS_VARIABLES, LaunchFolder
from ingot.launch.slurm.commands import host_names
from ingot.launch.slurm.script import container_options, gpu_options, node_python
from ingot.launch.spec import LaunchSpec, make_spec, read_spec
from ingot.launch.supervisor.failure_log import node_name


def check_nodes(run: Path | None, profile: str | None) -> int:
    """Returns the exit code; the first node prints what is found."""
    spec = read_spec(LaunchFolder(run).spec_file) if run is not None else _plain_spec(profile)
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    hosts = host_names(nodes) if nodes else [node_name()]
    # in the run folder, or here: all nodes must see it
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=spec.run_folder) as folder:
        spec = spec.model_copy(update={"nodes": len(hosts), "run_folder": folder})
        env = os.environ | {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(61000 + os.getpid() % 4500),
                            ATTEMPT_VARIABLE: "doctor", NODES_VARIABLE: ",".join(hosts)}  # fmt: skip
        start, python = [], sys.executable
        if nodes:
            start = ["srun", f"--nodes={len(hosts)}", "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1"]
            start += [
                *container_options(spec, (ATTEMPT_VARIABLE, *RENDEZVOUS_VARIABLES, NODES_VARIABLE)),
                *gpu_options(spec),
            ]
            python = node_python(spec)
        command = [*start, python, "-m", NODE_AGENT, "--check", "--spec", str(spec.write())]
        return subprocess.run(command, env=env).returncode


def _plain_spec(profile: str | None) -> LaunchSpec:
    """Nodes as the profile describes them; without one, like this machine."""
    gpus = count_gpus()
    values, _ = with_defaults({"profile": profile})
    if profile is None and values["profile"] == "tcp":
        values |= {"profile": "tcp" if gpus else "cpu", "gpus_per_node": gpus}
    known = {key: values[key] for key in ("profile", "gpus_per_node")}
    return make_spec({"name": "doctor", "run_folder": os.getcwd(), "workdir": os.getcwd(), **known})
