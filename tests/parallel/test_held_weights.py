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
from ingot.errors import ConfigError
from ingot.model import kernels
from ingot.model.kernels.bf16_weights import Bf16Linear
from ingot.model.kernels.fp8.linear import Fp8Linear
from ingot.parallel.dtensor import gather, local
from ingot.parallel.executors import cuda_graph
from ingot.parallel.executors.base import Executor, NoMessages
from ingot.parallel.executors.build import build_distributed, build_single, check_distributed
from ingot.parallel.executors.cuda_graph import Pass
from ingot.parallel.executors.distributed import Distributed
from ingot.parallel.fsdp import GradientAccumulation, sharded_modules
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


class Recorded:
    """Stands for a CUDA graph: the same pass, on tensors that must be where they were when it was captured."""

    executor: Distributed
    runs = 0

    def __init__(self, forward_backward: Pass, parameters: list[Tensor], arguments: tuple[Tensor, Tensor, Tensor]):
        self.forward_backward, self.places = forward_backward, self.look()

    def look(self) -> list[tuple[int, int]]:
        modules = sharded_modules(self.executor.roots)
        records = [
            record for module in modules for record in cast(Any, module)._get_fsdp_state()._fsdp_param_group.fsdp_params
        ]
        return [(r.unsharded_param.data_ptr(), r.unsharded_accumulated_grad.data_ptr()) for r in records]

    def run(self, tokens: Tensor, labels: Tensor, divisor: Tensor) -> Tensor:
        assert self.look() == self.places
        Recorded.runs += 1
        return self.forward_backward(tokens, labels, divisor)


def three_steps(executor: Distributed, part: slice = slice(None)) -> list[dict[str, Tensor]]:
    """The gradients of each, and what an evaluation between them finds; weights change after each."""
    found, tokens = [], np.random.default_rng(1).integers(0, 96, (2, 32))
    for _ in range(3):
        found.append({name: gradient.clone() for name, gradient in gradients(executor, True, part).items()})
        with executor.evaluating():
            found[-1]["loss"] = executor.loss_sum(tokens, tokens).clone()
        with torch.no_grad():
            for parameter in executor.parameters:
                local(parameter.tensor).sub_(local(parameter.tensor.grad), alpha=0.1)
                parameter.tensor.grad = None
    return found


def assert_capturing_changes_nothing(run: RunConfig, layout: Layout, world: World) -> None:
    first, end = 8 * world.rank_env.rank // layout.data, 8 * (world.rank_env.rank + 1) // layout.data
    part = slice(first, end)
    expected = three_steps(build_distributed(run, layout, world, CPU, False, NoMessages()), part)
    executor = build_distributed(run.model_copy(update={"cuda_graphs": True}), layout, world, CPU, False, NoMessages())
    Recorded.executor, Recorded.runs = executor, 0
    cuda_graph.MicrobatchGraph = Recorded  # type: ignore[misc,assignment]
    cuda_graph._seconds = lambda work, device: 0.1 * bool(work())
    cuda_graph.why_no_graph = lambda *_: None
    found = three_steps(executor, part)
    assert isinstance(executor.graph, Recorded) and Recorded.runs == 1 + 2 * (8 // layout.data // 2)  # tried once
    for step, other in zip(expected, found, strict=True):
        assert step.keys() == other.keys() and all(torch.equal(other[name], step[name]) for name in step)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_step_between_one_gathering_and_one_reduction_has_the_same_bits(
    world: World, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MicrobatchGraph", "_seconds", "why_no_graph"):  # restored afterwards
        monkeypatch.setattr(cuda_graph, name, getattr(cuda_graph, name))
    assert_capturing_changes_nothing(config(precision), Layout(), world)


def test_what_stays_in_place_for_a_graph_can_be_freed_again(world: World) -> None:
    executor = build_distributed(config("bf16"), Layout(), world, CPU, False, NoMessages())
    accumulation = GradientAccumulation(executor.roots)
    accumulation.hold_weights(True)
    accumulation.stay_in_place(True)
    accumulation.gather()
    block = executor.roots[0].gpt.blocks["0"]
    (record, *_) = cast(Any, block)._get_fsdp_state()._fsdp_param_group.fsdp_params
    size = record.all_gather_outputs[0].untyped_storage().size
    accumulation.stop()
    executor.weights_changed()
    assert size() > 0
    accumulation.stay_in_place(False)
    assert size() == 0


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


def test_a_graph_needs_weights_that_stay_gathered(world: World) -> None:
    run = config("bf16").model_copy(update={"cuda_graphs": True})
    executor = build_distributed(run, Layout(), world, CPU, False, NoMessages())
    assert executor.hold_choices.keys() == {True}, "the search for a microbatch may not free them"
    sharded = run.parallel.model_copy(update={"reshard_after_forward": True})
    with pytest.raises(ConfigError, match="cuda_graphs=true keeps gathered weights"):
        check_distributed(run.model_copy(update={"parallel": sharded}), Layout())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["parallel.tensor=2"], "precision=fp8 does not work with parallel.tensor=2; use bf16"),
        (["parallel.reshard_after_forward=true"], "precision=fp8 keeps 8-bit weights between passes"),
    ],
)
def test_what_fp8_cannot_do_is_refused(more: list[str], said: str) -> None:
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
    for layout in (Layout(shard=2), Layout(replicate=2)):
        assert_capturing_changes_nothing(config("bf16"), layout, world)
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
