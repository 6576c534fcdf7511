"""Each verb as a user types it."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TINY, Ingot
from safetensors.torch import load_file
from warm_process import run_warm

import ingot as package

ALIBI = [*TINY, "model.positions=alibi", "model.no_bias=true"]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verbs") / "run"
    command = [sys.executable, "-m", "ingot.cli.main", "train", *ALIBI, "loggers.tensorboard={}", "eval_interval=5ba",
               f"data={data}", f"save_folder={folder}"]  # fmt: skip
    run_warm(command, check=True, capture_output=True)
    return folder


def test_a_run_folder_holds_config_metrics_checkpoints_and_logs(trained: Path) -> None:
    assert yaml.safe_load((trained / "config.yaml").read_text())["model"]["d_model"] == 32
    assert (trained / "checkpoints" / "12" / "manifest.json").is_file()
    assert "attention: sdpa" in (trained / "logs" / "train.log").read_text()
    assert (trained / "tokenizer" / "tokenizer.json").is_file()


def test_every_step_has_a_row_with_the_metric_names_of_dashboards(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["time/batch"] for row in rows] == list(range(1, 13))
    names = {"loss/train/total", "metrics/train/LanguageCrossEntropy", "metrics/train/LanguagePerplexity", "time/batch",
             "time/token", "throughput/tokens_per_sec", "memory/peak_resident_mem",
             "lr-DecoupledAdamW/group0", "l2_norm/grad/global", "time/remaining_estimate"}  # fmt: skip
    for row in rows:
        assert names <= row.keys()
        assert row["metrics/train/LanguagePerplexity"] == pytest.approx(math.exp(row["loss/train/total"]))
        assert row["time/token"] == row["time/batch"] * 8 * 32
        assert not [key for key in row if "mfu" in key]  # a CPU has no reliable peak
    evaluated = [row["time/batch"] for row in rows if "metrics/eval/BitsPerByte" in row]
    assert evaluated == [5, 10, 12]
    assert rows[-1]["loss/train/total"] < rows[0]["loss/train/total"] - 0.5


def test_tensorboard_gets_the_same_numbers(trained: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    shown = [(event.step, event.value) for event in events.Scalars("loss/train/total")]
    assert shown == [(row["time/batch"], pytest.approx(row["loss/train/total"])) for row in rows]


def test_eval_reports_what_training_saw_at_its_end(ingot: Ingot, trained: Path, data: Path) -> None:
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    shown = json.loads(ingot("eval", str(trained), "--json").stdout)
    for name in ("LanguageCrossEntropy", "LanguagePerplexity", "BitsPerByte"):
        assert shown[f"metrics/eval/{name}"] == pytest.approx(last[f"metrics/eval/{name}"], rel=1e-5)
    other = json.loads(ingot("eval", str(trained), "data.eval.split=train", "--json").stdout)
    assert other["metrics/eval/LanguageCrossEntropy"] != shown["metrics/eval/LanguageCrossEntropy"]


def test_bits_per_byte_is_the_loss_over_the_bytes_of_the_text(trained: Path, data: Path) -> None:
    from ingot.data.tokenizer import load_tokenizer
    from ingot.evaluation.run import evaluate_run

    result, _ = evaluate_run(trained, [])[""]
    text = (data / "text" / "val.txt").read_text()
    # every token but the first is predicted, and the end-of-document tokens stand for no text
    first = len(load_tokenizer(data / "tokenizer").decode(load_tokenizer(data / "tokenizer").encode(text)[:1]).encode())
    bits = result.loss * result.tokens / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / (len(text.encode()) - first), rel=1e-6)
    assert result.metrics()["metrics/eval/BitsPerByte"] == result.bits_per_byte
    assert "metrics/eval/BitsPerByte" not in replace(result, bits_per_byte=None).metrics()


def test_generate_repeats_with_a_seed_and_streams_the_prompt_first(ingot: Ingot, trained: Path) -> None:
    command = ("generate", str(trained), "--prompt", "The miller", "--max-new-tokens", "20")
    one = ingot(*command, "--seed", "1", "--top-k", "20", "--top-p", "0.9").stdout
    two = ingot(*command, "--seed", "1", "--top-k", "20", "--top-p", "0.9").stdout
    other = ingot(*command, "--seed", "2", "--temperature", "1.5").stdout
    assert one.startswith("The miller") and len(one) > len("The miller") + 5
    assert one == two != other


def test_export_import_and_export_again_keep_every_bit(ingot: Ingot, trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert "MptForCausalLM" in ingot("export", str(trained), "--to", "hf", "out").stdout
    ingot("import", "out", "again")
    ingot("export", "again", "--to", "hf", "out2")
    one, two = (load_file(tmp_path / f / "model.safetensors") for f in ("out", "out2"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)

    tokens = torch.randint(0, 320, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
        for path in (trained, trained / "checkpoints" / "12", tmp_path / "out", tmp_path / "again"):
            logits = package.load(path)(tokens)
            assert logits.shape == (2, 30, 320)
            assert (logits - expected).abs().max() <= 1e-4
    text = "The old ferryman sang"
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").decode(
            AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"]
        )
        == text
    )
    assert ingot("generate", "again", "--prompt", text, "--max-new-tokens", "5").stdout.startswith(text)


def test_imported_weights_are_where_training_starts(ingot: Ingot, trained: Path, data: Path, tmp_path: Path) -> None:
    ingot("export", str(trained), "--to", "hf", "out")
    ingot("import", "out", "start")
    done = ingot(
        "train",
        "start/config.yaml",
        *TINY[4:],
        "max_duration=1ba",
        f"data={data}",
        "load_path=start",
        "save_folder=run",
    )
    assert "weights from start" in done.stdout
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["loss/train/total"] < 5.0  # a fresh model starts near ln 320 = 5.8

    done = ingot("train", "start/config.yaml", *TINY[4:], "max_duration=1ba", f"data={data}", "save_folder=start")
    assert f"starting from the weights in {Path('start', 'checkpoints', '0')}" in done.stdout
    (in_place,) = [json.loads(line) for line in (tmp_path / "start" / "metrics.jsonl").read_text().splitlines()]
    assert in_place["time/batch"] == 1 and in_place["loss/train/total"] == row["loss/train/total"]


def test_recipes_can_be_listed_and_shown(ingot: Ingot) -> None:
    listed = ingot("recipes", "list").stdout
    assert "mpt-125m" in listed and "125.3M" in listed and "gpt3-175b" in listed and "0.00025" in listed
    assert max(map(len, listed.splitlines())) <= 80 and "…" not in listed
    assert ingot("recipes").stdout == listed
    shown = ingot("recipes", "show", "mpt-125m").stdout
    assert yaml.safe_load(shown)["model"]["d_model"] == 768


def test_config_schema_and_show(ingot: Ingot) -> None:
    schema = json.loads(ingot("config", "schema").stdout)
    assert "max_duration" in schema["properties"] and "d_model" in schema["$defs"]["ModelConfig"]["properties"]
    shown = yaml.safe_load(ingot("config", "show", "mpt-125m", "model.d_model=96").stdout)
    assert shown["model"]["d_model"] == 96 and shown["optimizer"]["lr"] == 6e-4


def test_doctor_reports_python_torch_and_kernels(ingot: Ingot) -> None:
    done = ingot("doctor")
    for what in ("python", "torch", "kernels", "disk", "extra hf", "torch.compile"):
        assert what in done.stdout


@pytest.mark.parametrize("recipe", [pytest.param("mpt-125m", marks=pytest.mark.slow), "pythia-14m"])
def test_a_real_recipe_runs_on_a_cpu_with_small_data(ingot: Ingot, data: Path, tmp_path: Path, recipe: str) -> None:
    done = ingot("train", recipe, "max_duration=2ba", "global_train_batch_size=2", "max_seq_len=128", f"data={data}")
    assert "run folder: runs/" in done.stdout
    rows = (tmp_path / "runs" / recipe / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2


def test_training_data_alone_is_enough(ingot: Ingot, data: Path, tmp_path: Path) -> None:
    done = ingot("train", "mpt-125m", *TINY, "max_duration=2ba", f"data.train.path={data}", "data.train.split=train")
    assert "no validation data" in done.stdout
    assert len((tmp_path / "runs" / "mpt-125m" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_compile_trains_to_the_same_losses(ingot: Ingot, data: Path, tmp_path: Path) -> None:
    losses = []
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        ingot("train", *TINY, "max_duration=3ba", f"compile={compiled}", f"data={data}", f"save_folder={name}")
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss/train/total"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_python_api_is_the_command_line(data: Path, tmp_path: Path) -> None:
    config = package.RunConfig.model_validate({
        "max_seq_len": 32, "model": {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 320}, "precision": "fp32",
        "data": str(data), "global_train_batch_size": 4, "max_duration": "2ba", "save_folder": str(tmp_path / "run"),
    })  # fmt: skip
    result = package.train(config)
    import ingot.config.run as layer  # the layer of the same name stays what it was

    assert layer.RunConfig is package.RunConfig
    assert result.batches == 2 and package.load(result.folder)(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 320)
