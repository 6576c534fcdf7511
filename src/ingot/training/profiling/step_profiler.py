"""Profiles the steps that `profiler.steps` names, on every rank.

Each rank writes a table (`steps-A-B-rank-N.json`) and a trace for Perfetto next to it. The table is written last: it
says that these steps are done, so a run that crashes and resumes does not profile them again. A profile that fails is
a warning, never the end of a run.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from ingot.config.training import ProfilerConfig
from ingot.errors import ConfigError, IngotError
from ingot.parallel.rank_env import RankEnv
from ingot.storage.atomic import write_json
from ingot.training.listener import RunListener
from ingot.training.profiling.tables import ProfileTable, profiled_steps
from ingot.training.profiling.trace import Trace, time_by_category, write_bounded
from ingot.training.runtime.run_files import PROFILE

MOST_EVENTS = 500_000  # in the trace of a rank: about 15 MB compressed, 100 MB for the viewer
MOST_EVENTS_TOGETHER = 16_000_000  # of all ranks
FEWEST_EVENTS = 20_000


class StepProfiler:
    """Records the time of some steps. Nothing here changes what a step computes."""

    def __init__(
        self,
        config: ProfilerConfig,
        folder: Path,
        env: RankEnv,
        listener: RunListener,
        paused: Callable[[str], AbstractContextManager[None]],
    ):
        self.config, self.folder, self.env, self.listener = config, folder / PROFILE, env, listener
        self.paused = paused
        """Around what takes long and does not belong to a step."""
        self.wanted = set(config.steps.numbers()) - profiled_steps(folder) if config.steps is not None else set()
        self.last_step = -1
        self.has_ended_run = False
        """Whether the run is to end, because `end_run` says so and all is profiled."""
        self._profile: Any = None
        self._steps: list[int] = []

    def begin(self, batch: int, total: int) -> None:
        """The next step follows `batch`, and the last is `total`."""
        if self.config.steps is None:
            return
        if not (ahead := {step for step in self.wanted if batch < step <= total}):
            why = "profiled already" if not self.wanted else f"not among the steps to come, {batch + 1} to {total}"
            if self.config.end_run:
                raise ConfigError(f"profiler.steps={self.config.steps}: {why}; choose others")
            self.listener.note(f"profiler.steps={self.config.steps}: {why}")
        self.wanted, self.last_step = ahead, max(ahead, default=-1)
        for draft in self.folder.glob(f".steps-*-rank-{self.env.rank}.*tmp"):  # of a process that was killed
            draft.unlink(missing_ok=True)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step and everything that belongs to it."""
        if self._profile is not None and number != self._steps[-1] + 1:  # a rollback
            self.finish()
        if number not in self.wanted:
            yield
            return
        if self._profile is None:
            self._start()
        self._steps.append(number)
        with torch.profiler.record_function(f"step {number}"):
            yield
        self.wanted.discard(number)
        if number + 1 not in self.wanted:
            self.finish()
        self.has_ended_run = self.config.end_run and not self.wanted

    def ends_run_at(self, number: int) -> bool:
        """Whether the run is to end after a step, so that nothing needs to be saved."""
        return self.config.end_run and number == self.last_step

    def finish(self) -> None:
        """Write what is being recorded, if anything is."""
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        first, last = self._steps[0], self._steps[-1]
        try:
            with self.paused("profile"):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                profile.stop()
                self._write(profile, f"steps-{first}-{last}-rank-{self.env.rank}", first, last)
        except (OSError, RuntimeError, IngotError) as error:
            self.listener.warn(f"no profile of steps {first} to {last}: {error}")

    def close(self) -> None:
        """Drop what is being recorded, because the run has failed."""
        if self._profile is not None:
            with suppress(RuntimeError):
                self._profile.stop()
            self._profile = None

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile, self._steps = torch.profiler.profile(activities=activities, acc_events=True), []
        self._profile.start()

    def _write(self, profile: Any, name: str, first: int, last: int) -> None:
        self.folder.mkdir(exist_ok=True)
        draft, trace_file = self.folder / f".{name}.tmp", self.folder / f"{name}.trace.json.gz"
        most = max(FEWEST_EVENTS, min(MOST_EVENTS, MOST_EVENTS_TOGETHER // self.env.world))
        with ExitStack() as cleanup:
            cleanup.callback(draft.unlink, missing_ok=True)
            profile.export_chrome_trace(str(draft))
            try:
                trace = cleanup.enter_context(Trace(draft))
            except (OSError, ValueError, msgspec.DecodeError):  # torch does not say that it could not write
                raise OSError(f"{draft} could not be written; is the disk full?") from None
            table = time_by_category(trace.events())
            left_out = write_bounded(trace, trace_file, most)
        steps = last - first + 1
        per_step = {key: round(ms / steps, 3) for key, ms in table.milliseconds.items()}
        found = ProfileTable((first, last), self.env.rank, table.on_gpu, per_step, round(table.total / steps, 3),
                             trace_file.name, left_out)  # fmt: skip
        write_json(self.folder / f"{name}.json", msgspec.to_builtins(found))
        where = "on the GPU" if table.on_gpu else "in torch's operations on the CPU"
        self.listener.note(f"where the time of steps {first} to {last} went {where}, per step:")
        for line in table.lines(steps):
            self.listener.note(f"  {line}")
        cut = f" (without its {left_out:,} shortest events)" if left_out else ""
        self.listener.note(f"trace for https://ui.perfetto.dev: {trace_file}{cut}")
