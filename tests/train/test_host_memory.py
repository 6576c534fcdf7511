"""A model that this machine cannot hold is refused with its numbers, before the system kills the process."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Ingot

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.host_memory import available_memory
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, estimate_memory
from ingot.training.runtime.memory_check import check_host_memory

GIB = 2**30


@pytest.mark.parametrize("nproc", [[], ["--nproc", "2"]])
def test_a_model_beyond_this_machine_is_refused_with_its_numbers(
    ingot: Ingot, data: Path, tmp_path: Path, nproc: list[str]
) -> None:
    size = ["model.d_model=131072", "model.n_heads=1024", "model.n_layers=96"]  # 20 trillion parameters
    done = ingot("train", *TINY, *size, "device=cpu", f"data={data}", "save_folder=run", *nproc, check=False)
    said = done.stderr
    assert done.returncode == 2 and "Traceback" not in said
    assert "parameters; training it takes at least" in said and "GiB are available" in said
    assert "smaller recipe: the largest that fits is" in said and "parallel.shard" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_bound_is_16_bytes_per_parameter_shared_by_the_processes_that_shard_it() -> None:
    config = load_config(RunConfig, ["mpt-1b", "activation_checkpointing=full"])
    state = 16 * config.model.parameters
    check_host_memory(config, Layout(), 1, state + GIB)  # it fits: no word
    for layout, processes, share in [(Layout(), 1, 1.0), (Layout(shard=4), 4, 1.0), (Layout(shard=4), 2, 0.5),
                                     (Layout(replicate=2, shard=2), 4, 2.0), (Layout(tensor=2, pipeline=2), 4, 1.0)]:  # fmt: skip
        with pytest.raises(ConfigError, match="choose a smaller recipe"):
            check_host_memory(config, layout, processes, int(share * state))
        check_host_memory(config, layout, processes, int(share * state) + 4 * GIB)


def test_the_bound_has_the_activations_of_one_sequence_per_process() -> None:
    config = load_config(RunConfig, ["mpt-1b", "activation_checkpointing=full", "device_train_microbatch_size=4"])
    one = estimate_memory(config.model, Layout(), config.parallel, replace(StepShape.of(config), micro=1))
    least = one.weights + one.gradients + one.optimizer + one.activations
    check_host_memory(config, Layout(), 1, int(least) + 1)
    with pytest.raises(ConfigError, match="max_seq_len=1024 would fit"):
        check_host_memory(config, Layout(), 1, int(least) - 1)


def fake_system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:  8388608 kB\nMemAvailable:  4194304 kB\nSwapFree:  1048576 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 5 * GIB),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/memory.max": f"{2 * GIB}\n",
          "sys/fs/cgroup/job/step/memory.max": "max\n"}, 2 * GIB),  # the limit of the group above counts
        ({"proc/self/cgroup": "0::/elsewhere\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}, 3 * GIB),  # a container
        ({"proc/self/cgroup": "4:cpu,memory:/x\n1:cpu:/\n",
          "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}, 5 * GIB),
    ],
)  # fmt: skip
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_memory(fake_system(tmp_path, {"proc/meminfo": MEMINFO} | files)) == expected


def test_without_limits_from_the_system_nothing_is_refused(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_a_batch_that_no_memory_holds_is_refused_with_one_that_fits() -> None:
    from ingot.training.runtime.memory_check import check_batch_memory

    config = load_config(RunConfig, ["pythia-14m", "data=x", "max_seq_len=1024", "global_train_batch_size=1000"])
    check_batch_memory(config, Layout(), 1, 5 * 1000 * 1024 * 16)
    with pytest.raises(ConfigError, match=r"global_train_batch_size = 1000: .*; use at most 500"):
        check_batch_memory(config, Layout(), 1, 5 * 500 * 1024 * 16)
    with pytest.raises(ConfigError, match=r"max_seq_len = 1024: .*; use a smaller one"):
        check_batch_memory(config, Layout(), 1, 1024)


def test_an_absurd_batch_size_is_refused_at_once() -> None:
    for micro in ("auto", "7"):
        with pytest.raises(ConfigError, match="9,999,999,999,999 sequences in one step are too many"):
            load_config(RunConfig, ["pythia-14m", "global_train_batch_size=9999999999999",
                                    f"device_train_microbatch_size={micro}"])  # fmt: skip


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1_000_000_007])
def test_divisors_are_found_by_the_square_root(number: int) -> None:
    from ingot.divisors import divisors

    found = divisors(number)
    assert found == sorted(set(found)) and found[0] == 1 and found[-1] == number
    if number < 100:
        assert found == [n for n in range(1, number + 1) if number % n == 0]
