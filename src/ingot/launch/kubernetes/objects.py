"""A run as Kubernetes objects: a JobSet, a TrainJob or a PyTorchJob, each with one pod per node.

The first pod runs the same supervisor as a Slurm job, all pods the same agent on the same spec. Failed processes first
restart inside their pods. If that does not help, Kubernetes replaces all pods together (JobSet, TrainJob). A user's
error ends the job at once. The spec, and config files that the pods cannot see, travel in a Secret, and with them the
token by which the pods know each other. The values of the user's secrets never do: pods read them from a Secret that
already exists in the cluster.

Objects are plain dicts, dumped as YAML at the end, so a user's value can never become a key, a document or a command.
"""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from ingot.config.secrets import IN_URL, redact
from ingot.errors import EXIT_GIVEN_UP, EXIT_USER_ERROR, ConfigError
from ingot.launch.image import check_pinned
from ingot.launch.kubernetes.pod_cluster import RESTART_VARIABLE
from ingot.launch.messages import TOKEN_VARIABLE
from ingot.launch.profiles import find_profile
from ingot.launch.protocol import ATTEMPT_VARIABLE, SPEC
from ingot.launch.spec import LaunchSpec, make_spec
from ingot.launch.supervisor.failure_log import NODE_NAME_VARIABLE

Kind = Literal["jobset", "trainjob", "pytorchjob"]
KINDS: tuple[Kind, ...] = ("jobset", "trainjob", "pytorchjob")
Json = dict[str, Any]

SPEC_FOLDER = "/etc/ingot"  # where pods see the spec
SHARED_MEMORY = "/dev/shm"  # noqa: S108
PORT = 61_000  # of the supervisor; above the range from which Linux assigns ports to outgoing connections
NODE = "node"  # the name that TrainJob expects of its replicated job and container
PYTORCH, PYTORCH_PORT = "pytorch", "pytorchjob-port"  # the names that PyTorchJob expects
MAX_NAME_LENGTH = 42  # Kubernetes appends to this to name a pod, and allows 63 characters
MAX_SECRET_BYTES = 200_000  # `kubectl apply` also keeps a copy in an annotation of at most 262,144 bytes
TOKEN_KEY = "token"  # in the run's Secret: by it the supervisor and the agents of other pods know each other
POD_AGENT = "ingot.launch.kubernetes.pod_agent"
RESTART_ANNOTATION = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
INSTANCE, QUEUE = "app.kubernetes.io/instance", "kueue.x-k8s.io/queue-name"
TRAINER_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
HOSTNAME, GPU = "kubernetes.io/hostname", "nvidia.com/gpu"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def find_kind(name: str) -> Kind:
    for kind in KINDS:
        if kind == name:
            return kind
    raise ConfigError(f"--kind {name} does not exist; choose one of {', '.join(KINDS)}")


def new_launch_id() -> str:
    """A unique id for one launch, so that objects and attempts of two launches never share a name."""
    return secrets.token_hex(3)


def object_name(spec: LaunchSpec, launch: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return f"{name[: MAX_NAME_LENGTH - len(launch) - 1].rstrip('-')}-{launch}"


def adapt_to_pods(spec: LaunchSpec) -> tuple[LaunchSpec, dict[str, str]]:
    """The spec with paths that exist inside the pods, and the contents of config files that must travel with it."""
    files: dict[str, str] = {}
    arguments = []
    for argument in spec.arguments:
        path = Path(argument)
        if argument.startswith("--") or not path.is_file() or _is_mounted(spec, str(path.absolute())):
            arguments.append(argument)
            continue
        if path.name in files or path.name == SPEC or not re.fullmatch(r"[-._a-zA-Z0-9]+", path.name):
            raise ConfigError(
                f"{path} travels with the job under its file name, so that name must be unique, not {SPEC}, and "
                "consist of letters, digits and - . _; rename the file"
            )
        files[path.name] = path.read_bytes().decode()
        arguments.append(f"{SPEC_FOLDER}/{path.name}")
    workdir = spec.workdir if _is_mounted(spec, spec.workdir) else spec.run_folder
    return make_spec(spec.model_dump() | {"arguments": arguments, "workdir": workdir}), files


def render(
    spec: LaunchSpec, kind: Kind, launch: str, files: Mapping[str, str] | None = None, token: str | None = None
) -> str:
    """The manifest of a run, after checking what its user may have got wrong.

    token: proves that two pods belong to this launch; a new one if there is none
    """
    name = object_name(spec, launch)
    metadata = {"name": name, "namespace": spec.namespace, "labels": _labels(name)}
    queue = {QUEUE: spec.queue} if spec.queue else {}
    job_metadata = metadata | {"labels": _labels(name) | queue}
    contents = {SPEC: spec.model_dump_json(indent=1), **(files or {})}
    same_run = {"podSelector": {"matchLabels": {INSTANCE: name}}}
    # anyone who can reach the ports of the ranks can join the run, so the policy admits only the run's own pods
    policy = {**same_run, "policyTypes": ["Ingress"], "ingress": [{"from": [same_run]}]}
    objects: list[Json] = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata,
         "type": "Opaque", "immutable": True,
         "stringData": contents | {TOKEN_KEY: token or secrets.token_hex(32)}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": policy},
    ]  # fmt: skip
    if kind == "pytorchjob":
        objects.append({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": job_metadata,
                        "spec": _pytorchjob_spec(spec, name, launch, list(contents))})  # fmt: skip
    elif kind == "jobset":
        count = {"completions": spec.nodes, "parallelism": spec.nodes}
        objects.append({"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": job_metadata,
                        "spec": _jobset_spec(spec, name, launch, list(contents), count, {})})  # fmt: skip
    else:
        # its own runtime, in the run's namespace: creating a ClusterTrainingRuntime needs an administrator
        trainer = {"apiVersion": "trainer.kubeflow.org/v1alpha1"}
        labels = {"metadata": {"labels": TRAINER_LABEL}}
        jobset = _jobset_spec(
            spec, name, launch, list(contents), {}, labels
        )  # the TrainJob's controller fills in the number of pods
        nodes = {"numNodes": spec.nodes}
        runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
        objects += [
            trainer | {"kind": "TrainingRuntime", "metadata": metadata,
                       "spec": {"mlPolicy": nodes, "template": {"spec": jobset}}},
            trainer | {"kind": "TrainJob", "metadata": job_metadata, "spec": {"runtimeRef": runtime, "trainer": nodes}},
        ]  # fmt: skip
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)
    _check(spec, text, contents)
    return text


