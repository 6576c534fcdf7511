"""What is wrong with a foreign checkpoint is said in one sentence; nothing in it is run, and nothing is left behind."""

import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_files import model_of, mpt_config, neox_config, write_composer, write_megatron, write_neox

from ingot.errors import CheckpointError, IngotError
from ingot.migrate.checkpoints.import_checkpoint import import_checkpoint, recognize
from ingot.migrate.checkpoints.pt_reader import unpack

pytestmark = pytest.mark.usefixtures("warm_readers")

MPT = {"family": "mpt", "n_layers": 2}
PYTHIA = {"family": "neox", "n_layers": 2}
GPT3 = {"family": "gpt3", "n_layers": 2, "vocab_size": 70, "vocab_multiple": 16}


class RunsCode:
    """A pickle that makes a file when it is opened."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.canary}",)


class LooksUp:
    """As Python 3.11.2 pickles an enum's member: `getattr(class, name)`, which a hostile file could use as well."""

    def __init__(self, owner: type, name: str):
        self.found = owner, name

    def __reduce__(self) -> tuple[Any, tuple[type, str]]:
        return getattr, self.found


def refused(source: Path, out: Path, match: str, config: str | None = None) -> None:
    with pytest.raises(IngotError, match=match) as caught:
        import_checkpoint(source, out, config)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}*"))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old-format"])
