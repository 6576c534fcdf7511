"""The state of a run in one line, since when, and what happens next: a pure function of what its folder and its back
end say."""

from dataclasses import dataclass, field
from datetime import datetime

from ingot.launch.monitor.advice import without_bad_advice
from ingot.launch.monitor.attempts import RANK_PHASES
from ingot.launch.monitor.job_states import JobState
from ingot.launch.monitor.owner import LivingOwner
from ingot.launch.supervisor.history import LAUNCH_ENDING_STOPS, LAUNCHER_GONE, History
from ingot.launch.supervisor.judge import launch_end
from ingot.launch.supervisor.records import Judged, PhaseBegan

HELD = ("SPECIAL_EXIT", "REQUEUE_HOLD", "RESV_DEL_HOLD")
_PHASES = {
    "staging": "copying the image to the nodes",
    "hello": "waiting for the agents of all nodes",
    "preflight": "checking the nodes",
    "starting": "starting the ranks",
    "collecting": "asking all nodes why an attempt ended",
    "stopping": "saving before it stops",
}
_ENDS = {
    "NODE_FAIL": "a node of it died",
    "TIMEOUT": "it was killed at its time limit",
    "OUT_OF_MEMORY": "the kernel killed it for memory",
    "PREEMPTED": "another job took its nodes",
    "BOOT_FAIL": "its nodes did not boot",
    "DEADLINE": "its deadline passed",
}


@dataclass(frozen=True)
class Facts:
    """What is known, before it is put into words."""

    run: str
    verb: str = "train"
    history: History = field(default_factory=History)
    phase: PhaseBegan | None = None
    """The last phase of the open attempt, or the pause after one."""
    jobs: list[JobState] | None = field(default_factory=list)
    """None: the back end does not answer."""
    owner: LivingOwner | None = None
    """Who trains in the folder, if that belongs to a job that lives, or to no job."""
    finished: str = ""
    """When the run was complete."""
    halted: str | None = None
    """The content of the file HALT."""
    asked_to_stop: bool = False
    """Whether the file STOP is there."""
    was_started: bool = False
    checkpoint: int = 0
    cancelled_by: str = ""
    exit: str = ""
    """What the script of a job that failed ended with, if Slurm says so."""
    elsewhere: str = ""
    """The other machine that the launcher of a local run was started on."""
    has_spec: bool = False
    """Whether it can be launched again by its spec, also without records."""
    trains_since: str = ""
    """When the ranks of the open attempt began to train."""
    has_newer_batch: bool = False
    """Whether a batch has ended since the last phase was written down."""

    @property
    def resume(self) -> str:
        return self.history.resume(self.run)

    @property
    def living(self) -> list[JobState]:
        return [job for job in self.jobs or () if job.is_living]

    @property
    def suspended(self) -> JobState | None:
        """The job that would train if it were not suspended."""
        if any(job.is_running for job in self.living):
            return None
        return next((job for job in self.living if job.is_suspended), None)

    @property
    def ending(self) -> JobState | None:
        """The job that Slurm cleans up, if there is no other one."""
        return self.living[-1] if self.living and all(job.is_ending for job in self.living) else None

    @property
    def is_training(self) -> bool:
        """Whether the owner's ranks are at work: its lease outlives them for a minute, and those of a job that is
        suspended stand still."""
        if self.owner is None or self.suspended is not None:
            return False
        if any(job.is_running for job in self.living) or not any(job.is_ending for job in self.living):
            return True
        return self.history.open is not None and self.history.stop is not None  # Slurm lets them save

    @property
    def ends_soon(self) -> bool:
        """Whether somebody asked for a stop that the run has not come to yet."""
        stop = self.history.stop
        return self.asked_to_stop or (stop is not None and stop.reason in LAUNCH_ENDING_STOPS)


@dataclass(frozen=True)
class RunState:
    state: str
    since: str = ""
    next: str = ""
    """What happens without anybody's doing, and why."""
    advice: str = ""
    """The command that helps, if nothing happens by itself."""