def _labels(name: str) -> dict[str, str]:
    return {INSTANCE: name, "app.kubernetes.io/managed-by": "ingot"}


def _jobset_spec(
    spec: LaunchSpec, name: str, launch: str, files: Sequence[str], count: Json, template_metadata: Json
) -> Json:
    """Replaces all pods after a failure, unless a pod exits with a code that means it would fail again."""
    env: list[Json] = [
        {"name": RESTART_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": RESTART_ANNOTATION}}},
        {"name": ATTEMPT_VARIABLE, "value": f"{launch}.$({RESTART_VARIABLE})"},
        {"name": "MASTER_ADDR", "value": f"{name}-{NODE}-0-0.{name}"},
        {"name": "MASTER_PORT", "value": str(PORT)},
    ]
    final = {"containerName": NODE, "operator": "In", "values": [EXIT_USER_ERROR, EXIT_GIVEN_UP]}
    pod = _pod_template(spec, name, files, env, NODE, "supervisor")
    job = {
        "completionMode": "Indexed",
        **count,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": pod | {"spec": {"restartPolicy": "Never", **pod["spec"]}},
    }
    rule = {"name": "wouldFailAgain", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": spec.restarts, "rules": [rule]},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {**template_metadata, "spec": job}}],
    }


def _pytorchjob_spec(spec: LaunchSpec, name: str, launch: str, files: Sequence[str]) -> Json:
    """The operator sets address, port and node rank, and replaces a pod only for exit codes of 128 and above."""
    pod = _pod_template(spec, name, files, [{"name": ATTEMPT_VARIABLE, "value": f"{launch}.0"}], PYTORCH, PYTORCH_PORT)
    counts = {"Master": 1, "Worker": spec.nodes - 1}
    return {
        "runPolicy": {
            "cleanPodPolicy": "Running",
            "backoffLimit": spec.restarts,
            "schedulingPolicy": {"minAvailable": spec.nodes},
        },
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": "ExitCode", "template": pod}
            for role, count in counts.items()
            if count
        },
    }


def _pod_template(
    spec: LaunchSpec, name: str, files: Sequence[str], env: list[Json], container_name: str, port_name: str
) -> Json:
    volumes, mounts = _volumes(spec, name, files)
    devices = {
        **find_profile(spec.profile).kubernetes_resources,
        **({GPU: spec.gpus_per_node} if spec.gpus_per_node else {}),
        **({"cpu": spec.cpus_per_task} if spec.cpus_per_task else {}),
    }
    container = {
        "name": container_name,
        "image": _image(spec),
        "command": [spec.python or "python3", "-m", POD_AGENT, "--spec", f"{SPEC_FOLDER}/{SPEC}"],
        "env": [*env, *_pod_variables(name), *_secret_variables(spec)],
        "ports": [{"name": port_name, "containerPort": PORT}],
        **({"resources": {"limits": devices, "requests": devices}} if devices else {}),
        "volumeMounts": mounts,
        "securityContext": {
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]},  # RDMA locks memory, and needs nothing else
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    toleration = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
    pod = {
        "terminationGracePeriodSeconds": spec.signal_seconds,  # the default of 30 s is too short to save
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "affinity": _affinity(spec, name),
        **({"tolerations": [toleration]} if spec.gpus_per_node else {}),
        "containers": [container],
        "volumes": volumes,
    }
    return {"metadata": {"labels": _labels(name)}, "spec": pod}


