"""Which layouts work, where a process stands, and how many to start: decided from numbers, without a process."""

import math

import pytest

from ingot.config.load import load_config
from ingot.config.model import ModelConfig
from ingot.config.parallel import ParallelConfig
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.launch.agent.local_ranks import find_node
from ingot.model.shapes import parameter_shapes
from ingot.parallel.layout import Layout
from ingot.parallel.memory_estimate import StepShape, choose_layout, estimate_memory
from ingot.parallel.rank_env import RankEnv, find_rank_env, first_host

MODEL = ModelConfig(d_model=64, n_heads=4, n_layers=4, vocab_size=128, max_seq_len=64)


SINGLE = {"tensor": 1, "pipeline": 1, "context": 1}


def choose(world: int, model: ModelConfig = MODEL, seq_len: int = 64, batch: int = 16, **axes: object) -> Layout:
    return choose_layout(ParallelConfig.model_validate(axes), world, model, batch, StepShape(seq_len))[0]


def test_sharding_takes_what_the_other_axes_leave() -> None:
    assert choose(8) == Layout(shard=8)
    assert choose(8, tensor=2) == Layout(shard=4, tensor=2)
    assert choose(8, shard=2) == Layout(replicate=4, shard=2)
    assert choose(8, replicate=2, pipeline=2) == Layout(replicate=2, shard=2, pipeline=2)
    assert choose(1) == Layout()


@pytest.mark.parametrize(
    ("world", "axes", "problem", "hint"),
    [
        (4, {"tensor": 8}, "needs 8 processes, more than the 4", "parallel.tensor=4"),
        (4, {"shard": 2, "replicate": 1, **SINGLE}, "needs 2 processes, fewer than the 4", "parallel.replicate=2 parallel.shard=2"),
        (3, {"tensor": 3}, "does not divide the model's n_heads, 4", "parallel.pipeline=3"),
        (6, {"pipeline": 6}, "4 layers cannot fill 6 pipeline stages", "parallel.shard=2 parallel.pipeline=3"),
        (4, {"pipeline": 4, "pipeline_schedule": "zero_bubble"}, "cannot fill 8 pipeline stages", "parallel.pipeline=2"),
        (3, {"context": 3}, "max_seq_len 64 is not divisible by 6", "parallel.shard=3"),
        (32, SINGLE, "32 data-parallel processes cannot share a global_train_batch_size of 16",
         "parallel.shard=16"),
        (2, {"tensor": 0}, "parallel.tensor=0: must be at least 1", ""),
    ],
)  # fmt: skip
def test_an_impossible_layout_is_refused_with_the_nearest_that_work(
    world: int, axes: dict[str, object], problem: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(world, **axes)
    assert problem in str(caught.value) and hint in str(caught.value)


def test_zero_bubble_keeps_weights_and_the_other_schedules_may_drop_them() -> None:
    resharded = {"pipeline": 2, "reshard_after_forward": True}
    for schedule in ("1f1b", "interleaved_1f1b"):
        assert choose(4, **resharded, pipeline_schedule=schedule) == Layout(shard=2, pipeline=2)
    with pytest.raises(ConfigError, match="reshard_after_forward=true does not work with pipeline_schedule=zero_bub"):
        choose(4, **resharded, pipeline_schedule="zero_bubble")


@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_documents_are_kept_apart_only_where_whole_sequences_are(axis: str) -> None:
    apart = MODEL.model_copy(update={"eos_token_id": 0, "document_mask": True})
    with pytest.raises(ConfigError, match=r"model.document_mask .* do not work with parallel.context or pipeline"):
        choose(4, apart, **{axis: 2})
    assert choose(4, apart, tensor=2) == Layout(shard=2, tensor=2)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"activation_checkpointing": "selective"}, "selective does not work with zero_bubble"),
        ({"compile": True}, "compile=true does not work with pipeline_schedule=zero_bubble"),
    ],
)
def test_what_a_distributed_model_cannot_do_is_refused(values: dict[str, object], problem: str) -> None:
    import torch

    from ingot.config.run import RunConfig
    from ingot.parallel.executors.build import check_distributed
    from ingot.parallel.executors.device import choose_compile

    parallel = {"pipeline": 2, "pipeline_schedule": "zero_bubble"}
    config = RunConfig.model_validate({"data": "x", "parallel": parallel, **values})
    with pytest.raises(ConfigError, match=problem):
        check_distributed(config, Layout(pipeline=2))
        choose_compile(config, torch.device("cpu"), Layout(pipeline=2))


