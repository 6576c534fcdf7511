"""One owner per run folder: a file `owner.json` that the owner touches every few seconds.

A second run on the same folder is refused, naming the owner. A dead owner on this machine is recognized by its process
id. An owner on another machine counts as dead when its file has not been touched for a minute; a new run waits that
long. Ages come from the folder's own file system, so different clocks do not matter.

Attempts of a launched run have epochs (INGOT_EPOCH), each higher than the one before. A higher epoch is never refused:
it takes the file, and waits until what is left of an earlier attempt, for example on a node that is cut off from the
network, must have noticed; it does not wait if that node's agent has confirmed that its ranks have ended
(INGOT_ENDED_EPOCH).
For its part, an owner with an epoch ends its process at once when it finds a higher one, and after half a minute in
which it could not look.
"""

import json
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from ingot.errors import FencedError, OwnerError, disk_error
from ingot.parallel.rank_env import ENDED_EPOCH, EPOCH
from ingot.storage.small_files import read_bytes
from ingot.training.runtime.fence import FENCE_SECONDS, end_process, end_when_silent
from ingot.training.runtime.run_files import OWNER, STOP

BEAT_SECONDS = 8.0  # a beat is four operations on the shared file system
EXPIRY_SECONDS = 60.0
FUTURE_SECONDS = 60.0  # a file touched later than that in the future has not been touched by a living owner
DRAFT_SECONDS = 3600.0  # in which a process on another machine takes the folder or ends
MARGIN_SECONDS = 2.0  # between the end of a silent owner and the moment when a higher epoch relies on it


def own_epoch() -> int:
    """The epoch of this process's attempt; 0 outside a launched run."""
    text = os.environ.get(EPOCH, "")
    return int(text) if text.isdigit() else 0


