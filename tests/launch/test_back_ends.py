"""status, logs, stop and resume go by the run folder or a job's id, whatever the run was launched on; Slurm's own tests
are in test_slurm.py."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from specs import put_on_path

from ingot.launch.kubernetes.kubectl import state_of
from ingot.launch.monitor.job_states import JobState, is_living, job_states
from ingot.launch.monitor.status import Status, read_status
from ingot.launch.protocol import LaunchFolder
from ingot.launch.spec import read_spec
from ingot.launch.supervisor.progress import newest_checkpoint, pieces_done

# answers `get` with the file `object`, keeps what is applied in `applied`
KUBECTL = """
from pathlib import Path
here = Path({folder!r})
if "get" in sys.argv:
    print((here / "object").read_text() if (here / "object").exists() else "")
elif "apply" in sys.argv:
    (here / "applied").write_text(sys.stdin.read())
    print("applied")
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of kubectl."""
    return put_on_path(monkeypatch, tmp_path / "bin", "kubectl", KUBECTL.format(folder=str(tmp_path)))


def called(calls: Path) -> list[str]:
    return json.loads(calls.read_text().splitlines()[-1])


def test_a_run_on_kubernetes_has_a_status_is_ended_and_launched_again(
    kubectl: Path, tmp_path: Path, ingot: Callable[..., Any]
) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (tmp_path / "own.yaml").write_text("max_duration: 3ba\n")
    ingot("launch", "kubernetes", "mpt-125m", "own.yaml", "data=/data/c4", f"save_folder={run}", "--profile", "cpu", "-N",
          "2", "-i", "a/b:1", "-m", f"shared:{tmp_path / 'runs'}", "--namespace", "team", "--apply")  # fmt: skip
    (job,) = LaunchFolder(run).jobs()
    assert job.back_end == "kubernetes/team/jobset"
    assert "state: not running" in ingot("status", str(run)).stdout  # the cluster does not know it
    (tmp_path / "object").write_text(
        json.dumps({"metadata": {"name": job.id}, "status": {"replicatedJobsStatus": [{"active": 1}]}})
    )
    for name in (str(run), job.id):
        said = ingot("status", name).stdout
        assert "state: starting" in said and f"job {job.id} (attempts {job.id[-6:]}.*): RUNNING" in said
    assert called(kubectl) == ["--namespace", "team", "get", "jobset", job.id, "--ignore-not-found", "--output=json"]
    again = ingot("launch", "resume", str(run), check=False)
    assert again.returncode == 2 and "already has a job" in again.stderr
    assert f"stop it first with `ingot stop {run}`, which saves" in again.stderr

    assert "asked" in ingot("stop", str(run)).stdout and (run / "STOP").exists()
    assert "delete" not in kubectl.read_text()
    assert f"ended job {job.id}" in ingot("stop", "--now", job.id).stdout
    assert called(kubectl)[2:] == [
        "delete", "jobset,secret,networkpolicy", "--selector", f"app.kubernetes.io/instance={job.id}", "--wait=false",
    ]  # fmt: skip
    (tmp_path / "object").unlink()
    for line in ("machine", "machine"):
        with (run / "failures.jsonl").open("a") as file:
            file.write(json.dumps({"kind": line, "host": "n7", "message": "gone", "time": "", "attempt": "a.0.1", "rank": 0,
                                   "batch": 1, "progress": False}) + "\n")  # fmt: skip
    printed = ingot("launch", "resume", str(run), "--dry-run").stdout
    assert next(yaml.safe_load_all(printed))["stringData"]["own.yaml"] == "max_duration: 3ba\n"
    ingot("launch", "resume", str(run))
    documents = list(yaml.safe_load_all((tmp_path / "applied").read_text()))
    assert documents[0]["stringData"]["own.yaml"] == "max_duration: 3ba\n"  # it travels again
    assert "n7" in json.loads(documents[0]["stringData"]["spec.json"])["exclude"]
    assert [each.id == job.id for each in LaunchFolder(run).jobs()] == [True, False]


def test_a_cluster_that_does_not_answer_leaves_the_state_unknown_and_nothing_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    LaunchFolder(run).add_job("kubernetes/team/trainjob", "mine-0abc12")
    put_on_path(monkeypatch, tmp_path / "bin", "kubectl", "sys.exit('connection refused')")
    assert "state: unknown" in ingot("status", str(run)).stdout
    assert "does not answer, so job mine-0abc12 was not ended" in ingot("stop", "--now", str(run)).stdout


@pytest.mark.parametrize(("verb", "shown"), [("train", True), ("prepare", False)])
def test_only_a_run_that_trains_is_said_to_have_checkpoints(verb: str, shown: bool) -> None:
    assert ("no checkpoint yet" in Status("running", verb=verb).lines()) == shown
    assert ("last checkpoint: batch 7" in Status("running", verb=verb, checkpoint=7).lines()) == shown


def test_a_preparation_that_ends_while_its_journals_are_read_is_not_an_error(tmp_path: Path) -> None:
    work = tmp_path / ".train.partial"
    work.mkdir()
    (work / "journal-0.jsonl").write_text('{"task": "tokenize"}\n{"task": "write"}\n')
    assert pieces_done(tmp_path / "run") == 1
    (work / "journal-0.jsonl").unlink()
    (work / "journal-0.jsonl").symlink_to("gone")  # as listed, and gone when it is read
    assert pieces_done(tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "PENDING"),
        ({"conditions": [{"type": "Suspended", "status": "True"}]}, "PENDING"),
        ({"conditions": [{"type": "Suspended", "status": "False"}], "replicatedJobsStatus": [{"ready": 2}]}, "RUNNING"),
        ({"jobsStatus": [{"active": 1}]}, "RUNNING"),
        ({"conditions": [{"type": "Created", "status": "True"}, {"type": "Running", "status": "True"}]}, "RUNNING"),
        (
            {"conditions": [{"type": "Running", "status": "False"}, {"type": "Succeeded", "status": "True"}]},
            "COMPLETED",
        ),
        ({"conditions": [{"type": "Completed", "status": "True"}]}, "COMPLETED"),
        ({"conditions": [{"type": "Failed", "status": "True"}], "replicatedJobsStatus": [{"active": 1}]}, "FAILED"),
    ],
)
def test_the_state_of_each_kind_of_object_is_understood(status: dict[str, Any], state: str) -> None:
    assert state_of(status) == state


def test_a_local_run_is_stopped_now_and_launched_again(
    tiny: list[str], tmp_path: Path, ingot: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    options = ["max_duration=3000ba", "save_interval=10ba", "--profile", "cpu", "--gpus-per-node", "0"]
    command = [sys.executable, "-m", "ingot.cli.main", "launch", "local", *tiny, *options]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not list((run / "checkpoints").glob("*/manifest.json")):
            assert launcher.poll() is None
            time.sleep(0.02)
        assert f"ended job {launcher.pid}" in ingot("stop", "--now", str(run)).stdout
        assert launcher.wait(30) == -signal.SIGKILL
    finally:
        launcher.kill()
        launcher.wait()
    (run / "STOP").unlink()
    for flags in (["--now"], []):  # there is nothing left to stop, and nothing that a later start would obey
        said = ingot("stop", *flags, str(run)).stdout
        assert f"{run} is not running, so there is nothing to stop; `ingot launch resume {run}` continues it" in said
    assert not (run / "STOP").exists()
    spec = read_spec(run / "launch" / "spec.json")
    path = run / "launch" / "spec.json"
    more = f"max_duration={newest_checkpoint(run) + 3}ba"
    path.write_text(spec.model_copy(update={"arguments": [*spec.arguments, more]}).model_dump_json())
    ingot("launch", "resume", str(run))
    assert "state: finished" in ingot("status", str(run)).stdout
    assert [job.back_end for job in LaunchFolder(run).jobs()] == ["local", "local"]


def test_a_slurm_that_says_nothing_leaves_the_state_unknown_and_nothing_is_done(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot: Callable[..., Any]
) -> None:
    """F35: squeue may come back empty while slurmctld is busy; a job that Slurm has forgotten is another answer."""
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    LaunchFolder(run).add_job("slurm", "42")
    calls = {name: put_on_path(monkeypatch, tmp_path / "bin", name) for name in ("squeue", "sbatch", "scancel")}
    assert "state: unknown" in ingot("status", str(run)).stdout
    assert "does not answer, so job 42 was not ended" in ingot("stop", "--now", str(run)).stdout
    refused = ingot("launch", "slurm", *tiny, "--profile", "cpu", check=False)
    assert refused.returncode == 2 and "cannot tell whether a job" in refused.stderr
    assert not calls["sbatch"].exists() and not calls["scancel"].exists()
    put_on_path(monkeypatch, tmp_path / "bin", "squeue", "print('JOBID|STATE|COMMAND|END_TIME|REASON')")
    assert "state: stopped by the file STOP" in ingot("status", str(run)).stdout
    forgotten = "sys.exit('slurm_load_jobs error: Invalid job id specified')"
    put_on_path(monkeypatch, tmp_path / "bin", "squeue", forgotten)
    assert "state: stopped by the file STOP" in ingot("status", str(run)).stdout


@pytest.mark.parametrize(
    "state", ["SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD", "STOPPED", "STAGE_OUT", "A_NEW_STATE"]
)
def test_a_job_that_has_not_ended_for_good_keeps_the_run_folder(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot: Callable[..., Any], state: str
) -> None:
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    LaunchFolder(run).add_job("slurm", "42")
    put_on_path(monkeypatch, tmp_path / "bin", "squeue", f"print('42|{state}')")
    calls = put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(43)")
    refused = ingot("launch", "slurm", *tiny, "--profile", "cpu", check=False)
    assert refused.returncode == 2 and f"already has a job: 42: {state}" in refused.stderr
    assert not calls.exists()
    shown = "suspended" if state == "STOPPED" else "queued" if state in ("STAGE_OUT", "A_NEW_STATE") else "held"
    assert f"state: {shown}\nnext: job 42 is {state}" in ingot("status", str(run)).stdout


# as squeue shows jobs 41 to 43, of which 41 was put back and held while 42 and 43 ran
HELD = """
import re
print("JOBID|STATE|COMMAND|END_TIME|REASON")
for job in re.findall(r"\\d+", next(a for a in sys.argv if a.startswith("--jobs"))):
    if job in ("41", "42"):
        state, reason = ("SPECIAL_EXIT", "job requeued in held state") if job == "41" else ("COMPLETED", "None")
        print(f"{{job}}|{{state}}|{script}|N/A|{{reason}}")
