"""What ingot asks of a cluster, by way of kubectl and whatever login the user's kubectl has."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.errors import EXIT_FAULT, ConfigError, IngotError
from ingot.launch.kubernetes.objects import INSTANCE

TIMEOUT_SECONDS = 120


class KubernetesError(IngotError):
    """The cluster refused, or could not be reached."""

    exit_code = EXIT_FAULT


def apply(manifest: str) -> str:
    """Hand a manifest to the cluster; returns what kubectl prints."""
    return _kubectl(["apply", "-f", "-"], manifest)


def object_state(namespace: str, kind: str, name: str) -> str:
    """The state of a run's object in Slurm's words; empty if the cluster does not know the object."""
    found = _kubectl(["--namespace", namespace, "get", kind, name, "--ignore-not-found", "--output=json"])
    return state_of(json.loads(found).get("status", {})) if found else ""


def state_of(status: Mapping[str, Any]) -> str:
    """The status of a JobSet, TrainJob or PyTorchJob in Slurm's words."""
    true = {condition["type"] for condition in status.get("conditions", []) if condition.get("status") == "True"}
    if true & {"Completed", "Complete", "Succeeded"}:
        return "COMPLETED"
    if "Failed" in true:
        return "FAILED"
    if "Suspended" in true:
        return "PENDING"  # Kueue has not admitted it
    jobs = [*status.get("replicatedJobsStatus", []), *status.get("jobsStatus", [])]
    active = true & {"Running", "Restarting"} or any(job.get("active") or job.get("ready") for job in jobs)
    return "RUNNING" if active else "PENDING"


def delete(namespace: str, kind: str, name: str) -> None:
    """Delete a run's objects."""
    kinds = ",".join([kind, "secret", "networkpolicy", *(["trainingruntime"] if kind == "trainjob" else [])])
    _kubectl(["--namespace", namespace, "delete", kinds, "--selector", f"{INSTANCE}={name}", "--wait=false"])


def _kubectl(arguments: Sequence[str], text: str | None = None) -> str:
    """What kubectl prints; an error is one sentence."""
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on this machine; install it, or run this on a machine that has it")
    command = ["kubectl", *arguments]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise KubernetesError(
            f"kubectl did not answer within {TIMEOUT_SECONDS} s; check that the cluster can be reached"
        ) from None
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        hint = "; its controller is not installed there: try another --kind" if "no matches for kind" in reason else ""
        raise KubernetesError(f"kubectl failed: {reason}{hint}")
    return done.stdout.strip()