def describe(facts: Facts) -> RunState:
    """The state of a run."""
    end = launch_end(facts.history)
    if facts.finished or (end is not None and end.action == "finish"):
        return RunState("finished", facts.finished or (end.time if end else ""))
    if facts.is_training:
        return _training(facts)
    stop = facts.history.stop
    if end is not None and end.action == "stop" and stop is not None and stop.reason not in LAUNCH_ENDING_STOPS:
        end = None if facts.living else end  # the cluster stopped it, and will start it again
    if end is not None:
        return _ended(facts, end)
    if facts.halted is not None:
        return RunState(
            f"halted: {without_bad_advice(facts.halted) or 'see the failures'}", "", "nothing by itself", facts.resume
        )
    if facts.jobs is None:
        return RunState("unknown: the cluster does not answer", _last_time(facts))
    if any(job.is_running for job in facts.living):
        return _training(facts) if facts.verb == "prepare" else _between(facts)
    if facts.living:
        return _queued(facts) if facts.ending is None else _ending(facts.ending, facts.history)
    return _gone(facts)


def _training(facts: Facts) -> RunState:
    """Ranks are alive, or a preparation is at work."""
    stop, phase = facts.history.stop, facts.phase
    if stop is not None or facts.asked_to_stop:
        why = (
            f"a stop was asked for ({stop.reason}{', ' + stop.detail if stop.detail else ''})"
            if stop
            else "STOP is there"
        )
        then = (
            "the job is queued again"
            if stop is not None and stop.reason in ("time-limit", "preempt")
            else "the run stops"
        )
        return RunState("stopping", stop.time if stop else "", f"it saves after this step, then {then}: {why}")
    opened = facts.history.open.time if facts.history.open is not None else ""
    since = facts.trains_since or (phase.time if phase is not None else opened)
    if phase is not None and phase.phase in ("evaluating", "saving") and not facts.has_newer_batch:
        return RunState("running", since, f"it is {phase.phase} now, then it goes on with the next batch")
    return RunState("running", since, _until_limit(facts))


def _between(facts: Facts) -> RunState:
    """A job runs, and its ranks do not train: not yet, or not for the moment."""
    history, phase = facts.history, facts.phase
    if history.stop is not None or facts.asked_to_stop:
        return RunState("stopping", history.stop.time if history.stop else "", "the run stops: a stop was asked for")
    if history.open is None and history.judgments:
        last = history.judgments[-1]
        if last.action == "wait":
            again = f"{_clock(last.time, last.wait_seconds)}: attempt {len(history.attempts) + 1}"
            return RunState(f"waiting: {_cause(history)}", last.time, f"{again}; {last.reason}")
        if last.action in ("restart", "swap"):
            return RunState("restarting", last.time, f"attempt {len(history.attempts) + 1} starts: {last.reason}")
    if phase is not None and phase.phase in RANK_PHASES:
        return RunState("running", facts.trains_since, _until_limit(facts))  # its owner's file could not be seen
    what = "starting the ranks" if history.is_local else "the job has just begun"
    what = _PHASES.get(phase.phase, phase.phase) if phase is not None else what
    what += f" ({phase.detail})" if phase is not None and phase.detail else ""
    since = phase.time if phase is not None else _last_time(facts)
    if phase is not None and phase.phase == "collecting":
        return RunState("restarting", since, f"{what}; then it is decided how to go on")
    opened = history.open
    copied = opened.copied if opened is not None and opened.copied > facts.checkpoint else 0
    where = f"the copy of batch {copied} in host memory" if copied else f"batch {facts.checkpoint}"
    return RunState("starting", since, f"{what}; then it trains from {where}")


def _queued(facts: Facts) -> RunState:
    if (job := facts.suspended) is not None:
        asked = "; a stop was asked for: it stops after it has been resumed" if facts.ends_soon else ""
        return RunState("suspended", "", f"{_waits(job)}; whoever suspended it can resume it{asked}")
    job = next((job for job in facts.living if not _is_held(job) and not job.is_ending), facts.living[0])
    last = facts.history.judgments[-1] if facts.history.judgments else None
    since = last.time if last is not None else facts.history.launched.time if facts.history.launched else ""
    waits = _waits(job)
    again = f"; it was queued again: {last.reason}" if last is not None and last.action in ("requeue", "stop") else ""
    again += "; a stop was asked for: it ends when it starts" if facts.ends_soon else ""
    if _is_held(job):
        return RunState("held", "", f"{waits}{again}", _release(job))
    return RunState("queued", since, f"{waits}{again}")


