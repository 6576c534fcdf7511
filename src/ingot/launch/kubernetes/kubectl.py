"""What ingot asks of a cluster, by way of kubectl and whatever login the user's kubectl has."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.launch.kubernetes.objects import INSTANCE
from ingot.launch.programs import ProgramError, output_of


def apply(manifest: str) -> str:
    """Hand a manifest to the cluster; returns what kubectl prints."""
    return _kubectl(["apply", "-f", "-"], manifest)


def object_states(namespace: str, kind: str, names: Sequence[str]) -> dict[str, str]:
    """The states of objects in Slurm's words, without those that the cluster does not know."""
    found = _kubectl(["--namespace", namespace, "get", kind, *names, "--ignore-not-found", "--output=json"])
    if not found:
        return {}
    answer = json.loads(found)
    objects = answer.get("items", [answer])  # a list, if several were asked for
    return {each["metadata"]["name"]: state_of(each.get("status", {})) for each in objects}


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
