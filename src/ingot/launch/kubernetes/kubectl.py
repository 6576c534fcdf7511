"""What ingot asks of a cluster, by way of kubectl and whatever login the user's kubectl has."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.launch.kubernetes.objects import INSTANCE
from ingot.launch.programs import ProgramError, output_of


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
    try:
        return output_of(["kubectl", *arguments], text=text)
    except ProgramError as error:
        if "no matches for kind" not in str(error):
            raise
        raise ProgramError(f"{error}; its controller is not installed there: try another --kind") from None
