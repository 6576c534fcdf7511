"""What must hold of every manifest: its fields are those that Kubernetes has, and what a run relies on is in them."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ingot.launch.spec import make_spec

TYPES = {"string": str, "integer": int, "boolean": bool}
DNS_LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"


def documents(text: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def find_dicts(node: Any, key: str) -> Iterator[dict[str, Any]]:
    """Every dict that has a key, at any depth."""
    if isinstance(node, dict) and key in node:
        yield node
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from find_dicts(value, key)


def pods(text: str) -> list[dict[str, Any]]:
    """The specs of the pod templates, wherever the kind keeps them."""
    return list(find_dicts(list(yaml.safe_load_all(text)), "containers"))


def manifest_problems(text: str) -> list[str]:
    """What is wrong with a manifest; empty for a good one."""
    found = documents(text)
    problems = [problem for document in found.values() for problem in _document_problems(document)]
    if problems:
        return problems
    spec = make_spec(json.loads(found["Secret"]["stringData"]["spec.json"]))
    name = found["Secret"]["metadata"]["name"]
    if (count := _pod_count(found)) != spec.nodes:
        problems.append(f"{count} pods for {spec.nodes} nodes")
    if any(each["network"]["enableDNSHostnames"] is not True for each in find_dicts(list(found.values()), "network")):
        problems.append("enableDNSHostnames is off")
    for pod in find_dicts(list(found.values()), "containers"):
        (container,) = pod["containers"]
        env = {variable["name"]: variable for variable in container["env"]}
        if "PyTorchJob" not in found:
            if (env["MASTER_ADDR"]["value"], env["MASTER_PORT"]["value"]) != (f"{name}-node-0-0.{name}", "61000"):
                problems.append("MASTER_ADDR and MASTER_PORT are not those of the first pod")
            if pod.get("restartPolicy") != "Never":
                problems.append("restartPolicy is not Never")
        if pod["terminationGracePeriodSeconds"] < spec.signal_seconds:
            problems.append("killed before a save is done")
        if [port["containerPort"] for port in container["ports"]] != [61_000]:
            problems.append("the port is not 61000")
        if container["securityContext"]["privileged"]:
            problems.append("privileged")
        if any(env[secret]["valueFrom"]["secretKeyRef"]["key"] != secret for secret in spec.secrets):
            problems.append("a secret is not a reference")
        problems += _resource_problems(container, spec.gpus_per_node)
        problems += _volume_problems(pod, container)
    return problems


def _resource_problems(container: dict[str, Any], gpus: int) -> Iterator[str]:
    resources = container.get("resources", {"limits": {}, "requests": {}})
    if resources["limits"] != resources["requests"]:
        yield "requests and limits differ, so the pod could be evicted"
    if resources["limits"].get("nvidia.com/gpu", 0) != gpus:
        yield f"not {gpus} GPUs"


def _volume_problems(pod: dict[str, Any], container: dict[str, Any]) -> Iterator[str]:
    mounts = container["volumeMounts"]
    targets = [mount["mountPath"] for mount in mounts]
    if sorted(mount["name"] for mount in mounts) != sorted(volume["name"] for volume in pod["volumes"]):
        yield "volumes and mounts do not match"
    if len(set(targets)) != len(targets) or not {"/etc/ingot", "/dev/shm"} <= set(targets):
        yield "/etc/ingot, /dev/shm and each target must be mounted once"


def _pod_count(found: dict[str, Any]) -> int:
    if "PyTorchJob" in found:
        replicas = found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
        return sum(replica["replicas"] for replica in replicas.values()) if replicas["Master"]["replicas"] == 1 else 0
    if "TrainJob" in found:
        job = found["TrainJob"]["spec"]
        runtime = found["TrainingRuntime"]["metadata"]["name"]
        return job["trainer"]["numNodes"] if job["runtimeRef"]["name"] == runtime else 0
    (job,) = (each["template"]["spec"] for each in found["JobSet"]["spec"]["replicatedJobs"])
    return job["completions"] if job["completions"] == job["parallelism"] else 0


@cache
def _kinds() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "kubernetes_fields.yaml").read_text())["kinds"]


def _document_problems(document: dict[str, Any]) -> Iterator[str]:
    kind, kinds = document["kind"], _kinds()
    return _field_problems(document, kinds[kind], kind) if kind in kinds else iter([f"{kind} is not a known kind"])


def _field_problems(value: Any, expected: Any, where: str) -> Iterator[str]:
    """What of a value differs from the fields that kubernetes_fields.yaml lists."""
    if isinstance(expected, list):
        for number, item in enumerate(value if isinstance(value, list) else [None]):
            yield from _field_problems(item, expected[0], f"{where}[{number}]")
    elif isinstance(expected, dict):
        if not isinstance(value, dict):
            yield f"{where} is not a mapping"
            return
        yield from (f"{where}.{key[:-1]} is missing" for key in expected if key[-1] == "!" and key[:-1] not in value)
        for key, item in value.items():
            inner = expected.get(key) or expected.get(f"{key}!") or expected.get("*")
            if inner is None:
                yield f"{where}.{key} is not a field"
            else:
                yield from _field_problems(item, inner, f"{where}.{key}")
    elif expected == "name":
        if not isinstance(value, str) or not re.fullmatch(DNS_LABEL, value):
            yield f"{where} is not a name"
    elif expected in TYPES:
        if type(value) is not TYPES[expected]:
            yield f"{where} is not {expected}"
    elif value not in expected.split("|"):
        yield f"{where} is not one of {expected}"
