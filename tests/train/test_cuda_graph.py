"""When passes are recorded as a CUDA graph. What a recorded run computes is tested in test_gpu.py."""

import numpy as np
import pytest
import torch

from ingot.config.load import load_config
from ingot.config.run import RunConfig
from ingot.data.loading.batch_loader import Batch
from ingot.errors import ConfigError
from ingot.training import cuda_graph
from ingot.training.cuda_graph import check_graph, choose_graph, why_no_graph

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def config(*more: str) -> RunConfig:
    return load_config(RunConfig, ["pythia-14m", "data=x", *more])


def test_what_cannot_be_recorded_is_said() -> None:
    assert why_no_graph(config(), GPU, False, None) is None
    assert "CPU" in str(why_no_graph(config(), CPU, False, None))
    assert "collectives" in str(why_no_graph(config(), GPU, True, None))
    assert "8-bit" in str(why_no_graph(config("precision=fp8"), GPU, False, None))
    assert "recomputed" in str(why_no_graph(config(), GPU, False, "full"))
    assert "dropout" in str(why_no_graph(config("model.resid_pdrop=0.1"), GPU, False, None))


def test_to_insist_where_it_cannot_be_is_an_error() -> None:
    check_graph(config("cuda_graphs=true"), GPU, False)
    check_graph(config(), CPU, False)
    with pytest.raises(ConfigError, match="cuda_graphs=true cannot be: there are none on a CPU; leave it at auto"):
        check_graph(config("cuda_graphs=true"), CPU, False)
    with pytest.raises(ConfigError, match="recomputed"):
        check_graph(config("cuda_graphs=true", "activation_checkpointing=true"), GPU, False)


class Step:
    """A step that is measured, with a clock of its own."""

    def __init__(self, run: RunConfig):
        self.config, self.device, self.spread, self.graph, self.optimizer = run, GPU, None, None, self
        self.model = torch.nn.Linear(1, 1)

    def first_microbatch(self, batch: Batch) -> tuple[()]:
        return ()

    def forward_backward(self) -> None: ...

    def zero_grad(self) -> None:
        self.cleared = True


@pytest.mark.parametrize(
    ("launched", "replayed", "reserved", "expected"),
    [
        (0.021, 0.005, 1, "CUDA graph: a microbatch takes 5.0 ms, launched one by one 21.0"),
        (0.003, 0.003, 1, "33% of the peak, and as a CUDA graph 3.0"),
        (0.0015, 0.001, 1, "67% of the peak, so launching is not what it waits for"),
        (0.021, 0.005, 50, "more memory than is left"),
    ],
)
def test_a_graph_is_chosen_by_measurement(
    monkeypatch: pytest.MonkeyPatch, launched: float, replayed: float, reserved: int, expected: str
) -> None:
    times = iter([launched, replayed])
    monkeypatch.setattr(cuda_graph, "_seconds", lambda work, device: next(times))
    monkeypatch.setattr(cuda_graph, "MicrobatchGraph", lambda work, parameters: "recorded")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    step = Step(config())
    batch = Batch(np.zeros((2, 4), int), np.zeros((2, 4), int), np.arange(2))
    assert expected in str(choose_graph(step, batch, None, 0.001))
    assert (step.graph == "recorded") == expected.startswith("CUDA graph") and step.cleared


def test_large_microbatches_are_not_even_measured() -> None:
    step = Step(config())
    assert "0.3 s of arithmetic" in str(choose_graph(step, None, None, 0.3)) and step.graph is None
    assert choose_graph(Step(config("cuda_graphs=false")), None, None, 0.001) is None
