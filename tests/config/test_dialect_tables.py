"""The tables of the dialects: no key is lost, and no value, however odd, ends in a stack trace."""

from pathlib import Path
from typing import Any

import pytest

from ingot.config.base import known_keys
from ingot.config.load import validate
from ingot.config.run import RunConfig
from ingot.errors import ConfigError
from ingot.migrate import DIALECTS, load_run_config, translate
from ingot.migrate.translation import BECAME, Translation

HERE = Path(__file__).parent
BASES = {
    "foundry": ["foundry/mpt-125m.yaml"],
    "neox": ["neox/70M.yml", "neox/pile.yml", "train_batch_size=1024"],
    "megatron": ["megatron/gpt3-350m.yaml"],
}
NATIVE = frozenset(known_keys(RunConfig))


def base_arguments(name: str) -> list[str]:
    return [path if "=" in path else str(HERE / path) for path in BASES[name]]


def base(name: str) -> dict[str, Any]:
    return translate(base_arguments(name)).given


@pytest.mark.parametrize("name", DIALECTS)
def test_a_key_stands_in_one_table_only(name: str) -> None:
    d = DIALECTS[name]
    keys = [*d.table["renamed"], *d.table["choices"], *d.reasons, *d.refusals, *d.table["computed"],
            *d.table["trackers"]]  # fmt: skip
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", DIALECTS)
def test_tables_name_native_keys_that_exist(name: str) -> None:
    d = DIALECTS[name]
    named = {*d.table["renamed"].values(), *(e["native"] for e in d.table["choices"].values() if "native" in e)}
    assert named <= NATIVE and set(d.table["defaults"]) <= set(d.table["renamed"])


@pytest.mark.parametrize("name", DIALECTS)
def test_every_key_has_a_target_or_a_reason(name: str) -> None:
    d = DIALECTS[name]
    texts = {
        **d.table["computed"],
        **d.table["trackers"],
        **d.reasons,
        **{key: why for key, (_, why) in d.refusals.items()},
    }
    texts |= {key: " ".join(map(str, entry["names"].values())) for key, entry in d.table["choices"].items()}
    assert d.keys == {*texts, *d.table["renamed"]} and all(isinstance(text, str) and text for text in texts.values())


@pytest.mark.parametrize("name", DIALECTS)
def test_a_computed_key_becomes_what_its_table_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    d = DIALECTS[name]
    real = Translation.put

    def put(self: Translation, native: str, value: Any, *keys: str) -> None:
        for key in (key for key in keys if key in d.table["computed"] and self.given.get(key) is not None):
            section = ".".join(native.split(".")[:2]) if native.startswith("data.") else native
            assert section in d.table["computed"][key], (
                key,
                native,
            )
        real(self, native, value, *keys)

    monkeypatch.setattr(Translation, "put", put)
    for path in sorted((HERE / name).iterdir()):
        translate([str(path)])


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("value", [0, -1, 3, 0.5, True, "nonsense", "", [1, "x"], [], {}])
def test_odd_values_are_translated_or_refused_but_never_break(name: str, value: object) -> None:
    given = base(name)
    dialect = DIALECTS[name]
    for key in (*dialect.table["renamed"], *dialect.table["choices"], *dialect.table["computed"],
                *dialect.table["trackers"]):  # fmt: skip
        translation = Translation(dialect, {**given, key: value}, {}).run()
        assert key in translation.rows
        try:
            translation.check()
            validate(RunConfig, translation.values)
        except ConfigError as error:
            assert str(error)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_computed_key_is_read_by_the_translation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    real = Translation.get

    def get(self: Translation, key: str, default: Any = None) -> Any:
        read.add(key)
        return real(self, key, default)

    monkeypatch.setattr(Translation, "get", get)
    rare = {
        "foundry": [["load_path=x"], ["scheduler.name=inv_sqrt_with_warmup"]],
        "neox": [["load=x"]],
        "megatron": [
            ["load=x", "deepspeed=true"],
            ["micro-batch-size=null"],
            ["train-iters=null", "train-samples=99", "lr-decay-style=WSD"],
        ],
    }
    for overrides in [[], *rare[name]]:
        for path in sorted((HERE / name).iterdir()):
            translate([str(path), *overrides])
    by_prefix = {
        "compile_config",
        "algorithms.low_precision_layernorm",
        "model.config_overrides.activation_function",
        "train_loader.dataset.streams",
        "eval_loader.dataset.streams",
    }
    table = DIALECTS[name].table
    assert {*table["computed"], *table["choices"]} - read <= by_prefix


@pytest.mark.parametrize("name", DIALECTS)
def test_unknown_keys_never_pass(name: str) -> None:
    given = base(name)
    for key in DIALECTS[name].keys:
        odd = f"{key.rpartition('.')[0]}.zzz_{key.rpartition('.')[2]}".strip(".")
        if not DIALECTS[name].knows(odd):
            translation = Translation(DIALECTS[name], {**given, odd: 1}, {}).run()
            assert any(problem.startswith(f"unknown key {odd} of ") for problem in translation.problems), odd
            return
    raise AssertionError("no key could be misspelled")


@pytest.mark.parametrize(
    ("name", "override"),
    [("foundry", "model.attn_config.sliding_window_size=512"), ("neox", "sliding_window_width=512"),
     ("megatron", "window-size=[512, 0]"), ("megatron", "window-size='512,0'")],
)  # fmt: skip
def test_a_window_of_the_peers_does_not_count_the_token_itself(name: str, override: str) -> None:
    """They see as far as token i - 512."""
    files = base_arguments(name)
    assert load_run_config([*files, override]).model.sliding_window == 513
    assert load_run_config(files).model.sliding_window is None


def test_a_refused_key_keeps_its_reason_and_others_their_rows() -> None:
    translation = Translation(DIALECTS["neox"], {**base("neox"), "num_layers": "$X"}, {}).run()
    assert translation.rows["num_layers"].text == "must be a number" and translation.rows["hidden_size"].fate == BECAME
