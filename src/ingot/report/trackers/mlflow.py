"""MLflow. Each call is a request to the server, so what it holds is known exactly. Metrics cannot be taken back:
after a rollback the repeated steps go under a new run with the same group."""

import os
import re
import time
from typing import Any

from ingot.config.dotted_keys import flatten
from ingot.config.training import MLflowConfig
from ingot.report.trackers.base import Summary, TrackedRun, Tracker, Values

ALWAYS = "time/batch"  # a metric of every row
LONGEST_PARAMETER, MOST_PER_CALL = 6000, 100  # limits of MLflow's API
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "crashed": "FAILED"}


class MLflow(Tracker):
    """An MLflow run, by the client, without MLflow's global state."""

    def __init__(self, config: MLflowConfig):
        self.config = config
        self.client: Any = None
        self.run_id = ""
        self.pending: list[Any] = []

    def open(self, run: TrackedRun, after: int) -> str:
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=self.config.tracking_uri)
        if continued := run.id or (None if run.suffix else self.config.id):
            self.run_id = continued
            self.client.update_run(self.run_id, status="RUNNING")
            return self.run_id
        name = self.config.experiment_name
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        tags = {"ingot.group": self.config.group or run.group, "ingot.folder": str(run.folder), **self.config.tags}
        if run.forked_from:
            tags["ingot.forked_from"] = run.forked_from
        made = self.client.create_run(experiment_id, run_name=(self.config.name or run.name) + run.suffix, tags=tags)
        self.run_id = str(made.info.run_id)
        parameters = [Param(_name(k), str(v)[:LONGEST_PARAMETER]) for k, v in flatten(run.config).items()]
        for start in range(0, len(parameters), MOST_PER_CALL):
            self.client.log_batch(self.run_id, params=parameters[start : start + MOST_PER_CALL])
        return self.run_id

    def last_step(self) -> int | None:
        history = self.client.get_metric_history(self.run_id, ALWAYS)
        return max((metric.step for metric in history), default=-1)

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        # the metric by which `last_step` knows of a step is sent with the others or after them
        for name in sorted(values, key=lambda name: name == ALWAYS):
            self.pending.append(Metric(_name(name), values[name], now, step))

    def flush(self) -> None:
        while self.pending:
            self.client.log_batch(self.run_id, metrics=self.pending[:1000])
            del self.pending[:1000]

    def event(self, step: int, kind: str, text: str) -> None:
        self.client.set_tag(self.run_id, f"ingot.{kind}.{step}", text[:LONGEST_PARAMETER])

    def table(self, step: int, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        table = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        self.client.log_table(self.run_id, table, f"{name}-{step}.json")

    def close(self, summary: Summary) -> None:
        self.client.set_tag(self.run_id, "ingot.state", f"{summary.state} at batch {summary.step}")
        self.client.set_terminated(self.run_id, STATUS.get(summary.state, "KILLED"))


def _name(text: str) -> str:
    """A name that MLflow accepts."""
    return re.sub(r"[^\w. /:-]", "_", text)[:250]
