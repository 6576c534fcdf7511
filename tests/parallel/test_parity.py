"""Every layout trains like one process: the same losses, gradient norms, evaluations and final weights."""

from pathlib import Path

import pytest
import torch
from harness import evaluations, losses, norms, tensors, train_all, train_here

from ingot.checkpoint.hf.transfer import export_run
from ingot.config.parallel import ParallelConfig
from ingot.report.metrics_file import read_rows

# An eps well above the rounding of a gradient: AdamW would otherwise blow the last bits of a zero gradient (a key's
# bias has one) up to full steps.
BASE = [
    "model.d_model=32", "model.n_heads=4", "model.n_layers=4", "model.vocab_size=321", "model.vocab_multiple=64",
    "model.init=normal", "max_seq_len=32", "global_train_batch_size=8", "precision=fp32", "scheduler.t_warmup=2ba",
    "optimizer.lr=0.01", "optimizer.eps=1e-5", "max_duration=12ba", "eval_interval=6ba", "eval_subset_num_batches=2",
]  # fmt: skip
FAMILIES = {
    "mpt": ["model.family=mpt", "model.positions=alibi", "model.no_bias=true"],
    "gpt3": ["model.family=gpt3"],
    "pythia": ["model.family=neox"],
    "llama": ["model.family=llama", "model.n_kv_heads=2", "model.ffn_hidden_size=96"],
}
FSDP, HSDP, TP, CP, PP = "shard=2", "replicate=2 shard=2", "tensor=2", "context=2", "pipeline=2"
INTERLEAVED, ZERO_BUBBLE = "pipeline_schedule=interleaved_1f1b", "pipeline_schedule=zero_bubble"
LAYOUTS = {
    2: [FSDP, "replicate=2", TP, CP, PP, f"{PP} {INTERLEAVED}", f"{PP} {ZERO_BUBBLE}"],
    3: ["shard=3", "replicate=3"],
    4: [HSDP, f"{TP} {FSDP}", f"{PP} {FSDP}", f"{PP} {FSDP} {ZERO_BUBBLE}", f"{TP} {PP}", f"{CP} {TP}", f"{CP} {FSDP}"],
    8: [f"{FSDP} {TP} {PP}", f"{FSDP} {TP} {CP}", f"{CP} {TP} {PP} {ZERO_BUBBLE}"],
}


def arguments(family: str, data: Path, folder: Path, *more: str) -> list[str]:
    return [*BASE, *FAMILIES[family], f"data={data}", f"save_folder={folder}", *more]


def relative(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(x) for x, y in zip(a, b, strict=True))


def assert_same_training(one: Path, many: Path, steps: int = 12) -> None:
    assert len(losses(one)) == steps
    assert relative(losses(one), losses(many)) <= 1e-5
    assert relative(norms(one), norms(many)) <= 1e-4
    assert relative(evaluations(one), evaluations(many)) <= 1e-5
    for section in ("model", "optimizer"):
        expected, got = tensors(one, section), tensors(many, section)
        assert expected.keys() == got.keys()
        for name in expected:
            assert expected[name].shape == got[name].shape, name
        if section == "model":
            for name, tensor in expected.items():
                assert (tensor - got[name]).norm() <= 1e-4 * tensor.norm().clamp(min=1e-2), name


STILL = ["max_duration=1ba", "scheduler.t_warmup=10ba", "data.eval=null"]  # learning rate 0: weights as they were drawn
UNPADDED = ["model.vocab_size=322", "model.vocab_multiple=1"]  # Hugging Face knows no padding
LION = ["optimizer.name=lion", "optimizer.lr=0.0003", "optimizer.weight_decay=1e-4", "max_duration=4ba"]
MUON = ["optimizer.name=muon", "optimizer.lr=0.003", "max_duration=4ba", "data.eval=null"]
HEADS = ["model.qk_ln=true", "max_duration=4ba", "data.eval=null"]
EACH_HEAD = ["model.qk_ln=heads", "model.norm_bias=true", "model.no_bias=true", "max_duration=4ba", "data.eval=null"]
APART = ["model.eos_token_id=5", "model.document_mask=true", "model.document_positions=true", "mask_eos_loss=true",
         "max_duration=4ba"]  # fmt: skip