GIB = 2**30


def fit(recipe: str, world: int, gib: int | None, **axes: object) -> tuple[Layout, str]:
    config = load_config(RunConfig, [recipe, "data=x", *(f"parallel.{a}={n}" for a, n in axes.items())])
    memory = gib * GIB if gib is not None else None
    batch = config.global_train_batch_size
    return choose_layout(config.parallel, world, config.model, batch, StepShape.of(config), memory, node=8)


@pytest.mark.parametrize(
    ("recipe", "world", "gib", "layout"),
    [
        ("mpt-7b", 8, 80, Layout(shard=8)),
        ("mpt-30b", 8, 72, Layout(shard=4, tensor=2)),
        ("mpt-70b", 64, 80, Layout(shard=64)),
        ("mpt-70b", 8, None, Layout(shard=8)),
    ],
)
def test_auto_is_the_smallest_layout_that_fits(recipe: str, world: int, gib: int | None, layout: Layout) -> None:
    assert fit(recipe, world, gib)[0] == layout


def test_the_choice_of_a_layout_says_why() -> None:
    _, why = fit("mpt-30b", 8, 72)
    assert "the smallest that fits" in why and "of 72 GiB per device" in why and "shard=8 would need" in why
    assert "too tight by our estimate" in fit("mpt-70b", 8, 40, tensor=1, context=1, pipeline=1)[1]


def test_auto_refuses_with_the_numbers_when_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"no layout of 8 processes fits: the least is .* GiB \(weights .* of 40 GiB"):
        fit("mpt-70b", 8, 40)


def test_auto_finds_a_layout_for_a_small_batch() -> None:
    assert choose(32, batch=16) == Layout(shard=16, tensor=2)


@pytest.mark.parametrize("recipe", ["gpt3-125m", "mpt-7b", "llama-8b", "pythia-1b"])
def test_the_estimate_counts_every_parameter(recipe: str) -> None:
    model = load_config(RunConfig, [recipe, "data=x"]).model
    for more in (
        {},
        {"qk_ln": True},
        {"no_bias": True},
        {"n_kv_heads": 1},
        {"qk_ln": "heads", "no_bias": True, "norm_bias": model.norm != "rmsnorm"},
    ):
        m = model.model_copy(update=more)
        assert m.parameters == sum(map(math.prod, parameter_shapes(m).values()))


@pytest.mark.parametrize(
    ("layout", "layers", "shards"), [(Layout(), 4, 1), (Layout(shard=4), 4, 4), (Layout(shard=2, pipeline=2), 2, 2)]
)
def test_an_optimizer_keeps_its_bytes_of_the_weights_here(layout: Layout, layers: int, shards: int) -> None:
    hidden, ends = layers * MODEL.block_parameters / shards, MODEL.end_parameters / shards
    for optimizer, expected in (
        ("adamw", 8 * (hidden + ends)),
        ("lion", 4 * (hidden + ends)),
        ("muon", 4 * hidden + 8 * ends),
    ):
        needs = estimate_memory(MODEL, layout, ParallelConfig(), StepShape(64, optimizer=optimizer))
        assert needs.optimizer == expected and needs.weights == needs.gradients == 4 * (hidden + ends), optimizer
        assert needs.saved == needs.weights + expected


@pytest.mark.parametrize("axis", ["shard", "tensor", "context", "pipeline"])
def test_every_axis_but_replicate_lowers_the_estimate(axis: str) -> None:
    config = load_config(RunConfig, ["mpt-30b", "data=x"])

    def total(**axes: int) -> float:
        return estimate_memory(config.model, Layout(**axes), config.parallel, StepShape.of(config)).total

    assert total(**{axis: 4}) < total(**{axis: 2}) < total() == total(replicate=4)