class Lease:
    """Held from construction until `release` or the death of the process."""

    def __init__(self, run: Path, expiry: float = EXPIRY_SECONDS):
        self.path, self.lost, self.epoch = run / OWNER, False, own_epoch()
        pid, job = os.getpid(), os.environ.get("SLURM_JOB_ID")
        owner = {"host": socket.gethostname(), "pid": pid, "started": _start_time(pid), "job": job}
        self.content = json.dumps(owner | ({"epoch": self.epoch} if self.epoch else {})).encode()
        try:
            self._acquire(expiry)
            self._remove_drafts()
        except OSError as error:
            raise disk_error("write the run folder", run, error) from None
        self.ended = threading.Event()
        self.last_beat = time.monotonic()
        self.thread = threading.Thread(target=self._beat, name="ingot-lease", daemon=True)
        self.thread.start()
        if self.epoch:
            threading.Thread(target=self._watch, name="ingot-fence", daemon=True).start()

    def release(self) -> None:
        self.ended.set()
        self.thread.join(BEAT_SECONDS)  # longer only if the file system does not answer
        if not self.lost:
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if another process has taken over the folder because this one seemed dead."""
        if self.lost:
            owner = _read(self.path)
            by = _describe(owner) if owner else "a process that has ended"
            raise OwnerError(f"{self.path.parent} was taken over by {by}; this run stops")

    def confirm(self) -> None:
        """Look on the disk, before something that only the owner may do, and raise if this process is not the owner.

        Without the file another process has owned the folder since, and has ended: a living owner never removes it.
        """
        try:
            self.lost = self.lost or read_bytes(self.path) != self.content
        except FileNotFoundError:
            self.lost = True
        except OSError as error:
            raise disk_error("read", self.path, error) from None
        self.check()

    def _acquire(self, expiry: float) -> None:
        draft = self.path.with_name(f".{OWNER}.{os.getpid()}")
        draft.write_bytes(self.content)
        try:
            for _ in range(3):
                try:
                    os.link(draft, self.path)  # fails if the name exists: only one wins
                    return
                except FileExistsError:
                    owner = _read(self.path)
                if self.epoch and self._outranks(owner):
                    return self._take_over(draft, owner)
                if _is_alive(owner, self.path, expiry):
                    what = f"{self.path.parent} is in use by {_describe(owner)}"
                    raise OwnerError(f"{what}; stop it first or choose another save_folder") from None
                doomed = self.path.with_name(f".{OWNER}.dead-{os.getpid()}")
                os.replace(self.path, doomed)  # another run may have replaced the dead owner meanwhile:
                if _read(doomed) != owner:  # then this is its file; give it back
                    os.replace(doomed, self.path)
                else:
                    doomed.unlink()
            raise OwnerError(f"{self.path.parent} is being claimed by several runs at once; try again")
        finally:
            draft.unlink(missing_ok=True)

    def _remove_drafts(self) -> None:
        """Remove what processes left that were killed while they took the folder."""
        now = self.path.stat().st_ctime  # just given its name, by the clock of the file system
        for draft in self.path.parent.glob(f".{OWNER}.*"):
            with suppress(OSError):
                owner = _read(draft)
                is_here = draft.suffix[1:].isdecimal() and owner.get("host") == socket.gethostname()
                if (is_here and not _is_alive(owner, draft, 0)) or now - draft.stat().st_ctime > DRAFT_SECONDS:
                    draft.unlink()

    def _outranks(self, owner: dict) -> bool:
        """Whether the owner belongs to an earlier attempt. A later one's presence ends this process: it is the one
        that was left behind."""
        epoch = owner.get("epoch")
        if not isinstance(epoch, int):
            return False
        if epoch > self.epoch:
            raise FencedError(f"{self.path.parent}: attempt {epoch} has begun; this is a leftover of {self.epoch}")
        return epoch < self.epoch

    def _take_over(self, draft: Path, owner: dict) -> None:
        """Take the file of an earlier attempt, then wait until its owner has seen that, or has given up."""
        touched = self.path.stat().st_mtime_ns
        os.replace(draft, self.path)
        if owner["epoch"] <= int(os.environ.get(ENDED_EPOCH) or 0):
            return
        if owner.get("host") == socket.gethostname():
            pid, limit = owner.get("pid"), time.monotonic() + FENCE_SECONDS + MARGIN_SECONDS
            while isinstance(pid, int) and _start_time(pid) == owner.get("started") and time.monotonic() < limit:
                time.sleep(0.1)
            return
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".clock-") as clock:
            age = (os.stat(clock.name).st_mtime_ns - touched) / 1e9
        left = FENCE_SECONDS + MARGIN_SECONDS - max(0.0, age)
        if left > 0:
            print(f"waiting {left:.0f} s until {_describe(owner)} of an earlier attempt has ended", file=sys.stderr)
            end = time.monotonic() + left
            while (now := time.monotonic()) < end:
                time.sleep(min(1.0, end - now))
                if _read(self.path).get("epoch", 0) > self.epoch:
                    self._outranks(_read(self.path))

    def _beat(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            try:
                if read_bytes(self.path) != self.content:
                    self.lost = True
                    if self.epoch:
                        end_process(f"{self.path} is now of {_describe(_read(self.path))}")
                    return
                os.utime(self.path)
                self.last_beat = time.monotonic()
            except FileNotFoundError:
                if self.epoch and not self.ended.is_set():
                    self._restore()
            except OSError:
                pass  # the folder is unavailable; if that lasts, saving fails

    def _restore(self) -> None:
        """Put the file back that somebody has deleted, if nobody else has."""
        draft = self.path.with_name(f".{OWNER}.{os.getpid()}")
        try:
            draft.write_bytes(self.content)
            os.link(draft, self.path)
            self.last_beat = time.monotonic()
        except OSError:
            pass
        finally:
            draft.unlink(missing_ok=True)

    def _watch(self) -> None:
        """End this process when it has not been able to look for too long: the thread that looks may be stuck."""
        end_when_silent(lambda: self.last_beat, self.ended, f"{self.path.parent} has not answered")


def clear_stop_request(run: Path) -> None:
    """Remove the file STOP of an earlier run, unless that is still running. Only the user's command calls this, before
    it starts ranks: a file created later is a request to this run."""
    owner = run / OWNER
    content = _read(owner)
    if content.get("host") != socket.gethostname() or not _is_alive(content, owner, 0):
        try:
            (run / STOP).unlink(missing_ok=True)
        except OSError as error:
            raise disk_error("write the run folder", run, error) from None


def _read(path: Path) -> dict:
    try:
        owner = json.loads(read_bytes(path))
        return owner if isinstance(owner, dict) else {}
    except (OSError, ValueError):
        return {}


def _describe(owner: dict) -> str:
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"process {owner.get('pid')} on {owner.get('host')}{job}"


def _is_alive(owner: dict, path: Path, expiry: float) -> bool:
    if owner.get("host") == socket.gethostname():
        pid = owner.get("pid")
        return isinstance(pid, int) and owner.get("started") is not None and _start_time(pid) == owner["started"]
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".clock-") as now:
            touched = path.stat().st_mtime_ns
            age = (os.stat(now.name).st_mtime_ns - touched) / 1e9
        left = expiry - max(0.0, age)  # a time in the future, of a clock that was wrong, says nothing
        end = time.monotonic() + left
        while time.monotonic() < end:  # a living owner touches its file in this time
            time.sleep(0.2)
            if path.stat().st_mtime_ns != touched:
                return True
    except FileNotFoundError:
        pass  # just released
    return False


def _start_time(pid: int) -> str | None:
    """When a process of this machine started, in clock ticks since boot: identifies it, together with its id."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
