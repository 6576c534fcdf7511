"""The judge: each fault of the catalogue ends as it should, and no history whatsoever breaks an invariant."""

from collections import Counter

import pytest
from histories import RUN, Job, random_job

from ingot.launch.supervisor import judge as judging
from ingot.launch.supervisor.history import read_history
from ingot.launch.supervisor.judge import EXTRA_SWAPS, MAX_ALIKE, MAX_ATTEMPTS, choose_nodes, judge, strikes
from ingot.launch.supervisor.records import Cause, Closed, Excluded, Judged, Opened, Started, StopRequested


def started(**values: int) -> Job:
    job = Job(**values)
    assert job.start()
    return job


PROGRAM = Cause("program", "internal error: KeyError: 'x'", "n2", 1, 4)
ECC = Cause("device", "n2: CUDA error: uncorrectable ECC error encountered", "n2", is_local=True)
FULL = Cause("site", "No space left on device: /runs/a")


def test_a_finished_attempt_ends_the_launch() -> None:
    job = started()
    assert job.fail(Cause("finished", "")) == ["finish"] and not job.start()


@pytest.mark.parametrize("kind", ["user", "data", "numeric"])
def test_what_would_fail_again_is_final(kind: str) -> None:
    job = started()
    assert job.fail(Cause(kind, "the loss is NaN in batch 4")) == ["halt"]  # type: ignore[arg-type]
    assert "NaN" in job.verdicts[-1][1].judged.reason and not job.start()


def test_bad_input_that_only_one_node_sees_is_tried_on_a_spare_once() -> None:
    """U2: a file system that is not mounted there."""
    job = started()
    assert job.fail(Cause("data", "/data is not there", "n2", is_local=True)) == ["swap"]
    assert choose_nodes(job.records) == ("n1", "n3") and strikes(job.records) == {}
    assert job.fail(Cause("data", "/data is not there", "n3", is_local=True)) == ["halt"]
    assert started(spares=0).fail(Cause("data", "/data is not there", "n2", is_local=True)) == ["halt"]


def test_a_device_error_is_the_nodes_own() -> None:
    """G1: struck and out, a spare in."""
    job = started()
    assert job.fail(ECC) == ["swap"]
    assert choose_nodes(job.records) == ("n1", "n3") and strikes(job.records) == {"n2": 1}


def test_without_a_spare_the_job_goes_back_into_the_queue_without_the_node() -> None:
    job = started(spares=0)
    assert job.fail(ECC) == ["requeue"]
    assert "n2" not in read_history(job.records).allocation and choose_nodes(job.records) == ("n1", "n3")


def test_a_node_that_is_out_stays_out_over_requeues_and_reboots() -> None:
    """I8, P1, P4: Slurm may give the node again."""
    job = started(spares=0)
    job.fail(ECC)
    job.start(("n2", "n1"))
    assert job.ended == "" and job.verdicts[-1][1].judged.action == "requeue"
    job.start(("n2", "n1"))
    assert job.ended == "halt" and "2 nodes are needed and 1 are usable" in job.verdicts[-1][1].judged.reason


def test_many_bad_nodes_one_after_another_have_a_budget_of_their_own() -> None:
    """P4: spares + 2 within a day."""
    job = started(nodes=1, spares=2, pool=9)
    causes = [Cause("machine", "disk full", f"n{i}", is_local=True) for i in range(1, 8)]
    assert job.fail(*causes) == ["swap", "swap", "requeue", "swap", "halt"]
    assert "4 replacements" in job.verdicts[-1][1].judged.reason


def test_the_budget_of_replacements_is_a_days() -> None:
    job = started(nodes=1, spares=0, pool=9)
    assert job.fail(*[Cause("device", "Xid", f"n{i}", is_local=True) for i in (1, 2)]) == ["requeue", "requeue"]
    job.now(90_000)
    assert job.fail(Cause("device", "Xid", "n3", is_local=True)) == ["requeue"]


def test_an_unforeseen_error_moves_first_and_is_final_on_another_node() -> None:
    job = started()
    assert job.fail(PROGRAM, PROGRAM) == ["restart", "swap"]
    other = Cause("program", PROGRAM.message, "n3", 1, 4)
    assert job.fail(other) == ["halt"] and "different nodes" in job.verdicts[-1][1].judged.reason
    assert strikes(job.records) == {}


def test_the_same_error_twice_is_final_where_no_other_node_is_free() -> None:
    job = started(spares=0)
    assert job.fail(PROGRAM, PROGRAM) == ["restart", "halt"] and "twice" in job.verdicts[-1][1].judged.reason
    everywhere = Cause("program", "KeyError")
    assert started().fail(everywhere, everywhere) == ["restart", "halt"]


