"""When passes are captured as a CUDA graph. What a captured run computes is tested in test_gpu.py."""

import pytest
import torch

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.parallel.executors import cuda_graph
from ingot.parallel.executors.cuda_graph import GraphChoice, check_cuda_graphs, why_no_graph
from ingot.parallel.layout import Layout

GPU, CPU, ONE = torch.device("cuda"), torch.device("cpu"), Layout()
NO_ARGUMENTS = (torch.zeros(()), torch.zeros(()), torch.zeros(()))


def config(*more: str) -> RunConfig:
    return load_config(RunConfig, ["pythia-14m", "data=x", *more])


def test_the_reason_why_a_run_cannot_be_captured() -> None:
    assert why_no_graph(config(), GPU, None, ONE) is None
    assert "CPU" in str(why_no_graph(config(), CPU, None, ONE))
    assert "8-bit" in str(why_no_graph(config("precision=fp8"), GPU, None, ONE))
    assert "activation checkpointing" in str(why_no_graph(config(), GPU, "full", ONE))
    assert "dropout" in str(why_no_graph(config("model.resid_pdrop=0.1"), GPU, None, ONE))


def test_cuda_graphs_true_is_an_error_where_they_are_impossible() -> None:
    check_cuda_graphs(config("cuda_graphs=true"), GPU, ONE)
    check_cuda_graphs(config(), CPU, Layout(shard=2))
    with pytest.raises(ConfigError, match="cuda_graphs=true is not possible: a CPU has none; use auto"):
        check_cuda_graphs(config("cuda_graphs=true"), CPU, ONE)
    with pytest.raises(ConfigError, match="activation checkpointing cannot be captured"):
        check_cuda_graphs(config("cuda_graphs=true", "activation_checkpointing=true"), GPU, ONE)
    check_cuda_graphs(config("cuda_graphs=true"), GPU, Layout(shard=2))
    for axis in ("tensor", "context", "pipeline"):
        with pytest.raises(ConfigError, match=f"parallel.{axis} communicates inside a pass"):
            check_cuda_graphs(config("cuda_graphs=true"), GPU, Layout(**{axis: 2}))


@pytest.mark.parametrize("asked", ["true", "auto"])
def test_running_out_of_memory_while_capturing_is_an_error_only_if_graphs_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    def capture(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graph, "_seconds", lambda work, device: 0.021)
    monkeypatch.setattr(cuda_graph, "MicrobatchGraph", capture)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100))
    choice = GraphChoice(config(f"cuda_graphs={asked}"), GPU, None, ONE, 0.001)
    if asked == "true":
        with pytest.raises(ConfigError, match="cuda_graphs=true needs memory for one more microbatch"):
            choice.measure(lambda *arguments: NO_ARGUMENTS[0], [], NO_ARGUMENTS)
    else:
        assert choice.measure(lambda *arguments: NO_ARGUMENTS[0], [], NO_ARGUMENTS)[0] is None


@pytest.mark.parametrize(
    ("launched", "replayed", "reserved", "expected"),
    [
        (0.021, 0.005, 1, "CUDA graphs: on (a microbatch takes 5.0 ms with a graph, 21.0 ms without)"),
        (0.003, 0.003, 1, "CUDA graphs: off (a microbatch takes 3.0 ms with a graph, 3.0 ms without)"),
        (0.0015, 0.001, 1, "CUDA graphs: off (at 67% of the peak the GPU does not wait for launches)"),
        (0.021, 0.005, 50, "CUDA graphs: off (the graph's memory may not fit; a microbatch takes 21.0 ms, 5% of"),
    ],
)
def test_a_graph_is_chosen_by_measurement(
    monkeypatch: pytest.MonkeyPatch, launched: float, replayed: float, reserved: int, expected: str
) -> None:
    times = iter([launched, replayed])
    monkeypatch.setattr(cuda_graph, "_seconds", lambda work, device: next(times))
    monkeypatch.setattr(cuda_graph, "MicrobatchGraph", lambda *arguments: "captured")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100))
    choice = GraphChoice(config(), GPU, None, ONE, 0.001)
    graph, reason = choice.measure(lambda *arguments: NO_ARGUMENTS[0], [], NO_ARGUMENTS)
    assert expected in reason
    assert (graph == "captured") == reason.startswith("CUDA graphs: on")


def test_large_microbatches_are_not_even_measured() -> None:
    def unused(*arguments: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    graph, reason = GraphChoice(config(), GPU, None, ONE, 0.3).measure(unused, [], NO_ARGUMENTS)
    assert graph is None and "next to 0.3 s of compute" in reason
