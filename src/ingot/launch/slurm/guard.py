"""The process of a job script: `python -m ingot.launch.slurm.guard ARGUMENTS` runs the supervisor with them, passes
Slurm's signals on to it, and starts another one if it is killed.

The kernel kills what needs memory, which on this node is the supervisor before this. It decides nothing: what the
supervisor was doing is in `launch/state.jsonl`, from which the next one continues in the same allocation. Without this,
the end of the supervisor is the end of the job, and nobody is left to record it or to queue the job again.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ingot.launch.child_process import end_with_parent

SUPERVISOR = "ingot.launch.supervisor.main"
MAX_RESTARTS = 3  # the supervisor has its own budget; this one is for a supervisor that is killed before it can read it
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def main(command: Sequence[str]) -> int:
    """Run it to its end; returns the exit code, 128 + N after signal N."""
    running: list[subprocess.Popen[bytes]] = []
    passed_on: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        passed_on.append(number)
        for process in running:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    code = 0
    for restart in range(MAX_RESTARTS + 1):
        # it must not outlive the job, which ends with this process
        process = subprocess.Popen(command, preexec_fn=end_with_parent)
        running[:] = [process]
        for early in passed_on:  # it came while the process was being started
            process.send_signal(early)
        code = process.wait()
        if code >= 0 or passed_on:  # told to end, it may have been too slow for whoever told it
            break
        again = "; it is started again" if restart < MAX_RESTARTS else ""
        print(f"the supervisor was killed by signal {-code}{again}", file=sys.stderr, flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main([sys.executable, "-m", SUPERVISOR, *sys.argv[1:]]))
