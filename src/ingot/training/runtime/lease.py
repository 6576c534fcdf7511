"""One owner per run folder: a file `owner.json` that the owner touches every few seconds.

A second run on the same folder is refused, naming the owner. A dead owner on this machine is recognized by its process
id. An owner on another machine counts as dead when its file has not been touched for a minute; a new run waits that
long. Ages come from the folder's own file system, so different clocks do not matter.
"""

import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

from ingot.errors import OwnerError, disk_error
from ingot.training.runtime.run_files import OWNER, STOP

BEAT_SECONDS = 5.0
EXPIRY_SECONDS = 60.0


class Lease:
    """Held from construction until `release` or the death of the process."""

    def __init__(self, run: Path, expiry: float = EXPIRY_SECONDS):
        self.path, self.lost = run / OWNER, False
        pid, job = os.getpid(), os.environ.get("SLURM_JOB_ID")
        self.content = json.dumps({"host": socket.gethostname(), "pid": pid, "started": _start_time(pid), "job": job})
        try:
            self._acquire(expiry)
        except OSError as error:
            raise disk_error("write the run folder", run, error) from None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="ingot-lease", daemon=True)
        self.thread.start()

    def release(self) -> None:
        self.ended.set()
        self.thread.join()
        if not self.lost:
            self.path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if another process has taken over the folder because this one seemed dead."""
        if self.lost:
            raise OwnerError(f"{self.path.parent} was taken over by {_describe(_read(self.path))}; this run stops")

    def _acquire(self, expiry: float) -> None:
        draft = self.path.with_name(f".{OWNER}.{os.getpid()}")
        draft.write_text(self.content)
        try:
            for _ in range(3):
                try:
                    os.link(draft, self.path)  # fails if the name exists: only one wins
                    return
                except FileExistsError:
                    owner = _read(self.path)
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

    def _beat(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            try:
                if self.path.read_text() != self.content:
                    self.lost = True
                    return
                os.utime(self.path)
            except OSError:
                pass  # the folder is unavailable; if that lasts, saving fails


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
        owner = json.loads(path.read_text())
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
            left = expiry - (os.stat(now.name).st_mtime_ns - touched) / 1e9
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
