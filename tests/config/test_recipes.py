"""Recipes hold the references' values. The numbers here are the references', typed in by hand."""

import pytest

from ingot.config.load import load_config
from ingot.config.recipes import recipe_names
from ingot.config.run import RunConfig

# name: (parameters, layers, width, heads, peak lr, global batch, duration)
MPT = {
    "125m": (125_311_488, 12, 768, 12, 6.0e-4, 256, "4800ba"),
    "350m": (355_985_408, 24, 1024, 16, 3.0e-4, 256, "13400ba"),
    "760m": (760_470_528, 24, 1536, 12, 2.5e-4, 256, "29000ba"),
    "1b": (1_315_950_592, 24, 2048, 16, 2.0e-4, 512, "24800ba"),
    "3b": (2_651_837_440, 32, 2560, 20, 1.6e-4, 512, "51500ba"),
    "7b": (6_658_859_008, 32, 4096, 32, 1.2e-4, 1024, "63900ba"),
    "13b": (12_853_954_560, 40, 5120, 40, 1.0e-4, 1024, "124000ba"),
    "30b": (29_975_214_080, 48, 7168, 56, 1.0e-4, 2048, "143100ba"),
    "70b": (64_862_437_376, 80, 8192, 64, 8.0e-5, 2048, "333800ba"),
}
PYTHIA = {
    "14m": (14_067_712, 6, 128, 4, 1e-3), "31m": (30_494_720, 6, 256, 8, 1e-3), "70m": (70_426_624, 6, 512, 8, 1e-3),
    "160m": (162_322_944, 12, 768, 12, 6e-4), "410m": (405_334_016, 24, 1024, 16, 3e-4),
    "1b": (1_011_781_632, 16, 2048, 8, 2.5e-4), "1.4b": (1_414_647_808, 24, 2048, 16, 2e-4),
    "2.8b": (2_775_208_960, 32, 2560, 32, 1.6e-4), "6.9b": (6_857_302_016, 32, 4096, 32, 1.2e-4),
    "12b": (11_846_072_320, 36, 5120, 40, 1.2e-4),
}  # fmt: skip
# layers, width, heads, peak lr, global batch, rows of the padded vocabulary
GPT3 = {
    "125m": (12, 768, 12, 6e-4, 256, 50304), "350m": (24, 1024, 16, 3e-4, 256, 50304),
    "760m": (24, 1536, 16, 2.5e-4, 256, 50304), "1.3b": (24, 2048, 16, 2e-4, 512, 50304),
    "2.7b": (32, 2560, 32, 1.6e-4, 512, 50304), "6.7b": (32, 4096, 32, 1.2e-4, 1024, 50304),
    "13b": (40, 5120, 40, 1e-4, 1024, 50304), "175b": (96, 12288, 96, 6e-5, 1536, 51200),
}  # fmt: skip


def load(name: str) -> RunConfig:
    return load_config(RunConfig, [name])


@pytest.mark.parametrize("family", ["mpt", "mosaic_gpt"])
@pytest.mark.parametrize("size", MPT)
def test_mpt_recipes_are_llm_foundrys(family: str, size: str) -> None:
    config = load(f"{family}-{size}")
    parameters, layers, width, heads, lr, batch, duration = MPT[size]
    assert config.model.parameters == parameters
    assert (config.model.n_layers, config.model.d_model, config.model.n_heads) == (layers, width, heads)
    assert (config.optimizer.lr, config.global_train_batch_size, str(config.max_duration)) == (lr, batch, duration)
    assert (config.optimizer.name, config.optimizer.betas, config.optimizer.eps) == (
        "decoupled_adamw",
        (0.9, 0.95),
        1e-8,
    )
    assert config.optimizer.weight_decay == 0.0
    schedule = config.scheduler
    assert (schedule.name, str(schedule.t_warmup), schedule.alpha_f) == ("cosine_with_warmup", "100ba", 0.1)
    assert config.gradient_clipping == 1.0 and config.max_seq_len == 2048 and config.seed == 17
    model = config.model
    assert (model.positions, model.no_bias, model.tie_word_embeddings) == ("learned", False, True)
    assert (model.init, model.residual_init) == ("kaiming_normal", "scaled")


@pytest.mark.parametrize("size", PYTHIA)
def test_pythia_recipes_are_gpt_neoxs(size: str) -> None:
    config = load(f"pythia-{size}")
    parameters, layers, width, heads, lr = PYTHIA[size]
    assert config.model.parameters == parameters
    assert (config.model.n_layers, config.model.d_model, config.model.n_heads) == (layers, width, heads)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw", lr, 0.1)
    assert (config.global_train_batch_size, str(config.max_duration)) == (1024, "143000ba")
    assert (str(config.scheduler.t_warmup), config.scheduler.alpha_f, config.seed) == ("1430ba", 0.1, 1234)
    model = config.model
    assert (model.positions, model.rotary_pct, model.parallel_residual) == ("rotary", 0.25, True)
    assert not model.tie_word_embeddings
    small = size not in ("6.9b", "12b")  # the published configs of these two leave the init methods unset
    assert (model.init, model.residual_init) == (("small", "wang") if small else ("normal", "scaled"))


@pytest.mark.parametrize("size", GPT3)
def test_gpt3_recipes_are_megatrons(size: str) -> None:
    config = load(f"gpt3-{size}")
    layers, width, heads, lr, batch, rows = GPT3[size]
    model = config.model
    assert (model.n_layers, model.d_model, model.n_heads, model.vocab_rows) == (layers, width, heads, rows)
    by_hand = rows * width + 2048 * width + layers * (12 * width**2 + 13 * width) + 2 * width
    assert model.parameters == by_hand
    assert (config.optimizer.lr, config.global_train_batch_size, config.optimizer.weight_decay) == (lr, batch, 0.1)
    assert (model.positions, model.activation, model.init, model.residual_init) == (
        "learned", "gelu_tanh", "normal", "scaled")  # fmt: skip
    assert (model.emb_pdrop, model.resid_pdrop, model.attn_pdrop) == (0.1, 0.1, 0.1)
    assert model.init_std == (0.006 if size == "175b" else 0.02)


def test_neox_20b_and_llama_have_the_published_sizes() -> None:
    neox = load("neox-20b")
    assert neox.model.parameters == 20_554_567_680
    assert (neox.optimizer.lr, neox.optimizer.weight_decay, neox.global_train_batch_size) == (9.7e-5, 0.01, 1536)
    assert load("llama-1b").model.parameters == 1_235_814_400
    assert load("llama-8b").model.parameters == 8_030_261_248


def test_no_recipe_is_untested() -> None:
    tested = {f"{f}-{s}" for f in ("mpt", "mosaic_gpt") for s in MPT} | {f"pythia-{s}" for s in PYTHIA}
    tested |= {f"gpt3-{s}" for s in GPT3} | {"neox-20b", "llama-1b", "llama-8b", "demo"}
    assert set(recipe_names()) == tested


@pytest.mark.parametrize(
    ("size", "full", "causal"), [("125m", 0.978e9, 0.865e9), ("1b", 9.104e9, 8.500e9), ("7b", 43.17e9, 41.56e9)]
)
def test_flops_per_token_are_llm_foundrys(size: str, full: float, causal: float) -> None:
    config = load(f"mpt-{size}")
    assert config.model.flops_per_token(2048) == pytest.approx(full, rel=1e-3)
    assert config.model.flops_per_token(2048, causal=True) == pytest.approx(causal, rel=1e-3)