def test_a_killed_rank_strikes_nobody_until_moving_has_shown_where_it_stays() -> None:
    """M2: a leak of the user's kills ranks on every node; bad memory on one."""
    killed = Cause("machine", "the process of rank 1 was killed by signal 9", "n2", 1, 4)
    leak = started()
    assert leak.fail(killed, killed) == ["restart", "swap"]
    assert leak.fail(*[Cause("machine", killed.message, "n3", 1, 4)] * 3) == ["restart", "restart", "halt"]
    assert strikes(leak.records) == {}
    bad = started()
    bad.fail(killed, killed)
    assert bad.fail(Cause("program", "another"), steps=10) == ["restart"]
    assert strikes(bad.records) == {"n2": 1}


def test_a_lost_agent_costs_its_node_only_if_a_spare_is_there() -> None:
    """L4: the out-of-memory killer took the agent; the node answers."""
    killed = Cause("lost", "n2: its agent was killed by signal 9", "n2")
    job = started()
    assert job.fail(killed) == ["swap"] and choose_nodes(job.records) == ("n1", "n3")
    alone = started(spares=0)
    assert alone.fail(killed, killed, killed) == ["restart", "restart", "halt"] and strikes(alone.records) == {}
    assert choose_nodes(alone.records) == ("n1", "n2")


def test_a_dead_node_is_struck_and_replaced() -> None:
    job = started()
    assert job.fail(Cause("lost", "n2: the cluster has lost it", "n2", is_local=True)) == ["swap"]
    assert strikes(job.records) == {"n2": 1}


def test_a_node_that_never_reports_is_left_out_without_a_strike() -> None:
    """P3, U1: its Python or its folder is missing."""
    job = started()
    assert job.fail(Cause("silent", "n2: execve(): No such file", "n2")) == ["swap"] and strikes(job.records) == {}


def test_a_drained_node_is_replaced_without_a_strike() -> None:
    """C2."""
    job = started()
    opened = job.open()
    job.add(Excluded(time=job.now(), node=opened.nodes[0], reason="maintenance", is_drained=True))
    assert job.close(Cause("program", "peers")) == "restart"
    assert choose_nodes(job.records) == ("n3", "n2") and strikes(job.records) == {}


def test_staging_that_fails_everywhere_is_final_at_once() -> None:
    """L1."""
    job = started()
    assert job.fail(Cause("user", "cannot copy a.sqsh to /proc/nowhere on n1, n2, n3")) == ["halt"]


def test_a_time_limit_before_the_first_checkpoint_is_final() -> None:
    """L2."""
    job = started()
    job.open()
    job.add(StopRequested(time=job.now(), reason="time-limit", detail="2 minutes"))
    assert job.close(Cause("stopped", "saved")) == "halt" and "shorter than" in job.verdicts[-1][1].judged.reason


def test_a_time_limit_after_a_checkpoint_is_not() -> None:
    job = started()
    job.open()
    job.add(StopRequested(time=job.now(), reason="time-limit"))
    assert job.close(Cause("stopped", "saved"), steps=7) == "requeue" and job.start()
    job.open()
    job.add(StopRequested(time=job.now(), reason="time-limit"))
    assert job.close(Cause("stopped", "saved")) == "halt"


def test_a_supervisor_that_dies_each_time_is_counted() -> None:
    """L3: Slurm requeues the job itself; nobody closes the attempt but the next start."""
    job = started()
    for _ in range(10):
        job.open()
        if not job.start():
            break
    assert job.ended == "halt" and job.epoch == 2 * (1 + EXTRA_SWAPS) + MAX_ALIKE  # twice on a host, then it is out
    assert list(read_history(job.records).excluded) == ["n1", "n2", "n3"]


@pytest.mark.parametrize(("reason", "comes_back"), [("user", False), ("wall-time", False), ("signal", True)])
def test_a_stop_ends_the_launch_unless_the_cluster_brings_the_job_back(reason: str, comes_back: bool) -> None:
    """S1, L5, C5; `scontrol requeue` also begins with a signal."""
    job = started()
    job.open()
    job.add(StopRequested(time=job.now(), reason=reason))  # type: ignore[arg-type]
    assert job.close(PROGRAM) == "stop"  # whatever happened while it stopped
    job.ended = ""
    assert job.start() == comes_back


