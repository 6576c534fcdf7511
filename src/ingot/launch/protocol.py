"""What a login node, a job's supervisor, the agents on its nodes and the ranks tell each other: every file, variable
and exit code.

The supervisor leads and the agents answer, over TCP (`messages`); what it decides is in `state.jsonl`
(`supervisor/records`). Agents send each other copies of the training state, over TCP as well (`peer_copies/wire`). On
Kubernetes the supervisor runs in the first pod. `ingot doctor --cluster` leads agents the same way.

An attempt is named JOB.RESTART.NUMBER on Slurm (RESTART counts requeues), LAUNCH.RESTART.NUMBER on Kubernetes,
local.LAUNCH.NUMBER on one machine (LAUNCH counts the launches before).

Files of the launch folder, RUN/launch/:

| file | written by | read by | content | lifetime |
|---|---|---|---|---|
| spec.json | `ingot launch` | supervisor, agents, status, resume | the launch spec, mode 0600 | until the next launch |
| job.sh, array.sh, last.sh | `ingot launch slurm` | sbatch | job scripts | until the next launch |
| jobs.jsonl | `ingot launch`, `ingot train` | status, stop, resume, logs | a line per submitted job | the run's |
| submitting | `ingot launch slurm` | the next launch | empty: jobs.jsonl may lack a job | while submitting |
| .lock | the same | the same | empty; locked while submitting | the run's |
| state.jsonl | the same, then supervisor | supervisor, status, logs | every step of every launch | the run's |
| shares/K/state.jsonl | supervisor of a share | the same, status | the same, of a share of a preparation | the run's |
| epochs/N | supervisor | supervisor | empty: attempt N has begun | the run's |
| reserve | whoever writes state.jsonl | - | 1 MiB, freed to write on a full disk how it ended | the run's |
| files/NAME | `ingot launch kubernetes` | resume | config files that travel with the job | until the next launch |
| slurm-JOB.out | Slurm | logs, and Slurm's answer about a job | what the supervisor prints | the run's |
| output/START.N.NODE.out | srun | people | what agents and rank 0 print; N counts the sruns of a start | the run's |
| HALT | supervisor, pods | supervisors of the chain, status | why no job may try again | the launch's |
| down | version 0.1 | status, the next launch | "JOB NODE": nodes that the cluster has lost | the run's |
| code.ATTEMPT | jobs that version 0.1 queued | their job script | the attempt's exit code | the run's |
| pods/LAUNCH.RESTART/POD | each pod | the pod of the supervisor | the machine that the pod is on | the run's |

Files of the run folder that the launcher uses (names in `training/runtime/run_files.py`):

| file | written by | read by | content |
|---|---|---|---|
| STOP | `ingot stop`, or by hand | supervisor; rank 0 before the first step, or without one | save and stop |
| FINISHED | rank 0; the last job of a preparation | supervisor, status, pods | the run is complete |
| failures.jsonl | supervisor, pods, `ingot train` | pods, status | a line per start and per failure |
| logs/ATTEMPT/rank-R.log | ranks | logs | output of rank R |
| logs/ATTEMPT/stacks-R.txt, nccl-R.log | agent | people | of a failed attempt, what ranks wrote about themselves |
| checkpoints/STEP/manifest.json | rank 0 | supervisor, restart policy | progress |

Files of a temporary folder on each node, ingot-launch-*/, which ends with the attempt: `lock` (held while its owner
lives), `beat-R` (heartbeat of rank R), `R` (why rank R failed, JSON), `stacks-R.txt`,
`nccl-R.log` and `agent` (the agent is alive).

Environment variables (those that ranks read are named where they are read, in `parallel`, `training/runtime` and
`agent/failure.py`, which do not depend on the launcher):

| variable | set by | read by | meaning |
|---|---|---|---|
| INGOT_SUPERVISOR, INGOT_JOB_START | supervisor | agent | where the supervisor listens; which life of it |
| INGOT_JOB_TOKEN | supervisor | agent | proves that both belong to the job; not passed to ranks |
| SLURM_JOB_ID, SLURM_RESTART_COUNT, SLURM_JOB_NODELIST, SLURM_ARRAY_* | Slurm | supervisor | the job and its nodes |
| INGOT_NODE_NAME | Kubernetes | supervisor, agent | the machine that a pod is on |
| SLURMD_NODENAME | Slurm | supervisor, agent | the node's name |
| INGOT_JOB_ATTEMPT | manifest; version 0.1's job script | pod | LAUNCH.RESTART; then the attempt |
| MASTER_ADDR, MASTER_PORT | manifest; agent | pod; ranks | where the supervisor listens; where rank 0 does |
| JOB_COMPLETION_INDEX, NODE_RANK, PET_NODE_RANK, RANK | Kubernetes | pod | number of the pod |
| RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK | agent | ranks | as torchrun sets them |
| INGOT_ATTEMPT, INGOT_EPOCH | agent | ranks | the attempt; its number, which a successor's exceeds |
| INGOT_ENDED_EPOCH | agent | ranks | an earlier attempt whose rank 0 has ended for certain |
| INGOT_AGENT_FILE | agent | ranks | when the agent was last alive |
| INGOT_COPY_FDS | agent, `ingot train` | ranks | memory that keeps copies of the state over restarts |
| INGOT_PEER_COPY_BYTES | agent | ranks | another node keeps copies; how many bytes of others this one keeps |
| INGOT_STORE_FD | agent | rank 0 | a socket that already listens |
| INGOT_FAILURE_FILE | agent | ranks | where to write why it failed |
| INGOT_HEARTBEAT_FILE, INGOT_STACKS_FILE | agent | ranks | heartbeat; stacks on SIGUSR1 |

Exit codes of ranks, and what becomes of them. No exit code decides by itself: `supervisor/judge` does, by all that is
known.

| code | meaning | job | pod |
|---|---|---|---|
| 0 | finished; a job: also stopped as requested | 0 | exits with 0 |
| 1 | a fault that may pass; a job: queued again, or continued by the next of its chain | 1 | 138 |
| 2 | the user's error: the same command fails again | 2; the launch has ended | exits with 2 |
| 3 | given up: the same failure twice, or no progress | 3; the launch has ended | exits with 3 |
| 75 | stopped as requested, with a checkpoint | 0, or queued again if it was the time limit | 0 with STOP, else 138 |
| 130 | Ctrl-C, twice (`ingot train` only) | - | - |
| 138 | - | - | Kubernetes replaces all pods (a PyTorchJob retries codes from 128) |
"""

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from ingot.errors import ConfigError
from ingot.storage.atomic import sync
from ingot.storage.small_files import OddFile, move_away, read_bytes, read_text
from ingot.training.runtime.run_files import STOP

