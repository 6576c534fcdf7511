"""Faults from outside: processes and nodes that are killed, cables that are cut, commands of users and administrators."""

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster import Cluster

from chaos.schedule import Fault

SUPERVISOR = b"ingot.launch.supervisor.main"


def processes_of(run: Path) -> dict[int, bytes]:
    """Processes of a run on all nodes, with their command lines."""
    found = {}
    name = str(run).encode()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # a process that has just ended
            words = (path / "cmdline").read_bytes()
            if words and b"ingot.launch." in words and (name in words or name in (path / "environ").read_bytes()):
                found[int(path.name)] = words
    return found


def inject(fault: Fault, cluster: Cluster, run: Path, job: str, ingot: Callable[..., str]) -> Callable[[], None] | None:
    """Do it; returns what ends it, if it lasts for a while."""
    if fault.kind == "node":
        cluster.kill_node(fault.node)
        return lambda: cluster.start_node(fault.node)
    if fault.kind == "cable":
        return _cut(cluster, fault.node)
    if fault.kind == "drain":
        cluster.ask("scontrol", "update", f"NodeName={fault.node}", "State=DRAIN", "Reason=maintenance")
    elif fault.kind == "supervisor":
        for pid, words in processes_of(run).items():
            if SUPERVISOR in words:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    elif fault.kind == "requeue":
        cluster.ask("scontrol", "requeue", job)
    elif fault.kind == "usr2":
        cluster.ask("scancel", "--batch", "--signal=USR2", job)
    elif fault.kind == "scancel":
        cluster.ask("scancel", job)
    elif fault.kind == "ingot stop":
        ingot("stop", str(run))
    elif fault.kind == "controller":
        cluster.stop_controller()
        return cluster.start_controller
    elif fault.kind == "disk":
        filler = cluster.small / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=64k"], capture_output=True)
        return filler.unlink
    elif fault.kind == "workdir":  # an empty folder lies over its parent, on that node
        homes = cluster.folder / "homes"
        homes.mkdir(exist_ok=True)
        cluster.on(fault.node, "mount", "-t", "tmpfs", "none", str(homes))
    else:
        raise ValueError(fault.kind)
    return None


def _cut(cluster: Cluster, node: str) -> Callable[[], None]:
    link = ["ip", "link", "set", f"{cluster.bridge}.{node[1:]}"]
    subprocess.run([*link, "down"], check=True, capture_output=True, env=cluster.env)
    return lambda: _run(*link, "up", env=cluster.env)


def _run(*command: str, env: dict[str, str]) -> None:
    subprocess.run(command, capture_output=True, env=env)  # the node may have been started again with a new one
