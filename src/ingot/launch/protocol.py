"""What a login node, a job script, the node agents and the ranks tell each other: every file, variable and exit code.

They share one folder, the run folder, and nothing else: there is no server, and exit codes get lost on the way (srun
reports those of tasks that it killed itself). A file is written once, whole, or appended to in lines. Processes find
each other's files by the names below; `LaunchFolder` reads and writes them, and `shell_variables` gives the job script
the same names.

An attempt is named JOB.RESTART.NUMBER on Slurm (RESTART counts requeues), LAUNCH.RESTART.NUMBER on Kubernetes.
JOB.RESTART names one start of a job.

Files of the launch folder, RUN/launch/:

| file | written by | read by | content | lifetime |
|---|---|---|---|---|
| spec.json | `ingot launch` | node agent, status, resume | the launch spec, mode 0600 | until the next launch |
| job.sh, array.sh, last.sh | `ingot launch slurm` | sbatch | job scripts | until the next launch |
| jobs.jsonl | `ingot launch` | status, stop, resume, logs | a line per submitted job | the run's |
| .lock | `ingot launch` | `ingot launch` | empty; locked while submitting | the run's |
| files/NAME | `ingot launch kubernetes` | resume | config files that travel with the job | until the next launch |
| slurm-JOB.out | Slurm | logs, and Slurm's answer about a job | what the job script prints | the run's |
| output/ATTEMPT.NODE.out | srun | people | what node agents and rank 0 print | the run's |
| output/JOB.stage.NODE.out | srun | people | what copying the image prints | the run's |
| code.ATTEMPT | the first node that fails, or node 0 | all nodes, job script | the attempt's exit code | the run's |
| bad.JOB | preflight, node agent, job script | job script | nodes that the job no longer uses, a line each | a start |
| down | job script | status, the next launch | "JOB NODE": nodes that the cluster has lost | the run's |
| stop.JOB.RESTART | job script; node agent if it saved | node agents, job script | a stop was requested | the start's |
| starts | job script | job script | "JOB.RESTART NODE STEP": starts and newest checkpoint | the launch's |
| ends | job script | job script | why each start ended | the launch's |
| HALT | node agent, job script | job scripts of the chain, status | why no job may try again | the launch's |
| pods/LAUNCH.RESTART/POD | each pod | the pod of the supervisor | the machine that the pod is on | the run's |
| started.LAUNCH | the pod of node 0 | the other pods | leftovers are removed | the launch's |
| preflight/ATTEMPT/NODE.json | each node | all nodes | what the node found out about itself | the run's |
| preflight/ATTEMPT/ready-N/NODE.json | each node | all nodes | measurements; where its processes listen | the run's |
| preflight/ATTEMPT/round-N/NODE.json | each node | all nodes | result of an all-reduce | the run's |
| preflight/ATTEMPT/claim | one node | all nodes | empty: its owner writes the result | the run's |
| preflight/ATTEMPT/verdict.json | that node | all nodes | the result that all nodes follow | the run's |
| preflight/ATTEMPT/nccl-N-NODE.log | NCCL | its node | which transport it chose | the run's |

Files of the run folder that the launcher uses (names in `training/runtime/run_files.py`):

| file | written by | read by | content |
|---|---|---|---|
| STOP | `ingot stop`, or by hand | ranks, node agents, job script | save and stop |
| FINISHED | rank 0 | job script, status, node agents | the run is complete |
| failures.jsonl | node agents, `ingot train` | node agents, status | a line per start and per failure |
| logs/ATTEMPT/rank-R.log | ranks | logs | output of rank R |
| logs/ATTEMPT/stacks-R.txt, nccl-R.log | node agent | people | of a failed attempt, what ranks wrote about themselves |
| checkpoints/STEP/manifest.json | rank 0 | job script, restart policy | progress |

Files of a temporary folder on each node, ingot-launch-*/, which ends with the attempt: `lock` (held while its owner
lives), `beat-R` (heartbeat of rank R), `R` (why rank R failed, JSON), `stacks-R.txt`,
`nccl-R.log` and `agent` (the agent is alive).

Environment variables (those that ranks read are named where they are read, in `parallel`, `training/runtime` and
`agent/failure.py`, which do not depend on the launcher):

| variable | set by | read by | meaning |
|---|---|---|---|
| INGOT_JOB_ATTEMPT | job script, pod | node agent | the attempt; in a pod, LAUNCH.RESTART |
| INGOT_SUPERVISOR, INGOT_JOB_START | supervisor | node agent | where the supervisor listens; which life of it |
| INGOT_JOB_TOKEN | supervisor | node agent | proves that both belong to the job; not passed to ranks |
| INGOT_NODE_NAME | Kubernetes | supervisor, agent | the machine that a pod is on |
| INGOT_JOB_NODES | job script | preflight | the attempt's nodes by name, separated by commas |
| MASTER_ADDR, MASTER_PORT | job script, pod | node agent, ranks | where rank 0 listens |
| SLURM_JOB_ID, SLURM_NODEID, SLURMD_NODENAME | Slurm | node agent | job, node rank, node name |
| JOB_COMPLETION_INDEX, NODE_RANK, PET_NODE_RANK, RANK | Kubernetes | node agent | node rank |
| RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK | node agent | ranks | as torchrun sets them |
| INGOT_ATTEMPT | node agent | ranks | the attempt |
| INGOT_STORE_FD | node agent | rank 0 | a socket that already listens (one node) |
| INGOT_FAILURE_FILE | node agent | ranks | where to write why it failed |
| INGOT_EPOCH | node agent | ranks | the attempt's number in the run; a later attempt has a higher one |
| INGOT_AGENT_FILE | node agent | ranks | when the agent was last alive |
| INGOT_HEARTBEAT_FILE, INGOT_STACKS_FILE | node agent | ranks | heartbeat; stacks on SIGUSR1 |

Exit codes of ranks, of the node agent's `code.ATTEMPT`, and what becomes of them:

| code | meaning | job script | pod |
|---|---|---|---|
| 0 | finished | exits with 0 | exits with 0 |
| 1 | a fault that may pass | next attempt, then requeue | next attempt, then 138 |
| 2 | the user's error: the same command fails again | exits with 2; HALT ends the chain | exits with 2 |
| 3 | given up: the same failure twice, or no progress | exits with 3; HALT ends the chain | exits with 3 |
| 75 | stopped as requested, with a checkpoint | exits with 0; requeued if a signal asked | 0 with STOP, else 138 |
| 130 | Ctrl-C, twice (`ingot train` only) | - | - |
| 138 | - | - | Kubernetes replaces all pods (a PyTorchJob retries codes from 128) |

The node agent itself exits with 0 when a run saves and stops, so that srun does not kill nodes that still save.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from ingot.checkpoint.manifest import CHECKPOINTS, MANIFEST
from ingot.errors import EXIT_CONTINUE, EXIT_FAULT, EXIT_FINISHED, EXIT_GIVEN_UP, EXIT_USER_ERROR
from ingot.storage.json_lines import read_json_lines
from ingot.training.runtime.run_files import FINISHED, STOP

LAUNCH, SPEC = "launch", "spec.json"
NODE_AGENT = "ingot.launch.agent.node_agent"
"""The module that runs on each node; jobs that v0.1 queued start `ingot.launch.worker`."""
ATTEMPT_VARIABLE, NODES_VARIABLE = "INGOT_JOB_ATTEMPT", "INGOT_JOB_NODES"
RENDEZVOUS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
NODE_RANK_VARIABLES = ("SLURM_NODEID", "JOB_COMPLETION_INDEX", "NODE_RANK", "PET_NODE_RANK", "RANK")
EXIT_NEW_PODS = 138

_JOBS, _HALT, _RESULT, _EXCLUDED, _LOST, _STOP = "jobs.jsonl", "HALT", "code", "bad", "down", "stop"
_STARTS, _ENDS, _OUTPUT, _FILES, _STARTED, _PREFLIGHT = "starts", "ends", "output", "files", "started", "preflight"


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    back_end: str
    """slurm, local, or kubernetes/NAMESPACE/KIND."""
    id: str
    time: str


def job_of(attempt: str) -> str:
    return attempt.partition(".")[0]


def start_of(attempt: str) -> str:
    """The start of a job, JOB.RESTART, that an attempt belongs to."""
    return attempt.rpartition(".")[0]


class LaunchFolder:
    """The launcher's folder in a run folder."""

    def __init__(self, run: Path):
        self.run, self.path = run, run / LAUNCH
        self.spec_file = self.path / SPEC

    # --- submission

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a job is submitted: the second of two launchers finds the first one's job."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write_script(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o750)
        return path

    def add_job(self, back_end: str, job: str) -> None:
        entry = Job(back_end, job, datetime.now().isoformat(timespec="seconds"))
        with (self.path / _JOBS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def jobs(self) -> list[Job]:
        """Submitted jobs, oldest first."""
        return [Job(**line) for line in read_json_lines(self.path / _JOBS)]

    def keep_files(self, files: Mapping[str, str]) -> None:
        """Keep the config files that travel with a Kubernetes job."""
        for name, content in files.items():
            (self.path / _FILES).mkdir(exist_ok=True)
            (self.path / _FILES / name).write_bytes(content.encode())

    def kept_files(self) -> dict[str, str]:
        return {path.name: path.read_bytes().decode() for path in sorted((self.path / _FILES).glob("*"))}

    def leftovers(self) -> list[Path]:
        """What an earlier launch left that would end or count against the next one."""
        return [self.run / STOP, *(self.path / name for name in (_HALT, _STARTS, _ENDS))]

    # --- attempts

    def result(self, attempt: str) -> int | None:
        """The attempt's exit code, once a node has recorded it."""
        with suppress(FileNotFoundError):
            return int((self.path / f"{_RESULT}.{attempt}").read_text())
        return None

    def record_result(self, attempt: str, code: int, node_rank: int) -> None:
        """Record the attempt's exit code; the first node's record stands."""
        path = self.path / f"{_RESULT}.{attempt}"
        draft = path.with_name(f".{path.name}.{node_rank}")
        draft.write_text(f"{code}\n")
        with suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()

    def exclude_nodes(self, attempt: str, hosts: Sequence[str]) -> None:
        """Run the next attempts of this job without these nodes."""
        if hosts:
            with (self.path / f"{_EXCLUDED}.{job_of(attempt)}").open("a") as file:
                file.write("".join(f"{host}\n" for host in hosts))

    def lost_nodes(self) -> list[str]:
        """Nodes that the cluster has lost, once per job."""
        with suppress(OSError):
            lines = set((self.path / _LOST).read_text(encoding="utf-8").splitlines())
            return [line.partition(" ")[2] for line in lines]
        return []

    def request_stop(self, attempt: str) -> None:
        """Record that somebody asked this start of the job to stop."""
        (self.path / f"{_STOP}.{start_of(attempt)}").touch()

    def stop_requested(self, attempt: str) -> bool:
        return (self.path / f"{_STOP}.{start_of(attempt)}").exists()

    def halt(self, reason: str) -> None:
        """Let no further job of this launch try again."""
        (self.path / _HALT).write_text(f"{reason}\n", encoding="utf-8")

    def halted(self) -> str | None:
        """Why the launch was halted; None if it was not."""
        with suppress(FileNotFoundError):  # a new launch removes it
            return (self.path / _HALT).read_text(encoding="utf-8").strip()
        return None

    def mark_started(self, attempt: str) -> None:
        (self.path / f"{_STARTED}.{job_of(attempt)}").touch()

    def started(self, attempt: str) -> bool:
        """Whether node 0 of a Kubernetes launch has removed the leftovers of earlier ones."""
        return (self.path / f"{_STARTED}.{job_of(attempt)}").exists()

    def preflight(self, attempt: str) -> Path:
        """Where the nodes of an attempt exchange what they find."""
        return self.path / _PREFLIGHT / attempt

    # --- Slurm

    @property
    def slurm_output(self) -> str:
        """What the job script prints, as an option of sbatch."""
        return f"{self.path}/slurm-%j.out"

    def slurm_logs(self) -> list[Path]:
        return sorted(self.path.glob("slurm-*.out"))

    def shell_variables(self) -> dict[str, str]:
        """The names above for the job script; it appends the attempt, job or start to those in the plural."""
        return {
            "RUN": str(self.run),
            "SPEC_FILE": str(self.spec_file),
            "HALT_FILE": str(self.path / _HALT),
            "STOP_FILE": str(self.run / STOP),
            "FINISHED_FILE": str(self.run / FINISHED),
            "RESULT_FILES": str(self.path / _RESULT),
            "EXCLUDED_FILES": str(self.path / _EXCLUDED),
            "STOP_REQUEST_FILES": str(self.path / _STOP),
            "LOST_NODES_FILE": str(self.path / _LOST),
            "STARTS_FILE": str(self.path / _STARTS),
            "ENDS_FILE": str(self.path / _ENDS),
            "OUTPUT_FOLDER": str(self.path / _OUTPUT),
            "CHECKPOINTS": str(self.run / CHECKPOINTS),
            "MANIFEST": MANIFEST,
            "NODE_AGENT": NODE_AGENT,
            "EXIT_FINISHED": str(EXIT_FINISHED),
            "EXIT_FAULT": str(EXIT_FAULT),
            "EXIT_USER_ERROR": str(EXIT_USER_ERROR),
            "EXIT_GIVEN_UP": str(EXIT_GIVEN_UP),
            "EXIT_CONTINUE": str(EXIT_CONTINUE),
        }


def folder_of_output(text: str) -> Path | None:
    """The run folder, from what Slurm says about a job's output file."""
    found = re.search(rf"^ *StdOut=(.+)/{LAUNCH}/slurm-[^/]+$", text, re.MULTILINE)
    return Path(found[1]) if found else None
