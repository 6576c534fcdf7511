"""Manifests against the published schemas: Kubernetes' own (kubernetes-validate, strict, so that a field which does not
exist is an error), and for JobSet, TrainJob and TrainingRuntime the models that Kubeflow generates from the schemas of
their custom resources (kubeflow-trainer-api, Apache-2.0). A PyTorchJob's own fields are in kubernetes_fields.yaml."""

from copy import deepcopy
from typing import Any

import pytest
from manifests import documents, find_dicts
from specs import LAUNCH, spec

from ingot.launch.kubernetes.objects import KINDS, Kind, render

kubernetes_validate = pytest.importorskip("kubernetes_validate")
models = pytest.importorskip("kubeflow_trainer_api.models")

VERSIONS = ("1.31", "1.37")  # podFailurePolicy is stable since the first
MODELS = {"JobSet": "JobsetV1alpha2JobSet", "TrainJob": "TrainerV1alpha1TrainJob",
          "TrainingRuntime": "TrainerV1alpha1TrainingRuntime"}  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {"profile": "aws-p5", "gpus_per_node": 8, "queue": "research", "exclude": ["n1"], "secrets": ["HF_TOKEN"], "secret_name": "hub"},
    {"nodes": 1, "cpus_per_task": 4, "restarts": 0, "mounts": ["/nvme:/cache:ro"]},
]  # fmt: skip


def schema_problems(text: str) -> list[str]:
    """What the schemas do not allow."""
    found = []
    for kind, document in documents(text).items():
        if kind in MODELS:
            known = getattr(models, MODELS[kind]).from_dict(deepcopy(document)).to_dict()
            found += [f"{kind}{where}" for where in _lost(document, known)]
        for part in _parts(kind, document):
            for version in VERSIONS:
                try:
                    kubernetes_validate.validate(part, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    found.append(f"{kind}: {error}")
    return found


def _parts(kind: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of Kubernetes that a custom resource contains."""
    if kind not in (*MODELS, "PyTorchJob"):
        return [document]
    name = {"metadata": {"name": "part"}}
    pods = [{"apiVersion": "v1", "kind": "Pod", **name, "spec": each["template"]["spec"]}
            for each in find_dicts(document, "template") if "containers" in each["template"].get("spec", {})]  # fmt: skip
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", **name, "spec": each} for each in find_dicts(document, "backoffLimit")
            if "template" in each]  # fmt: skip
    return [*pods, *jobs]


def _lost(ours: Any, known: Any, where: str = "") -> list[str]:
    """What of a document a model does not know; it may add defaults."""
    if isinstance(ours, dict) and isinstance(known, dict):
        return [lost for key, value in ours.items()
                for lost in ([f"{where}.{key}"] if key not in known else _lost(value, known[key], f"{where}.{key}"))]  # fmt: skip
    if isinstance(ours, list) and isinstance(known, list) and len(ours) == len(known):
        return [
            lost
            for number, pair in enumerate(zip(ours, known, strict=True))
            for lost in _lost(*pair, f"{where}[{number}]")
        ]
    return [] if ours == known else [where]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", CHANGES)
def test_every_manifest_follows_the_published_schemas(kind: Kind, changes: dict[str, Any]) -> None:
    text = render(spec(**changes), kind, LAUNCH)
    assert schema_problems(text) == []
    assert _parts(
        kind, documents(text)[{"jobset": "JobSet", "trainjob": "TrainingRuntime", "pytorchjob": "PyTorchJob"}[kind]]
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("maxRestarts:", "maxRestart:", "JobSet.spec.failurePolicy.maxRestart"),
        ("enableDNSHostnames:", "enableDnsHostnames:", "JobSet.spec.network.enableDnsHostnames"),
        ("backoffLimit:", "backOffLimit:", "backOffLimit"),
        ("terminationGracePeriodSeconds: 180", 'terminationGracePeriodSeconds: "180"', "terminationGracePeriodSeconds"),
        ("podSelector:", "podsSelector:", "NetworkPolicy: "),
        ("stringData:", "stringdata:", "Secret: "),
        ("topologyKey:", "topology:", "topology"),
    ],
)
def test_the_schemas_find_what_is_wrong(old: str, new: str, problem: str) -> None:
    text = render(spec(), "jobset", LAUNCH)
    assert old in text
    try:
        found = "; ".join(schema_problems(text.replace(old, new)))
    except ValueError as error:  # the models refuse a wrong type at once
        found = str(error)
    assert problem in found
