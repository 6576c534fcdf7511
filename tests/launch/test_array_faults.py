"""What can happen to a share of `ingot launch slurm prepare`, on a real Slurm: its node dies, its time is over, its
supervisor is killed, its image cannot be copied. The bytes are those of one process, or the reason is said once."""

import hashlib
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import Cluster, cluster
from test_array import Prepared, content
from test_slurm_faults import usual

from ingot.launch.supervisor.judge import strikes
from ingot.launch.supervisor.records import Closed, Started, StopRequested
from ingot.launch.supervisor.state_file import read_state

__all__ = ["cluster", "usual"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("usual")]


class Share(Prepared):
    """A preparation whose share 1 waits after two pieces, until `go`."""

    def wait_for_two_pieces(self) -> None:
        self.ingot("prepare", *self.arguments, "--out_root", str(self.out.parent / "whole"))
        (self.hold / "hold.1").touch()
        self.submit()
        self.wait((self.hold / "started.1").exists)

    def go(self) -> None:
        (self.hold / "hold.1").unlink()

    def of_share(self, kind: type, share: str = "1") -> list[object]:
        path = self.folder / "launch" / "shares" / share / "state.jsonl"
        return [record for record in read_state(path) if isinstance(record, kind)]

    def end_as_in_one_process(self) -> None:
        self.wait(lambda: (self.folder / "FINISHED").exists(), 240)
        self.wait_for_end()
        assert self.states() == ["COMPLETED"] * 4, self.output()
        assert content(self.out) == content(self.out.parent / "whole")


def test_the_share_of_a_node_that_dies_goes_on_elsewhere(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = Share(cluster, data, tmp_path)
    run.wait_for_two_pieces()
    (started,) = run.of_share(Started)
    cluster.kill_node(started.host)
    run.go()
    run.end_as_in_one_process()
    lost, finished = run.of_share(Closed)
    assert (lost.cause.kind, lost.cause.node) == ("lost", started.host) and finished.cause.kind == "finished"
    assert run.of_share(Started)[-1].host != started.host


def test_a_share_whose_time_is_over_goes_back_into_the_queue_and_continues(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    run = Share(cluster, data, tmp_path)
    run.wait_for_two_pieces()
    cluster.ask("scancel", "--batch", "--signal=USR2", f"{run.jobs()[0]}_1")
    run.wait(lambda: run.of_share(Closed))  # not before: it might finish all the same
    run.go()
    run.end_as_in_one_process()
    assert [stop.reason for stop in run.of_share(StopRequested)] == ["time-limit"]
    assert [start.step > 0 for start in run.of_share(Started)] == [False, True], "pieces that were done stay done"


def test_a_share_whose_supervisor_is_killed_costs_an_attempt(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    run = Share(cluster, data, tmp_path)
    run.wait_for_two_pieces()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, env = (path / "cmdline").read_bytes(), (path / "environ").read_bytes().split(b"\0")
            ours = b"launch.supervisor.main" in words and str(run.folder).encode() in words
            if ours and b"SLURM_ARRAY_TASK_ID=1" in env:
                os.kill(int(path.name), signal.SIGKILL)
    run.go()
    run.end_as_in_one_process()
    assert [closed.cause.kind for closed in run.of_share(Closed)] == ["supervisor", "finished"]
    assert len({(start.job, start.restart) for start in run.of_share(Started)}) == 1


def test_an_image_that_no_node_can_be_given_ends_all_and_strikes_nobody(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """L1: a share has one node, which shows nothing of others, so it tries a few."""
    image = tmp_path / "ingot.sqsh"
    image.write_bytes(b"an image")
    digest = hashlib.sha256(b"an image").hexdigest()
    (tmp_path / "ingot.sqsh.sha256").write_text(f"{digest}  ingot.sqsh\n")
    run = Share(cluster, data, tmp_path)
    run.arguments += ["--image", str(image), "--stage", "/proc/nowhere"]
    run.submit()
    run.wait_for_end()
    assert "FAILED" in run.states() and run.states()[-1] == "CANCELLED", run.output()
    for share in "012":
        closed = run.of_share(Closed, share)
        assert 1 <= len(closed) <= 3 and all("cannot copy" in record.cause.message for record in closed)
        assert strikes(run.of_share(object, share)) == {}
    said = run.ingot("status", str(run.folder))
    assert "state: halted" in said and "/proc/nowhere" in said
