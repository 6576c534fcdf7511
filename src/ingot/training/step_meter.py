"""The metrics of a run: every row and every metric name is made here.

A row covers the batches since the row before it. Its times tell where they went: waiting for data, for a checkpoint,
for an evaluation, for other ranks, or computing.
"""

import math
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.data.loading.token_dataset import Dataset
from ingot.parallel.executors.base import Executor
from ingot.parallel.executors.device import memory_metrics, peak_flops
from ingot.training.listener import Row
from ingot.training.progress import Progress
from ingot.training.runtime.remaining_time import RemainingTime
from ingot.training.step import StepResult

NAME_BYTES = 60  # of a machine's name
PEAK_MEMORY = ("memory/peak_reserved_mem", "memory/peak_resident_mem")  # on a GPU, on a CPU


class StepMeter:
    """Measures the batches since the last row, and makes rows of them."""

    def __init__(self, config: RunConfig, executor: Executor, data: Dataset, compiled: bool, remaining: RemainingTime):
        self.config, self.executor, self.data, self.remaining = config, executor, data, remaining
        self.samples_per_batch = config.global_train_batch_size
        self.tokens_per_batch = config.global_train_batch_size * config.max_seq_len
        self.flops = config.model.flops_per_token(config.max_seq_len)
        self.causal_flops = config.model.flops_per_token(config.max_seq_len, causal=True)
        self.peak: float | None = None
        """FLOP/s of the device. None for a CPU: its clock varies and other processes share its cores, so a matrix
        product timed once may be several times slower than training."""
        self.peak_source = ""
        if executor.device.type == "cuda":
            self.peak, self.peak_source = peak_flops(executor.device, config.precision)
        self.stragglers = StragglerWatch()
        self.loss: float | None = None
        """Of the last row."""
        self.warning = ""
        """What the last row shows that the user should know."""
        self.own_seconds = 0.0
        """Of this rank, for its own work on a batch."""
        self._evaluation = 0.0  # seconds of the evaluation after a row, which the next row counts
        self._compiling = compiled  # until the first row, whose time predicts nothing
        self.restart()

    def restart(self) -> None:
        """Begin to measure the next row."""
        self.executor.start_comm_timer()
        self._start, self._batches = time.perf_counter() - self._evaluation, 0
        self._waited = {"data": 0.0, "checkpoint": 0.0, "evaluation": self._evaluation}
        self._evaluation = 0.0

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Count the seconds within as spent on `data`, `checkpoint`, `evaluation` or `profile`, not on steps."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        if what == "evaluation":
            self._evaluation += seconds
        else:
            self._waited[what] = self._waited.get(what, 0.0) + seconds
        if what == "checkpoint":
            self.remaining.add_save(seconds)

    def next_batch(self, batches: Iterator[Batch]) -> Batch:
        """The next batch, counted, and the wait for it measured."""
        with self.waiting("data"):
            batch = next(batches)
        self._batches += 1
        return batch

    def position(self, batch: int) -> Row:
        """Where in the run a batch is."""
        samples = batch * self.samples_per_batch
        parts = self.data.taken(samples)
        return {
            "time/batch": batch,
            "time/sample": samples,
            "time/token": batch * self.tokens_per_batch,
            "time/epoch": samples / self.data.samples,
            **{f"time/token/{name}": count * self.config.max_seq_len for name, count in parts.items()},
        }

    def row(self, progress: Progress, result: StepResult) -> Row:
        """The row of a step. Reading its loss is the only place where the training loop waits for the device."""
        self.loss = loss = float(self.executor.sum_loss(result.loss_share))
        row = self.position(progress.batch) | {
            "loss/train/total": loss,
            "metrics/train/LanguageCrossEntropy": loss,
            "metrics/train/LanguagePerplexity": math.exp(min(loss, 700.0)),
            "l2_norm/grad/global": float(result.grad_norm),
            "trainer/device_train_microbatch_size": self.executor.microbatch,
            **memory_metrics(self.executor.device),
        }
        elapsed = time.perf_counter() - self._start
        seconds = elapsed - self._paused
        batches_per_second = self._batches / seconds
        progress.train_seconds += elapsed - self._waited["evaluation"]
        row["time/train"] = progress.train_seconds / 3600
        row |= self._throughput(batches_per_second) | self._times(elapsed)
        row |= self._over_ranks(row, elapsed)
        if not self._compiling:
            self.remaining.add_batches(self._batches, seconds)
        if progress.is_last:
            row["time/remaining_estimate"] = 0.0
        elif (remaining := self.remaining.seconds_after(progress.batch)) is not None:
            row["time/remaining_estimate"] = remaining / 3600
        self._compiling = False
        return row

    @property
    def _paused(self) -> float:
        """Seconds in which no step went on."""
        return sum(self._waited.values()) - self._waited["data"]

    @property
    def has_checkpoint_wait(self) -> bool:
        """Whether a checkpoint was saved since the last row."""
        return self._waited["checkpoint"] > 0

    def close(self) -> None:
        self.executor.stop_comm_timer()

    def _throughput(self, batches_per_second: float) -> Row:
        tokens = batches_per_second * self.tokens_per_batch * (1 - self.data.padding_share)
        per_device = tokens / self.executor.layout.size
        row = {
            "throughput/batches_per_sec": batches_per_second,
            "throughput/samples_per_sec": batches_per_second * self.samples_per_batch,
            "throughput/tokens_per_sec": tokens,
            "throughput/device/tokens_per_sec": per_device,
        }
        if self.peak is not None:
            row["throughput/device/mfu"] = per_device * self.flops / self.peak
            row["throughput/device/mfu_causal"] = per_device * self.causal_flops / self.peak
        return row

    def _times(self, elapsed: float) -> Row:
        row = {f"time/{what}": seconds / elapsed for what, seconds in self._waited.items()}
        if (communication := self.executor.comm_seconds()) is not None:
            row["time/communication"] = communication / elapsed
        return row | {"time/compute": 1 - sum(row.values())}

    def _over_ranks(self, row: Row, elapsed: float) -> Row:
        """What differs between ranks: who needs the most memory, and who takes longest for its own work."""
        self.warning = ""
        if "time/communication" not in row:
            return {}
        memory = next(name for name in PEAK_MEMORY if name in row)
        own_seconds = elapsed * (1 - row["time/communication"]) - self._paused
        ranks = self.executor.all_gather([row[memory], row["time/data"], own_seconds / self._batches])
        used, waited, own = zip(*ranks, strict=True)
        self.own_seconds = own_seconds / self._batches
        if late := self.stragglers.look(own):  # the same on all ranks, which send the names of their machines
            hosts = self.executor.all_gather(_encode(os.environ.get("SLURMD_NODENAME") or socket.gethostname()))
            self.warning = f"{late[0]} on {_decode(hosts[self.stragglers.rank])} {late[1]}"
        return {
            f"{memory}/min": min(used),
            f"{memory}/max": max(used),
            "time/data/max": max(waited),
            "time/own_seconds/min": min(own),
            "time/own_seconds/max": max(own),
            "time/own_seconds/slowest_rank": own.index(max(own)),
        }


