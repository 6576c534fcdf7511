"""What cannot work is refused in one sentence before anything is queued, by `--dry-run` too."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from specs import put_on_path, spec

from ingot.errors import ConfigError
from ingot.launch import submit_checks
from ingot.launch.measured_times import MeasuredTimes, read_times
from ingot.launch.monitor.owner import living_owner
from ingot.launch.protocol import LaunchFolder
from ingot.launch.submit import submit_to_slurm
from ingot.launch.submit_checks import check_folder, check_secrets, check_time_limit, local_file_system, seconds_of
from ingot.launch.supervisor.records import Launched, Opened, PhaseBegan
from ingot.launch.supervisor.state_file import StateFile, read_state

Ingot = Callable[..., Any]
DRY = ["launch", "slurm", "--profile", "cpu", "-N", "2", "--dry-run"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("2-00:00:05", 172805),
        ("0", 0),
        ("UNLIMITED", 0),
    ],
)
def test_a_time_limit_means_what_slurm_means_by_it(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("options", [["--time", "2", "--signal-seconds", "110"], ["--time", "3"], ["--time", "0:30"]])
def test_a_limit_shorter_than_start_step_and_save_is_refused_with_the_numbers(
    tiny: list[str], tmp_path: Path, ingot_here: Ingot, options: list[str]
) -> None:
    refused = ingot_here(*DRY, *options, *tiny, check=False)
    assert refused.returncode == 2 and "60 s to start (assumed), 10 s for a step (assumed), " in refused.stderr
    assert f"--time {options[1]} (" in refused.stderr and " s to save (--signal-seconds) are " in refused.stderr
    assert not refused.stdout and not (tmp_path / "run").exists()


def test_the_numbers_are_those_of_the_run_once_they_are_measured(
    tiny: list[str], tmp_path: Path, ingot_here: Ingot
) -> None:
    run = tmp_path / "run"
    row = {"checkpoint/write_seconds": 40.0, "throughput/batches_per_sec": 0.05}
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    state = StateFile(run / "launch")
    for epoch, minutes in ((1, "05"), (2, "03")):  # the second attempt was faster to start, the third did not get there
        state.append(
            Opened(time=f"2026-01-01T0{epoch}:00:00+00:00", epoch=epoch, attempt="1.0.1", nodes=("n1",), step=0)
        )
        for phase, at in (("starting", "00"), ("running", minutes)):
            time = f"2026-01-01T0{epoch}:{at}:30+00:00"
            state.append(PhaseBegan(time=time, epoch=epoch, phase=phase))  # type: ignore[arg-type]
    state.append(Opened(time="2026-01-01T03:00:00+00:00", epoch=3, attempt="1.0.3", nodes=("n1",), step=0))
    assert read_times(run) == MeasuredTimes(start_up=210.0, step=20.0, save=40.0)
    refused = ingot_here(*DRY, "--time", "6", *tiny, check=False)
    assert (
        "210 s to start (measured), 20 s for a step (measured), 180 s to save (--signal-seconds) are 410 s"
        in refused.stderr
    )
    assert "too short" not in ingot_here(*DRY, "--time", "7", *tiny).stderr
    refused = ingot_here(*DRY, "--signal-seconds", "50", *tiny, check=False)
    assert (
        "--signal-seconds 50 is too short: a step took up to 20 s and a save 40 s; leave it out or use 180"
        in refused.stderr
    )


def test_no_time_limit_and_one_of_a_preparation_are_understood() -> None:
    check_time_limit(spec(time="0", image=None), MeasuredTimes())
    check_time_limit(spec(time="5", verb="prepare"), MeasuredTimes(step=1e6))  # preparations do not train
    with pytest.raises(ConfigError, match="too short"):
        check_time_limit(spec(time="3", verb="prepare"), MeasuredTimes())


@pytest.mark.parametrize(
    ("where", "code", "says"),
    [
        ("absent", 2, "absent does not exist; write a dataset there with `ingot prepare`"),
        ("{here}/absent", 2, "absent does not exist; write a dataset there with `ingot prepare`"),
        ("{here}", 2, "is empty; write a dataset there"),
        ("/absent/c4", 0, "warning: /absent/c4 does not exist on this machine; each node must see this data"),
        ("/mounted/c4", 0, "warning: /mounted/c4 (/absent/fsx/c4 here) does not exist on this machine; each node must"),
        ("/volume/c4", 0, ""),  # a claim, which is nowhere but in pods
        ("s3://bucket/c4", 0, ""),
        ("{data}", 0, ""),
    ],
)
def test_data_that_is_not_there_is_refused_below_this_folder_and_noted_elsewhere(
    tiny: list[str], data: Path, tmp_path: Path, ingot_here: Ingot, where: str, code: int, says: str
) -> None:
    path = where.format(here=tmp_path, data=data)
    source = ["data.train.path=cache", f"data.train.remote={path}"] if "://" in path else [f"data={path}"]
    arguments = [*(argument for argument in tiny if not argument.startswith("data=")), *source, "data.eval=null"]
    options = ["--profile", "cpu", "-N", "2", "--image", "a/b:1"]
    slurm = ["launch", "slurm", *options, "--mounts", "/absent/fsx:/mounted", "--dry-run"]
    pods = ["launch", "kubernetes", *options, "--mounts", f"shared:{tmp_path},other:/volume,/absent/fsx:/mounted"]
    for command in [pods] if path.startswith("/volume") else [slurm, pods]:
        done = ingot_here(*command, *arguments, check=False)
        assert done.returncode == code and says in done.stderr, done.stderr
        assert ("warning" in done.stderr) == says.startswith("warning")


@pytest.mark.parametrize("where", ["absent", "/absent/c4"])
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_run_on_this_machine_is_refused_without_its_data_before_anything_is_written(
    tiny: list[str], tmp_path: Path, ingot_here: Ingot, where: str, more: list[str]
) -> None:
    arguments = [*(argument for argument in tiny if not argument.startswith("data=")), f"data={where}"]
    refused = ingot_here("launch", "local", "--profile", "cpu", *arguments, *more, check=False)
    assert refused.returncode == 2 and f"error: {where} does not exist; write a dataset" in refused.stderr
    assert not refused.stdout and not (tmp_path / "run").exists()


def test_more_spares_than_nodes_are_refused(tiny: list[str], ingot_here: Ingot) -> None:
    refused = ingot_here(*DRY, "--spares", "3", *tiny, check=False)
    assert refused.returncode == 2 and "--spares 3 is more than --nodes 2" in refused.stderr
    ingot_here(*DRY, "--spares", "2", *tiny)


@pytest.mark.parametrize(
    "option",
    ["--sbatch-args=--x : --y", "--sbatch-args=hetjob", "--srun-args=--het-group=0,1", "--srun-args=--pack-group 1"],
)
def test_heterogeneous_jobs_are_refused(tiny: list[str], ingot_here: Ingot, option: str) -> None:
    refused = ingot_here(*DRY, option, *tiny, check=False)
    assert refused.returncode == 2 and "makes a heterogeneous job; all nodes of a run are alike" in refused.stderr


MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:27 / /dev/shm rw - tmpfs tmpfs rw
31 27 0:28 / /fsx rw - lustre fs@tcp:/fsx rw
32 31 0:29 / /fsx/scratch rw - xfs /dev/nvme0n1 rw
33 27 0:30 / /my\\040data rw - nfs4 server:/data rw
34 27 0:31 / /gpfs rw - gpfs gpfs rw
35 27 0:32 / /blob rw - fuse.blobfuse2 blob rw
36 27 0:33 / /tmp rw - nfs4 server:/tmp rw
37 27 0:34 / /over rw - nfs4 server:/over rw
38 27 0:35 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/me/run", "ext4"), ("/dev/shm/run", "tmpfs"), ("/fsx/run", ""), ("/fsx/scratch/run", "xfs"), ("/fsx2/run", "ext4"),
     ("/my data/run", ""), ("/gpfs/run", ""), ("/blob/run", ""), ("/tmp/run", "nfs4"), ("/over/run", "tmpfs"),
     ("/exported/me/run", "")],
)  # fmt: skip
def test_the_disk_of_one_machine_is_known_by_its_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, kind: str
) -> None:
    monkeypatch.setattr(submit_checks, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(submit_checks, "EXPORTS", tmp_path / "etab")
    (tmp_path / "mounts").write_text(MOUNTS)
    (tmp_path / "etab").write_text("/exported\t10.0.0.0/16(rw,sync)\n")
    assert local_file_system(Path(folder)) == kind


def test_a_run_folder_on_the_disk_of_one_machine_is_refused_where_jobs_can_be_submitted(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingot_here: Ingot
) -> None:
    monkeypatch.delenv("INGOT_LAUNCH_DEFAULTS")
    put_on_path(monkeypatch, tmp_path / "bin", "sbatch")
    run = tmp_path / "run"
    refused = ingot_here(*DRY, *tiny, check=False)  # in a temporary folder
    assert refused.returncode == 2 and f"the run folder {run} is on a disk of this machine" in refused.stderr
    assert "choose a save_folder on a shared file system, or add --local-folder" in refused.stderr
    assert "#SBATCH" in ingot_here(*DRY, "--local-folder", *tiny).stdout
    local = spec(run_folder=str(run))
    assert "all nodes share" in check_folder(local, has_slurm=False)[0]  # a laptop has other mounts
    LaunchFolder(run).path.mkdir(parents=True)
    LaunchFolder(run).add_job("slurm", "42")  # it has worked before
    assert check_folder(local, has_slurm=True) == []


@pytest.mark.parametrize("content", [b'{"event": "other"}\n', b"\0\xff\n", b'{"event": "launched"}\n', b"# notes\n"])
@pytest.mark.parametrize(
    "command", [[*DRY, "--time", "1:00:00"], ["launch", "slurm", "--profile", "cpu"], ["launch", "local"]]
)
def test_a_state_file_that_is_not_ours_is_refused_and_kept(
    tiny: list[str],
    tmp_path: Path,
    ingot_here: Ingot,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    content: bytes,
) -> None:
    state = tmp_path / "run" / "launch" / "state.jsonl"
    state.parent.mkdir(parents=True)
    state.write_bytes(content)
    sbatch = put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(1)")
    refused = ingot_here(*command, *tiny, check=False)
    assert refused.returncode and f"{state} is damaged, or something else has written it" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) <= 2  # of which one may name the defaults file
    assert state.read_bytes() == content and not sbatch.exists()
    assert sorted(path.name for path in state.parent.iterdir()) == ["state.jsonl"]


def test_a_submission_is_recorded_and_a_refused_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    launch = LaunchFolder(run)
    first = spec(run_folder=str(run), workdir=str(tmp_path), image=None, spares=1, chain=3)
    sbatch = put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(7)")
    assert submit_to_slurm(first) == "7"
    (record,) = read_state(launch.path / "state.jsonl")
    assert isinstance(record, Launched)
    assert (record.back_end, record.nodes, record.spares, record.chain) == ("slurm", 2, 1, 3)
    put_on_path(monkeypatch, tmp_path / "bin", "squeue", "print('7|FAILED')")
    kept = {launch.path / "HALT": b"why", run / "STOP": b"me"}
    for path, content in kept.items():
        path.write_bytes(content)
    kept |= {path: path.read_bytes() for path in (launch.path / "state.jsonl", run / "failures.jsonl")}
    put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "sys.exit('no such partition')")
    with pytest.raises(Exception, match="no such partition"):
        submit_to_slurm(first)
    assert {path: path.read_bytes() for path in kept} == kept
    put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(8)")
    submit_to_slurm(first)
    assert not [path for path in list(kept)[:2] if path.exists()]
    records = read_state(launch.path / "state.jsonl")
    assert len({each.launch for each in records}) == len(records) == 2
    assert len(sbatch.read_text().splitlines()) == 3


def own(run: Path, **content: object) -> Path:
    run.mkdir(exist_ok=True)
    path = run / "owner.json"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": "1", "job": None} | content))
    return path


def test_a_folder_in_which_somebody_trains_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    own(run)
    put_on_path(monkeypatch, tmp_path / "bin", "sbatch", "print(7)")
    squeue = put_on_path(monkeypatch, tmp_path / "bin", "squeue", "print('17|COMPLETED')")
    mine = spec(run_folder=str(run), workdir=str(tmp_path), image=None)
    with pytest.raises(ConfigError, match="is in use by process 7 on elsewhere; stop it first"):
        submit_to_slurm(mine)
    assert not squeue.exists()
    own(run, job="17")  # an orphan of a job that has ended: the next one deals with it
    assert submit_to_slurm(mine) == "7"


def test_whether_somebody_trains_does_not_depend_on_this_machines_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = own(tmp_path)
    for skew in (-3600.0, 3600.0):
        monkeypatch.setattr("time.time", lambda skew=skew: skew)
        assert str(living_owner(tmp_path)) == "process 7 on elsewhere"
    old = path.stat().st_mtime - 61
    os.utime(path, (old, old))
    assert living_owner(tmp_path) is None
    monkeypatch.setattr("ingot.launch.monitor.owner.BEAT_SECONDS", 0.1)
    future = path.stat().st_mtime + 3600
    os.utime(path, (future, future))  # of a clock that was wrong: nobody touches it now
    assert living_owner(tmp_path) is None
    own(tmp_path, host=os.uname().nodename)  # a process that is not there
    assert living_owner(tmp_path) is None
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    own(tmp_path, host=os.uname().nodename, pid=os.getpid(), started=fields[19])
    os.utime(path, (old, old))
    assert living_owner(tmp_path) is not None
    path.write_text("{")
    assert living_owner(tmp_path) is None


def test_who_may_not_write_to_the_folder_watches_whether_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    path = own(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    monkeypatch.setattr("ingot.launch.monitor.owner.BEAT_SECONDS", 0.4)
    assert living_owner(tmp_path) is None  # recent, by a clock that may be wrong
    timer = threading.Timer(0.2, os.utime, [path])
    timer.start()
    assert living_owner(tmp_path) is not None
    timer.join()


def test_a_secret_that_is_nowhere_is_refused_where_the_job_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    launch = spec(run_folder=str(tmp_path / "run"), workdir=str(tmp_path), image=None, secrets=["HF_TOKEN"])
    with pytest.raises(ConfigError, match="the secret HF_TOKEN is neither in the environment nor in"):
        check_secrets(launch, has_slurm=True)
    (note,) = check_secrets(launch, has_slurm=False)
    assert "HF_TOKEN" in note and "the machine that submits the job needs it" in note
    monkeypatch.setenv("HF_TOKEN", "x" * 20)
    assert check_secrets(launch, has_slurm=True) == []