@pytest.mark.parametrize(
    ("precision", "changes", "stream", "inputs", "products", "cheap"),
    [
        # In units of d_model=64 values: 2 inputs of norms are as wide as the model. The products save q (1), k and v
        # (2 x 1/2), the output of attention (1) and the input of GELU (4); the cheap rest is the input of the output
        # projection (1) and of the last product (4), and q and k before they are rotated or normalized (1 + 1/2).
        ("bf16", {}, 2, 2, 7, 5),
        ("bf16", {"positions": "rotary"}, 2, 2, 7, 6.5),
        ("bf16", {"qk_ln": True}, 2, 2, 7, 6.5),
        ("fp32", {}, 2, 2, 7, 5),
        ("fp32", {"positions": "rotary"}, 2, 2, 7, 6.5),
    ],
)
def test_the_activations_of_a_token_and_layer_are_those_counted_by_hand(
    precision: str, changes: dict[str, str], stream: float, inputs: float, products: float, cheap: float
) -> None:
    model = MODEL.model_copy(update={"n_kv_heads": 2, "positions": "learned", **changes})
    needs = estimate_memory(model, Layout(), ParallelConfig(), StepShape(64, micro=3, precision=precision))
    values = 64 * (stream + inputs + products + cheap)
    assert needs.activations / (3 * 64 * model.n_layers) == {"bf16": 2, "fp32": 4}[precision] * values


@pytest.mark.parametrize(("data", "batch"), [(3, 8), (4, 8), (5, 7), (8, 8)])
def test_the_slices_of_a_batch_cover_it_once_and_differ_by_at_most_one(data: int, batch: int) -> None:
    layout = Layout(shard=data)
    parts = [range(*layout.part(rank, batch)) for rank in range(data)]
    assert [sample for part in parts for sample in part] == list(range(batch))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_process_finds_its_place_under_torchrun_and_srun() -> None:
    torchrun = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7",
    }
    assert find_rank_env(torchrun) == RankEnv(5, 8, 1, 4, "a", 7)
    srun = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-09],x1",
    }
    assert find_rank_env(srun) == RankEnv(3, 4, 1, 1, "gpu07")
    assert find_rank_env(srun | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}).local_world == 2
    assert find_rank_env(srun | {"MASTER_ADDR": "b", "MASTER_PORT": "9"}) == RankEnv(3, 4, 1, 1, "b", 9)
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}  # not started by srun: alone
    assert find_rank_env(batch_script) == RankEnv()
    assert find_rank_env({}) == RankEnv()
    with pytest.raises(ConfigError, match="RANK=9 is out of range for WORLD_SIZE=8"):
        find_rank_env(torchrun | {"RANK": "9"})
    with pytest.raises(ConfigError, match="'eight' is not a number"):
        find_rank_env(torchrun | {"WORLD_SIZE": "eight"})


@pytest.mark.parametrize(("nodes", "host"), [("n1", "n1"), ("n[1-3,7],m1", "n1"), ("a-b-[003-9]", "a-b-003"), ("", "")])
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_composer_variables_and_options_say_how_many_processes_to_start() -> None:
    env = {"WORLD_SIZE": "16", "NODE_RANK": "1", "MASTER_ADDR": "head", "MASTER_PORT": "1234", "LOCAL_WORLD_SIZE": "8"}
    node = find_node(None, None, None, None, None, lambda: 1, env)
    assert (node.processes, node.world, node.first_rank, node.address, node.port) == (8, 16, 8, "head", 1234)
    node = find_node(4, 8, 1, "x", 5, lambda: 1, {})
    assert (node.processes, node.world, node.first_rank, node.address, node.port) == (4, 8, 4, "x", 5)
    assert find_node(None, None, None, None, None, lambda: 8, {}).world == 8
    for options, problem in (
        ((3, 8, 0, "x", 5), "must be a multiple"),
        ((4, 8, 2, "x", 5), "make machines 0 to 1"),
        ((4, 8, None, None, None), "need --master_addr"),
        ((0, None, None, None, None), "at least one process"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find_node(*options, lambda: 1, {})  # type: ignore[arg-type]
