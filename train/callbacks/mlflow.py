"""Sends reported metrics to MLflow."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import time
from typing import TYPE_CHECKING, Any

from miniray.train.base.state import RunState
from miniray.train.callbacks.base import Callback
from miniray.train.callbacks.libraries import choose
from miniray.train.callbacks.values import scalars, step_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.callbacks.base import RunContext
    from miniray.train.storage.checkpoint import Checkpoint

#: By which a run that goes on is found again in MLflow: a hash of the path of its folder, which
#: itself may hold quotes that MLflow's search does not take.
_RUN_TAG = "miniray.run"

#: MLflow takes so many metrics in one request.
_MOST_METRICS = 1000

_STATUS = {
    RunState.FINISHED: "FINISHED",
    RunState.ERRORED: "FAILED",
    RunState.ABORTED: "KILLED",
}


def _module() -> str:
    return choose("MLflowCallback", {"mlflow": ["mlflow"]}, "mlflow")


class MLflowCallback(Callback):
    """Makes a run in MLflow and logs the numbers that rank 0 reports.

    Keys of nested dictionaries are joined by ``/``; what is no number is left out. A run that
    continues an older one of the same name and storage path goes on in the same MLflow run.

    Args:
        tracking_uri: Server or folder of MLflow. Default: what MLflow itself uses.
        experiment_name: Experiment of the run; made if there is none. Default: the run's name.
        params: Values to log as parameters beside the number of workers and what they hold.
        tags: Tags of the run.
        step_key: A metric that counts steps, to be used in place of the number of the report.

    Raises:
        ImportError: MLflow is not installed.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        step_key: str | None = None,
    ) -> None:
        _module()
        self.tracking_uri = tracking_uri
        self.experiment_name = experiment_name
        self.params = dict(params or {})
        self.tags = dict(tags or {})
        self.step_key = step_key
        self._client: Any = None
        self._run_id = ""

    def on_start(self, run_context: RunContext) -> None:
        """Make the run, or find that of an earlier start."""
        mlflow = importlib.import_module(_module())
        self._client = client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        name = self.experiment_name or run_context.name
        experiment = client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment is not None else client.create_experiment(name)
        )
        mark = hashlib.sha256(run_context.path.encode()).hexdigest()
        found = client.search_runs([experiment_id], filter_string=f"tags.`{_RUN_TAG}` = '{mark}'")
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        tags = {_RUN_TAG: mark, "miniray.path": run_context.path, **self.tags}
        run = client.create_run(experiment_id, run_name=run_context.name, tags=tags)
        self._run_id = run.info.run_id
        scaling = dataclasses.asdict(run_context.scaling_config)
        known = {key: value for key, value in scaling.items() if value is not None}
        for key, value in {**known, **self.params}.items():
            client.log_param(self._run_id, key, value)

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Log the numbers of rank 0."""
        entity = importlib.import_module("mlflow.entities").Metric
        step = step_of(self, self.step_key, run_context, metrics[0])
        now = int(time.time() * 1000)
        values = scalars(metrics[0])
        entries = [entity(key, value, now, step) for key, value in values.items()]
        for start in range(0, len(entries), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=entries[start : start + _MOST_METRICS])

    def after_checkpoint(
        self, run_context: RunContext, checkpoint: Checkpoint, metrics: dict[str, Any]
    ) -> None:
        """Note where the newest checkpoint is."""
        self._client.set_tag(self._run_id, "miniray.checkpoint", checkpoint.path)

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        """End the run in MLflow, with the status that fits."""
        if not self._run_id:
            return
        if error is not None:
            self._client.set_tag(self._run_id, "miniray.error", error[:5000])
        self._client.set_terminated(self._run_id, status=_STATUS[state])
