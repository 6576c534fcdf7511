"""A run as Kubernetes objects: a JobSet, a TrainJob or a PyTorchJob, each with one pod per node.

The pods run the same worker on the same spec as a Slurm job's tasks. Processes that fail are started again inside their
pods first; pods are made anew when that did not help, all of them together (JobSet, TrainJob) so that the collective
can form again. A user's error ends the job at once. The spec, and config files that the pods could not see, travel in a
Secret; the values of secrets do not travel at all: pods take them from a Secret that somebody else has made.
"""

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ingot.config.secrets import IN_URL, redact
from ingot.errors import EXIT_FAULT, EXIT_GIVEN_UP, EXIT_USER_ERROR, ConfigError, IngotError
from ingot.launch.image import check_pinned
from ingot.launch.kubernetes import objects as k8s
from ingot.launch.profiles import find_profile
from ingot.launch.spec import SPEC, LaunchSpec, make_spec
from ingot.launch.supervisor.node_agent import ATTEMPT_VARIABLE

Kind = Literal["jobset", "trainjob", "pytorchjob"]
AGENT = "ingot.launch.supervisor.node_agent"
FOLDER = "/etc/ingot"  # where pods see the spec
PORT = 61_000  # of the rendezvous; a pod has its own ports, and this one is above those it draws for itself
NODE = "node"  # TrainJob wants its replicated job and its container to be called so
PYTORCH, PYTORCH_PORT = "pytorch", "pytorchjob-port"  # and PyTorchJob these
LONGEST_NAME = 42  # what Kubernetes adds to make a pod's name must fit into 63 characters
LARGEST_SECRET = 200_000  # bytes; `kubectl apply` keeps a copy in an annotation of at most 262,144
RESTART = "INGOT_RESTART"
INSTANCE, QUEUE = "app.kubernetes.io/instance", "kueue.x-k8s.io/queue-name"
STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


class KubernetesError(IngotError):
    """The cluster refused, or cannot be reached."""

    exit_code = EXIT_FAULT


def launch_id() -> str:
    """A new name for one launch: objects and attempts of two launches never meet."""
    return secrets.token_hex(3)


