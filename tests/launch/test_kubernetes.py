"""Manifests contain what a run relies on, and wrong runs are refused; what runs in pods is in test_pods.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manifests import documents, manifest_problems, pods
from specs import LAUNCH, put_on_path, spec

from ingot.errors import ConfigError
from ingot.launch.kubernetes.kubectl import apply
from ingot.launch.kubernetes.objects import KINDS, Kind, adapt_to_pods, object_name, render
from ingot.launch.programs import ProgramError
from ingot.launch.spec import make_spec

GPU = {"profile": "aws-p5", "gpus_per_node": 8}


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_gets_its_devices_shared_memory_time_to_save_and_a_node_of_its_own(kind: Kind) -> None:
    text = render(spec(**GPU, signal_seconds=400), kind, LAUNCH)
    assert pods(text)
    for pod in pods(text):
        container = pod["containers"][0]
        assert container["resources"]["limits"] == {"vpc.amazonaws.com/efa": 32, "nvidia.com/gpu": 8}
        assert container["command"][1:5] == [
            "-m",
            "ingot.launch.kubernetes.pod_agent",
            "--spec",
            "/etc/ingot/spec.json",
        ]
        assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
        assert container["securityContext"]["privileged"] is False
        assert pod["terminationGracePeriodSeconds"] == 400
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod["volumes"]
        term = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
        assert term["topologyKey"] == "kubernetes.io/hostname"


def test_a_jobset_replaces_all_pods_but_not_after_a_users_error() -> None:
    body = documents(render(spec(restarts=7), "jobset", LAUNCH))["JobSet"]["spec"]
    job = body["replicatedJobs"][0]["template"]["spec"]
    assert body["failurePolicy"]["maxRestarts"] == 7
    assert body["failurePolicy"]["rules"][0] == {
        "name": "wouldFailAgain", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"],
    }  # fmt: skip
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3]
    assert (job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 0)


def test_a_pytorchjob_has_one_master_and_the_other_nodes_as_workers() -> None:
    replicas = documents(render(spec(nodes=4), "pytorchjob", LAUNCH))["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 3}
    assert all(replica["restartPolicy"] == "ExitCode" for replica in replicas.values())
    alone = documents(render(spec(nodes=1), "pytorchjob", LAUNCH))["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert list(alone) == ["Master"]


def test_queue_excluded_nodes_and_mounts_reach_the_cluster() -> None:
    text = render(spec(queue="research", exclude=["n1"], mounts=["/nvme:/cache:ro"]), "jobset", LAUNCH)
    assert documents(text)["JobSet"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    (pod,) = pods(text)
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"] == [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1"]}]
    assert {"name": "mount-0", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]
    assert {"name": "mount-1", "hostPath": {"path": "/nvme"}} in pod["volumes"]
    assert {"name": "mount-1", "mountPath": "/cache", "readOnly": True} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_travel_only_by_reference(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    text = render(spec(secrets=["HF_TOKEN"], secret_name="hub"), kind, LAUNCH)
    assert "hf_0123456789" not in text
    reference = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}}
    assert all(reference in pod["containers"][0]["env"] for pod in pods(text))
    with pytest.raises(ConfigError, match="--secret-name"):
        render(spec(secrets=["HF_TOKEN"]), kind, LAUNCH)
    with pytest.raises(ConfigError, match="value of HF_TOKEN"):
        render(spec(arguments=["--", "mpt-125m", "data=hf_0123456789"]), kind, LAUNCH)
    for secret in ("hf_0123456789", "x" * 6):
        with pytest.raises(ConfigError, match="use --secret HF_TOKEN"):
            spec(env={"HF_TOKEN": secret})
    assert spec(env={"HF_TOKEN": "x" * 5}).env  # too short to be one


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image": None}, "pods need --image"),
        ({"image": "/apps/ingot.sqsh"}, "pods need --image"),
        ({"image": "registry.example:5000/ingot"}, "different one tomorrow"),
        ({"image": "registry.example/ingot:latest"}, "different one tomorrow"),
        ({"claims": []}, "lost with its pod"),
        ({"claims": ["shared:/data:ro"]}, "lost with its pod"),
        ({"claims": ["shared:/data", "other:/data"]}, "once"),
        ({"claims": ["shared:/data", "other:/dev/shm"]}, "/dev/shm must be mounted only once"),
        ({"arguments": ["x" * 250_000]}, "fit into a Secret"),
        ({"arguments": ["--", "mpt-125m", "data=s3://user:password@host/c4"]}, "URL with a password"),
    ],
)
def test_a_run_that_could_not_work_in_pods_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        render(spec(**changes), "jobset", LAUNCH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        GPU,
        {"nodes": 1, "cpus_per_task": 4},
        {"exclude": ["n1", "1e3"], "mounts": ["/nvme:/cache:ro"], "queue": "research"},
        {"secrets": ["HF_TOKEN"], "secret_name": "hub", "restarts": 0, "signal_seconds": 600},
    ],
)
def test_every_manifest_has_the_fields_of_kubernetes_and_what_a_run_relies_on(
    kind: Kind, changes: dict[str, Any]
) -> None:
    assert manifest_problems(render(spec(**changes), kind, LAUNCH)) == []


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("completions: 2", "completions: 3", "0 pods for 2 nodes"),
        ("completions: 2\n        parallelism: 2", "completions: 3\n        parallelism: 3", "3 pods"),
        ("terminationGracePeriodSeconds: 180", "terminationGracePeriodSeconds: 30", "before a save"),
        ("containerPort: 61000", "containerPort: 29500", "port is not 61000"),
        ('value: "61000"', 'value: "29500"', "MASTER_PORT"),
        ("golden-0abc12-node-0-0.golden-0abc12", "localhost", "MASTER_ADDR"),
        ("mountPath: /dev/shm", "mountPath: /tmp/shm", "/dev/shm"),
        ("- name: mount-0\n              persistent", "- name: mount-9\n              persistent", "do not match"),
        ("privileged: false", "privileged: true", "privileged"),
        (
            "nvidia.com/gpu: 8\n                requests",
            "nvidia.com/gpu: 4\n                requests",
            "requests and limits",
        ),
        ("backoffLimit: 0", "backOffLimit: 0", "backOffLimit is not a field"),
        ("topologyKey:", "topology:", "topologyKey is missing"),
        ("maxRestarts: 10", 'maxRestarts: "10"', "maxRestarts is not integer"),
        ("operator: In", "operator: Within", "operator is not one of In|NotIn"),
        ("restartPolicy: Never", "restartPolicy: Always", "restartPolicy"),
        ("kind: JobSet", "kind: Pod", "Pod is not a known kind"),
        ("enableDNSHostnames: true", "enableDNSHostnames: false", "enableDNSHostnames"),
    ],
)
def test_the_check_of_manifests_finds_what_is_wrong(old: str, new: str, reason: str) -> None:
    text = render(spec(**GPU), "jobset", LAUNCH)
    assert old in text
    changed = text.replace(old, new, 1) if "\n" in old or "kind" in old else text.replace(old, new)
    assert reason in "; ".join(manifest_problems(changed))


@pytest.mark.parametrize("kind", KINDS)
def test_pods_know_each_other_by_a_token_that_is_new_for_each_launch_and_in_no_file(kind: Kind) -> None:
    texts = [render(spec(), kind, LAUNCH, {"my.yaml": "{}"}) for _ in range(2)]
    tokens = {documents(text)["Secret"]["stringData"]["token"] for text in texts}
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)
    reference = {"secretKeyRef": {"name": "golden-0abc12", "key": "token"}}
    for pod in pods(texts[0]):
        assert {"name": "INGOT_JOB_TOKEN", "valueFrom": reference} in pod["containers"][0]["env"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "spec"]
        assert [item["key"] for item in volume["secret"]["items"]] == ["spec.json", "my.yaml"]
        assert texts[0].count(documents(texts[0])["Secret"]["stringData"]["token"]) == 1


def test_names_become_what_kubernetes_allows() -> None:
    assert object_name(spec(name="30B_run.Final"), LAUNCH) == "run-30b-run-final-0abc12"
    long = object_name(spec(name="a" * 63), LAUNCH)
    assert len(f"{long}-node-0-99999-abcde") <= 63


def test_config_files_that_pods_cannot_see_travel_with_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "# ünïcode\n  model:\n    d_model: 32   \n\n'quoted': \"$(HOME)\"\r\n"
    (tmp_path / "my.yaml").write_bytes(content.encode())
    monkeypatch.chdir(tmp_path)
    placed, files = adapt_to_pods(spec(arguments=["--", "my.yaml", "data=/data/c4"], workdir=str(tmp_path)))
    assert placed.arguments == ["--", "/etc/ingot/my.yaml", "data=/data/c4"]
    assert placed.workdir == placed.run_folder  # the folder of the command is not in the pod
    secret = documents(render(placed, "jobset", LAUNCH, files))["Secret"]["stringData"]
    assert secret["my.yaml"] == content
    assert make_spec(json.loads(secret["spec.json"])) == placed
    (tmp_path / "spec.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be unique"):
        adapt_to_pods(spec(arguments=["spec.json"]))


def test_apply_hands_the_manifest_to_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(spec(), "jobset", LAUNCH)
    seen = tmp_path / "stdin"
    body = f"open({str(seen)!r}, 'w').write(sys.stdin.read()); print('jobset created')"
    calls = put_on_path(monkeypatch, tmp_path / "bin", "kubectl", body)
    assert apply(text) == "jobset created"
    assert json.loads(calls.read_text()) == ["apply", "-f", "-"]
    assert seen.read_text() == text


def test_apply_says_why_it_did_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = 'sys.exit(\'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\')'
    put_on_path(monkeypatch, tmp_path / "bin", "kubectl", refusal)
    with pytest.raises(ProgramError, match=r"no matches for kind.*try another --kind"):
        apply("")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="kubectl is not on this machine"):
        apply("")


def test_the_command_prints_a_manifest_that_passes_the_check(tmp_path: Path, ingot: Callable[..., Any]) -> None:
    done = ingot(
        "launch", "kubernetes", "mpt-125m", "data=/data/c4", "save_folder=/data/run", "-N", "2", "--profile", "aws-p5",
        "-i", "registry.example/ingot:0.1.0", "-m", "shared:/data,/nvme:/cache", "--kind", "trainjob",
    )  # fmt: skip
    assert set(documents(done.stdout)) == {"Secret", "NetworkPolicy", "TrainingRuntime", "TrainJob"}
    assert manifest_problems(done.stdout) == []
    refused = ingot("launch", "kubernetes", "mpt-125m", "data=/data/c4", "--profile", "cpu", "-i", "a/b:1", check=False)
    assert refused.returncode == 2
    assert "would be lost with its pod" in refused.stderr
