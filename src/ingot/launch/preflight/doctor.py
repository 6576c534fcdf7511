"""The checks that come before each attempt, by hand: on every node of the Slurm allocation that this is called in, or
on this machine alone; for a launched run, or for nodes that are to run something."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ingot.launch.build_spec import with_defaults
from ingot.launch.slurm.script import ask, container_options
from ingot.launch.spec import LAUNCH, SPEC, LaunchSpec, make_spec, read_spec
from ingot.launch.supervisor.local_ranks import NODES_VARIABLE
from ingot.launch.supervisor.node_agent import ATTEMPT_VARIABLE
from ingot.launch.supervisor.restart_policy import node_name


def check_nodes(run: Path | None, profile: str | None) -> int:
    """The exit code; what is found is printed by the first node."""
    spec = read_spec(run / LAUNCH / SPEC) if run is not None else _plain_spec(profile)
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    hosts = ask(["scontrol", "show", "hostnames", nodes]).split() if nodes else [node_name()]
    # in the run folder, or here: all nodes must see it
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=spec.run_folder) as folder:
        spec = spec.model_copy(update={"nodes": len(hosts), "run_folder": folder})
        env = os.environ | {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(61000 + os.getpid() % 4500),
                            ATTEMPT_VARIABLE: "doctor", NODES_VARIABLE: ",".join(hosts)}  # fmt: skip
        start, python = [], sys.executable
        if nodes:
            start = ["srun", f"--nodes={len(hosts)}", "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1"]
            start += container_options(spec)
            start += [f"--gpus-per-node={spec.gpus_per_node}"] if spec.gpus_per_node else []
            python = spec.python or ("python3" if spec.image else python)
        command = [*start, python, "-m", "ingot.launch.supervisor.node_agent", "--check", "--spec", str(spec.write())]
        return subprocess.run(command, env=env).returncode


def _plain_spec(profile: str | None) -> LaunchSpec:
    """Nodes as the profile has them; without one, as this machine is."""
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    values, _ = with_defaults({"profile": profile})
    if profile is None and values["profile"] == "tcp":
        values |= {"profile": "tcp" if gpus else "cpu", "gpus_per_node": gpus}
    known = {key: values[key] for key in ("profile", "gpus_per_node")}
    return make_spec({"name": "doctor", "run_folder": os.getcwd(), "workdir": os.getcwd(), **known})
