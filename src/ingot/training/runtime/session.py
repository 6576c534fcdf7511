"""A process's hold on its run folder while it trains: lease, sample log and heartbeat."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.checkpoint.store import clear_drafts
from ingot.config.run import RunConfig
from ingot.data.tokenizer import Tokenizer
from ingot.errors import disk_error
from ingot.storage.atomic import write_whole
from ingot.training.runtime.fence import watch_agent
from ingot.training.runtime.heartbeat import HangBudgets, Heartbeat
from ingot.training.runtime.lease import Lease
from ingot.training.runtime.run_files import FINISHED, GUARDS, STOPPED, TOKENIZER
from ingot.training.runtime.run_folder import check_disk_space, open_run_folder, write_config
from ingot.training.runtime.sample_log import SampleLog, truncate_sample_logs


class RunSession:
    """Rank 0 owns the folder and writes what all ranks share; every rank writes its own samples and heartbeat."""

    def __init__(self, config: RunConfig, rank: int):
        self.config, self.folder, self.is_owner = config, Path(config.run_folder), rank == 0
        watch_agent()
        self.heartbeat = Heartbeat(HangBudgets(config.startup_timeout, config.hang_timeout, config.save_timeout))
        self.samples = SampleLog(self.folder, rank, config.loggers.samples)
        self._lease: Lease | None = None

    def open(self, fresh: bool) -> None:
        """Own the folder, emptied of an earlier run if asked. Other ranks must wait until rank 0 has done so."""
        if not self.is_owner:
            return
        self._lease = open_run_folder(self.config, fresh)
        # weights, and the two moments of the optimizer
        check_disk_space(self.folder, (4 if self.config.save_weights_only else 12) * self.config.model.parameters)
        clear_drafts(self.folder)

    def begin(self, batch: int, total: int, tokenizer: Tokenizer | None) -> None:
        """Write what belongs to a run that continues after `batch`."""
        if not self.is_owner:
            return
        truncate_sample_logs(self.folder, batch)
        (self.folder / STOPPED).unlink(missing_ok=True)
        if batch < total:
            (self.folder / FINISHED).unlink(missing_ok=True)
        write_config(self.folder, self.config)
        if tokenizer is not None:
            tokenizer.save(self.folder / TOKENIZER)

    def roll_back(self, batch: int) -> None:
        """Forget the samples after a batch. The sample logs of all ranks must be closed."""
        if self.is_owner:
            truncate_sample_logs(self.folder, batch)

    def record_anomaly(self, line: dict[str, Any]) -> None:
        """Append a line to guards.jsonl."""
        if self.is_owner:
            try:
                with (self.folder / GUARDS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                raise disk_error("write", self.folder / GUARDS, error) from None

    def check(self) -> None:
        """Raise an error if another process has taken over the folder."""
        if self._lease is not None:
            self._lease.check()

    def confirm_owner(self) -> None:
        """Raise an error unless this process still owns the folder, by what is on the disk now."""
        if self._lease is not None:
            self._lease.confirm()

    def finish(self, batch: int) -> None:
        """Mark the run as finished."""
        if self.is_owner:
            try:
                write_whole(self.folder / FINISHED, f"{batch}\n")
            except OSError as error:
                raise disk_error("write", self.folder / FINISHED, error) from None

    def record_stop(self, reason: str, batch: int, total: int) -> None:
        """Write why the run stops before its end, for `ingot status`."""
        if self.is_owner:
            text = json.dumps({"reason": reason, "batch": batch, "total": total}) + "\n"
            with suppress(OSError):  # what was saved counts
                write_whole(self.folder / STOPPED, text)

    def close(self) -> None:
        self.samples.close()
        if self._lease is not None:
            self._lease.release()