def test_a_preemption_costs_a_start_and_nothing_else_as_long_as_there_is_progress() -> None:
    job = started()
    for _ in range(2 * judging.MAX_STARTS):
        job.open()
        job.add(StopRequested(time=job.now(), reason="preempt"))
        assert job.close(Cause("stopped", "saved"), steps=1) == "requeue" and job.start()
    for _ in range(2 * judging.MAX_STARTS):
        job.open()
        job.add(StopRequested(time=job.now(), reason="preempt"))
        job.close(Cause("stopped", "stopped before the first step"))
        if not job.start():
            break
    assert job.ended == "halt", "it is bounded"


def test_being_stopped_without_a_request_is_a_failure() -> None:
    """I4."""
    assert started().fail(Cause("stopped", "exit code 75")) == ["restart"]


def test_memory_is_a_step_of_the_config_until_nothing_smaller_is_left() -> None:
    """M1: four halvings and more."""
    job = started()
    sizes = [Cause("memory", "out of memory", fits=size) for size in (32, 16, 8, 4, 2, 1)]
    assert job.fail(*sizes) == ["restart"] * 6
    assert job.fail(*[Cause("memory", "out of memory", fits=1)] * 9)[-1] == "halt"


def test_a_full_disk_is_waited_for_and_blames_nobody() -> None:
    """D1f."""
    job = started()
    said = job.fail(*[FULL] * 30)
    waits = [verdict.judged.wait_seconds for _, verdict in job.verdicts]
    assert said[-1] == "halt" and set(said[:-1]) == {"wait"} and len(said) < MAX_ATTEMPTS
    assert waits[:4] == [10, 20, 40, 80] and max(waits) == 600 and 3600 <= sum(waits) < 4300
    assert not read_history(job.records).excluded and strikes(job.records) == {}


def test_undecided_tries_the_same_nodes_then_the_suspects_then_gives_up() -> None:
    unclear = Cause("hang", "all ranks wait", suspects=("n1", "n2"))
    job = started(spares=2)
    assert job.fail(unclear, unclear) == ["restart", "swap"]
    assert choose_nodes(job.records) == ("n3", "n4") and strikes(job.records) == {}
    assert started(spares=0).fail(*[unclear] * 9) == ["restart", "restart", "halt"]


def test_the_nodes_of_the_last_attempt_are_kept_where_possible() -> None:
    job = started(nodes=2, spares=2)
    job.fail(Cause("device", "Xid", "n1", is_local=True))
    assert choose_nodes(job.records) == ("n3", "n2"), "each in its place"
    job.fail(Cause("device", "Xid", "n2", is_local=True))
    assert choose_nodes(job.records) == ("n3", "n4")
    job.start(("n1", "n4", "n3", "n2"))
    assert choose_nodes(job.records) == ("n4", "n3"), "a new allocation has its own order"


def test_a_run_that_saves_may_fail_as_often_as_it_likes() -> None:
    job = started()
    assert set(job.fail(*[Cause("machine", "killed", "n2", 1)] * 200, steps=10)) == {"restart"}


def test_an_open_attempt_cannot_be_judged_nor_opened_or_closed_twice() -> None:
    """I1."""
    job = started()
    opened = job.open()
    with pytest.raises(ValueError, match="no closed attempt"):
        judge(job.records, job.now(), RUN)
    with pytest.raises(ValueError, match=r"before 7\.0\.1 was closed"):
        read_history([*job.records, opened])
    closed = Closed(time=job.now(), epoch=1, cause=PROGRAM, step=0)
    with pytest.raises(ValueError, match="was not open"):
        read_history([*job.records, closed, closed])


def check_invariants(job: Job) -> None:
    records = job.records
    opened = [r.epoch for r in records if isinstance(r, Opened)]
    closed = [r.epoch for r in records if isinstance(r, Closed)]
    assert closed == opened[: len(closed)] and len(opened) - len(closed) <= 1, "I1"
    check_budget(job)
    out: set[str] = set()
    user_stop = False
    for record in records:
        if isinstance(record, Opened):
            assert not out & set(record.nodes), "I8: a node that is out was used"
            assert not user_stop, "I5: an attempt after a stop"
            assert len(record.nodes) == job.nodes
        elif isinstance(record, Excluded):
            out.add(record.node)
        elif isinstance(record, StopRequested):
            user_stop = user_stop or record.reason in ("user", "wall-time")
    for count, verdict in job.verdicts:
        check_verdict(records[:count], verdict)
    if job.ended:
        assert job.ended in ("finish", "stop", "halt", "queued"), "I10"
    evidence = {node for r in records if isinstance(r, Closed) for node in (r.cause.node, *r.cause.bad_nodes)}
    assert set(strikes(records)) <= evidence, "I7"
    harmless = {"site", "silent", "supervisor", "user", "data", "numeric"}
    by_node = [r.cause for r in records if isinstance(r, Closed)]
    for node in strikes(records):
        own = [c for c in by_node if node in (c.node, *c.bad_nodes) and c.kind not in harmless]
        assert any(c.is_local for c in own) or len(own) >= 2 or sum(c.node == node for c in by_node) >= 2, "I7"


