"""Copies of the training state in host memory that a restart within the job continues from.

The launcher owns the memory and keeps it while its ranks die and are started again. A copy costs a save's stall
(milliseconds) and no file system, so it can be made every minute. After a failure, a step of which every rank has an
intact copy is newer than the last checkpoint. In a job, another node's agent keeps each copy as well, so a rank that
now runs on another node finds its copy there (`launch.peer_copies`). If a rank has none, the checkpoint counts. A copy
is used once, so that one that itself makes the run fail cannot do so again.
"""

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import msgspec
import torch
from torch import Tensor

from ingot.checkpoint.copy_memory import SLOTS, CopyRecord, content_hash, find_memory
from ingot.checkpoint.manifest import MODEL, OPTIMIZER, Manifest
from ingot.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES
from ingot.checkpoint.save_plan import SavePlan, Tensors, file_order
from ingot.checkpoint.snapshot import Snapshot
from ingot.config.durations import BatchClock
from ingot.config.run import RunConfig
from ingot.errors import CheckpointError
from ingot.host_memory import available_memory
from ingot.parallel.dtensor import local
from ingot.parallel.executors.base import Executor
from ingot.parallel.rank_env import PEER_COPY_BYTES
from ingot.plurals import count_of
from ingot.storage.byte_sizes import format_bytes
from ingot.training.listener import RunListener

SECONDS = 60.0  # between copies, by default
MEASURED_STEPS = 8  # before the default interval is chosen
MEMORY_SHARE = 0.5  # of the free host memory that copies may take, by default
IN_MEMORY = "host memory"  # the folder of a copy's manifest
CONTENT = "copy"