FP16 = ["precision=fp16", "max_duration=4ba", "data.eval=null"]
ONE_PROCESS = {
    **{family: [family] for family in FAMILIES},
    "still-one": ["pythia", *STILL],
    "hf-one": ["pythia", *UNPADDED, "max_duration=2ba"],
    "bf16-one": ["mpt", "precision=bf16"],
    "lion-one": ["llama", *LION],
    "muon-one": ["llama", *MUON],
    "heads-one": ["gpt3", *HEADS],
    "each-head-one": ["gpt3", *EACH_HEAD],
    "apart-one": ["gpt3", *APART],
    "fp16-one": ["gpt3", *FP16],
    "moved": ["gpt3", "scheduler.t_max=12ba", "eval_interval=0ba", "max_duration=4ba"],
}
TWO_PROCESSES = {  # started together, once, for all the tests below
    "gpt3 fsdp": ["gpt3", FSDP],
    "mpt tensor": ["mpt", TP],
    "gpt3 context": ["gpt3", CP],
    "pythia pipeline": ["pythia", PP, "guards.checksum_interval=5ba"],
    "gpt3 zero bubble": ["gpt3", PP, ZERO_BUBBLE],
    "gpt3 small": ["gpt3", FSDP, "device_train_microbatch_size=1", "reshard_after_forward=false"],
    "gpt3 recompute": ["gpt3", PP, "activation_checkpointing=true"],
    "llama selective": ["llama", TP, "activation_checkpointing=selective"],
    "hf-fsdp": ["pythia", FSDP, *STILL, *UNPADDED, "load_path=HF"],
    "hf-tensor": ["pythia", TP, *STILL, *UNPADDED, "load_path=HF"],
    "hf-v": ["pythia", PP, ZERO_BUBBLE, *STILL, *UNPADDED, "load_path=HF"],
    "hf-padded": ["pythia", TP, *STILL, "model.vocab_size=322", "load_path=HF"],
    "still-fsdp": ["pythia", FSDP, *STILL],
    "still-tensor": ["pythia", TP, *STILL],
    "still-v": ["pythia", PP, ZERO_BUBBLE, *STILL],
    "bf16-fsdp": ["mpt", FSDP, "precision=bf16"],
    "bf16-held": ["mpt", FSDP, "precision=bf16", "device_train_microbatch_size=1", "reshard_after_forward=false"],
    "bf16-pipeline": ["mpt", PP, "precision=bf16"],
    "lion-tensor": ["llama", TP, *LION],
    "muon-fsdp": ["llama", FSDP, *MUON],
    "muon-tensor": ["llama", TP, *MUON],
    "heads-tensor": ["gpt3", TP, *HEADS],
    "each-head-tensor": ["gpt3", TP, *EACH_HEAD],
    "apart-tensor": ["gpt3", TP, *APART],
    "apart-fsdp": ["gpt3", FSDP, *APART],
    "fp16-fsdp": ["gpt3", FSDP, *FP16],
    "fp16-pipeline": ["gpt3", PP, *FP16],
    "moved": ["gpt3", "scheduler.t_max=12ba", "eval_interval=0ba", "max_duration=9ba", PP],
    "moved, on": ["gpt3", "scheduler.t_max=12ba", "eval_interval=0ba", "max_duration=12ba", FSDP],
}


