"""Which rank the others wait for: the system knows which is stopped, the stacks show which is not in torch, the counts
of collectives show which missed one.
"""

import contextlib
import math
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ingot.errors import EXIT_FAULT
from ingot.launch.agent.failure import Failure
from ingot.storage.small_files import read_bytes
from ingot.training.runtime.heartbeat import Beat

DUMP_SECONDS = 1.0  # for ranks to write their stacks
COMM_TIMER = "ingot/parallel/executors/comm_timer.py"  # wraps every wait


def explain_hang(
    processes: Mapping[int, subprocess.Popen], beats: Mapping[int, Beat], folder: Path, logs: Path
) -> tuple[int, Failure]:
    """Have all ranks dump their stacks, and find the rank that the others wait for."""
    stopped = [rank for rank, process in processes.items() if process_state(process.pid) == "T"]
    stacks = dump_stacks(processes, folder)
    rank, why = (stopped[0], "it is stopped (SIGSTOP or a debugger)") if stopped else _find_culprit(stacks, beats)
    beat = beats.get(rank) or min(beats.values(), key=lambda b: b.at)
    message = (
        f"rank {rank} has made no progress for {time.monotonic() - beat.at:.0f} s in batch {beat.batch + 1}: {why}"
    )
    return rank, Failure(f"{message}; the stacks of all ranks are in {logs}/stacks-*.txt", "hang", EXIT_FAULT, 0.0)


def dump_stacks(processes: Mapping[int, subprocess.Popen], folder: Path) -> dict[int, str]:
    """What ranks write when asked for the stacks of their threads; empty for one that is stopped or cannot run."""
    sizes = {rank: _size(folder / f"stacks-{rank}.txt") for rank in processes}
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    return {rank: _tail(folder / f"stacks-{rank}.txt", size) for rank, size in sizes.items()}


def _find_culprit(stacks: Mapping[int, str], beats: Mapping[int, Beat]) -> tuple[int, str]:
    """By the most reliable sign first: outside torch, fewer collectives, another collective, the oldest heartbeat."""
    elsewhere = [rank for rank, text in stacks.items() if text and "torch" not in innermost(text)]
    if len(elsewhere) == 1:
        return elsewhere[0], f"it is in {innermost(stacks[elsewhere[0]])} while the others wait for it"
    joined = {rank: (beat.world_collectives, beat.collectives) for rank, beat in beats.items()}
    fewest, most = min(joined.values()), max(joined.values())
    behind = [rank for rank, counts in joined.items() if counts == fewest]
    if len(behind) < len(beats):
        number, count = (fewest[0], most[0]) if fewest[0] != most[0] else (fewest[1], most[1])
        return behind[0], f"it has joined {number} collectives and others {count}: it missed one that they wait in"
    waits = {rank: innermost(text).partition("(")[2][:-1] for rank, text in stacks.items()}
    usual, _ = Counter(waits.values()).most_common(1)[0]
    odd = [rank for rank, name in waits.items() if name != usual]
    if len(odd) == 1:
        where = f"it waits in {waits[odd[0]]} and the others in {usual}"
        return odd[0], f"{where}, as collective {most[0]} of all ranks: it missed one"
    return min(beats, key=lambda r: (beats[r].batch, beats[r].at)), "all ranks wait"


def innermost(stack: str) -> str:
    """File, line and function where the main thread of a dump is: the last thread written."""
    main = stack[stack.rfind("Thread 0x") :] if "Thread 0x" in stack else stack
    main = stack[stack.rfind("Current thread") :] if "Current thread" in stack else main
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    frames = [frame for frame in frames if not frame[0].endswith(COMM_TIMER)]
    return "{}:{} ({})".format(*frames[0]) if frames else "code without a Python stack"


def process_state(pid: int) -> str:
    """The letter in /proc: T is stopped, D waits for a device or file system; ? if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    return read_bytes(path, math.inf)[start:].decode(errors="replace") if path.exists() else ""
