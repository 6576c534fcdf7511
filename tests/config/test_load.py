import ast
import json
from pathlib import Path

import pytest
import yaml

import ingot.config as config_package
from ingot.config.base import known_keys
from ingot.config.load import load_config, to_yaml
from ingot.config.recipes import recipe_names
from ingot.config.run import RunConfig
from ingot.config.training import LoggersConfig
from ingot.errors import ConfigError
from ingot.migrate import load_run_config
from ingot.migrate.trackers import native_override_of

BASE = """\
max_seq_len: 128
data: ./somewhere
model:
  family: llama
  d_model: 64
  n_heads: 4
optimizer:
  lr: 1e-3
"""


def write(folder: Path, text: str, name: str = "run.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def error_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(arguments)
    return str(caught.value)


def test_trackers_of_llm_foundry_are_overrides_of_a_native_recipe_too() -> None:
    assert native_override_of("loggers.wandb.project", "p") == ["loggers.wandb.project=p"]
    assert native_override_of("loggers.tensorboard.log_dir", "x") is None
    assert native_override_of("wandb.project", "p") is None


def test_files_merge_in_order_and_overrides_come_last(tmp_path: Path) -> None:
    first = write(tmp_path, BASE)
    second = write(tmp_path, "model:\n  d_model: 128\nseed: 3\n", "second.yaml")
    config = load_run_config([first, second, "seed=4", "model.n_layers=2"])
    assert (config.model.d_model, config.model.n_heads, config.model.n_layers, config.seed) == (128, 4, 2, 4)
    assert config.name == "run"  # the first file names the run


def test_interpolation_reaches_other_keys(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "global_train_batch_size: ${max_seq_len}\n")
    assert load_run_config([path, "max_seq_len=16"]).global_train_batch_size == 16


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "x-${oc.env:HOME}", "${oc.decode:'1'}"])
def test_resolvers_that_run_code_are_refused(tmp_path: Path, value: str) -> None:
    assert "calls a resolver" in error_of(write(tmp_path, BASE + f'name: "{value}"\n'))