LAUNCH, SPEC = "launch", "spec.json"
LOCAL, TRAIN = "local", "train"
"""Back ends of a run on one machine, whose launcher is its job: `ingot launch local`, and `ingot train`."""
CLUSTER_AGENT = "ingot.launch.agent.cluster_agent"
"""The module that runs on each node; its supervisor starts it. Jobs that v0.1 queued start `ingot.launch.worker`."""
ATTEMPT_VARIABLE = "INGOT_JOB_ATTEMPT"
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
NODE_RANK_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "NODE_RANK", "PET_NODE_RANK", "RANK")
EXIT_NEW_PODS = 138

_JOBS, _HALT, _RESULT, _LOST = "jobs.jsonl", "HALT", "code", "down"
_OUTPUT, _FILES, _SUBMITTING = "output", "files", "submitting"
_BACK_END = re.compile(rf"slurm|{LOCAL}|{TRAIN}|kubernetes/[^/]+/[^/]+")


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    back_end: str
    """slurm, local, train (`ingot train`: there is no spec), or kubernetes/NAMESPACE/KIND."""
    id: str
    time: str


class LaunchFolder:
    """The launcher's folder in a run folder."""

    def __init__(self, run: Path):
        self.run, self.path = run, run / LAUNCH
        self.spec_file = self.path / SPEC

    # --- submission

    @contextmanager
    def lock(self, wait: bool = True) -> Iterator[None]:
        """Held while a job is submitted: the second of two launchers finds the first one's job. Without `wait`, a
        BlockingIOError if somebody else holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # for writing only, a pipe would wait
        with open(file, "rb+", buffering=0) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:  # a file system without locks: two launchers at the same moment are not told apart
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
            yield

    def write_script(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o750)
        return path

    def add_job(self, back_end: str, job: str) -> None:
        entry = Job(back_end, job, datetime.now().isoformat(timespec="seconds"))
        with (self.path / _JOBS).open("a+b") as file:
            file.seek(0)
            whole, newline, torn = file.read().rpartition(b"\n")
            if torn and _job_of(torn) is None:  # of a launcher that a power cut has ended
                file.truncate(len(whole) + len(newline))
                torn = b""
            file.write((b"\n" if torn else b"") + json.dumps(asdict(entry)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync(self.path)

    def jobs(self) -> list[Job]:
        """Submitted jobs, oldest first. What comes after the last newline was perhaps never complete."""
        path = self.path / _JOBS
        try:
            *lines, torn = read_bytes(path).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; see whether its disk is there") from None
        jobs = [_job_of(line) for line in lines]
        if None in jobs:
            then = (
                f"end the jobs that it names, then move it away with `{move_away(path)}`: they are not seen without it"
            )
            raise ConfigError(f"line {jobs.index(None) + 1} of {path} is not a job of the launcher; {then}")
        return [job for job in [*jobs, _job_of(torn)] if job is not None]

    @property
    def submitting(self) -> Path:
        """There while Slurm may have a job that `jobs` does not know."""
        return self.path / _SUBMITTING

    def begin_submission(self) -> None:
        self.submitting.touch()
        sync(self.path)

    def keep_files(self, files: Mapping[str, str]) -> None:
        """Keep the config files that travel with a Kubernetes job."""
        for name, content in files.items():
            (self.path / _FILES).mkdir(exist_ok=True)
            (self.path / _FILES / name).write_bytes(content.encode())

    def kept_files(self) -> dict[str, str]:
        return {path.name: path.read_bytes().decode() for path in sorted((self.path / _FILES).glob("*"))}

    def leftovers(self) -> list[Path]:
        """What an earlier launch left that would end or count against the next one."""
        return [self.run / STOP, self.path / _HALT]

    # --- attempts

    def result(self, attempt: str) -> int | None:
        """The attempt's exit code, once a node has recorded it."""
        with suppress(FileNotFoundError):
            return int(read_text(self.path / f"{_RESULT}.{attempt}"))
        return None

    def record_result(self, attempt: str, code: int, node_rank: int) -> None:
        """Record the attempt's exit code; the first node's record stands."""
        path = self.path / f"{_RESULT}.{attempt}"
        draft = path.with_name(f".{path.name}.{node_rank}")
        draft.write_text(f"{code}\n")
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()

    def lost_nodes(self) -> list[str]:
        """Nodes that the cluster had lost, once per job, as version 0.1 wrote it down."""
        with suppress(OSError):
            lines = set(read_text(self.path / _LOST).splitlines())
            return [line.partition(" ")[2] for line in lines]
        return []

    def halt(self, reason: str) -> None:
        """Let no further job of this launch try again."""
        (self.path / _HALT).write_text(f"{reason}\n", encoding="utf-8")

    def clear_halt(self) -> None:
        """A user launches the run again."""
        (self.path / _HALT).unlink(missing_ok=True)

    def halted(self) -> str | None:
        """Why the launch was halted; None if it was not."""
        with suppress(FileNotFoundError):  # a new launch removes it
            try:
                return read_bytes(self.path / _HALT).decode(errors="replace").strip()
            except OddFile as error:  # that it is there counts
                return f"cannot read {self.path / _HALT}: {error.strerror}; remove it"
        return None

    # --- Slurm

    @property
    def output(self) -> Path:
        """Where srun writes what the agents print."""
        return self.path / _OUTPUT

    @property
    def slurm_output(self) -> str:
        """What the job script prints, as an option of sbatch."""
        return f"{self.path}/slurm-%j.out"

    def slurm_logs(self) -> list[Path]:
        return sorted(self.path.glob("slurm-*.out"))


def _job_of(line: bytes) -> Job | None:
    """The job that a line names; None if it cannot be read."""
    try:
        job = msgspec.json.decode(line, type=Job)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_known = _BACK_END.fullmatch(job.back_end) and (job.id.isdecimal() or "/" in job.back_end)
    return job if is_known else None


def folder_of_output(text: str) -> Path | None:
    """The run folder, from what Slurm says about a job's output file."""
    found = re.search(rf"^ *StdOut=(.+)/{LAUNCH}/slurm-[^/]+$", text, re.MULTILINE)
    return Path(found[1]) if found else None