def _affinity(spec: LaunchSpec, name: str) -> Json:
    """Each pod on its own node, and none on the excluded nodes."""
    same_run = {"labelSelector": {"matchLabels": {INSTANCE: name}}, "topologyKey": HOSTNAME}
    excluded = {"key": HOSTNAME, "operator": "NotIn", "values": spec.exclude}
    nodes = {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [excluded]}]}}
    return {**({"nodeAffinity": nodes} if spec.exclude else {}), "podAntiAffinity": {REQUIRED: [same_run]}}


def _pod_variables(name: str) -> list[Json]:
    return [
        {"name": NODE_NAME_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": {"name": name, "key": TOKEN_KEY}}},
    ]


def _secret_variables(spec: LaunchSpec) -> list[Json]:
    if spec.secrets and spec.secret_name is None:
        raise ConfigError(f"--secret {spec.secrets[0]}: name the cluster's Secret that holds it, with --secret-name")
    return [
        {"name": secret, "valueFrom": {"secretKeyRef": {"name": spec.secret_name, "key": secret}}}
        for secret in spec.secrets
    ]


def _volumes(spec: LaunchSpec, name: str, files: Sequence[str]) -> tuple[list[Json], list[Json]]:
    """The pod's volumes and the container's mounts of them."""
    memory = "64Gi" if spec.gpus_per_node else "2Gi"  # a limit, not a reservation
    volumes: list[Json] = [
        {"name": "spec", "secret": {"secretName": name, "items": [{"key": key, "path": key} for key in files]}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": memory}},
    ]
    mounts: list[Json] = [
        {"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": SHARED_MEMORY},
    ]
    for number, (source, target, is_read_only) in enumerate(_mounts(spec)):
        read_only = {"readOnly": True} if is_read_only else {}
        claim = {"persistentVolumeClaim": {"claimName": source, **read_only}}
        volume = {"hostPath": {"path": source}} if source.startswith("/") else claim
        volumes.append({"name": f"mount-{number}", **volume})
        mounts.append({"name": f"mount-{number}", "mountPath": target, **read_only})
    return volumes, mounts


def _mounts(spec: LaunchSpec) -> list[tuple[str, str, bool]]:
    """The source and target of each mount, and whether it is read-only."""
    texts = dict.fromkeys([*spec.claims, *spec.mounts, *find_profile(spec.profile).mounts])
    split = (text.split(":") for text in texts)
    return [(source, target, mode == ["ro"]) for source, target, *mode in split]


def _is_mounted(spec: LaunchSpec, path: str) -> bool:
    return any(Path(path).is_relative_to(target) for _, target, _ in _mounts(spec))


def _image(spec: LaunchSpec) -> str:
    """The image's registry name, pinned so that every node starts the same image."""
    image = spec.image or ""
    if not image or image.startswith("/") or "#" in image or "://" in image:
        raise ConfigError("pods need --image with a registry name, such as registry.example/ingot:0.1.0@sha256:...")
    check_pinned(image)
    return image


def _check(spec: LaunchSpec, text: str, contents: Mapping[str, str]) -> None:
    """Refuse a manifest that contains a secret, is too large, or does not mount the run folder."""
    problems = [
        f"it contains the value of {variable}; pass that by name, with --secret {variable}"
        for variable, value in os.environ.items()
        if redact(text, {variable: value}) != text
    ]
    if any(IN_URL.search(content) for content in contents.values()):
        problems.append("it contains a URL with a password or a signature; pass credentials with --secret")
    if (size := sum(len(content.encode()) for content in contents.values())) > MAX_SECRET_BYTES:
        problems.append(f"the spec and config files have {size:,} bytes; only {MAX_SECRET_BYTES:,} fit into a Secret")
    mounts = _mounts(spec)
    targets = [SPEC_FOLDER, SHARED_MEMORY, *(target for _, target, _ in mounts)]
    if repeated := sorted({target for target in targets if targets.count(target) > 1}):
        problems.append(f"{', '.join(repeated)} must be mounted only once")
    if not any(Path(spec.run_folder).is_relative_to(target) for _, target, read_only in mounts if not read_only):
        problems.append(
            f"the run folder {spec.run_folder} would be lost with its pod; mount a volume, such as --mounts "
            "CLAIM:/data, and set save_folder=/data/..."
        )
    if problems:
        raise ConfigError(f"cannot render a manifest of {spec.name}: {'; '.join(dict.fromkeys(problems))}")


class _Dumper(yaml.SafeDumper):
    """Quotes strings that another YAML reader would take for a number or a boolean: Go's reads `1e3` and `y` as such,
    PyYAML's own reader and writer do not. Texts of several lines stay readable as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, value: str) -> yaml.ScalarNode:
        is_plain = len(value) > 1 and (value[0].isalpha() or value[0] == "/")
        style = "|" if "\n" in value else None if is_plain else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