"""


def test_an_earlier_job_that_is_held_keeps_the_run_folder_and_its_reason_is_shown(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    (run / "launch").mkdir(parents=True)
    for job in ("41", "42"):
        LaunchFolder(run).add_job("slurm", job)
    squeue = put_on_path(monkeypatch, tmp_path / "bin", "squeue", HELD.format(script=f"{run}/launch/job.sh"))
    calls = {name: put_on_path(monkeypatch, tmp_path / "bin", name) for name in ("sbatch", "scancel")}
    said = ingot("status", str(run)).stdout
    assert "state: held" in said and "command: scontrol release 41" in said and "job 42: COMPLETED" in said
    assert (
        "job 41: SPECIAL_EXIT (job requeued in held state: it was put back and is held: `scontrol release 41`" in said
    )
    assert len(squeue.read_text().splitlines()) == 1  # one question for all jobs
    for command in (["launch", "slurm", *tiny, "--profile", "cpu"], ["launch", "local", *tiny, "--profile", "cpu"]):
        refused = ingot(*command, check=False)
        assert refused.returncode == 2 and "already has a job: 41: SPECIAL_EXIT (job requeued" in refused.stderr
    assert not calls["sbatch"].exists() and len(LaunchFolder(run).jobs()) == 2
    assert "it will end when it starts; `ingot stop --now" in ingot("stop", str(run)).stdout and (run / "STOP").exists()
    assert "@" in (run / "STOP").read_text()  # who asked
    ingot("stop", "--now", str(run))
    assert calls["scancel"].read_text() == '["41"]\n'


def test_a_number_that_another_cluster_has_given_out_again_is_not_a_job_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot: Callable[..., Any]
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        (folder / "launch").mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    LaunchFolder(run).add_job("slurm", "42")
    for script, shown in {other / "launch" / "job.sh": False, other / "launch" / "mine.sh": False,
                          tmp_path / "link" / "launch" / "job.sh": True, run / "launch" / "job.sh": True,
                          tmp_path / "moved" / "launch" / "job.sh": True}.items():  # fmt: skip
        put_on_path(monkeypatch, tmp_path / "bin", "squeue", f"print('42|RUNNING|{script}|N/A|None')")
        assert ("job 42: RUNNING" in ingot("status", str(run)).stdout) == shown, script


def test_a_machine_without_slurm_leaves_the_state_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LaunchFolder(tmp_path).path.mkdir()
    LaunchFolder(tmp_path).add_job("slurm", "42")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_status(tmp_path).state.startswith("unknown")


def test_a_process_with_the_number_of_an_ended_launcher_is_not_that_launcher(tmp_path: Path) -> None:
    launch = LaunchFolder(tmp_path)
    launch.path.mkdir()
    words = ["-c", "import time; time.sleep(60)", "launch", "resume"]
    process = subprocess.Popen([sys.executable, *words])
    try:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)  # the new program is being loaded
        launch.add_job("local", str(process.pid))
        assert job_states(tmp_path) == [JobState(str(process.pid), "RUNNING")]
        jobs = launch.path / "jobs.jsonl"
        jobs.write_text(jobs.read_text().replace('"time": "20', '"time": "19'))  # a hundred years before
        assert job_states(tmp_path) == []
    finally:
        process.kill()
        process.wait()


def test_objects_of_several_launches_are_asked_about_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LaunchFolder(tmp_path).path.mkdir()
    for name in ("old", "new"):
        LaunchFolder(tmp_path).add_job("kubernetes/team/jobset", name)
    items = [
        {"metadata": {"name": name}, "status": {"replicatedJobsStatus": [{"active": 1}]}} for name in ("old", "new")
    ]
    calls = put_on_path(monkeypatch, tmp_path / "bin", "kubectl", f"print({json.dumps({'items': items})!r})")
    assert job_states(tmp_path) == [JobState("old", "RUNNING", number="old"), JobState("new", "RUNNING", number="new")]
    assert called(calls)[2:6] == ["get", "jobset", "old", "new"]


@pytest.mark.parametrize(
    "state", ["COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL",
              "PREEMPTED", "REVOKED"],
)  # fmt: skip
def test_a_job_that_has_ended_does_not(state: str) -> None:
    assert not is_living(state)


def test_neither_a_folder_nor_a_job_is_a_sentence(tmp_path: Path, ingot: Callable[..., Any]) -> None:
    for name in ("12345", "mine-0abc12", "absent/folder"):
        refused = ingot("status", name, check=False)
        assert refused.returncode == 2 and f"{name} is neither a run folder nor a job" in refused.stderr
    assert "is not a run folder" in ingot("logs", str(tmp_path), check=False).stderr


SBATCH = """
import json
with open({seen!r}, "a") as file:
    file.write(json.dumps(dict(os.environ)) + "\\n")
