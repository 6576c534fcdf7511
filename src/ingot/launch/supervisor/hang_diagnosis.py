"""Which process the others wait for: the system knows who is stopped, the stacks say who is not in torch, the counts
of collectives who missed one.
"""

import contextlib
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import EXIT_FAULT
from ingot.launch.supervisor.failure import Failure
from ingot.training.runtime.heartbeat import Beat

DUMP_SECONDS = 1.0  # for processes to write their stacks
CLOCK = "ingot/parallel/executors/comm_timer.py"  # stands around every wait, and says nothing of it


def explain_hang(
    processes: Mapping[int, subprocess.Popen], beats: Mapping[int, Beat], logs: Path
) -> tuple[int, Failure]:
    """Have all processes write down where they are, and find out which of them the others wait for."""
    sizes = {rank: _size(logs / f"stacks-{rank}.txt") for rank in processes}
    stopped = [rank for rank, process in processes.items() if _state(process.pid) == "T"]
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    stacks = {rank: _tail(logs / f"stacks-{rank}.txt", size) for rank, size in sizes.items()}
    elsewhere = [rank for rank, text in stacks.items() if text and not _waits_in_torch(text)]
    joined = {rank: (beat.world_collectives, beat.collectives) for rank, beat in beats.items()}
    fewest, most = min(joined.values()), max(joined.values())
    behind = [rank for rank, counts in joined.items() if counts == fewest]
    waits = {rank: _innermost(text).partition("(")[2][:-1] for rank, text in stacks.items()}
    usual, _ = Counter(waits.values()).most_common(1)[0]
    odd = [rank for rank, name in waits.items() if name != usual]
    if stopped:
        rank, why = stopped[0], "it is stopped (SIGSTOP or a debugger)"
    elif len(elsewhere) == 1:
        rank, why = elsewhere[0], f"it is in {_innermost(stacks[elsewhere[0]])} while the others wait for it"
    elif len(behind) < len(beats):
        rank = behind[0]
        number, count = (fewest[0], most[0]) if fewest[0] != most[0] else (fewest[1], most[1])
        why = f"it has joined {number} collectives and others {count}: it misses one that they wait in"
    elif len(odd) == 1:
        rank = odd[0]
        why = (
            f"it waits in {waits[rank]} and the others in {usual}, as collective {most[0]} of all ranks: it missed one"
        )
    else:
        rank, why = min(beats, key=lambda r: (beats[r].batch, beats[r].at)), "all ranks wait"
    beat = beats.get(rank) or min(beats.values(), key=lambda b: b.at)
    waited = time.monotonic() - beat.at
    message = (
        f"rank {rank} has made no progress for {waited:.0f} s in batch {beat.batch + 1}: {why}; the stacks of all "
    )
    return rank, Failure(f"{message}ranks are in {logs}/stacks-*.txt", "hang", EXIT_FAULT, 0.0)


def _waits_in_torch(stack: str) -> bool:
    """Whether the main thread of a dump is inside a collective or the backward pass."""
    return "torch" in _innermost(stack)


def _innermost(stack: str) -> str:
    """File, line and function where the main thread of a dump is: the last thread written."""
    main = stack[stack.rfind("Thread 0x") :] if "Thread 0x" in stack else stack
    main = stack[stack.rfind("Current thread") :] if "Current thread" in stack else main
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    frames = [frame for frame in frames if not frame[0].endswith(CLOCK)]
    return "{}:{} ({})".format(*frames[0]) if frames else "code without a Python stack"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    return path.read_bytes()[start:].decode(errors="replace") if path.exists() else ""