def test_a_pickle_that_runs_code_is_refused_and_not_run(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # in a process as users have it
    canary = tmp_path / "canary"
    torch.save({"state": {"model": RunsCode(canary)}}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "x.pt", tmp_path / "out", "system")
    assert not canary.exists()
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert canary.exists()  # the payload does work where pickles are trusted


def test_a_payload_under_a_trusted_name_is_only_a_stand_in(tmp_path: Path) -> None:
    """`torch.hub.load` is torch's, so it gets a stand-in, which does nothing."""

    class Loads:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return torch.hub.load, (str(tmp_path),)

    torch.save({"args": Loads(), "kept": torch.ones(2)}, tmp_path / "x.pt")
    [found] = unpack([tmp_path / "x.pt"], [""], tmp_path / "work")
    assert "load" in found.values["args"]
    assert found.tensors["kept"].get().tolist() == [1, 1]


def test_what_the_child_hands_over_is_plain(tmp_path: Path) -> None:
    args = Namespace(layers=2, dtype=torch.float16, sizes=(1, 2), nested={"a": None, 3: True})
    shared = torch.arange(6.0)
    content = {"args": args, "model": {"a": {"w": shared[:2]}, "b": [shared]}, "optimizer": {"state": torch.ones(9)}}
    torch.save(content, tmp_path / "x.pt")
    [found] = unpack([tmp_path / "x.pt"], ["args", "model"], tmp_path / "work")
    assert found.values["args"] == {
        "layers": 2, "dtype": "torch.float16", "sizes": [1, 2], "nested": {"a": None, "3": True}
    }  # fmt: skip
    assert {name: piece.get().tolist() for name, piece in found.tensors.items()} == {
        "model.a.w": [0, 1], "model.b.0": [0, 1, 2, 3, 4, 5],
    }  # fmt: skip


def test_an_enum_that_is_looked_up_by_name_is_a_stand_in_too(tmp_path: Path) -> None:
    torch.save({"args": Namespace(kind=LooksUp(Namespace, "__init__"), layers=3)}, tmp_path / "x.pt")
    [found] = unpack([tmp_path / "x.pt"], ["args"], tmp_path / "work")
    assert found.values["args"]["layers"] == 3
    assert found.values["args"]["kind"].startswith("getattr(") and "function" not in found.values["args"]["kind"]


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    torch.save({"state": {"model": {"w": torch.zeros(1).expand(10**12)}}}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", tmp_path / "out", "far larger than itself")


def test_a_file_that_refers_to_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    torch.save({"state": {"model": loop}}, tmp_path / "x.pt")
    refused(tmp_path / "x.pt", tmp_path / "out", "more memory")


@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "ep0-ba3-rank0.pt"
    model = model_of(**MPT)
    write_composer(path, model, inside=mpt_config(model.config))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    refused(path, tmp_path / "out", "ep0-ba3-rank0.pt.*damaged or cut short|ep0-ba3-rank0.pt is not a checkpoint")


def test_a_path_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", tmp_path / "out", "no such file or folder")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, tmp_path / "out", "is not a checkpoint of")
    (empty / "latest").write_text("../../etc")
    refused(empty, tmp_path / "out", "names '../../etc', which is not in that folder")
    (empty / "latest").unlink()
    (empty / "__0_0.distcp").touch()
    refused(empty, tmp_path / "out", "sharded by torch.distributed.checkpoint")
    torch.save({"weights": torch.ones(3)}, tmp_path / "other.pt")
    refused(tmp_path / "other.pt", tmp_path / "out", "not a full-state file")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    refused(tmp_path / "tensor.pt", tmp_path / "out", "not a full-state file")
    (tmp_path / "weights.bin").touch()
    refused(tmp_path / "weights.bin", tmp_path / "out", "not a .pt file")


def test_of_several_states_the_latest_is_imported(tmp_path: Path) -> None:
    for name in ("ep0-ba900-rank0.pt", "ep0-ba1000-rank0.pt", "ep1-ba950-rank1.pt"):
        (tmp_path / name).touch()
    assert recognize(tmp_path) == ("foundry", tmp_path / "ep0-ba1000-rank0.pt")
    (tmp_path / "latest-rank0.pt").touch()
    assert recognize(tmp_path) == ("foundry", tmp_path / "latest-rank0.pt")


def test_a_composer_file_needs_its_config(tmp_path: Path) -> None:
    model = model_of(**MPT)
    write_composer(tmp_path / "a.pt", model)
    refused(tmp_path / "a.pt", tmp_path / "out", "does not hold its model's config; .*--config")
    for change, match in (
        ({"model_type": "llama"}, "type 'llama'"),
        ({"ffn_config": {"ffn_type": "mb_dmoe", "moe_num_experts": 4}}, "moe_num_experts|ffn_type"),
        ({"norm_type": "rmsnorm_of_ours"}, "norm_type"),
        ({"d_model": 64}, r"wte.weight comes out as \[96, 32\], its config says \[96, 64\]"),
        ({"learned_pos_emb": False}, "no tensor for state.model.model.transformer.wpe.weight"),
    ):
        write_composer(tmp_path / "a.pt", model, inside=mpt_config(model.config) | change)
        refused(tmp_path / "a.pt", tmp_path / "out", match)


def test_a_tensor_that_the_config_calls_for_is_named(tmp_path: Path) -> None:
    config = mpt_config((model := model_of(**MPT)).config)
    config["attn_config"]["qk_ln"] = True
    write_composer(tmp_path / "a.pt", model, inside=config)
    refused(
        tmp_path / "a.pt", tmp_path / "out", "no tensor for blocks.0.attn.q_norm.weight, which its config calls for"
    )


def test_a_hugging_face_folder_takes_no_other_config(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    with pytest.raises(CheckpointError, match="contains its config; remove --config"):
        import_checkpoint(tmp_path / "hf", tmp_path / "out", "gpt3-125m")


def lose(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        target = folder / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return change


def mix_in_neox(folder: Path) -> None:
    """A slice of another run, with narrower layers, among the others."""
    other = model_of(**PYTHIA, ffn_hidden_size=64)
    write_neox(folder.parent / "other", other, {}, tp=2)
    name = "layer_03-model_01-model_states.pt"
    shutil.copy(folder.parent / "other" / "global_step10" / name, folder / name)


def mix_in_megatron(folder: Path) -> None:
    write_megatron(folder.parent / "other", model_of(**GPT3, ffn_hidden_size=64), tp=2, pp=2)
    name = "mp_rank_01_001/model_optim_rng.pt"
    shutil.copy(folder.parent / "other" / "iter_0000010" / name, folder / name)


@pytest.mark.parametrize(
    ("change", "more", "match"),
    [
        (lose("layer_02-model_01-model_states.pt"), {}, "layer_02-model_01-model_states.pt is missing"),
        (lose("configs"), {}, "no configs/"),
        (None, {"model-parallel-size": 4}, "2 tensor-parallel ranks, its config says model_parallel_size 4"),
        (None, {"moe_num_experts": 8}, "moe_num_experts = 8"),
        (None, {"norm": "scalenorm"}, "norm = scalenorm"),
        (None, {"gpt_j_tied": True}, "gpt_j_tied"),
        (None, {"num-layers": 3}, "fewer layers"),
        (mix_in_neox, {}, "not slices of one model"),
    ],
    ids=["slice", "configs", "parallel-size", "moe", "norm", "tied-norms", "layers", "sizes"],
)
def test_a_broken_neox_checkpoint_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None] | None, more: dict[str, Any], match: str
) -> None:
    model = model_of(**PYTHIA)
    write_neox(tmp_path / "run", model, neox_config(model.config) | {"model-parallel-size": 2, **more}, tp=2)
    if change:
        change(tmp_path / "run" / "global_step10")
    refused(tmp_path / "run", tmp_path / "out", match)


def test_a_checkpoint_without_word_embeddings_is_not_a_megatron_gpt(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "iter_0000010" / "mp_rank_00"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    torch.save({"model": {"encoder.weight": torch.zeros(2)}, "args": {}}, folder / "model_optim_rng.pt")
    refused(tmp_path / "run", tmp_path / "out", "has no word embeddings, so it is not a Megatron GPT")


@pytest.mark.parametrize(
    ("change", "more", "match"),
    [
        (lose("mp_rank_01_001"), {}, "lacks the slice of tensor-parallel rank 1, pipeline stage 1"),
        (lose("mp_rank_01_001/model_optim_rng.pt"), {}, "mp_rank_01_001 has no model_optim_rng.pt"),
        (None, {"tensor_model_parallel_size": 4}, "tensor_model_parallel_size 2, its args say 4"),
        (None, {"num_experts": 8}, "num_experts = 8"),
        (None, {"multi_latent_attention": True}, "multi_latent_attention"),
        (None, {"normalization": "L2Norm"}, "normalization = L2Norm"),
        (None, {"add_bias_linear": False}, "has no tensor for .*bias"),
        (None, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (mix_in_megatron, {}, "not slices of one model"),
    ],
    ids=["slice", "file", "parallel-size", "moe", "mla", "norm", "no-bias", "post-norm", "sizes"],
)
def test_a_broken_megatron_checkpoint_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None] | None, more: dict[str, Any], match: str
) -> None:
    write_megatron(tmp_path / "run", model_of(**GPT3), tp=2, pp=2, **more)
    if change:
        change(tmp_path / "run" / "iter_0000010")
    refused(tmp_path / "run", tmp_path / "out", match)


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    model = model_of(**MPT)
    write_composer(tmp_path / "a.pt", model, inside=mpt_config(model.config))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="already exists"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
