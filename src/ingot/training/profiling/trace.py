"""A trace of torch's profiler (Chrome's JSON): the time by category, and a copy of bounded size for Perfetto.

On a GPU, the time is that of its kernels and copies. On a CPU it is that of torch's operations, without the operations
that they call.
"""

import gzip
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ingot.storage.atomic import whole_file

CATEGORIES = {
    "communication": r"nccl|gloo|c10d::|fsdp::|registerpostbackward",
    "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|^aten::(_scaled_|add|badd)?b?m[mv]|^aten::(linear|matmul)",
    "attention": r"cudnn|flash|fmha|^_(forward|backward_kv|backward_q|delta|reach)$|scaled_dot_product|aten::_?softmax",
    "norms, GELU, heads": r"^_(norm|gelu|join)\w*kernel$|^aten::(native_)?(layer|rms)_?norm|^aten::gelu",
    "to 8 bits": r"^_(largest|quantize)_kernel$",
    "loss kernel": r"^_softmax$|log_softmax|nll_loss|cross_entropy",
    "optimizer": r"multi_tensor_apply|adam|lpnorm|^aten::_foreach|^optimizer\.",
    "copies": r"^mem(cpy|set)|^aten::(copy_|_to_copy|clone|zero_|fill_)$",
    "autograd": r"^autograd::|^\w+backward\d*$",
    "element-wise": r"",
}
"""By name in lower case, the first match counts; our Triton kernels by their whole name."""
IDLE = "idle"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_PATTERNS = {category: re.compile(pattern) for category, pattern in CATEGORIES.items()}


class TraceEvent(msgspec.Struct, gc=False):
    """The fields of an event that matter here."""

    ph: str
    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


class _Document(msgspec.Struct):
    traceEvents: list[msgspec.Raw]


@dataclass
class TimeTable:
    """Milliseconds by category, the largest first; idle last."""

    on_gpu: bool
    milliseconds: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    """From the start of the first to the end of the last, in milliseconds."""

    def lines(self, steps: int) -> list[str]:
        """The table as text, per step."""
        width = max(map(len, self.milliseconds), default=0)
        return [f"{name:{width}}  {ms / steps:9,.1f} ms  {ms / self.total if self.total else 0:6.1%}"
                for name, ms in self.milliseconds.items()]  # fmt: skip


class Trace:
    """A trace in a file. Its events are read one by one: a trace of a large model takes hundreds of MB."""

    def __init__(self, path: Path):
        with path.open("rb") as file:
            self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.raw = msgspec.json.decode(self.text, type=_Document).traceEvents

    def events(self) -> Iterator[TraceEvent]:
        decode = msgspec.json.Decoder(TraceEvent).decode
        return map(decode, self.raw)

    def close(self) -> None:
        self.raw.clear()
        self.text.close()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def category_of(name: str) -> str:
    """The category of a kernel or an operation."""
    lower = name.lower()
    return next(category for category, pattern in _PATTERNS.items() if pattern.search(lower))


def time_by_category(events: Iterator[TraceEvent]) -> TimeTable:
    """Where the time went: on the GPU if it ran anything, otherwise in torch's operations on the CPU."""
    device, host = [], []
    for event in events:
        if event.cat in ON_DEVICE:
            device.append(event)
        elif event.cat == "cpu_op":
            host.append(event)
    spent: dict[str, float] = {}
    names: dict[str, str] = {}  # few names, many events
    for event, microseconds in ((e, e.dur) for e in device) if device else _own_times(host):
        category = names.get(event.name) or names.setdefault(event.name, category_of(event.name))
        spent[category] = spent.get(category, 0.0) + microseconds / 1e3
    shown = device or host
    total, busy = _span_and_busy([(e.ts, e.ts + e.dur) for e in shown])
    ordered = dict(sorted(spent.items(), key=lambda item: -item[1]))
    return TimeTable(bool(device), ordered | {IDLE: (total - busy) / 1e3}, total / 1e3)


def write_bounded(trace: Trace, target: Path, most_events: int) -> int:
    """Write a trace as Perfetto reads it. Of more than `most_events`, keep the longest, those of the device first.
    Return how many were left out."""
    least, left_out = _shortest_kept(trace, most_events), 0
    with (
        whole_file(target) as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=4, filename="", mtime=0) as out,
    ):
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        separator = b""
        for raw, event in zip(trace.raw, trace.events(), strict=True):
            if event.ph == "M" or least is None or (event.ph == "X" and _rank(event) > least):
                out.write(separator + bytes(raw))
                separator = b",\n"
            else:
                left_out += 1
        out.write(b"]}\n")
    return left_out


def _shortest_kept(trace: Trace, most_events: int) -> tuple[int, float] | None:
    """The rank above which events are kept; None for all. Links between two events (ph s and f) go with the short."""
    if len(trace.raw) <= most_events:
        return None
    ranks = sorted((_rank(event) for event in trace.events() if event.ph == "X"), reverse=True)
    return ranks[most_events] if len(ranks) > most_events else (-1, 0.0)


def _rank(event: TraceEvent) -> tuple[int, float]:
    return (2 if event.cat == "user_annotation" else int(event.cat in ON_DEVICE)), event.dur


def _own_times(events: list[TraceEvent]) -> Iterator[tuple[TraceEvent, float]]:
    """Each event with its time less that of the events within it, per thread."""
    events.sort(key=lambda e: (str(e.tid), e.ts, -e.dur))
    open_events: list[list[Any]] = []
    for event in events:
        while open_events and (open_events[-1][0].tid != event.tid or _end(open_events[-1][0]) <= event.ts):
            yield tuple(open_events.pop())
        if open_events:
            open_events[-1][1] -= event.dur
        open_events.append([event, event.dur])
    while open_events:
        yield tuple(open_events.pop())


def _end(event: TraceEvent) -> float:
    return event.ts + event.dur


def _span_and_busy(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """From the first start to the last end, and how much of that any span covers."""
    if not spans:
        return 0.0, 0.0
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy, end = busy + max(0.0, last - max(first, end)), max(end, last)
    return end - spans[0][0], busy
