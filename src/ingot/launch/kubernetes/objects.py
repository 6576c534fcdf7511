"""Kubernetes objects as types: exactly the fields that a run needs, with what the published schemas require of them.

Typed objects instead of a text template: a user's value can become a wrong value, but never a key, a document or a
command. The same types read a manifest back, so that a misspelt or missing field is found before a cluster sees it.
"""

from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from ingot.errors import ConfigError

DnsLabel = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Port = Annotated[int, Field(ge=1024, le=65_535)]
Count = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    """A part of an object; Kubernetes writes its fields in camel case."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)


class Metadata(Part):
    name: DnsLabel | None = None
    namespace: str | None = None
    labels: dict[str, str] | None = None


class Object(Part):
    """A document of a manifest."""

    api_version: str
    kind: str
    metadata: Metadata

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not self.metadata.name:
            raise ValueError("metadata.name is required")
        return self


class Secret(Object):
    api_version: Literal["v1"] = "v1"
    kind: Literal["Secret"] = "Secret"
    type: Literal["Opaque"] = "Opaque"
    immutable: bool = True
    string_data: dict[Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$")], str]


class KeyRef(Part):
    name: str
    key: str


class FieldRef(Part):
    field_path: str


class EnvSource(Part):
    secret_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


class EnvVar(Part):
    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class ContainerPort(Part):
    name: str
    container_port: Port


class Mount(Part):
    name: str
    mount_path: Annotated[str, Field(pattern="^/")]
    read_only: bool | None = None


class Resources(Part):
    limits: dict[str, Count]
    requests: dict[str, Count]

    @model_validator(mode="after")
    def _equal(self) -> Self:
        if self.limits != self.requests:
            raise ValueError("requests and limits differ, so the pod could lose its node to others")
        return self


class Capabilities(Part):
    add: list[str] | None = None
    drop: list[str] | None = None


class Seccomp(Part):
    type: Literal["RuntimeDefault"] = "RuntimeDefault"


class ContainerSecurity(Part):
    privileged: Literal[False] = False
    allow_privilege_escalation: Literal[False] = False
    capabilities: Capabilities
    seccomp_profile: Seccomp = Seccomp()


class Container(Part):
    name: str
    image: Annotated[str, Field(min_length=1)]
    command: Annotated[list[str], Field(min_length=1)]
    env: list[EnvVar]
    ports: list[ContainerPort]
    resources: Resources | None = None
    volume_mounts: list[Mount]
    security_context: ContainerSecurity


class EmptyDir(Part):
    medium: Literal["Memory"] = "Memory"
    size_limit: str


class ClaimSource(Part):
    claim_name: str
    read_only: bool | None = None


class HostPath(Part):
    path: Annotated[str, Field(pattern="^/")]


class SecretSource(Part):
    secret_name: str


class Volume(Part):
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: ClaimSource | None = None
    host_path: HostPath | None = None
    secret: SecretSource | None = None


class Expression(Part):
    key: str
    operator: Literal["NotIn"] = "NotIn"
    values: list[str]


class NodeSelectorTerm(Part):
    match_expressions: list[Expression]


class NodeSelector(Part):
    node_selector_terms: list[NodeSelectorTerm]


class NodeAffinity(Part):
    required_during_scheduling_ignored_during_execution: NodeSelector


class LabelSelector(Part):
    match_labels: dict[str, str]


class PodAffinityTerm(Part):
    label_selector: LabelSelector
    topology_key: str


class PodAntiAffinity(Part):
    required_during_scheduling_ignored_during_execution: list[PodAffinityTerm]


class Affinity(Part):
    node_affinity: NodeAffinity | None = None
    pod_anti_affinity: PodAntiAffinity


class Toleration(Part):
    key: str
    operator: Literal["Exists"] = "Exists"
    effect: Literal["NoSchedule"] = "NoSchedule"


class PodSpec(Part):
    restart_policy: Literal["Never"] | None = "Never"
    termination_grace_period_seconds: Count
    automount_service_account_token: Literal[False] = False
    enable_service_links: Literal[False] = False
    affinity: Affinity
    tolerations: list[Toleration] | None = None
    containers: Annotated[list[Container], Field(min_length=1, max_length=1)]
    volumes: list[Volume]


class PodTemplate(Part):
    metadata: Metadata
    spec: PodSpec


class ExitCodes(Part):
    container_name: str
    operator: Literal["In"] = "In"
    values: list[int]


class PodFailureRule(Part):
    action: Literal["FailJob"] = "FailJob"
    on_exit_codes: ExitCodes


class PodFailurePolicy(Part):
    rules: list[PodFailureRule]


class JobSpec(Part):
    completion_mode: Literal["Indexed"] = "Indexed"
    completions: Count | None = None
    parallelism: Count | None = None
    backoff_limit: Literal[0] = 0
    pod_failure_policy: PodFailurePolicy
    template: PodTemplate


class JobTemplate(Part):
    metadata: Metadata | None = None
    spec: JobSpec


class ReplicatedJob(Part):
    name: DnsLabel
    replicas: Literal[1] = 1
    template: JobTemplate


class Network(Part):
    enable_dns_hostnames: Annotated[Literal[True], Field(alias="enableDNSHostnames")] = True
    publish_not_ready_addresses: Literal[True] = True


class FailureRule(Part):
    name: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    action: Literal["FailJobSet"] = "FailJobSet"
    on_job_failure_reasons: list[str]


class FailurePolicy(Part):
    max_restarts: Annotated[int, Field(ge=0)]
    rules: list[FailureRule]


class JobSetSpec(Part):
    network: Network = Network()
    failure_policy: FailurePolicy
    replicated_jobs: Annotated[list[ReplicatedJob], Field(min_length=1)]


class JobSet(Object):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"] = "jobset.x-k8s.io/v1alpha2"
    kind: Literal["JobSet"] = "JobSet"
    spec: JobSetSpec


class MlPolicy(Part):
    num_nodes: Count


class JobSetTemplate(Part):
    spec: JobSetSpec


class TrainingRuntimeSpec(Part):
    ml_policy: MlPolicy
    template: JobSetTemplate


class TrainingRuntime(Object):
    api_version: Literal["trainer.kubeflow.org/v1alpha1"] = "trainer.kubeflow.org/v1alpha1"
    kind: Literal["TrainingRuntime"] = "TrainingRuntime"
    spec: TrainingRuntimeSpec


class RuntimeRef(Part):
    api_group: Literal["trainer.kubeflow.org"] = "trainer.kubeflow.org"
    kind: Literal["TrainingRuntime"] = "TrainingRuntime"
    name: DnsLabel


class Trainer(Part):
    num_nodes: Count


class TrainJobSpec(Part):
    runtime_ref: RuntimeRef
    trainer: Trainer


class TrainJob(Object):
    api_version: Literal["trainer.kubeflow.org/v1alpha1"] = "trainer.kubeflow.org/v1alpha1"
    kind: Literal["TrainJob"] = "TrainJob"
    spec: TrainJobSpec


class SchedulingPolicy(Part):
    min_available: Count


class RunPolicy(Part):
    clean_pod_policy: Literal["Running"] = "Running"
    backoff_limit: Annotated[int, Field(ge=0)]
    scheduling_policy: SchedulingPolicy


class ReplicaSpec(Part):
    replicas: Count
    restart_policy: Literal["ExitCode"] = "ExitCode"
    template: PodTemplate


class PyTorchJobSpec(Part):
    run_policy: RunPolicy
    pytorch_replica_specs: dict[Literal["Master", "Worker"], ReplicaSpec]


class PyTorchJob(Object):
    api_version: Literal["kubeflow.org/v1"] = "kubeflow.org/v1"
    kind: Literal["PyTorchJob"] = "PyTorchJob"
    spec: PyTorchJobSpec


class Peer(Part):
    pod_selector: LabelSelector


class Ingress(Part):
    from_: Annotated[list[Peer], Field(alias="from")]


class NetworkPolicySpec(Part):
    pod_selector: LabelSelector
    policy_types: list[Literal["Ingress"]]
    ingress: list[Ingress]


class NetworkPolicy(Object):
    api_version: Literal["networking.k8s.io/v1"] = "networking.k8s.io/v1"
    kind: Literal["NetworkPolicy"] = "NetworkPolicy"
    spec: NetworkPolicySpec


KINDS: dict[str, type[Object]] = {
    kind.__name__: kind for kind in (Secret, NetworkPolicy, JobSet, TrainingRuntime, TrainJob, PyTorchJob)
}


class _Dumper(yaml.SafeDumper):
    """Quotes whatever another YAML reader could take for a number or a boolean (Go reads `1e3` and `y` as such)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = len(value) > 1 and (value[0].isalpha() or value[0] == "/")
    style = "|" if "\n" in value else None if plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def to_text(objects: list[Object]) -> str:
    """A manifest."""
    content = [each.model_dump(by_alias=True, exclude_none=True) for each in objects]
    return yaml.dump_all(content, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=120)


def from_text(text: str) -> list[Object]:
    """The objects of a manifest; an error names the object and the field."""
    objects = []
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"the manifest is no YAML: {' '.join(str(error).split())}") from None
    for number, document in enumerate(documents, 1):
        kind = document.get("kind") if isinstance(document, dict) else None
        if kind not in KINDS:
            raise ConfigError(f"document {number} of the manifest is a {kind}, not one of {', '.join(KINDS)}")
        try:
            objects.append(KINDS[kind].model_validate(document))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, (kind, *first["loc"])))
            raise ConfigError(f"the manifest is wrong at {where}: {first['msg']}") from None
    return objects
