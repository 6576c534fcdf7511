"""Checkpoints of Composer, GPT-NeoX and Megatron become run folders with the same weights and the same logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from foreign_files import model_of, mpt_config, neox_config, write_composer, write_megatron, write_neox
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from ingot.checkpoint.load import open_weights
from ingot.config.model import ModelConfig
from ingot.migrate.checkpoints.import_checkpoint import import_checkpoint
from ingot.model.gpt import GPT

pytestmark = pytest.mark.usefixtures("warm_readers")

MPT = {"family": "mpt", "norm": "low_precision_layernorm"}
ALIBI = {**MPT, "positions": "alibi", "no_bias": True, "clip_qkv": 6.0}
PYTHIA = {"family": "neox", "rotary_pct": 0.25}
GPT2_LIKE = {"family": "neox", "positions": "learned", "parallel_residual": False, "tie_word_embeddings": True}
NEOX_LLAMA = {"family": "neox", "rotary_pct": 1.0, "parallel_residual": False, "norm": "rmsnorm", "no_bias": True,
              "activation": "swiglu", "n_kv_heads": 2, "ffn_hidden_size": 48}  # fmt: skip
GPT3 = {"family": "gpt3", "vocab_size": 70, "vocab_multiple": 16}
BARE = {**GPT3, "no_bias": True, "norm_bias": True, "qk_ln": "heads", "activation": "gelu"}
LLAMA = {"family": "llama", "n_kv_heads": 2, "rotary_base": 10000.0, "ffn_hidden_size": 48, "vocab_size": 70,
         "vocab_multiple": 16}  # fmt: skip
TOKENS = torch.arange(24).view(2, 12) * 5 % 70


def loaded(folder: Path) -> GPT:
    config, tensors = open_weights(folder)
    model = GPT(config).eval()
    model.load_state_dict({name: tensors.get(name) for name in tensors.names()})
    return model


def assert_same(folder: Path, model: GPT) -> None:
    """The same parameters, bit for bit, and the same function of the tokens."""
    ours = loaded(folder)
    assert ours.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(ours(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    "values",
    [ALIBI, MPT, {**MPT, "qk_ln": True, "tie_word_embeddings": False}, {**MPT, "n_kv_heads": 2}],
    ids=["alibi", "learned", "qk_ln", "gqa"],
)
def test_an_mpt_of_llm_foundry_is_imported_with_the_config_inside(tmp_path: Path, values: dict[str, Any]) -> None:
    model = model_of(**values)
    grouped = {"attn_type": "grouped_query_attention", "kv_n_heads": 2} if "n_kv_heads" in values else {}
    write_composer(tmp_path / "ep0-ba3-rank0.pt", model, inside=mpt_config(model.config, **grouped))
    import_checkpoint(tmp_path / "ep0-ba3-rank0.pt", tmp_path / "out")
    assert_same(tmp_path / "out", model)


@pytest.mark.parametrize("style", ["mosaic_gpt", "mosaic_gpt-torch"])
def test_the_older_mosaic_gpt_is_imported_with_its_yaml(tmp_path: Path, style: str) -> None:
    model = model_of(family="mosaic_gpt")
    write_composer(tmp_path / "latest-rank0.pt", model, style)
    c = model.config
    described = {"name": "mosaic_gpt", "device": "meta", "d_model": c.d_model, "n_heads": 4, "n_layers": 4, "mlp_ratio": 4,
                 "max_seq_len": 16, "vocab_size": c.vocab_size, "init_std": 0.02, "attn_pdrop": 0.0}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"max_seq_len": 16, "model": described, "max_duration": "10ba"}))
    import_checkpoint(tmp_path, tmp_path / "out", str(tmp_path / "run.yaml"))
    assert_same(tmp_path / "out", model)


@pytest.mark.parametrize(
    ("values", "tp", "pipeline", "more"),
    [
        (PYTHIA, 1, 1, {}),
        (PYTHIA, 2, 2, {}),
        (PYTHIA, 2, 0, {}),
        (GPT2_LIKE, 1, 0, {}),
        (GPT2_LIKE, 2, 1, {}),
        (NEOX_LLAMA, 2, 1, {"activation": "swiglu", "num_kv_heads": 2, "use_bias_in_attn_linear": False,
                            "use_bias_in_mlp": False, "rms_norm_epsilon": 1e-5}),
    ],
    ids=["pythia", "pythia-tp2-pp2", "pythia-tp2-sequential", "gpt2-sequential", "gpt2-tp2", "llama-gqa-tp2"],
)  # fmt: skip
def test_a_gpt_neox_checkpoint_is_imported(
    tmp_path: Path, values: dict[str, Any], tp: int, pipeline: int, more: dict[str, Any]
) -> None:
    model = model_of(**values)
    config = neox_config(model.config, **more, **({"model-parallel-size": tp} if tp > 1 else {}))
    write_neox(tmp_path / "run", model, config, tp, pipeline, legacy=tp == 1)
    import_checkpoint(tmp_path / "run", tmp_path / "out")
    assert_same(tmp_path / "out", model)


def test_a_gpt_neox_checkpoint_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
    hf_config = GPTNeoXConfig(**shape, vocab_size=96, max_position_embeddings=16, rotary_pct=0.25, hidden_act="gelu")
    torch.manual_seed(2)
    hf = GPTNeoXForCausalLM(hf_config).eval()
    state = {name.removeprefix("gpt_neox."): value for name, value in hf.state_dict().items()}
    step = tmp_path / "global_step1"
    (step / "configs").mkdir(parents=True)
    config = neox_config(ModelConfig.model_validate({**PYTHIA, "d_model": 32, "n_heads": 4, "n_layers": 2,
                                                     "max_seq_len": 16}), **{"model-parallel-size": 2})  # fmt: skip
    (step / "configs" / "pythia.yml").write_text(yaml.safe_dump(config))
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in state.items():
        top = {"embed_in": (0, "word_embeddings"), "final_layer_norm": (5, "norm"), "embed_out": (6, "final_linear"),
               "lm_head": (6, "final_linear")}  # fmt: skip
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            layers.setdefault(int(number) + 2, {})[rest] = value
        elif name.split(".")[0] in top:
            layer, module = top[name.split(".")[0]]
            layers.setdefault(layer, {})[f"{module}.{name.split('.')[1]}"] = value
    for layer, content in layers.items():
        for rank in range(2):
            part = {}
            for name, value in content.items():
                if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
                    part[name] = value.chunk(2, dim=1)[rank].clone()
                elif name.endswith(("dense.bias", "dense_4h_to_h.bias")):
                    part[name] = value / 2
                elif "norm" in name:
                    part[name] = value
                else:
                    part[name] = value.chunk(2)[rank].clone()
            torch.save(part, step / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    import_checkpoint(step, tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path / "out")(TOKENS), hf(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        (GPT3, {"style": "legacy"}),
        (GPT3, {"style": "legacy", "tp": 2, "pp": 2}),
        (GPT3, {"style": "legacy", "tp": 2, "version": None}),
        (GPT3, {"style": "legacy", "tp": 2, "version": 1.0}),
        (GPT3, {"style": "mcore", "tp": 2, "pp": 2, "chunks": 2}),
        (BARE, {"style": "mcore", "tp": 2, "pp": 2}),
        (LLAMA, {"style": "te"}),
        (LLAMA, {"style": "te", "tp": 2, "pp": 2}),
        (LLAMA, {"style": "legacy", "tp": 2, "pp": 1}),
    ],
    ids=[
        "legacy",
        "legacy-tp2-pp2",
        "version-0",
        "version-1",
        "core-interleaved",
        "heads-normalized-tp2-pp2",
        "llama",
        "llama-tp2-pp2",
        "llama-old",
    ],
)
def test_a_megatron_checkpoint_is_imported_without_its_padding(
    tmp_path: Path, values: dict[str, Any], options: dict[str, Any]
) -> None:
    model = model_of(**values)
    write_megatron(tmp_path / "run", model, **options)
    import_checkpoint(tmp_path / "run", tmp_path / "out")
    assert_same(tmp_path / "out", model)


def test_zero_centered_norms_of_megatron_get_one_added_back(tmp_path: Path) -> None:
    model, stored = model_of(**GPT3), model_of(**GPT3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    write_megatron(tmp_path / "run", stored, apply_layernorm_1p=True)
    import_checkpoint(tmp_path / "run", tmp_path / "out")
    assert_same(tmp_path / "out", model)


def test_a_native_recipe_may_describe_the_model(tmp_path: Path) -> None:
    model = model_of(**PYTHIA)
    write_neox(tmp_path / "run", model, {}, tp=2)
    native = {
        "max_seq_len": 16,
        "model": {"family": "neox", "d_model": 32, "n_heads": 4, "n_layers": 4, "vocab_size": 96},
    }
    (tmp_path / "native.yaml").write_text(yaml.safe_dump(native))
    import_checkpoint(tmp_path / "run" / "global_step10", tmp_path / "out", str(tmp_path / "native.yaml"))
    assert_same(tmp_path / "out", model)


def test_half_precision_weights_keep_their_bits(tmp_path: Path) -> None:
    model = model_of(**GPT2_LIKE).to(torch.bfloat16)
    write_neox(tmp_path / "run", model, neox_config(model.config, **{"model-parallel-size": 2}), tp=2)
    import_checkpoint(tmp_path / "run", tmp_path / "out")
    _, tensors = open_weights(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(tensors.get(name), value), name


@pytest.mark.slow
def test_training_continues_from_an_imported_checkpoint(tmp_path: Path, data: Path, ingot: Any) -> None:
    model = model_of(family="gpt3", vocab_size=320, vocab_multiple=16, max_seq_len=32)
    write_megatron(tmp_path / "run", model, tp=2)
    ingot("import", str(tmp_path / "run"), str(tmp_path / "start"))
    ingot(
        "train", str(tmp_path / "start" / "config.yaml"), f"data={data}", f"load_path={tmp_path / 'start'}",
        f"save_folder={tmp_path / 'more'}", "max_duration=1ba", "global_train_batch_size=4", "precision=fp32",
        "optimizer.lr=1e-9", "scheduler.t_warmup=0ba",
    )  # fmt: skip
    after = loaded(tmp_path / "more").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)