@pytest.mark.parametrize(
    "value",
    ["${seed}${oc.env:SECRET}", "${seed}-${oc.env:SECRET,x}", "${ oc.env:SECRET}", "${a.${oc.env:SECRET}}", "${oc.decode:${oc.env:SECRET}}",
     "\\${oc.env:SECRET}", "\\\\${oc.env:SECRET}", "$${seed}{oc.env:SECRET}", "${dollar}{oc.env:SECRET}",
     "${oc.create:{a:${oc.env:SECRET}}}", "\\${seed}"],
)  # fmt: skip
@pytest.mark.parametrize(
    "place", ["file", "override", "nested", "list", "base", "foundry", "neox", "words", "script", "MODEL_ARGS"]
)
def test_no_form_of_a_resolver_is_ever_called(
    place: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cr3tVALUE99")
    text = json.dumps(value)  # quoted for YAML
    arguments, base = [write(tmp_path, f"{BASE}name: a\ntokenizer: {text}\ndollar: $\n")], None
    if place in ("override", "base"):
        arguments = [write(tmp_path, BASE + "dollar: $\n"), *([f"tokenizer={text}"] if place == "override" else [])]
        base = {"tokenizer": value} if place == "base" else None
    elif place == "nested":
        arguments = [write(tmp_path, BASE.replace("llama", text) + "dollar: $\n")]
    elif place == "list":
        arguments = [write(tmp_path, BASE + f"dollar: $\nlist: [1, [{text}]]\n")]
    elif place == "foundry":
        arguments = [write(tmp_path, f"max_seq_len: 8\ndollar: $\nrun_name: {text}\ntrain_loader:\n  name: text\n")]
    elif place == "neox":
        arguments = [write(tmp_path, f"num-layers: 2\nhidden-size: 8\ndollar: $\nsave: {text}\n", "x.yml")]
    elif place == "words":
        arguments = ["--dollar", "$", "--num-layers", "2", "--save", value]
    elif place == "script":
        arguments = [write(tmp_path, f"ARGS=(\n --num-layers 2\n --dollar '$'\n --save '{value}'\n)\n", "run.sh")]
    elif place == "MODEL_ARGS":
        arguments = [write(tmp_path, f"TEST_TYPE: x\ndollar: $\nMODEL_ARGS: {text}\n")]
    with pytest.raises(ConfigError) as caught:
        load_config(RunConfig, arguments, base) if base else load_run_config(arguments)
    message = str(caught.value)
    assert "s3cr3t" not in message
    if place == "MODEL_ARGS" and "${oc" not in value:
        return  # text in place of a mapping is dropped before it could be put together
    assert "${other.key}" in message or (place == "script" and "takes it from elsewhere" in message), message


@pytest.mark.parametrize("key", ["${oc.env:SECRET}", "model.${oc.env:SECRET}", "data.train.mix.${oc.env:SECRET}.path"])
def test_a_key_is_never_interpolated(key: str, tmp_path: Path) -> None:
    message = error_of(f"{key}=3")
    assert message.startswith("command line: a key may not contain ${...}") and repr(key) in message
    assert "run.yaml:9: a key may not" in error_of(write(tmp_path, BASE + f"'{key}': 3\n"))
    assert "a key may not" in error_of(write(tmp_path, BASE + f"x: [{{'{key}': 3}}]\n"))


@pytest.mark.parametrize("key", ["data.train.split", "data.eval.split", "data.train.mix.a.split"])
@pytest.mark.parametrize("value", ["../x", "/x", "a/../../x", "..", ".x", "''", "a\\b", '"a\\0b"'])
def test_a_split_to_read_is_one_plain_name(key: str, value: str) -> None:
    where = [f"{key.rpartition('.')[0]}.path=p", *(["data.train.path=p"] if "eval" in key else [])]
    assert f"command line: {key} = " in (error := error_of(*where, f"{key}={value}")) and "one plain name" in error


@pytest.mark.parametrize(
    "value", ["../../x", "/x", "a/../../x", "..", ".x", "' '", "a\\b", '"a\\0b"', '"a\\nb"', "x/y", "${tokenizer}"]
)
def test_the_name_of_a_run_is_one_plain_name(value: str) -> None:
    assert (
        "command line: name = " in (error := error_of("tokenizer=../x", f"name={value}")) and "one plain name" in error
    )


@pytest.mark.parametrize(
    ("stem", "name"),
    [("my run", "my run"), (".hidden", "hidden"), ("..", "run"), ("a\\b\n", "a-b-"), ("x" * 240, "x" * 200)],
)
def test_a_file_names_its_run_plainly(stem: str, name: str, tmp_path: Path) -> None:
    assert load_run_config([write(tmp_path, BASE, f"{stem}.yaml")]).name == name


def test_a_misspelled_key_names_file_line_and_the_closest_key(tmp_path: Path) -> None:
    path = write(tmp_path, BASE.replace("d_model", "d_modle"))
    assert error_of(path) == f"{path}:5: unknown key model.d_modle; did you mean model.d_model?"


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert error_of(path, "lr=3") == "command line: unknown key lr; did you mean optimizer.lr?"


def test_every_unknown_key_is_named_at_once(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, BASE + "bogus_one: 1\n"), "model.bogus_two=1")
    assert "bogus_one" in message and "bogus_two" in message


def test_a_wrong_type_names_key_value_and_what_was_expected(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + "seed: many\n")
    assert error_of(path).startswith(f"{path}:9: seed = 'many': must be a whole number")