print(len(open({seen!r}).readlines()))
"""


def test_a_secret_of_a_file_reaches_a_containers_job_and_is_written_nowhere(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot: Callable[..., Any]
) -> None:
    seen = tmp_path / "seen"
    calls = put_on_path(monkeypatch, tmp_path / "bin", "sbatch", SBATCH.format(seen=str(seen)))
    put_on_path(monkeypatch, tmp_path / "bin", "squeue", "print('JOBID')")
    secret = tmp_path / "home" / ".config" / "ingot" / "secrets" / "HF_TOKEN"
    secret.parent.mkdir(parents=True)
    secret.write_text("hf_0123456789\n")
    secret.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in (("SLURM_JOB_ID", "7"), ("SLURM_MEM_PER_NODE", "9"), ("SLURM_ARRAY_TASK_ID", "2")):
        monkeypatch.setenv(name, value)  # launched from inside another job
    monkeypatch.setenv("SLURM_CONF", "/etc/own.conf")
    command = ["launch", "slurm", *tiny, "--profile", "cpu", "--image", "/apps/ingot.sqsh", "--secret", "HF_TOKEN"]
    said = ingot(*command)
    (env,) = map(json.loads, seen.read_text().splitlines())
    assert env["HF_TOKEN"] == "hf_0123456789" and env["SLURM_CONF"] == "/etc/own.conf"
    assert not {"SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SLURM_ARRAY_TASK_ID"} & set(env)
    written = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert "hf_0123456789" not in "".join([said.stdout, said.stderr, calls.read_text(), *written])
    secret.chmod(0o644)
    (tmp_path / "run" / "launch" / "jobs.jsonl").unlink()
    assert "can be read by others" in ingot(*command, check=False).stderr
