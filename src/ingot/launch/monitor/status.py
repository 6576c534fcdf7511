"""How a run is doing: from its folder, the records of its supervisor, and, where it was launched, its back end.

Silence proves nothing: a cluster that does not answer leaves the state "unknown". Runs of version 0.1 have no records;
of them the folder and the back end say less.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.config.secrets import redact
from ingot.errors import ConfigError, IngotError
from ingot.launch.build_spec import MAX_STRIKES, strikes
from ingot.launch.monitor.advice import without_bad_advice
from ingot.launch.monitor.attempts import (
    AttemptView,
    LaunchView,
    NodeOut,
    StateProblem,
    attempts_of,
    names,
    nodes_out,
    read_launches,
)
from ingot.launch.monitor.job_states import JobState, has_ended, job_states, last_jobs, launched_verb
from ingot.launch.monitor.owner import LivingOwner, living_owner
from ingot.launch.monitor.run_state import Facts, RunState, describe
from ingot.launch.protocol import LAUNCH, LaunchFolder
from ingot.launch.register import find_lost_jobs
from ingot.launch.slurm.commands import run_folder_of
from ingot.launch.slurm.queue import canceller, exit_of
from ingot.launch.supervisor.failure_log import node_name, read_all_failures, read_failures
from ingot.launch.supervisor.history import History
from ingot.launch.supervisor.progress import newest_checkpoint, pieces_done
from ingot.launch.supervisor.state_file import STATE
from ingot.plurals import count_of
from ingot.storage.json_lines import read_json_lines
from ingot.storage.small_files import read_text
from ingot.training.runtime.run_files import CONFIG, FINISHED, LOGS, METRICS, STOP, STOPPED

TAIL_BYTES = 200_000  # of the metrics, in which the last row with a loss is
SHOWN = 5  # attempts or failures
AFTER = "after the command below, "
OVER = ("finished", "halted", "stopped", "stopped by the file STOP", "not running")


@dataclass
class Status:
    """What is known."""

    state: str
    since: str = ""
    """When that began; empty if it is not known."""
    next: str = ""
    """What happens by itself, and why."""
    advice: str = ""
    """The command that helps, where nothing happens by itself."""
    stopped: str = ""
    """By what a run that is not running was stopped, and where; empty if it broke off."""
    stop: dict[str, str] = field(default_factory=dict)
    """The request to stop that is in force: reason, detail, time."""
    cancelled_by: str = ""
    """Who cancelled the last job, if Slurm's accounting says so."""
    verb: str = "train"
    pieces: int = 0
    """Of a running preparation: pieces of the input that are done."""
    batch: int = 0
    row: dict[str, Any] = field(default_factory=dict)
    checkpoint: int = 0
    attempts: int = 0
    """Starts of its ranks, by whichever part of the restart policy."""
    attempt_list: list[AttemptView] = field(default_factory=list)
    """Those of the last launch, with their causes; empty for runs of version 0.1."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    jobs: dict[str, str] = field(default_factory=dict)
    """States of the jobs of the last launch, and of earlier ones that still live."""
    waits_for: dict[str, str] = field(default_factory=dict)
    """Why living jobs do not run, in the words of Slurm."""
    job_numbers: dict[str, str] = field(default_factory=dict)
    """The ids by which jobs know themselves, and with which names of attempts begin, where they differ."""
    job_starts: dict[str, int] = field(default_factory=dict)
    """How often each job of the last launch has started, by these ids."""
    nodes: list[str] = field(default_factory=list)
    """Those of the last attempt."""
    spares: list[str] = field(default_factory=list)
    """Nodes of the job that wait to replace one."""
    nodes_out: dict[str, NodeOut] = field(default_factory=dict)
    """Nodes that the launch does without, and why."""
    strikes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self.state.partition(":")[0] in OVER

    def lines(self) -> list[str]:
        """For people."""
        since = f", since {_local(self.since)}" if self.since else ""
        out = [f"state: {self.state}" + (f": {self.stopped}" if self.stopped else "") + since]
        out += [f"next: {self.next}"] if self.next else []
        out += [f"command: {self.advice}"] if self.advice else []
        out += [f"warning: {warning}" for warning in self.warnings]
        out += self._progress()
        for job, state in self.jobs.items():
            number = self.job_numbers.get(job, job)
            again = self.job_starts.get(number, 1) - 1
            name = job if number == job else f"{job} (attempts {number}.*)"
            out.append(f"job {name}: {state}" + (f" ({self.waits_for[job]})" if job in self.waits_for else "")
                       + (f", started again {count_of(again, 'time')}" if again > 0 else ""))  # fmt: skip
        # attempts are those of the last launch, if it has records
        of_all = " (in all launches)" if self.failures and self.attempt_list else ""
        out.append(f"attempts: {self.attempts}, failures: {len(self.failures)}{of_all}")
        out += self._attempts()
        if self.nodes and not self.over:
            out.append(f"nodes: {names(self.nodes)}" + (f"; spare: {names(self.spares)}" if self.spares else ""))
        for node, item in self.nodes_out.items():
            word = "is being drained" if item.is_drained else "is left out"
            out.append(f"node {node} {word} since {_local(item.since)}: {item.reason}")
        for node, count in self.strikes.items():
            excluded = "; the next launch excludes it" if count >= MAX_STRIKES else ""
            out.append(f"node {node}: {count_of(count, 'strike')}{excluded}")
        return [redact(line) for line in out]

    def _progress(self) -> list[str]:
        out = []
        if self.row:
            eta = self.row.get("time/remaining_estimate")
            figures = f"batch {self.batch}, loss {self.row.get('loss/train/total') or float('nan'):.4f}"
            figures += f", {self.row.get('throughput/tokens_per_sec', 0.0):,.0f} tok/s"
            out.append(figures + (f", {eta:.2f} h to go" if eta is not None and self.state != "finished" else ""))
        if self.pieces:
            out.append(f"{self.pieces:,} pieces of the input are done")
        if self.verb != "prepare":
            out.append(f"last checkpoint: batch {self.checkpoint}" if self.checkpoint else "no checkpoint yet")
        return out

    def _attempts(self) -> list[str]:
        if self.attempt_list:
            return [
                f"  {_local(attempt.closed or attempt.opened)} {attempt.line()}"
                for attempt in self.attempt_list[-SHOWN:]
            ]
        out = []
        for failure in self.failures[-SHOWN:]:
            where = "attempt {attempt}, rank {rank} on {host}, batch {batch}".format(**failure)
            message = without_bad_advice(failure["message"])
            out.append(f"  {failure['time']} {failure['kind']}: {message} ({where})")
        return out


def find_run(text: str) -> Path:
    """A run folder, given as such or by the id of a job that was launched from here."""
    path = Path(text)
    if path.is_dir() and ((path / LAUNCH).is_dir() or (path / CONFIG).is_file() or (path / METRICS).is_file()):
        return path
    if path.is_dir():
        raise ConfigError(f"{text} is not a run folder: it has neither {CONFIG} nor {METRICS} nor {LAUNCH}")
    for folder in Path().glob("runs/*"):
        with suppress(ConfigError):  # a damaged jobs.jsonl matters only for its own run
            if any(job.id == text for job in LaunchFolder(folder).jobs()):
                return folder
    if re.fullmatch(r"[0-9]+(_[0-9]+)?", text):
        with suppress(IngotError):  # Slurm is not here, or has forgotten it
            found = run_folder_of(text)
            if found is not None and found.is_dir():
                return found
    raise ConfigError(f"{text} is neither a run folder nor a job of one under {Path('runs').absolute()}; name the run "
                      "folder")  # fmt: skip


def read_status(run: Path) -> Status:
    """All that is known about a run."""
    find_lost_jobs(run)
    rows = read_json_lines(run / METRICS, TAIL_BYTES)
    row: dict[str, Any] = next((row for row in reversed(rows) if "loss/train/total" in row), {})
    launches, problem = read_launches(run)
    verb = launched_verb(run) or "train"
    state, facts, warnings = _describe(run, verb, launches)
    if problem is not None:
        state = _despite(problem, state, facts)
    attempts = sorted(
        (a for view in launches for a in attempts_of(view)), key=lambda a: datetime.fromisoformat(a.opened)
    )
    history = facts.history
    return Status(
        state=state.state, since=state.since, next=state.next, advice=state.advice,
        stopped=_stopped(run, state.advice) if state.state == "not running" else "", stop=_stop(history),
        cancelled_by=facts.cancelled_by, verb=verb, pieces=pieces_done(run) if verb == "prepare" else 0,
        checkpoint=facts.checkpoint, attempts=len(attempts) or _attempts(run, state.state), attempt_list=attempts,
        failures=read_all_failures(run), jobs={job.id: job.state for job in facts.jobs or ()},
        waits_for={job.id: job.reason for job in facts.living if job.reason}, job_starts=_starts(launches),
        job_numbers={job.id: job.number for job in facts.jobs or () if job.number},
        nodes=attempts[-1].nodes if attempts else [],
        spares=[node for node in history.usable_nodes() if node not in attempts[-1].nodes] if attempts else [],
        nodes_out=nodes_out(launches), strikes=strikes(run, 1), row=row, batch=int(row.get("time/batch", 0)),
        warnings=[*([problem.message] if problem else []), *warnings],
    )  # fmt: skip


def _describe(run: Path, verb: str, launches: list[LaunchView]) -> tuple[RunState, Facts, list[str]]:
    """The state, what it follows from, and what is odd about it."""
    finished, owner = _finished(run), None
    if not finished:  # before asking the back end, which may take a while
        owner = living_owner(run)
    jobs, warnings = job_states(run), []
    if owner is not None and _is_orphan(owner, jobs):
        warnings.append(f"{owner} still trains in {run} although its job has ended; the next job replaces it")
        owner = None
    halted = LaunchFolder(run).halted()
    if verb == "prepare":  # each share has a supervisor; one that has halted ends the preparation
        found = [describe(Facts(str(run), history=view.history)).state for view in launches if view.name]
        halted = halted or next((state.partition(": ")[2] for state in found if state.startswith("halted")), None)
    main = next((view for view in launches if not view.name), None)
    facts = Facts(
        str(run), verb, main.history if main else History(), main.phase if main else None, jobs, owner, finished,
        halted, (run / STOP).exists(), (run / METRICS).exists() or bool(LaunchFolder(run).jobs()),
        newest_checkpoint(run), _cancelled_by(jobs), _exit_of(run, jobs), _elsewhere(main),
        LaunchFolder(run).spec_file.is_file(), main.trains_since if main else "", _has_newer_batch(run),
    )  # fmt: skip
    state = describe(facts)
    if state.state == "running" and facts.phase is not None and facts.phase.detail:
        warnings.append(facts.phase.detail)
    return state, facts, warnings


def _despite(problem: StateProblem, state: RunState, facts: Facts) -> RunState:
    """The state of a run whose records cannot be read: no launch is accepted before they are moved away."""
    if not problem.command or not Status(state.state).over or facts.finished:
        return state
    again = f"`{facts.resume}`" if facts.has_spec else "the command that started the run"
    then = f"nothing by itself; {AFTER}{again} continues"
    return RunState(state.state, state.since, then, problem.command)


def _has_newer_batch(run: Path) -> bool:
    """Whether the metrics are newer than the records, by the clock of their file system. (A phase is written down at
    most every ten seconds.)"""
    try:
        return (run / METRICS).stat().st_mtime_ns > (LaunchFolder(run).path / STATE).stat().st_mtime_ns
    except OSError:
        return False


def _finished(run: Path) -> str:
    try:
        return datetime.fromtimestamp((run / FINISHED).stat().st_mtime).astimezone().isoformat(timespec="seconds")
    except FileNotFoundError:
        return ""


def _has_nodes(job: JobState) -> bool:
    return job.is_running or job.is_suspended or job.is_ending


def _is_orphan(owner: LivingOwner, jobs: list[JobState] | None) -> bool:
    """A process of a job that has ended, for example on a node that was cut off."""
    if not owner.job or jobs is None or any(_has_nodes(job) for job in jobs):
        return False
    return any(job.id == owner.job for job in jobs) or has_ended(owner.job)


def _cancelled_by(jobs: list[JobState] | None) -> str:
    cancelled = [job.id for job in jobs or () if job.state == "CANCELLED"]
    return canceller(cancelled[-1]) if cancelled else ""


def _exit_of(run: Path, jobs: list[JobState] | None) -> str:
    slurms = {job.id for job in last_jobs(run) if job.back_end == "slurm"}
    failed = [job.id for job in jobs or () if job.state == "FAILED" and job.id.partition("_")[0] in slurms]
    return exit_of(failed[-1]) if failed else ""


def _elsewhere(view: LaunchView | None) -> str:
    host = view.history.starts[-1].host if view is not None and view.history.starts else ""
    return host if host != node_name() else ""


def _stop(history: History) -> dict[str, str]:
    stop = history.stop
    return {} if stop is None else {"reason": stop.reason, "detail": stop.detail, "time": stop.time}


def _starts(launches: list[LaunchView]) -> dict[str, int]:
    """On Slurm, a supervisor that was killed is started again in the same start of its job. (Not every object of
    Kubernetes counts its starts.)"""
    counted: dict[str, list[int]] = {}
    for view in launches:
        is_slurm = view.history.launched is not None and view.history.launched.back_end == "slurm"
        for started in view.history.starts:
            restarts = counted.setdefault(started.job, [])
            if not is_slurm or started.restart not in restarts:
                restarts.append(started.restart)
    return {job: len(restarts) for job, restarts in counted.items()}


def _stopped(run: Path, advice: str = "") -> str:
    """What the run wrote down when it stopped, and what continues it unless a command is advised anyway."""
    try:
        record = json.loads(read_text(run / STOPPED))
        reason, batch, total = str(record["reason"]), int(record["batch"]), int(record["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    by = {"SIGINT": "stopped by Ctrl-C", "SIGHUP": "stopped because its terminal was closed (SIGHUP)"}
    why = by.get(reason) or (f"stopped by {reason}" if reason.startswith("SIG") else f"stopped because {reason}")
    if advice:
        return f"{why} at batch {batch} of {total}"
    then = f"the same command continues from batch {batch} of {total}" if batch else "the same command starts over"
    return f"{why}; {then}"


def _attempts(run: Path, state: str) -> int:
    """Of a run without records. On a cluster each has a folder of logs; on one machine they share one, and all but the
    last have failed; the last one, too, if the run broke off."""
    if folders := [path for path in (run / LOGS).glob("*") if path.is_dir()]:
        return len(folders)
    failed = len(read_failures(run))
    has_failed = failed and state == "not running" and not _stopped(run)
    return failed if has_failed else failed + (run / LOGS).is_dir()


def _local(time: str) -> str:
    """A time in this machine's time zone, to the second."""
    try:
        return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return time
