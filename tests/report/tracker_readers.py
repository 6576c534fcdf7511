"""Reads what a tracker holds of a run, as the tracker's own tools would: the steps of its training loss, in order."""

import json
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOSS = "loss/train/total"
Points = list[tuple[int, float]]


def tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(LOSS)]


def tensorboard_tags(folder: Path) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return list(reader.Tags()["tensors"])


def tensorboard_texts(folder: Path, tag: str) -> list[tuple[int, str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    reader.Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in reader.Tensors(tag)]


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of all offline runs: LevelDB's log format after seven bytes, as `wandb sync` reads it."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("trackers/wandb/offline-run-*/*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            record = (b"" if kind in (1, 2) else record) + data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):
                yield Record.FromString(record)


def wandb(folder: Path) -> Points:
    found = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            if LOSS in items:
                found.append((record.history.step.num, json.loads(items[LOSS])))
    return sorted(found)


def wandb_runs(folder: Path) -> set[tuple[str, str]]:
    """Id and group of each run."""
    records = (r.run for r in wandb_records(folder) if r.WhichOneof("record_type") == "run")
    return {(run.run_id, run.run_group) for run in records}


def comet(folder: Path) -> Points:
    found = []
    for path in folder.glob("trackers/comet/*.zip"):
        with zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                message = json.loads(line)
                metric = message["payload"].get("metric") or {}
                if metric.get("metricName") == LOSS:
                    found.append((metric["step"], float(metric["metricValue"])))
    return sorted(found)


def comet_keys(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.glob("trackers/comet/*.zip")}


def mlflow(uri: str) -> dict[str, Points]:
    """Of each run, by name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ingot")
    return {
        str(run.info.run_name): [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, LOSS)]
        for run in client.search_runs([experiment.experiment_id])
    }


def trackio(folder: Path, project: str = "ingot") -> Points:
    """From Trackio's own database of a project in a folder (TRACKIO_DIR)."""
    import sqlite3

    found = []
    for path in folder.glob(f"{project}.db"):
        with sqlite3.connect(path) as database:
            rows = database.execute("select step, metrics from metrics").fetchall()
        found += [(step, json.loads(metrics)[LOSS]) for step, metrics in rows if LOSS in json.loads(metrics)]
    return sorted(found)


def comet_others(folder: Path) -> dict[str, str]:
    """What is said about a run besides its metrics and parameters."""
    found: dict[str, str] = {}
    for path in folder.glob("trackers/comet/*.zip"):
        with zipfile.ZipFile(path) as archive:
            for line in archive.read("messages.json").decode().splitlines():
                message = json.loads(line)
                if message["type"] == "log_other":
                    found[message["payload"]["key"]] = str(message["payload"]["value"])
    return found
