"""Asked to stop while it compiles, a run stops; it does not wait for compilers that took the request for themselves. And
a run that does not compile does not wait for the compiler to be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.model.kernels.conditions import TRITON

PROGRAM = """
import os, signal
from torch._inductor import async_compile
from ingot.training.runtime.stop import SIGNALS, start_compilers

heard = []
for number in SIGNALS:
    signal.signal(number, lambda *_: heard.append(1))
start_compilers()
pool = async_compile.AsyncCompile.process_pool()
assert pool.submit(os.getpid).result(60) != os.getpid()
for number in SIGNALS:
    os.killpg(0, number)
print(len(heard) == len(SIGNALS), pool.submit(os.getpid).result(60) != os.getpid())
"""


def test_signals_to_the_process_group_leave_the_compilers_alive() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, start_new_session=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.skipif(TRITON, reason="where there is Triton, the kernel of the loss brings the compiler along")
def test_on_a_cpu_a_run_trains_and_saves_without_the_compiler(data: Path, tmp_path: Path) -> None:
    program = """
import sys
from ingot.config.load import load_config
from ingot.api import train
from ingot.config.run import RunConfig
train(load_config(RunConfig, sys.argv[1:]))
sys.exit("torch._dynamo" in sys.modules)
"""
    small = ["model.d_model=16", "model.n_heads=2", "model.n_layers=1", "model.vocab_size=320", "max_seq_len=16",
             "global_train_batch_size=4", "max_duration=2ba", "device=cpu", "precision=fp32"]  # fmt: skip
    run = tmp_path / "run"
    command = [sys.executable, "-c", program, *small, f"data={data}", f"save_folder={run}"]
    subprocess.run(command, check=True, timeout=120)
    assert (run / "checkpoints" / "2").is_dir()