class StragglerWatch:
    """Names a rank that is slower than the others, row after row.

    Steps that all ranks finish together take equally long on each. What counts is the time that a rank does not spend
    waiting for others.
    """

    FACTOR, ROWS, QUIET = 1.5, 5, 100  # of the median; rows in a row; rows before the warning is repeated

    def __init__(self) -> None:
        self.rank, self.rows, self.silent = -1, 0, 0

    def look(self, own: Sequence[float]) -> tuple[str, str] | None:
        """Given each rank's own seconds per batch: a warning in two parts, who and why, or nothing."""
        slowest = max(range(len(own)), key=own.__getitem__)
        median = statistics.median(own)
        late = own[slowest] > self.FACTOR * median and own[slowest] - median > 0.02
        self.rows = self.rows + 1 if late and slowest == self.rank else int(late)
        self.rank = slowest if late else -1
        self.silent = max(0, self.silent - 1)
        if self.rows < self.ROWS or self.silent:
            return None
        self.silent = self.QUIET
        why = f"is slower than the others: {own[slowest]:.3f} s of compute per batch; median {median:.3f} s"
        return f"rank {slowest}", why


def _encode(text: str) -> list[float]:
    """A name as numbers, which ranks exchange: six bytes fit into each."""
    content = text.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    return [float(int.from_bytes(content[i : i + 6], "big")) for i in range(0, NAME_BYTES, 6)]


def _decode(numbers: Sequence[float]) -> str:
    return b"".join(int(number).to_bytes(6, "big") for number in numbers).rstrip(b"\0").decode(errors="replace")