def object_name(spec: LaunchSpec, launch: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return f"{name[: LONGEST_NAME - len(launch) - 1].rstrip('-')}-{launch}"


def fit_to_pods(spec: LaunchSpec) -> tuple[LaunchSpec, dict[str, str]]:
    """The spec as pods can run it, and the texts of config files that go with it, since pods see only their mounts."""
    files: dict[str, str] = {}
    arguments = []
    for argument in spec.arguments:
        path = Path(argument)
        if argument.startswith("--") or not path.is_file() or _is_mounted(spec, str(path.absolute())):
            arguments.append(argument)
            continue
        if path.name in files or path.name == SPEC or not re.fullmatch(r"[-._a-zA-Z0-9]+", path.name):
            raise ConfigError(f"{path} needs a name of its own, of letters, digits and - . _, to travel with the job")
        files[path.name] = path.read_bytes().decode()
        arguments.append(f"{FOLDER}/{path.name}")
    workdir = spec.workdir if _is_mounted(spec, spec.workdir) else spec.run_folder
    return make_spec(spec.model_dump() | {"arguments": arguments, "workdir": workdir}), files


def render(spec: LaunchSpec, kind: Kind, launch: str, files: Mapping[str, str] | None = None) -> str:
    """The checked manifest."""
    name = object_name(spec, launch)
    meta = k8s.Metadata(name=name, namespace=spec.namespace, labels=_labels(name))
    queued = meta.model_copy(update={"labels": _labels(name) | ({QUEUE: spec.queue} if spec.queue else {})})
    same = k8s.LabelSelector(match_labels={INSTANCE: name})
    objects: list[k8s.Object] = [
        k8s.Secret(metadata=meta, string_data={SPEC: spec.model_dump_json(indent=1), **(files or {})}),
        # whoever reaches the rendezvous port can join: let it be this run's pods alone
        k8s.NetworkPolicy(metadata=meta, spec=k8s.NetworkPolicySpec(
            pod_selector=same, policy_types=["Ingress"], ingress=[k8s.Ingress(from_=[k8s.Peer(pod_selector=same)])])),
    ]  # fmt: skip
    if kind == "pytorchjob":
        objects.append(k8s.PyTorchJob(metadata=queued, spec=_pytorch_spec(spec, name, launch)))
    elif kind == "jobset":
        objects.append(k8s.JobSet(metadata=queued, spec=_jobset_spec(spec, name, launch, {}, spec.nodes)))
    else:  # a runtime of its own, in the namespace: a ClusterTrainingRuntime would need an administrator
        template = k8s.JobSetTemplate(spec=_jobset_spec(spec, name, launch, STEP, None))
        policy = k8s.MlPolicy(num_nodes=spec.nodes)
        runtime = k8s.TrainingRuntimeSpec(ml_policy=policy, template=template)
        job = k8s.TrainJobSpec(runtime_ref=k8s.RuntimeRef(name=name), trainer=k8s.Trainer(num_nodes=spec.nodes))
        objects.append(k8s.TrainingRuntime(metadata=meta, spec=runtime))
        objects.append(k8s.TrainJob(metadata=queued, spec=job))
    text = k8s.to_text(objects)
    check_manifest(text)
    return text


def _labels(name: str) -> dict[str, str]:
    return {INSTANCE: name, "app.kubernetes.io/managed-by": "ingot"}


def _jobset_spec(
    spec: LaunchSpec, name: str, launch: str, labels: dict[str, str], completions: int | None
) -> k8s.JobSetSpec:
    """All pods anew after a failure, except after one that would come again. A TrainJob fills in the completions."""
    env = [
        k8s.EnvVar(name=RESTART, value_from=k8s.EnvSource(
            field_ref=k8s.FieldRef(field_path="metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"))),
        k8s.EnvVar(name=ATTEMPT_VARIABLE, value=f"{launch}.$({RESTART})"),
        k8s.EnvVar(name="MASTER_ADDR", value=f"{name}-{NODE}-0-0.{name}"),
        k8s.EnvVar(name="MASTER_PORT", value=str(PORT)),
    ]  # fmt: skip
    final = k8s.ExitCodes(container_name=NODE, values=[EXIT_USER_ERROR, EXIT_GIVEN_UP])
    job = k8s.JobSpec(
        completions=completions, parallelism=completions, template=_pod(spec, name, env, NODE, "rendezvous"),
        pod_failure_policy=k8s.PodFailurePolicy(rules=[k8s.PodFailureRule(on_exit_codes=final)]),
    )  # fmt: skip
    rule = k8s.FailureRule(name="wouldFailAgain", on_job_failure_reasons=["PodFailurePolicy"])
    template = k8s.JobTemplate(metadata=k8s.Metadata(labels=labels) if labels else None, spec=job)
    return k8s.JobSetSpec(
        failure_policy=k8s.FailurePolicy(max_restarts=spec.restarts, rules=[rule]),
        replicated_jobs=[k8s.ReplicatedJob(name=NODE, template=template)],
    )


def _pytorch_spec(spec: LaunchSpec, name: str, launch: str) -> k8s.PyTorchJobSpec:
    """The operator gives address, port and node rank; exit codes from 128 on, and no others, make a pod anew."""
    env = [k8s.EnvVar(name=ATTEMPT_VARIABLE, value=f"{launch}.0")]
    pod = _pod(spec, name, env, PYTORCH, PYTORCH_PORT)
    pod = pod.model_copy(update={"spec": pod.spec.model_copy(update={"restart_policy": None})})  # the replica's counts
    replicas: dict[Literal["Master", "Worker"], k8s.ReplicaSpec] = {"Master": k8s.ReplicaSpec(replicas=1, template=pod)}
    if spec.nodes > 1:
        replicas["Worker"] = k8s.ReplicaSpec(replicas=spec.nodes - 1, template=pod)
    policy = k8s.RunPolicy(
        backoff_limit=spec.restarts, scheduling_policy=k8s.SchedulingPolicy(min_available=spec.nodes)
    )
    return k8s.PyTorchJobSpec(run_policy=policy, pytorch_replica_specs=replicas)


def _pod(spec: LaunchSpec, name: str, env: list[k8s.EnvVar], container: str, port: str) -> k8s.PodTemplate:
    for secret in spec.secrets:
        if spec.secret_name is None:
            raise ConfigError(f"{secret} must come from a Secret of the cluster: name it with --secret-name")
        source = k8s.EnvSource(secret_key_ref=k8s.KeyRef(name=spec.secret_name, key=secret))
        env = [*env, k8s.EnvVar(name=secret, value_from=source)]
    devices = find_profile(spec.profile).kubernetes_resources | (
        {"nvidia.com/gpu": spec.gpus_per_node} if spec.gpus_per_node else {}
    )
    devices |= {"cpu": spec.cpus_per_task} if spec.cpus_per_task else {}
    volumes, mounts = _volumes(spec, name)
    same = k8s.LabelSelector(match_labels={INSTANCE: name})
    apart = k8s.PodAffinityTerm(label_selector=same, topology_key="kubernetes.io/hostname")
    return k8s.PodTemplate(
        metadata=k8s.Metadata(labels=_labels(name)),
        spec=k8s.PodSpec(
            termination_grace_period_seconds=spec.signal_seconds,  # time to save; the default of 30 s kills saves
            affinity=k8s.Affinity(
                node_affinity=_without(spec.exclude),
                pod_anti_affinity=k8s.PodAntiAffinity(required_during_scheduling_ignored_during_execution=[apart]),
            ),
            tolerations=[k8s.Toleration(key="nvidia.com/gpu")] if spec.gpus_per_node else None,
            volumes=volumes,
            containers=[k8s.Container(
                name=container, image=_image(spec), env=env, volume_mounts=mounts,
                command=[spec.python or "python3", "-m", AGENT, "--spec", f"{FOLDER}/{SPEC}", "--pod"],
                ports=[k8s.ContainerPort(name=port, container_port=PORT)],
                resources=k8s.Resources(limits=devices, requests=devices) if devices else None,
                # RDMA locks memory; it needs nothing else of what "privileged" would give
                security_context=k8s.ContainerSecurity(
                    capabilities=k8s.Capabilities(drop=["ALL"], add=["IPC_LOCK"])),
            )],
        ),
    )  # fmt: skip


def _volumes(spec: LaunchSpec, name: str) -> tuple[list[k8s.Volume], list[k8s.Mount]]:
    shm = "64Gi" if spec.gpus_per_node else "2Gi"  # a cap, not a reservation
    volumes = [
        k8s.Volume(name="spec", secret=k8s.SecretSource(secret_name=name)),
        k8s.Volume(name="shm", empty_dir=k8s.EmptyDir(size_limit=shm)),
    ]
    mounts = [k8s.Mount(name="spec", mount_path=FOLDER, read_only=True), k8s.Mount(name="shm", mount_path="/dev/shm")]  # noqa: S108
    for number, (source, target, read_only) in enumerate(_mounts(spec)):
        volume = f"mount-{number}"
        if source.startswith("/"):
            volumes.append(k8s.Volume(name=volume, host_path=k8s.HostPath(path=source)))
        else:
            claim = k8s.ClaimSource(claim_name=source, read_only=read_only or None)
            volumes.append(k8s.Volume(name=volume, persistent_volume_claim=claim))
        mounts.append(k8s.Mount(name=volume, mount_path=target, read_only=read_only or None))
    return volumes, mounts


def _mounts(spec: LaunchSpec) -> list[tuple[str, str, bool]]:
    """Source, target, and whether it is read-only."""
    found = []
    for text in dict.fromkeys([*spec.claims, *spec.mounts, *find_profile(spec.profile).mounts]):
        source, target, *mode = text.split(":")
        found.append((source, target, mode == ["ro"]))
    return found


def _is_mounted(spec: LaunchSpec, path: str) -> bool:
    return any(Path(path).is_relative_to(target) for _, target, _ in _mounts(spec))


def _without(nodes: list[str]) -> k8s.NodeAffinity | None:
    if not nodes:
        return None
    term = k8s.NodeSelectorTerm(match_expressions=[k8s.Expression(key="kubernetes.io/hostname", values=nodes)])
    return k8s.NodeAffinity(
        required_during_scheduling_ignored_during_execution=k8s.NodeSelector(node_selector_terms=[term])
    )


def _image(spec: LaunchSpec) -> str:
    """A registry name that means the same image on every node and every day."""
    image = spec.image or ""
    if not image or image.startswith("/") or "#" in image or "://" in image:
        raise ConfigError("pods need --image with a registry's name, such as registry.example/ingot:0.1.0@sha256:...")
    check_pinned(image)
    return image


def check_manifest(text: str) -> list[k8s.Object]:
    """Read a manifest back, and make sure of what a run relies on; gives its objects."""
    objects = k8s.from_text(text)
    by_kind = {each.kind: each for each in objects}
    secret = by_kind.get("Secret")
    if not isinstance(secret, k8s.Secret) or SPEC not in secret.string_data:
        raise ConfigError(f"the manifest has no Secret with {SPEC} in it")
    try:
        spec = make_spec(json.loads(secret.string_data[SPEC]))
    except ValueError as error:
        raise ConfigError(f"{SPEC} of the manifest is no JSON: {error}") from None
    problems = []
    for variable, value in os.environ.items():
        if redact(text, {variable: value}) != text:
            problems.append(f"it has the value of {variable} in it; pass that by name, with --secret {variable}")
    if any(IN_URL.search(value) for value in secret.string_data.values()):
        problems.append("it has an address with a password or a signature in it; credentials come by --secret")
    if (size := sum(len(value.encode()) for value in secret.string_data.values())) > LARGEST_SECRET:
        problems.append(f"spec and config files have {size:,} bytes; {LARGEST_SECRET:,} fit into a Secret")
    pods, nodes = _pods_of(by_kind)
    if not pods:
        problems.append("it has no JobSet, no TrainJob with its TrainingRuntime, and no PyTorchJob")
    if nodes != spec.nodes:
        problems.append(f"it has {nodes} pods, and the spec {spec.nodes} nodes")
    for pod in pods:
        problems += _pod_problems(pod, spec, objects[0].metadata.name)
    if problems:
        raise ConfigError(f"the manifest of {spec.name} cannot be right: {'; '.join(dict.fromkeys(problems))}")
    return objects


def _pods_of(by_kind: Mapping[str, k8s.Object]) -> tuple[list[k8s.PodSpec], int]:
    """The pods that a manifest describes, and how many there will be."""
    job = next((by_kind[kind] for kind in ("JobSet", "TrainJob", "PyTorchJob") if kind in by_kind), None)
    if isinstance(job, k8s.PyTorchJob):
        replicas = job.spec.pytorch_replica_specs
        count = sum(replica.replicas for replica in replicas.values()) if replicas.get("Master") else 0
        return [replica.template.spec for replica in replicas.values()], count
    runtime = by_kind.get("TrainingRuntime")
    if isinstance(job, k8s.TrainJob) and isinstance(runtime, k8s.TrainingRuntime):
        if job.spec.runtime_ref.name != runtime.metadata.name:
            return [], 0
        return [_job(runtime.spec.template.spec).template.spec], job.spec.trainer.num_nodes
    if isinstance(job, k8s.JobSet):
        one = _job(job.spec)
        return [one.template.spec], one.completions if one.completions and one.completions == one.parallelism else 0
    return [], 0


def _job(spec: k8s.JobSetSpec) -> k8s.JobSpec:
    return spec.replicated_jobs[0].template.spec


def _pod_problems(pod: k8s.PodSpec, spec: LaunchSpec, name: str | None) -> list[str]:
    problems, container = [], pod.containers[0]
    env = {variable.name: variable for variable in container.env}
    if pod.termination_grace_period_seconds < spec.signal_seconds:
        problems.append(f"pods are killed after {pod.termination_grace_period_seconds} s, before a save is done")
    if [port.container_port for port in container.ports] != [PORT]:
        problems.append(f"the port is not {PORT}")
    if container.name != PYTORCH:
        if "MASTER_PORT" not in env or env["MASTER_PORT"].value != str(PORT):
            problems.append(f"MASTER_PORT is not {PORT}")
        if "MASTER_ADDR" not in env or env["MASTER_ADDR"].value != f"{name}-{NODE}-0-0.{name}":
            problems.append("MASTER_ADDR is not the first pod")
    gpus = container.resources.limits.get("nvidia.com/gpu", 0) if container.resources else 0
    if gpus != spec.gpus_per_node:
        problems.append(f"pods get {gpus} GPUs, and the spec wants {spec.gpus_per_node}")
    targets = {mount.mount_path for mount in container.volume_mounts}
    if {mount.name for mount in container.volume_mounts} != {volume.name for volume in pod.volumes}:
        problems.append("its volumes and their mounts do not match")
    if len(targets) != len(container.volume_mounts) or not {FOLDER, "/dev/shm"} <= targets:  # noqa: S108
        problems.append(f"{FOLDER}, /dev/shm and each target must be mounted, once")
    kept = [mount.mount_path for mount in container.volume_mounts if mount.name.startswith("mount-")
            and not mount.read_only]  # fmt: skip
    if not any(Path(spec.run_folder).is_relative_to(target) for target in kept):
        problems.append(
            f"the run folder {spec.run_folder} would be lost with its pod; mount a volume, such as --mounts "
            "CLAIM:/data, and set save_folder=/data/..."
        )
    for secret in spec.secrets:
        source = env[secret].value_from if secret in env else None
        if source is None or source.secret_key_ref is None:
            problems.append(f"{secret} must come by secretKeyRef")
    return problems


def apply(text: str) -> str:
    """Hand a manifest to the cluster that kubectl is set up for; gives what kubectl says."""
    return _ask(["apply", "-f", "-"], text)


def object_state(namespace: str, kind: str, name: str) -> str:
    """The state of a run's object in Slurm's words; empty if the cluster does not know it."""
    found = _ask(["--namespace", namespace, "get", kind, name, "--ignore-not-found", "--output=json"])
    return state_of(json.loads(found).get("status", {})) if found else ""


def state_of(status: Mapping[str, Any]) -> str:
    """What the status of a JobSet, a TrainJob or a PyTorchJob comes to."""
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
    """Remove a run's objects."""
    kinds = ",".join([kind, "secret", "networkpolicy", *(["trainingruntime"] if kind == "trainjob" else [])])
    _ask(["--namespace", namespace, "delete", kinds, "--selector", f"{INSTANCE}={name}", "--wait=false"])


def _ask(arguments: Sequence[str], text: str | None = None) -> str:
    """What kubectl says; an error is one sentence."""
    if shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on this machine; run this, or hand the manifest over, where it is")
    try:
        done = subprocess.run(["kubectl", *arguments], input=text, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        raise KubernetesError("kubectl gave no answer within two minutes: can the cluster be reached?") from None
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        hint = "; its controller is not installed there: try another --kind" if "no matches for kind" in reason else ""
        raise KubernetesError(f"kubectl refused: {reason}{hint}")
    return done.stdout.strip()
