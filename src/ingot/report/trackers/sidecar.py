"""The process that feeds the trackers of a run: `python -m ingot.report.trackers.sidecar RUN`.

It is a process of its own so that a tracker cannot slow, block or end training: libraries that start threads, wait for
a server or exit hooks that hang are its problem. It follows the files of the run until its standard input ends, which
also happens when the training process is killed; then it sends the rest and exits, at the latest after `DEADLINE`
seconds. Each tracker has a thread, so that one that hangs does not hold up the others.

It writes lines for the user to standard output; the training process shows them.
"""

import fcntl
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ingot.config.secrets import redact
from ingot.config.training import LoggersConfig
from ingot.report.trackers.base import TrackedRun
from ingot.report.trackers.feed import Feed
from ingot.report.trackers.registry import configured, make_tracker
from ingot.training.runtime.run_files import CONFIG

POLL_SECONDS = 0.5
RETRY_SECONDS = (1, 5, 15, 60)  # after a failure, ever longer
DEADLINE = float(os.environ.get("INGOT_TRACKER_DEADLINE", "30"))
"""Seconds to send the rest at the end of a run."""


def tracked_run(folder: Path, values: dict[str, Any]) -> TrackedRun:
    """The run in a folder, by its config."""
    name = str(values.get("name", folder.name))
    return TrackedRun(name, folder, values, id=None, group=name, forked_from=values.get("load_path"))


class TrackerThread(threading.Thread):
    """Keeps one tracker up to date."""

    def __init__(
        self, name: str, loggers: LoggersConfig, run: TrackedRun, ended: threading.Event, say: Callable[[str], None]
    ):
        super().__init__(name=name, daemon=True)
        self.ended, self.say, self.crashed = ended, say, True
        self.feed = Feed(name, make_tracker(loggers, name), run)
        self.is_open = self.is_done = self.has_warned = False

    def run(self) -> None:
        failures = 0
        with (self.feed.run.tracker_folder / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the process of an earlier start may still be sending
            while not self.is_done:
                try:
                    self._advance()
                    failures = 0
                except Exception as error:
                    self._warn(error)
                    self.ended.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                    if self.ended.is_set():
                        time.sleep(POLL_SECONDS)
                    failures += 1

    def _advance(self) -> None:
        if not self.is_open:
            self.feed.open()
            self.is_open = True
            self.feed.tell_restart()
        ending = self.ended.is_set()  # before the files are read: what was written until then is sent
        self.feed.send()
        if self.feed.behind:
            return
        if ending:
            self.feed.close(self.crashed)
            self.is_done = True
        else:
            self.ended.wait(POLL_SECONDS)

    def _warn(self, error: Exception) -> None:
        if not self.has_warned:
            self.has_warned = True
            reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            self.say(f"warning: loggers.{self.name}: {reason}; training goes on, and what is not sent is sent later")


def main(folder: Path) -> int:
    """Feed the trackers of a run until standard input ends."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):  # meant for the training process
        signal.signal(signum, signal.SIG_IGN)
    user = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what trackers print is not for the user
    say = partial(print, file=user, flush=True)
    values = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    loggers = LoggersConfig.model_validate(values["loggers"])
    run, ended = tracked_run(folder, values), threading.Event()
    run.tracker_folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=run.tracker_folder, ignore_cleanup_errors=True) as scratch:
        tempfile.tempdir = os.environ["TMPDIR"] = scratch  # trackers leave files there
        threads = [TrackerThread(name, loggers, run, ended, say) for name in configured(loggers)]
        for thread in threads:
            thread.start()
        ending = sys.stdin.readline().strip()  # empty if the training process was killed
        for thread in threads:
            thread.crashed = ending != "end"
        ended.set()
        stop_at = time.monotonic() + DEADLINE
        for thread in threads:
            thread.join(max(0.0, stop_at - time.monotonic()))
    for thread in threads:
        if not thread.is_done:
            say(f"warning: {thread.feed.unsent():,} rows were not sent to {thread.name}; "
                f"`ingot sync {folder} --to {thread.name}` sends them")  # fmt: skip
    os._exit(0)  # the exit hooks of a tracker may wait for a server


if __name__ == "__main__":
    main(Path(sys.argv[1]))