class HostCopies:
    """This rank's copies. All ranks must call the methods together, unless they say otherwise."""

    def __init__(self, config: RunConfig, clock: BatchClock, executor: Executor, listener: RunListener):
        self.config, self.executor, self.listener = config, executor, listener
        interval, env = config.snapshot_interval, executor.rank_env
        self._is_auto = interval == "auto"
        self._seconds = SECONDS if interval == "auto" else interval.seconds if interval.is_wall_clock else 0.0
        self.every = 0 if interval == "auto" or interval.is_wall_clock else clock.interval(interval)
        """Batches between copies; 0 as long as there are none."""
        self._decided = not self._seconds and not self.every
        self.memory = None if self._decided else find_memory(os.environ, env.local_rank)
        self._for_peer = False
        """Whether another node keeps each copy as well: every node has room for another's, or a spare keeps them."""
        self._owner = f"{Path(config.run_folder).resolve()} {executor.layout} rank {env.rank} of {env.world}"
        self._life = ""
        self._snapshots: dict[int, Snapshot] = {}
        self._names: list[str] = []
        self._current: Snapshot | None = None
        self._thread: threading.Thread | None = None
        self._found: tuple[int, CopyRecord] | None = None
        self._step_ends: list[float] = []
        self._problem, self._is_broken = "", False

    # --- making copies

    def after_step(self, tensors: Callable[[], Tensors]) -> None:
        """Decide, once the optimizer has its state and step times are known, whether to make copies."""
        if self._decided:
            return
        self._step_ends.append(monotonic())
        if self._seconds and len(self._step_ends) <= MEASURED_STEPS:
            return
        self._decided = True
        size = sum(local(t).nbytes for content in tensors().values() for t in content.values())
        rows = self.executor.all_gather([
            float(self.memory is not None), float(len(SLOTS) * size * self.executor.rank_env.local_world),
            float((available_memory() or 0) + self._held()), self._batches_per_copy(),
            float(PEER_COPY_BYTES in os.environ),
        ])  # fmt: skip
        has_memory, needed, free = all(row[0] for row in rows), max(row[1] for row in rows), min(row[2] for row in rows)
        self.every = int(rows[0][3])
        room = free * (MEMORY_SHARE if self._is_auto else 1.0)
        if has_memory and needed <= room:
            self._life = self.executor.coordinator.broadcast(lambda: uuid.uuid4().hex.encode()).decode()
            has_peer = all(row[4] for row in rows)
            env, size_text = self.executor.rank_env, format_bytes(int(needed))
            is_alone = env.world == env.local_world
            self._for_peer = has_peer and (is_alone or 2 * needed <= room)
            what = f"every {count_of(self.every, 'batch', 'es')}, {size_text} on {'this' if is_alone else 'each'} node"
            if is_alone:
                what += " and on a spare" if has_peer else ", on no other (there is neither another node nor a spare)"
            elif self._for_peer:
                what += f" and {size_text} for those of another node"
            self.listener.note(f"copies in host memory: {what}; a restart within the job continues from them")
            if has_peer and not self._for_peer:
                why = f"they need {size_text} more on each node, and {format_bytes(int(free - needed))} are free"
                (self.listener.note if self._is_auto else self.listener.warn)(f"copies of another node: off ({why})")
            return
        self.every = 0
        if not has_memory:  # said only where somebody has asked for copies
            if not self._is_auto:
                self.listener.warn("snapshot_interval: no copies are made, since no launcher keeps memory for them")
            return
        why = f"they need {format_bytes(int(needed))} on each node, and {format_bytes(int(free))} are free"
        (self.listener.note if self._is_auto else self.listener.warn)(f"copies in host memory: off ({why})")

    def _held(self) -> int:
        """What this node has given to copies before, which new ones replace."""
        own = self.memory.bytes_in_use() if self.memory is not None else 0
        return own * self.executor.rank_env.local_world + int(os.environ.get(PEER_COPY_BYTES, 0))

    def _batches_per_copy(self) -> float:
        if not self._seconds:
            return self.every
        ends = self._step_ends
        return max(1, round(self._seconds / max(median(b - a for a, b in pairwise(ends)), 1e-9)))

    def is_due(self, batch: int) -> bool:
        """Whether to copy the state after a batch. Local."""
        return bool(self.every) and batch % self.every == 0

    def begin(self, batch: int, tensors: Tensors, state: Callable[[], dict[str, Any]]) -> None:
        """Start to copy the state. Tensors may change after `before_update`. Local."""
        if self._is_broken:
            return
        assert self.memory is not None
        self.wait()
        if self._problem:
            self.listener.warn(f"{self._problem}; trying again with the next copy")
            self._problem = ""
        names = [f"{kind}/{name}" for kind, content in tensors.items() for name in content]
        if names != self._names:
            self._names, self._snapshots = names, {}
        slot = self.memory.slot_to_write()
        if slot not in self._snapshots:
            try:
                self._snapshots[slot] = self._allocate(slot, tensors)
            except (OSError, RuntimeError) as error:  # for example a driver that does not accept the memory
                self._is_broken = True
                self.listener.warn(f"copies in host memory: off from now on ({error})")
                return
        self.memory.forget(slot)
        self._current = snapshot = self._snapshots[slot]
        snapshot.begin(tensors)
        described = [(kind, name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
                     for kind, content in tensors.items() for name, tensor in content.items()]  # fmt: skip
        values = json.dumps(state()) if self.executor.coordinator.is_first else ""
        record = CopyRecord(batch, self._life, self._owner, snapshot.bytes, "", described, values, self._for_peer)
        finish = partial(self._finish, slot, snapshot, record, tensors)
        self._thread = threading.Thread(target=finish, name="copy", daemon=True)
        self._thread.start()

    def before_update(self) -> None:
        """Call this before the weights change: until then the copy may still be in progress. Local."""
        if self._current is not None:
            self._current.hold()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the copy in flight. Local."""
        if self._thread is not None:
            self._thread.join(timeout)

    def discard(self) -> None:
        """Forget all copies: the state that they hold is in doubt. Local."""
        if self.memory is not None:
            self.wait()
            self.memory.forget_all()

    def _allocate(self, slot: int, tensors: Tensors) -> Snapshot:
        assert self.memory is not None
        keys = file_order([(kind, name) for kind, content in tensors.items() for name in content], tensors)
        return Snapshot(tensors, SavePlan({CONTENT: keys}, 1, {}), self.memory.begin(slot))

    def _finish(self, slot: int, snapshot: Snapshot, record: CopyRecord, tensors: Tensors) -> None:
        snapshot.finish()
        file = snapshot.files[CONTENT]
        assert self.memory is not None
        try:
            digest = content_hash(file.whole)
            self.memory.complete(slot, msgspec.structs.replace(record, xxh3=digest, bytes=len(file.whole)))
            for other in set(SLOTS) - self._snapshots.keys():  # what is there is older than the copy that is complete
                self._snapshots[other] = self._allocate(other, tensors)
        except (CheckpointError, OSError, RuntimeError) as error:  # the next one may work
            with suppress(OSError):
                self.memory.forget(slot)
            self._problem = str(error)

    # --- going back to a copy

    def find(self, newest_on_disk: int) -> Manifest | None:
        """The newest step, after that of the checkpoints, of which every rank has an intact copy: the same for all."""
        self._found = None
        records = self.memory.records() if self.memory is not None else {}
        own = {f"{r.step} {r.life}": slot for slot, r in records.items() if r.owner == self._owner}
        if not (chosen := self._choose(list(own), newest_on_disk)):
            self.discard()  # later ones would not fit to what follows
            return None
        slot, problem = own[chosen], ""
        assert self.memory is not None
        try:
            self.memory.content(slot, records[slot]).close()
        except (CheckpointError, OSError) as error:
            problem = str(error)
        self.memory.mark_used(slot)
        if problem := self.executor.coordinator.gather_and_decide(problem, self._first_problem):
            self.listener.warn(f"{problem}; continuing from the last checkpoint")
            self.discard()
            return None
        for other, record in records.items():
            if record.step > records[slot].step:
                self.memory.forget(other)
        state = self.executor.coordinator.broadcast(records[slot].state.encode)
        self._found = slot, records[slot]
        kinds: dict[str, Any] = {kind: {} for kind in (MODEL, OPTIMIZER)}
        return Manifest(records[slot].step, 1, {}, kinds, json.loads(state), Path(IN_MEMORY))

    def _choose(self, own: list[str], newest_on_disk: int) -> str:
        def newest_of_all(texts: list[str]) -> list[str]:
            common = set.intersection(*(set(msgspec.json.decode(text, type=list[str])) for text in texts))
            newer = [copy for copy in common if int(copy.split()[0]) > newest_on_disk]
            return [max(newer, key=lambda copy: int(copy.split()[0]), default="")] * len(texts)

        return self.executor.coordinator.gather_and_decide(msgspec.json.encode(own).decode(), newest_of_all)

    def _first_problem(self, texts: list[str]) -> list[str]:
        return [next(filter(None, texts), "")] * len(texts)

    def holds(self, manifest: Manifest) -> bool:
        """Whether a manifest is the one that `find` has returned. Local."""
        return self._found is not None and manifest.folder == Path(IN_MEMORY)

    def training_state(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Names, types and whole shapes of the optimizer's tensors in the copy that was found. Local."""
        assert self._found is not None
        for kind, name, dtype, shape in self._found[1].tensors:
            if kind == OPTIMIZER:
                yield name, DTYPES[dtype], shape

    def load(self, targets: Iterable[tuple[str, Tensor]]) -> None:
        """Fill this rank's tensors from the copy that was found. Local."""
        assert self._found is not None and self.memory is not None
        content = self.memory.content(*self._found)
        header_bytes = 8 + int.from_bytes(content[:8], "little")
        header = msgspec.json.decode(content[8:header_bytes])
        for name, target in targets:
            there, here = header[name], local(target)
            begin, end = there["data_offsets"]
            if there["shape"] != list(here.shape) or DTYPES[there["dtype"]] != here.dtype:
                raise CheckpointError(f"the copy in host memory holds another shard of {name}")
            if end > begin:
                flat = torch.frombuffer(content, dtype=torch.uint8, count=end - begin, offset=header_bytes + begin)
                with torch.no_grad():
                    here.copy_(flat.clone().view(here.dtype).view(here.shape))
