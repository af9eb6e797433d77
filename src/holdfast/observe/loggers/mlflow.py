"""MLflow: the metrics of a run, found again by a tag when the job resumes.

A step of several metrics is not written at once: what a store has is read back for each metric.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.observe.loggers.steps import LoggedStep

RUN_TAG = "holdfast.run_id"
"""Tag of the run: its id, which stays the same when the job resumes."""
_MOST_METRICS = 1000
"""MLflow takes so many values in one call."""
_LONGEST_NAME = 250


class MlflowLogger:
    """Writes the metrics of each step to a run of MLflow.

    Args:
        uri: Tracking URI, or a folder for MLflow's file store; "": MLflow's own default, such as ``MLFLOW_TRACKING_URI``.
        run_id: Holdfast's id of the run.
    """

    name = "mlflow"
    shows = frozenset(("images",))

    def __init__(self, uri: str, run_id: str) -> None:
        self._uri, self._holdfast_id = uri, run_id
        self._client: Any = None
        self._run = ""
        self._last: Mapping[str, int] = {}  # by name in MLflow

    def open(self) -> Mapping[str, int]:
        """Create the run, or find it; return the last step of each metric that it has."""
        from mlflow.tracking import MlflowClient

        uri = self._uri
        if uri and ":" not in uri:
            uri = Path(uri).resolve().as_uri()
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # asked for by its URI; MLflow prefers a database
        self._client = MlflowClient(uri or None)
        run = self._find_run()
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        histories = {name: self._client.get_metric_history(self._run, name) for name in run.data.metrics}
        self._last = {name: max(value.step for value in history) for name, history in histories.items() if history}
        return self._last

    def _find_run(self) -> Any:
        if env_id := os.environ.get("MLFLOW_RUN_ID"):
            return self._client.get_run(env_id)
        experiment = self._experiment_id()
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{self._holdfast_id}'", max_results=1)
        if runs:
            return runs[0]
        return self._client.create_run(
            experiment, tags={RUN_TAG: self._holdfast_id}, run_name=os.environ.get("MLFLOW_RUN_NAME")
        )

    def _experiment_id(self) -> str:
        if env_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return env_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id: str = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        return experiment_id

    def write(self, steps: Sequence[LoggedStep]) -> None:
        """Write all values, in the order of the steps."""
        from mlflow.entities import Metric

        values = [
            Metric(name, value, round(1e3 * step.time_s), step.step)
            for step in steps
            for name, value in ((metric_name(key), value) for key, value in step.metrics.items())
            if step.step > self._last.get(name, -1)  # the sink does not know the names of MLflow
        ]
        for first in range(0, len(values), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=values[first : first + _MOST_METRICS])
        for step in steps:
            for name, image in step.images.items():
                self._log_image(name, step.step, image.path)

    def _log_image(self, name: str, step: int, path: Path) -> None:
        """Keep an image as an artifact, whose name says the step; writing it again changes nothing."""
        folder = re.sub(r"[^\w.-]+", "_", name)
        with tempfile.TemporaryDirectory() as scratch:
            named = Path(scratch, f"{step:08d}.png")
            shutil.copyfile(path, named)
            self._client.log_artifact(self._run, str(named), f"images/{folder}")

    def close(self, *, is_done: bool) -> None:
        """Say how the run ended."""
        if self._run:
            self._client.set_terminated(self._run, "FINISHED" if is_done else "FAILED")


def metric_name(name: str) -> str:
    """Return a name with ``_`` for what MLflow refuses in names of metrics, which may be paths of files."""
    allowed = re.sub(r"[^/\w.\-: ]", "_", name)[:_LONGEST_NAME] or "_"
    if posixpath.normpath(allowed) != allowed or allowed.startswith((".", "/")):
        allowed = re.sub(r"^\.", "_", allowed.replace("/", "_"))
    return allowed