def _ending(job: JobState, history: History) -> RunState:
    last = history.judgments[-1] if history.judgments and history.open is None else None
    then = "it can be continued, unless Slurm queues it again by itself"
    if last is not None and last.action == "requeue":
        then = f"it is queued again: {last.reason}"
    return RunState(f"ending: job {job.id} is being cleaned up by Slurm", "", f"a moment later {then}")


def _ended(facts: Facts, end: Judged) -> RunState:
    """The supervisor has ended the launch."""
    by = f", cancelled by {facts.cancelled_by}" if facts.cancelled_by and end.action == "stop" else ""
    word = "halted" if end.action == "halt" else "stopped"
    where = f"from batch {facts.checkpoint}" if facts.checkpoint else "from the beginning"
    state = f"{word}: {without_bad_advice(end.reason)}{by}"
    then = f"nothing by itself; the command below continues {where}"
    longer = " --time LONGER" if end.advice.endswith(" --time LONGER") else ""
    return RunState(state, end.time, then, facts.resume + longer)  # the folder may have been moved since


def _gone(facts: Facts) -> RunState:
    """No job, and nobody has said why."""
    history = facts.history
    if not (facts.was_started or history.starts or facts.asked_to_stop):
        return RunState("never started")
    if history.is_local and facts.elsewhere:
        ask = f"it was launched on {facts.elsewhere}: `ingot status` there says whether it still runs"
        return RunState("unknown: this machine cannot see its launcher", _last_time(facts), ask)
    ended = [LAUNCHER_GONE] if history.is_local else [_end_of(job, facts) for job in facts.jobs or ()]
    if history.open is not None and not ended:
        ended = ["its job has gone, and Slurm no longer knows why"]
    advice = facts.resume if history.launched is not None or facts.jobs or facts.has_spec else ""
    since = _last_time(facts)
    if facts.asked_to_stop:
        then = "nothing by itself" if advice else "nothing by itself; the same command continues"
        return RunState("stopped by the file STOP", since, "; ".join([*ended, then]), advice)
    return RunState("not running", since, "; ".join([*ended, "nothing by itself"]) if advice else "", advice)


def _end_of(job: JobState, facts: Facts) -> str:
    if job.state == "CANCELLED":
        return f"job {job.id} was cancelled by {facts.cancelled_by or 'scancel (Slurm does not say whose)'}"
    why = _ENDS.get(job.state)
    if job.state == "FAILED" and facts.history.starts:
        how = f" ({facts.exit})" if facts.exit else ""
        return f"job {job.id} ended as FAILED{how} and its supervisor left no verdict: {facts.run}/launch/slurm-*.out"
    return f"job {job.id} ended as {job.state}" + (f": {why}" if why else "")


def _until_limit(facts: Facts) -> str:
    """What ends this stretch of training."""
    ends = [job.end for job in facts.living if job.is_running and job.end]
    if not ends or facts.verb != "train":
        return ""
    chain = facts.history.launched is not None and facts.history.launched.chain > 1
    then = "the next job of the chain continues" if chain else "it is queued again"
    end = ends[0].replace("T", " ")
    return f"before its time limit ({end}) it saves, and {then}"


def _waits(job: JobState) -> str:
    return f"job {job.id} is {job.state}" + (f": {job.reason}" if job.reason else "")


def _is_held(job: JobState) -> bool:
    return job.state in HELD or "held" in job.reason.lower()


def _release(job: JobState) -> str:
    return "" if "administrator" in job.reason else f"scontrol release {job.id}"


def _cause(history: History) -> str:
    return without_bad_advice(history.attempts[-1].cause.message) if history.attempts else "the site"


def _last_time(facts: Facts) -> str:
    """When the last thing known of a launch happened."""
    history = facts.history
    records = [
        history.launched,
        *history.starts,
        *(a.closed for a in history.attempts),
        *history.judgments,
        history.open,
        history.stop,
        facts.phase,
        *history.excluded.values(),
    ]
    return max((record.time for record in records if record is not None), key=datetime.fromisoformat, default="")


def _clock(time: str, seconds: float) -> str:
    end = datetime.fromisoformat(time).timestamp() + seconds
    return f"{datetime.fromtimestamp(end).astimezone():%H:%M:%S}"
