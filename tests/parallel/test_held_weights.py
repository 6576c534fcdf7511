"""FSDP2 that gathers weights once per step computes what one process computes, for the installed version of torch.

Matrices of the initial model are the same in bf16 whether copied or gathered, and its norms are ones, so a step's
gradients of matrices must be equal to the last bit.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from warm_process import spawn_warm

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.model import kernels
from ingot.model.kernels.bf16_weights import Bf16Linear
from ingot.model.kernels.fp8.linear import Fp8Linear
from ingot.parallel.dtensor import gather, local
from ingot.parallel.executors.base import Executor, NoMessages
from ingot.parallel.executors.build import build_distributed, build_single, check_distributed
from ingot.parallel.fsdp import GradientAccumulation
from ingot.parallel.layout import Layout
from ingot.parallel.rank_env import RankEnv
from ingot.parallel.rendezvous import World, join_world, leave_world

CPU = torch.device("cpu")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A process group of one."""
    yield join_world(RankEnv(), CPU, 60.0)
    leave_world()


def config(precision: str) -> RunConfig:
    return load_config(RunConfig, [
        "model.family=neox", "model.d_model=64", "model.n_heads=4", "model.n_layers=2", "model.vocab_size=96",
        "max_seq_len=32", "global_train_batch_size=8", f"precision={precision}", "data=x", "parallel.shard=1",
    ])  # fmt: skip


def gradients(executor: Executor, hold: bool, part: slice = slice(None), whole: bool = False) -> dict[str, Tensor]:
    executor.microbatch = 2
    executor.hold_weights(hold)
    executor.weights_changed()
    tokens = np.random.default_rng(0).integers(0, 96, (8, 32))
    executor.begin_step(0)
    executor.accumulate(Batch(tokens[part], np.roll(tokens, -1, 1)[part], np.arange(8)[part]))
    return {p.name: gather(p.tensor.grad) if whole else local(p.tensor.grad) for p in executor.parameters}


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_gradients_equal_those_of_one_process(world: World, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_no_fp8", lambda device: None)  # emulated on a CPU
    run = config(precision)
    expected = gradients(build_single(run, CPU, False, NoMessages()), True)
    executor = build_distributed(run, Layout(), world, CPU, False, NoMessages())
    assert executor.hold_choices.keys() == ({True} if precision == "fp8" else {True, False})
    layers = [layer for root in executor.roots for layer in root.modules() if isinstance(layer, Bf16Linear | Fp8Linear)]
    assert len(layers) == 8 and {type(layer) for layer in layers} == {Fp8Linear if precision == "fp8" else Bf16Linear}
    for _ in range(2):  # buffers and gathered weights of one step must not show in the next
        found = gradients(executor, True)
        assert all(layer.working.grad_buffer() is None for layer in layers)  # FSDP2 has reduced it
        for name, gradient in expected.items():
            if gradient.ndim > 1 and name.startswith("blocks."):
                assert torch.equal(found[name], gradient), name
            else:
                torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=2e-2, msg=name)
        for parameter in executor.parameters:
            parameter.tensor.grad = None


def test_one_process_finds_the_same_with_weights_that_are_cast_for_each_use() -> None:
    held, cast_each = (
        gradients(build_single(config("bf16"), CPU, False, NoMessages()), hold) for hold in (True, False)
    )
    assert all(torch.equal(cast_each[name], gradient) for name, gradient in held.items())


def test_the_backward_pass_adds_to_the_buffer_that_fsdp2_reduces(world: World) -> None:
    """A guard for a private attribute of torch: autograd must get no gradient of a matrix."""
    executor = build_distributed(config("bf16"), Layout(), world, CPU, False, NoMessages())
    layer = executor.roots[0].gpt.blocks["0"].mlp.up
    assert isinstance(layer, Bf16Linear)
    seen = []

    def look(*_: object) -> None:
        seen.append((layer.weight.grad, layer.weight.dtype, float(layer.working.grad_buffer().abs().sum())))

    executor.roots[0].gpt.blocks["0"].mlp.register_full_backward_hook(look)
    gradients(executor, True)
    assert [(grad, dtype) for grad, dtype, _ in seen] == [(None, torch.bfloat16)] * 4  # gathered once: still there
    assert 0 < seen[0][2] < seen[-1][2]  # a sum over microbatches


def test_a_module_whose_parts_hold_all_its_weights_has_no_buffer_of_its_own(world: World) -> None:
    """As the root of a stage in the middle of a pipeline."""
    mesh, part = init_device_mesh("cpu", (1,)), nn.Linear(4, 3, bias=False)
    root: Any = nn.Sequential(part)
    fully_shard(part, mesh=mesh)
    fully_shard(root, mesh=mesh)
    accumulation = GradientAccumulation([root])
    accumulation.start()
    (record,) = cast(Any, part)._get_fsdp_state()._fsdp_param_group.fsdp_params
    assert torch.equal(record.unsharded_accumulated_grad, torch.zeros(3, 4))
    accumulation.stop()
    assert record.unsharded_accumulated_grad is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["parallel.tensor=2"], "precision=fp8 does not work with parallel.tensor=2; use bf16"),
        (["parallel.reshard_after_forward=true"], "precision=fp8 keeps 8-bit weights between passes"),
    ],
)
def test_what_fp8_cannot_do_is_refused(more: list[str], said: str) -> None:
    from ingot.errors import ConfigError

    run = load_config(RunConfig, ["mpt-1b", "precision=fp8", "data=x", *more])
    with pytest.raises(ConfigError, match=said):
        check_distributed(run, Layout(tensor=2) if "tensor" in more[0] else Layout())


def one_of_two(rank: int, port: int, folder: str) -> None:
    """Save the gradients of this rank's shards, for each precision and choice."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    kernels.why_no_fp8 = lambda device: None  # emulated on a CPU
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    world = World(RankEnv(rank, 2), store, timedelta(seconds=60))
    for precision, hold in CHOICES:
        run = config(precision).model_copy(
            update={"parallel": config(precision).parallel.model_copy(update={"shard": 2})}
        )
        executor = build_distributed(run, Layout(shard=2), world, CPU, False, NoMessages())
        first, end = executor.batch_part(8)
        found = gradients(executor, hold, slice(first, end), whole=True)
        if rank == 0:
            torch.save(found, f"{folder}/{precision}-{hold}")
    dist.barrier()
    dist.destroy_process_group()


CHOICES = [("bf16", True), ("bf16", False), ("fp8", True)]


def test_two_ranks_sum_to_the_gradients_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches hold the same samples, so only the order of sums differs; 8-bit scales are those of a microbatch."""
    monkeypatch.setattr(kernels, "why_no_fp8", lambda device: None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn_warm(one_of_two, args=(store.port, str(tmp_path)), nprocs=2)
    for precision, hold in CHOICES:
        expected = gradients(build_single(config(precision), CPU, False, NoMessages()), True)
        found = torch.load(tmp_path / f"{precision}-{hold}", weights_only=True)
        for name, gradient in expected.items():
            assert found[name].shape == gradient.shape
            apart = float((found[name] - gradient).norm() / gradient.norm())
            # not held, each microbatch's gradient is rounded to bf16
            assert apart < (1e-5 if hold and gradient.ndim > 1 and name.startswith("blocks.") else 2e-2), (name, apart)
