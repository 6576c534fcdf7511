"""Whose vocabulary a file has is seen from its keys; files of none, or of two, are refused."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import Ingot

from ingot.errors import ConfigError
from ingot.migrate import load_run_config, translate

HERE = Path(__file__).parent
MPT, PYTHIA, PILE = HERE / "foundry/mpt-125m.yaml", HERE / "neox/70M.yml", HERE / "neox/pile.yml"


def error_of(*arguments: object, dialect: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config([str(argument) for argument in arguments], dialect=dialect)
    return str(caught.value)


@pytest.mark.parametrize("name", ["foundry", "neox", "megatron"])
def test_every_file_is_recognized(name: str) -> None:
    for path in (HERE / name).iterdir():
        assert translate([str(path)]).dialect.name == name, path


def test_a_native_file_stays_native(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nmodel: {d_model: 64, n_heads: 4}\ndata: {train: {path: x}}\n")
    assert load_run_config([str(path)]).model.d_model == 64
    with pytest.raises(ConfigError, match="native config already"):
        translate([str(path)])


def test_a_file_of_no_known_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("services:\n  web:\n    image: nginx\n")
    assert error_of(path).startswith(f"{path}: none of its keys (not services.web.image) are known")


def test_two_vocabularies_are_refused_in_two_files_and_in_one(tmp_path: Path) -> None:
    assert f"{MPT} is foundry; {PYTHIA} is neox; give files of one" in error_of(MPT, PYTHIA)
    mixed = tmp_path / "mixed.yml"
    mixed.write_text(PILE.read_text() + "train_loader: {name: text}\n")
    message = error_of(PYTHIA, mixed, "train_batch_size=1024")
    assert (
        message
        == f"{mixed}:9: unknown key train_loader.name of GPT-NeoX; it is a key of LLM Foundry, and a run is described in one vocabulary."
    )


def test_the_vocabulary_can_be_given() -> None:
    assert "unknown key" in error_of(MPT, dialect="neox")
    assert error_of(MPT, dialect="fairseq") == "there is no dialect fairseq; there are foundry, neox, megatron"


def test_convert_prints_a_recipe_that_means_the_same_and_what_became_of_each_key(ingot: Ingot, tmp_path: Path) -> None:
    for files in ([MPT], [PYTHIA, PILE, "train-batch-size=1024"], [HERE / "megatron/llama-8b.sh"]):
        printed = ingot("config", "convert", *map(str, files)).stdout
        recipe = tmp_path / "native.yaml"
        recipe.write_text(printed)
        foreign = load_run_config([str(file) for file in files])
        assert load_run_config([str(recipe), f"name={foreign.name}"]) == foreign
        assert "not needed: " in printed and " -> model.n_layers: " in printed


def test_a_refused_conversion_prints_no_recipe_and_reports_every_key(ingot: Ingot, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = ingot("config", "convert", str(PYTHIA), str(PILE), "moe_num_experts=8", "--report", str(report), check=False)
    assert done.returncode == 2 and "moe_num_experts = 8: mixtures of experts are not supported" in done.stderr
    assert done.stdout == ""
    text = report.read_text()
    assert "| `moe_num_experts` | 8 | refused | mixtures of experts are not supported" in text
    assert f"| `num_layers` | 6 | model.n_layers: 6, model.family: neox | {PYTHIA}:" in text


def test_train_takes_megatrons_own_command_line(ingot: Ingot) -> None:
    done = ingot("train", "--dialect", "megatron", "--", "--num-layers", "2", "--num-experts", "4", check=False)
    assert done.returncode == 2 and "num_experts = 4: mixtures of experts are not supported" in done.stderr


@pytest.fixture
def corpora(ingot: Ingot, data: Path, tmp_path: Path) -> list[str]:
    """Two corpora of the kind that Megatron and GPT-NeoX prepare, and their tokenizer."""
    lines = [line for line in (data / "text/train.txt").read_text().splitlines() if line]
    for name, part in (("web", lines[::2]), ("books", lines[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in part))
        ingot("prepare", "--path", f"{name}.jsonl", "--output_prefix", name, "--append_eod", "--tokenizer",
              str(data / "tokenizer"))  # fmt: skip
    return ["web_text_document", "books_text_document", str(data / "tokenizer/tokenizer.json")]


@pytest.mark.slow
def test_a_file_of_each_vocabulary_trains(ingot: Ingot, data: Path, tmp_path: Path, corpora: list[str]) -> None:
    small = HERE / "foundry/mpt-small-cpu.yaml"
    foundry = [small, f"data_local={data}", "train_loader.dataset.split=train", "eval_loader.dataset.split=val",
               "model.vocab_size=320", "max_duration=2ba", "max_seq_len=32", "loggers=null",
               "icl_tasks=null"]  # fmt: skip
    web, books, tokenizer = corpora
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
             "train_iters": 2, "padded_vocab_size": 320, "split": "8,1,1", "eod_mask_loss": True, "eval_iters": 1}  # fmt: skip
    neox = tmp_path / "tiny.yml"
    optimizer = {"type": "Adam", "params": {"lr": 0.001}}
    more = {"train_batch_size": 8, "data_path": web, "optimizer": optimizer, "vocab_file": tokenizer}
    neox.write_text(yaml.safe_dump(shape | more))
    shape |= {"global_batch_size": 8, "micro_batch_size": 4, "lr": 0.001, "tokenizer_model": tokenizer}
    megatron = [word for key, value in shape.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    megatron += ["--data-path", "0.3", web, "0.7", books, "--reset-attention-mask", "--reset-position-ids"]
    for arguments in (foundry, [neox], ["--dialect", "megatron", "--", *megatron]):
        done = ingot("train", *map(str, arguments))
        folder = tmp_path / done.stdout.strip().splitlines()[-1].removeprefix("run folder: ")
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["time/batch"] == 2 and "metrics/eval/LanguageCrossEntropy" in last
    assert (last["time/token/books_text_document"], last["time/token/web_text_document"]) == (11 * 32, 5 * 32)
