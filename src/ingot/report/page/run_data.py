"""What the report shows of a run, read from its folder alone: plain values that become JSON."""

import re
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ingot.checkpoint.manifest import CHECKPOINTS, MANIFEST, steps_in
from ingot.config.dotted_keys import flatten
from ingot.config.evaluation import GENERATED
from ingot.config.load import load_config
from ingot.config.model import ModelConfig
from ingot.config.recipes import recipe_names
from ingot.config.run import RunConfig
from ingot.config.secrets import redact
from ingot.errors import ConfigError, IngotError
from ingot.report.page.downsample import downsample
from ingot.storage.json_lines import read_json_lines
from ingot.training.profiling.tables import read_profiles
from ingot.training.runtime.run_files import CONFIG, FAILURES, FINISHED, GUARDS, LOGS, METRICS, OWNER

MOST_TABLE_ROWS = 100
MOST_TEXT = 2000  # characters of a cell
WHERE = ("name", "save_folder", "data", "load_path", "device", "loggers")  # keys that say where, not what
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def read_run(folder: Path) -> dict[str, Any]:
    """Everything about a run, ready for JSON."""
    if not folder.is_dir() or not (folder / METRICS).exists():
        raise ConfigError(f"{folder} is not a run folder with metrics: it has no {METRICS}")
    config = _read_config(folder)
    steps, columns = _read_columns(folder / METRICS)
    if not steps:
        raise ConfigError(f"{folder / METRICS} holds no metrics yet; wait for the first logged batch")
    size = int(config.get("global_train_batch_size", 0)) * int(config.get("max_seq_len", 0))
    model = _model(config)
    flops = model.flops_per_token(int(config["max_seq_len"])) if model else 0.0
    return {
        "name": str(config.get("name", folder.name)), "folder": str(folder), "state": _state(folder),
        "total": _total(folder), "tokens_per_step": size, "flops_per_step": flops * size,
        "series": {name: downsample(*column) for name, column in columns.items()},
        "last": {name: values[-1] for name, (_, values) in columns.items()},
        "summary": _summary(folder, config, model, columns, flops * size),
        "profiles": _profiles(folder), "generated": _generated(folder),
        "checkpoints": _checkpoints(folder), "marks": _marks(folder),
        "config": {key: _shown(value) for key, value in flatten(config).items()}, "changed": _changed(config),
    }  # fmt: skip


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_columns(path: Path) -> tuple[list[int], dict[str, tuple[list[int], list[float]]]]:
    """The steps, and of each metric the steps that have it with its values. NaN and infinity are null in the file; a
    line that is cut off is left out."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    steps: list[int] = []
    decode = msgspec.json.Decoder(dict[str, float | None]).decode
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    for line in lines:
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            row = decode(line)
            step = int(row["time/batch"] or 0)
            steps.append(step)
            for name, value in row.items():
                if value is not None:
                    column = columns.get(name)
                    if column is None:
                        column = columns[name] = ([], [])
                    column[0].append(step)
                    column[1].append(value)
    return steps, columns


def _model(config: dict[str, Any]) -> ModelConfig | None:
    try:
        return ModelConfig.model_validate(config["model"])
    except (KeyError, ValueError):  # a file of another version
        return None


def _state(folder: Path) -> str:
    if (folder / FINISHED).exists():
        return "finished"
    return "running" if (folder / OWNER).exists() else "stopped"


def _total(folder: Path) -> int | None:
    """Batches of the whole run, from the newest line of progress in its log."""
    with suppress(OSError):
        found = re.findall(r"\[batch=\d+/(\d+)\]", (folder / LOGS / "train.log").read_text(errors="replace")[-20000:])
        return int(found[-1]) if found else None
    return None


def _summary(
    folder: Path, config: dict[str, Any], model: ModelConfig | None, columns: dict[str, Any], flops_per_step: float
) -> dict[str, str]:
    """The table of what was run."""
    steps = columns["time/batch"][1][-1]
    last = {name: values[-1] for name, (_, values) in columns.items()}
    lines = {
        "model": f"{config['model'].get('family', '')}, {model.parameters:,} parameters" if model else "unknown",
        "steps": f"{int(steps):,}",
        "tokens": f"{last.get('time/token', 0):,.0f}",
        "training FLOPs": f"{steps * flops_per_step:.3g}",
        "batch": f"{config.get('global_train_batch_size')} sequences of {config.get('max_seq_len')} tokens",
        "data": str(((config.get("data") or {}).get("train") or {}).get("path")),
        "precision": str(config.get("precision")),
    }
    losses = columns.get("metrics/eval/LanguageCrossEntropy", ([], []))[1]
    if losses:
        lines["validation loss"] = f"{losses[-1]:.4f} (best {min(losses):.4f})"
    if "loss/train/total" in last:
        lines["training loss"] = f"{last['loss/train/total']:.4f}"
    hours = last.get("time/train", 0.0)
    wall = _wall_hours(folder)
    lines["time in training"] = f"{hours:.3g} h" + (f" of {wall:.3g} h since the first start ({hours / wall:.0%})"
                                                    if wall and hours <= wall else "")  # fmt: skip
    return lines | _environment(folder)


def _wall_hours(folder: Path) -> float | None:
    """From the first line of the log to the last."""
    with suppress(OSError, ValueError, IndexError):
        text = (folder / LOGS / "train.log").read_text(errors="replace")
        stamps = STAMP.findall(text[:400])[:1] + STAMP.findall(text[-4000:])[-1:]
        first, last = (datetime.fromisoformat(stamp) for stamp in stamps)
        return (last - first).total_seconds() / 3600 or None
    return None


def _environment(folder: Path) -> dict[str, str]:
    """Versions and layout, from the newest checkpoint."""
    found = steps_in(folder / CHECKPOINTS)
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
        state = msgspec.json.decode((folder / CHECKPOINTS / str(max(found)) / MANIFEST).read_bytes())["state"]
        lines = {f"{name} version": str(version) for name, version in state.get("versions", {}).items()}
        return lines | {name: str(value) for name, value in state.get("execution", {}).items()}
    return {}


def _checkpoints(folder: Path) -> list[list[Any]]:
    rows = []
    for step in sorted(steps_in(folder / CHECKPOINTS))[-MOST_TABLE_ROWS:]:
        path = folder / CHECKPOINTS / str(step)
        with suppress(OSError):
            size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            saved = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")
            rows.append([step, f"{size / 1e6:,.1f} MB", saved])
    return rows


def _generated(folder: Path) -> list[list[Any]]:
    """Batch, prompt and text of the newest generated texts, the newest first."""
    rows = []
    for line in reversed(read_json_lines(folder / GENERATED)):
        with suppress(KeyError, TypeError, ValueError):
            rows += [[int(line["batch"]), _cut(each["prompt"]), _cut(each["text"])] for each in line["texts"]]
    return rows[:MOST_TABLE_ROWS]


def _profiles(folder: Path) -> list[dict[str, Any]]:
    """Where the time of profiled steps went: a title, and category, milliseconds per step and share."""
    shown = []
    for table in read_profiles(folder):
        total = table.total_milliseconds_per_step or 1.0
        rows = [[name, f"{ms:,.1f} ms", f"{ms / total:.1%}"] for name, ms in table.milliseconds_per_step.items()]
        steps = f"steps {table.steps[0]} to {table.steps[1]}"
        where = "on the GPU" if table.on_gpu else "on the CPU"
        shown.append({"title": f"Where the time of {steps} went {where}", "rows": rows})
    return shown


def _cut(text: object) -> str:
    return redact(str(text))[:MOST_TEXT]


def _marks(folder: Path) -> list[list[Any]]:
    """Batch, kind and text of anomalies and failures."""
    marks = [[int(line.get("batch", 0)), "anomaly", f"{line.get('what')}: {line.get('action')}"]
             for line in read_json_lines(folder / GUARDS)]  # fmt: skip
    for line in read_json_lines(folder / FAILURES):
        if line.get("kind") != "start":
            where = f"(rank {line.get('rank')} on {line.get('host')})"
            what = redact(f"{line.get('time', '')} {line.get('kind')}: {line.get('message')} {where}")
            marks.append([int(line.get("batch", 0)), "failure", what])
    return sorted(marks)[-MOST_TABLE_ROWS:]


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    """What differs from the recipe of the run's name, or from the defaults."""
    name = str(config.get("name"))
    recipe = [name] if name in recipe_names() else []
    try:
        base = flatten(load_config(RunConfig, recipe).model_dump(mode="json"))
    except IngotError:
        return {}
    keys = {
        key: [_shown(base.get(key)), _shown(value)]
        for key, value in flatten(config).items()
        if value != base.get(key) and key.partition(".")[0] not in WHERE
    }
    return {"of": f"the recipe {recipe[0]}" if recipe else "the defaults", "keys": keys}


def _shown(value: Any) -> str:
    return _cut(value)
