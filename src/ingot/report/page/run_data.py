"""What the report shows of a run, read from its folder alone: plain values that become JSON."""

import re
import time
from collections import Counter
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ingot.config.dotted_keys import flatten
from ingot.config.load import load_config
from ingot.config.model import ModelConfig
from ingot.config.recipes import find_recipe, recipe_names
from ingot.config.run import RunConfig
from ingot.errors import ConfigError, IngotError
from ingot.report.page.downsample import downsample
from ingot.report.page.run_tables import LOG, checkpoints, cut, environment, generated, marks, profiles, whole
from ingot.report.page.run_text import number_rows, own_file, read_tail
from ingot.training.runtime.run_files import CONFIG, FINISHED, METRICS, OWNER

LARGEST_STEP = 1e15
SILENT_SECONDS = 300  # an owner touches its file every few seconds; clocks of machines may differ
WHERE = ("name", "save_folder", "data", "load_path", "device", "loggers")  # keys that say where, not what
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


def read_runs(folders: list[Path]) -> list[dict[str, Any]]:
    """Everything about several runs. Those of the same name get their folders' names too, or their whole paths."""
    runs = [read_run(folder) for folder in folders]
    names = [run["name"] for run in runs]
    for added in ([folder.name for folder in folders], list(map(str, folders))):
        count = Counter(names)
        longer = [f"{run['name']} ({more})" for run, more in zip(runs, added, strict=True)]
        names = [new if count[name] > 1 else name for name, new in zip(names, longer, strict=True)]
    return [run | {"name": name} for run, name in zip(runs, names, strict=True)]


def read_run(folder: Path) -> dict[str, Any]:
    """Everything about a run, ready for JSON."""
    metrics = own_file(folder, METRICS)
    if metrics is None:
        raise ConfigError(f"{folder} is not a run folder with metrics: it has no {METRICS}")
    config = _read_config(folder)
    steps, columns = _read_columns(metrics)
    if not steps:
        raise ConfigError(f"{folder / METRICS} holds no metrics yet; wait for the first logged batch")
    length = whole(config.get("max_seq_len"))
    size = whole(config.get("global_train_batch_size")) * length
    model = _model(config)
    flops = model.flops_per_token(length) if model and length else 0.0
    return {
        "name": cut(config.get("name", folder.name)), "folder": str(folder), "state": _state(folder),
        "total": _total(folder), "tokens_per_step": size, "flops_per_step": flops * size,
        "series": {name: downsample(*column) for name, column in columns.items()},
        "last": {name: values[-1] for name, (_, values) in columns.items()},
        "summary": _summary(folder, config, model, columns, flops * size),
        "profiles": profiles(folder), "generated": generated(folder), "checkpoints": checkpoints(folder),
        "marks": marks(folder),
        "config": {key: cut(value) for key, value in flatten(config).items()}, "changed": _changed(config),
    }  # fmt: skip


def _read_config(folder: Path) -> dict[str, Any]:
    text = read_tail(folder, CONFIG)
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            return {}  # ingot writes none, and a few lines of them can stand for gigabytes
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _read_columns(path: Path) -> tuple[list[int], dict[str, tuple[list[int], list[float]]]]:
    """The steps, and of each metric the steps that have it with its values. NaN and infinity are null in the file."""
    columns: dict[str, tuple[list[int], list[float]]] = {}
    steps: list[int] = []
    for row in number_rows(path):
        if (batch := row.get("time/batch")) is None or not 0 <= batch < LARGEST_STEP:
            continue
        step = int(batch)
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
    with suppress(OSError):
        if abs(time.time() - (folder / OWNER).stat().st_mtime) < SILENT_SECONDS:
            return "running"
    return "stopped"


def _total(folder: Path) -> int | None:
    """Batches of the whole run, from the newest line of progress in its log."""
    found = re.findall(r"\[batch=\d+/(\d{1,15})\]", read_tail(folder, LOG, 20_000))
    return int(found[-1]) if found else None


def _summary(
    folder: Path, config: dict[str, Any], model: ModelConfig | None, columns: dict[str, Any], flops_per_step: float
) -> dict[str, str]:
    """The table of what was run."""
    steps = columns["time/batch"][1][-1]
    last = {name: values[-1] for name, (_, values) in columns.items()}
    flat = flatten(config)
    mixed = [str(value) for key, value in flat.items() if re.fullmatch(r"data\.train\.mix\..*\.path", key)]
    lines = {
        "model": f"{model.family}, {model.parameters:,} parameters" if model else "unknown",
        "steps": f"{int(steps):,}",
        "tokens": f"{last.get('time/token', 0):,.0f}",
        "training FLOPs": f"{steps * flops_per_step:.3g}",
        "batch": cut(f"{config.get('global_train_batch_size')} sequences of {config.get('max_seq_len')} tokens"),
        "data": cut(flat.get("data.train.path") or ", ".join(mixed)),
        "precision": cut(config.get("precision")),
    }
    if config.get("load_path"):
        lines["starts from"] = cut(config["load_path"])
    losses = columns.get("metrics/eval/LanguageCrossEntropy", ([], []))[1]
    if losses:
        lines["validation loss"] = f"{losses[-1]:.4f} (best {min(losses):.4f})"
    if "loss/train/total" in last:
        lines["training loss"] = f"{last['loss/train/total']:.4f}"
    hours = last.get("time/train", 0.0)
    wall = _wall_hours(folder)
    lines["time in training"] = f"{hours:.3g} h" + (f" of {wall:.3g} h since the first start ({hours / wall:.0%})"
                                                    if wall and hours <= wall else "")  # fmt: skip
    return lines | environment(folder)


def _wall_hours(folder: Path) -> float | None:
    """From the first line of the log to the last."""
    with suppress(OSError, ValueError):
        path = own_file(folder, LOG)
        if path is None:
            return None
        with path.open(encoding="utf-8", errors="replace") as file:
            begin = file.read(400)
        stamps = STAMP.findall(begin)[:1] + STAMP.findall(read_tail(folder, LOG, 4000))[-1:]
        first, last = (datetime.fromisoformat(stamp) for stamp in stamps)
        return (last - first).total_seconds() / 3600 or None
    return None


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    """What differs from the recipe of the run, or from the defaults."""
    flat = flatten(config)
    recipe = _recipe_of(flat)
    try:
        base = flatten(load_config(RunConfig, [recipe] if recipe else []).model_dump(mode="json"))
    except IngotError:
        return {}
    keys = {
        key: [cut(base.get(key)), cut(value)]
        for key, value in flat.items()
        if value != base.get(key) and key.partition(".")[0] not in WHERE
    }
    return {"of": f"the recipe {recipe}" if recipe else "the defaults", "keys": keys}


def _recipe_of(flat: dict[str, Any]) -> str | None:
    """The recipe of a run: that of its name, or the one whose model it has and most of whose other values."""
    if flat.get("name") in recipe_names():
        return str(flat["name"])
    agreeing = {}
    for name in recipe_names():
        wanted = _recipe_values(name)
        same = [key for key, value in wanted.items() if flat.get(key) == value]
        if all(key in same for key in wanted if key.startswith("model.")):
            agreeing[name] = len(same)
    return max(agreeing, key=agreeing.__getitem__, default=None)


@cache
def _recipe_values(name: str) -> dict[str, Any]:
    return flatten(yaml.safe_load(find_recipe(name).read_text(encoding="utf-8")))