def check_budget(job: Job) -> None:
    """I2."""
    best, alike, total = 0, Counter[object](), 0
    nodes: tuple[str, ...] = ()
    asked = False
    for record in job.records:
        if isinstance(record, Opened):
            nodes = record.nodes
        elif isinstance(record, Started | StopRequested):
            asked = isinstance(record, StopRequested)
        elif isinstance(record, Closed):
            if record.step > best:
                best, total = record.step, 0
                alike.clear()
            total += 1
            assert total <= MAX_ATTEMPTS, "I2: too many attempts without a checkpoint"
            bounded = record.cause.kind == "site" or record.cause.fits is not None  # in another way
            if not bounded and not (asked and record.cause.kind == "stopped"):
                alike[record.cause.kind, frozenset(nodes)] += 1
                assert alike[record.cause.kind, frozenset(nodes)] <= MAX_ALIKE, "I2"


def check_verdict(records: list, verdict: judging.Verdict) -> None:
    judged: Judged = verdict.judged
    history = read_history(records)
    stop, closes = history.stop, [r for r in records if isinstance(r, Closed)]
    if judged.action == "requeue":
        start = next(r for r in reversed(records) if isinstance(r, Started))
        since = records[len(records) - 1 - records[::-1].index(start) :]
        progress = any(isinstance(r, Closed) and r.step > start.step for r in since)
        changed = bool(verdict.exclude) or any(isinstance(r, Excluded) for r in since)
        repeated = not any(isinstance(r, Opened) for r in since)  # Slurm gave a node that the job excludes
        assert progress or changed or repeated, "I3: nothing will differ"
    if judged.action == "stop":
        assert stop is not None, "I4: stopped, and nobody has asked"
    if stop is not None and stop.reason in ("user", "wall-time"):
        assert judged.action in ("stop", "finish"), "I5"
    if judged.action in ("restart", "swap", "wait"):
        assert stop is None, "I5: it goes on though it was asked to stop"
        left = [n for n in history.usable_nodes() if n not in {e.node for e in verdict.exclude}]
        assert len(left) >= history.nodes_needed, "an attempt that cannot have its nodes"
    if judged.action in ("halt", "stop"):
        assert judged.reason and RUN in judged.advice, "I10"
    assert "--fresh" not in judged.advice and "rm " not in judged.advice, "I10: advice that deletes data"
    for excluded in verdict.exclude:
        cause = closes[-1].cause
        assert excluded.node in (cause.node, *cause.bad_nodes, *cause.suspects), "a node that nothing speaks against"
        assert not excluded.is_drained
    if closes and closes[-1].cause.kind == "site" and not closes[-1].cause.is_local:
        assert not verdict.exclude, "I7: no node is at fault for the shared disk"


@pytest.mark.parametrize("part", range(4))
def test_no_history_breaks_an_invariant(part: int) -> None:
    for seed in range(part * 500, part * 500 + 500):
        job = random_job(seed)
        try:
            check_invariants(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_no_history_of_many_breaks_an_invariant(part: int) -> None:
    for seed in range(10_000 + part * 2_000, 12_000 + part * 2_000):
        try:
            check_invariants(random_job(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_without_a_checkpoint_every_launch_ends() -> None:
    """No loop is endless: whatever fails, however the job is brought back."""
    for seed in range(500):
        job = random_job(seed)
        if not any(isinstance(r, Closed) and r.step for r in job.records):
            assert job.ended, f"seed {seed}: {len(job.records)} records and no end"
            assert sum(isinstance(r, Opened) for r in job.records) <= MAX_ATTEMPTS


def test_the_histories_contain_everything() -> None:
    """The generator reaches every action and every end; otherwise the properties would hold of nothing."""
    actions, ends = Counter[str](), Counter[str]()
    for seed in range(500):
        job = random_job(seed)
        actions.update(verdict.judged.action for _, verdict in job.verdicts)
        ends[job.ended] += 1
    assert set(actions) == {"restart", "swap", "wait", "requeue", "finish", "stop", "halt"}
    assert all(actions[action] > 20 for action in actions) and set(ends) >= {"finish", "stop", "halt"}