@pytest.mark.parametrize(
    ("override", "rest"),
    [
        ("compile=atuo", "'atuo': input should be true or false, or 'auto'; did you mean auto?"),
        ("parallel.shard=1.5", "1.5: input should be a whole number, or 'auto'"),
        ("activation_checkpointing=ture",
         "'ture': input should be true or false, or 'auto', 'none', 'full' or 'selective', or a number; did you mean true?"),
        ("precision=bf17", "'bf17': input should be 'fp32', 'bf16', 'fp16' or 'fp8'; did you mean bf16?"),
        ("optimizer.betas=[a,0.9]", "'a': must be a number"),
    ],
)  # fmt: skip
def test_a_value_of_none_of_several_types_is_one_sentence_that_names_the_closest(
    tmp_path: Path, override: str, rest: str
) -> None:
    key = override.partition("=")[0] + (".0" if "[" in override else "")
    assert error_of(write(tmp_path, BASE), override) == f"command line: {key} = {rest}"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.n_heads=5", "model.n_heads: 5 heads do not divide d_model 64; use 4"),
        ("model.n_kv_heads=3", "3 does not divide n_heads 4"),
        ("max_duration=12", "has no unit"),
        ("max_duration=3h", "wall-clock"),
        ("device_train_microbatch_size=3", "does not divide global_train_batch_size 256"),
        ("device_train_microbatch_size=0", "at least 1"),
        ("global_train_batch_size=0", "must be more than 0"),
        ("precision=fp4", "'fp32', 'bf16', 'fp16' or 'fp8'"),
        ("optimizer.name=sgd", "adamw"),
        ("scheduler.t_warmup=5min", "wall-clock"),
        ("data.train.path=", "data.train.path"),
        ("optimizer.lr=.inf", "finite"),
        ("gradient_clipping=.nan", "finite"),
        ("activation_checkpointing=.nan", "fraction of the activations between 0 and 1"),
        ("optimizer.betas=[-1,0.9]", "must be at least 0"),
        ("optimizer.betas={a: 1}", "optimizer.betas"),
        ("seed=99999999999999999999999999", "seed"),
        (f"seed={'9' * 5000}", "seed"),
        (f"seed={'[' * 5000}", "seed"),
        ("max_duration=1e400ba", "too long"),
        ("scheduler.t_warmup=1e30ba", "too long"),
        ("model.family=[a]", "model.family"),
        (f"name={'x' * 300}", "1 to 200 bytes"),
        ("=3", "not of the form key=value"),
        ("model=", "model"),
    ],
)
def test_impossible_values_are_refused_with_a_reason(tmp_path: Path, override: str, words: str) -> None:
    message = error_of(write(tmp_path, BASE), override)
    assert words in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [("model: [1, 2\n", ":2: not valid YAML"), ("- a\n- b\n", "must be a mapping"), ("seed: 1\nseed: 2\n", "duplicate"),
     ("model: hello\ndata: x\n", "model"), ("seed: " + "9" * 5000, "cannot be read"), ("[" * 3000, "cannot be read")],
)  # fmt: skip
def test_files_that_are_not_configs_are_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in error_of(write(tmp_path, text))


def test_activation_checkpointing_none_and_full_are_false_and_true() -> None:
    assert [load_run_config(["mpt-125m", f"activation_checkpointing={kind}"]).recompute for kind in ("none", "full")] == [
        None, "full",
    ]  # fmt: skip


def test_missing_data_is_asked_for_when_it_is_needed() -> None:
    config = load_run_config(["mpt-125m"])
    with pytest.raises(ConfigError, match="data is missing; name a prepared folder with data=FOLDER"):
        _ = config.sources
    assert error_of("data.eval.path=x") == "data.train is missing; set it in the file or with data.train=..."
    assert "data.train.path: is missing; name the folder of a prepared dataset" in error_of("data.train.split=x")


def test_an_unknown_recipe_names_the_closest() -> None:
    assert "did you mean mpt-125m?" in error_of("mpt-125", "data=x")
    assert "no such config file" in error_of("nowhere/run.yaml")


def test_data_as_one_folder_stands_for_its_splits_and_can_be_refined() -> None:
    config = load_run_config(["data=folder", "data.eval.split=val_small"])
    assert (config.sources.train.path, config.sources.train.split) == ("folder", "train")
    assert config.sources.eval is not None and config.sources.eval.split == "val_small"