def command(description: list[str], data: Path, folder: Path) -> list[str]:
    family, *options = description
    spread = [f"parallel.{x}" for x in options if x.split("=")[0] in ParallelConfig.model_fields]
    return arguments(family, data, folder, *spread, *[x for x in options if f"parallel.{x}" not in spread])


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of finished runs, each under its name."""
    root = tmp_path_factory.mktemp("runs")
    for name, description in ONE_PROCESS.items():
        train_here(command(description, data, root / name))
    export_run(root / "hf-one", root / "hf")
    commands = [command(x, data, root / name.partition(",")[0]) for name, x in TWO_PROCESSES.items()]
    commands = [[a.replace("=HF", f"={root / 'hf'}") for a in arguments] for arguments in commands]
    errors = train_all(commands, 2, root / "notes")
    assert dict(zip(TWO_PROCESSES, errors, strict=True)) == dict.fromkeys(TWO_PROCESSES, "")
    return root


@pytest.mark.parametrize("name", [name for name in TWO_PROCESSES if name.split()[0] in FAMILIES])
def test_two_processes_train_like_one(runs: Path, name: str) -> None:
    assert_same_training(runs / name.split()[0], runs / name)


def test_initial_weights_are_bitwise_the_same_under_every_layout(runs: Path) -> None:
    expected = tensors(runs / "still-one", "model")
    for name in ("still-fsdp", "still-tensor", "still-v"):
        got = tensors(runs / name, "model")
        assert got.keys() == expected.keys() and all(torch.equal(got[n], expected[n]) for n in got), name


def test_weights_from_hugging_face_come_out_with_the_same_bytes_under_every_layout(runs: Path, tmp_path: Path) -> None:
    expected = (runs / "hf" / "model.safetensors").read_bytes()
    for name in ("hf-fsdp", "hf-tensor", "hf-v", "hf-padded"):
        export_run(runs / name, tmp_path / name)
        assert (tmp_path / name / "model.safetensors").read_bytes() == expected, name


def test_metrics_tell_ranks_apart_and_devices_from_the_total(runs: Path) -> None:
    row = read_rows(runs / "gpt3 fsdp")[-1]
    assert row["throughput/tokens_per_sec"] == pytest.approx(2 * row["throughput/device/tokens_per_sec"])
    assert 0 < row["memory/peak_resident_mem/min"] <= row["memory/peak_resident_mem/max"]
    assert row["time/own_seconds/slowest_rank"] in (0, 1) and row["time/data/max"] >= row["time/data"]


def test_bf16_keeps_fp32_weights_and_stays_near_one_process(runs: Path) -> None:
    for name in ("bf16-fsdp", "bf16-held", "bf16-pipeline"):
        assert relative(losses(runs / "bf16-one"), losses(runs / name)) <= 2e-2
        weights = tensors(runs / name, "model")
        assert {t.dtype for t in weights.values()} == {torch.float32}


def test_lion_trains_the_same_on_several_processes(runs: Path) -> None:
    assert relative(losses(runs / "lion-one"), losses(runs / "lion-tensor")) <= 1e-5


def test_muon_orthogonalizes_whole_matrices_however_they_are_sharded(runs: Path) -> None:
    for name in ("muon-fsdp", "muon-tensor"):  # in bf16, so the last bits of a gradient may show
        assert relative(losses(runs / "muon-one"), losses(runs / name)) <= 1e-4, name


def test_norms_over_all_heads_are_the_same_when_heads_are_split(runs: Path) -> None:
    for name in ("heads", "each-head"):
        assert relative(losses(runs / f"{name}-one"), losses(runs / f"{name}-tensor")) <= 1e-5, name


def test_documents_are_kept_apart_on_several_processes(runs: Path) -> None:
    for name in ("apart-tensor", "apart-fsdp"):
        assert relative(losses(runs / "apart-one"), losses(runs / name)) <= 1e-5, name


def test_fp16_scales_alike_on_all_processes_and_stays_near_one(runs: Path) -> None:
    for name in ("fp16-fsdp", "fp16-pipeline"):
        assert relative(losses(runs / "fp16-one"), losses(runs / name)) <= 2e-2, name
        scales = [[row["trainer/loss_scale"] for row in read_rows(runs / n)] for n in ("fp16-one", name)]
        assert scales[0] == scales[1]


def test_a_run_continues_under_any_other_layout(runs: Path) -> None:
    """Six steps on one process, three as a pipeline, three with sharded weights: the losses of one process."""
    assert relative(losses(runs / "gpt3"), losses(runs / "moved")) <= 1e-5
    one, moved = tensors(runs / "gpt3", "model"), tensors(runs / "moved", "model")
    for name, tensor in one.items():
        assert (tensor - moved[name]).norm() <= 1e-4 * tensor.norm().clamp(min=1e-2), name


def check(pairs: list[tuple[str, str]], processes: int, data: Path, tmp_path: Path) -> None:
    commands = []
    for family, layout in pairs:
        if not (tmp_path / family).exists():
            train_here(arguments(family, data, tmp_path / family))
        folder = tmp_path / f"{family}-{layout}".replace(" ", "-")
        commands.append(command([family, *layout.split()], data, folder))
    assert train_all(commands, processes, tmp_path / "notes") == [""] * len(commands)
    for family, layout in pairs:
        assert_same_training(tmp_path / family, tmp_path / f"{family}-{layout}".replace(" ", "-"))


@pytest.mark.parametrize(
    ("processes", "pairs"),
    [
        (3, [("pythia", "shard=3")]),
        pytest.param(4, [("mpt", HSDP), ("llama", f"{TP} {PP}")], marks=pytest.mark.slow),
    ],
)
def test_more_processes_train_like_one(
    processes: int, pairs: list[tuple[str, str]], data: Path, tmp_path: Path
) -> None:
    check(pairs, processes, data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("processes", LAYOUTS)
def test_every_layout_of_every_family_trains_like_one_process(
    processes: int, family: str, data: Path, tmp_path: Path
) -> None:
    check([(family, layout) for layout in LAYOUTS[processes]], processes, data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("mpt", TP), ("gpt3", FSDP), ("llama", PP)])
def test_compiled_blocks_train_like_one_process(family: str, layout: str, data: Path, tmp_path: Path) -> None:
    short = ["max_duration=4ba", "scheduler.t_max=20ba", "eval_interval=0ba"]
    train_here(arguments(family, data, tmp_path / "one", *short))
    spread = arguments(family, data, tmp_path / "many", *short, f"parallel.{layout}", "compile=true")
    assert train_all([spread], 2, tmp_path / "notes") == [""]
    assert_same_training(tmp_path / "one", tmp_path / "many", steps=4)
