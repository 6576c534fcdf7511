"""Asked to stop while it compiles, a run stops; it does not wait for compilers that took the request for themselves."""

import subprocess
import sys

PROGRAM = """
import os, signal
from torch._inductor import async_compile
from ingot.train.stop import SIGNALS, start_compilers

heard = []
for number in SIGNALS:
    signal.signal(number, lambda *_: heard.append(1))
start_compilers()
pool = async_compile.AsyncCompile.process_pool()
assert pool.submit(os.getpid).result(60) != os.getpid()
for number in SIGNALS:
    os.killpg(0, number)
print(len(heard), pool.submit(os.getpid).result(60) != os.getpid())
"""


def test_signals_to_the_process_group_leave_the_compilers_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "True"]