def test_data_as_one_folder_replaces_the_data_of_a_file(tmp_path: Path) -> None:
    config = load_run_config([write(tmp_path, BASE), "data=folder"])
    assert config.sources.train.path == "folder" and config.sources.eval and config.sources.eval.path == "folder"


def test_data_as_one_folder_is_what_the_folder_holds(tmp_path: Path) -> None:
    (tmp_path / "whole" / "train").mkdir(parents=True)
    assert load_run_config([f"data={tmp_path / 'whole'}"]).sources.eval is None  # there is no val in it
    (tmp_path / "whole" / "val").mkdir()
    assert load_run_config([f"data={tmp_path / 'whole'}"]).sources.eval is not None
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "index.json").write_text("{}")
    config = load_run_config([f"data={tmp_path / 'split'}"])
    assert config.sources.train.split is None and config.sources.eval is None


def test_the_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    config = load_run_config(["pythia-70m", "data=x", "loggers.tensorboard={}", "max_duration=2.5Btok"])
    path = write(tmp_path, to_yaml(config))
    assert load_run_config([path, "name=pythia-70m"]) == config


def test_overrides_reach_every_field(tmp_path: Path) -> None:
    parts = [f"data.{name}.documents={{split: '1', part: train}}" for name in ("train", "eval")]
    tasks = ["eval.tasks=[copy]", "eval.gauntlet={categories: []}"]
    loggers = [f"loggers.{name}={{}}" for name, value in LoggersConfig().model_dump().items() if value is None]
    whole = ["data=x", *loggers, *tasks, *parts]
    base = yaml.safe_load(to_yaml(load_run_config(whole)))
    keys = list(known_keys(RunConfig))
    assert "model.d_model" in keys and "data.train.split" in keys and "loggers.tensorboard.log_dir" in keys
    for key in keys:
        value = base
        for part in key.split("."):
            value = value[part]
        if not isinstance(value, dict):
            shown = "null" if value is None else json.dumps(value)
            load_run_config([*whole, f"{key}={shown}"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mask_eos_loss=true"], "mask_eos_loss: model.eos_token_id must say which token ends a document"),
        (["model.document_mask=true"], "model.eos_token_id: is missing; set it to the token that ends a document"),
        (["data.train.documents={split: '1,x', part: train}"], "write up to three shares, such as 969,30,1"),
        (["data.train.documents={split: '9,1', part: dev}"], "data.train.documents.part"),
        (["data.train.mix_order=random"], "data.train.mix_order"),
    ],
)
def test_impossible_document_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", ".")):
        load_run_config(["data=x", *overrides])


def test_every_field_is_documented() -> None:
    def check(schema: dict, name: str) -> None:
        for key, field in schema.get("properties", {}).items():
            assert field.get("description"), f"{name}.{key} has no docstring"

    schema = RunConfig.model_json_schema()
    check(schema, "RunConfig")
    for name, section in schema["$defs"].items():
        check(section, name)


def test_every_recipe_is_valid_and_its_schema_is_json() -> None:
    for name in recipe_names():
        load_run_config([name])
    json.dumps(RunConfig.model_json_schema())


def test_optional_keys_are_optional_to_type_checkers_too() -> None:
    """Without pydantic's plugin they see a default only as `Field(default=...)`."""
    for path in Path(config_package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field":
                assert not node.args, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("override", "closest"),
    [
        ("eval.tasks=[{label: a, dataset_uri: x, icl_task_typ: schema}]", "eval.tasks.0.icl_task_type"),
        (
            "eval.gauntlet={categories: [{name: a, benchmarks: [{nme: x}]}]}",
            "eval.gauntlet.categories.0.benchmarks.0.name",
        ),
    ],
)
def test_an_unknown_key_of_a_list_entry_names_the_closest(override: str, closest: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown key [\w.]+; did you mean {closest}\?"):
        load_config(RunConfig, [override])
