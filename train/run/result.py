"""``Result``: the outcome of a run, as ``fit()`` returns it or as a folder holds it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import operator
import textwrap
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import TrainingFailedError
from miniray.train.base.states import RunState
from miniray.train.config import CheckpointConfig
from miniray.train.controller.recorder import CheckpointBook, lookup, score
from miniray.train.controller.run_spec import STOPPED
from miniray.train.run.display import format_value, shorten
from miniray.train.storage.metrics_log import flatten, read_rows
from miniray.train.storage.storage import RunStorage

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from miniray.train.storage.checkpoint import Checkpoint
    from miniray.train.storage.storage import CheckpointRecord

logger = logging.getLogger(__name__)

#: A printed result names this many checkpoints.
_SHOWN = 5


@dataclasses.dataclass(repr=False)
class Result:
    """The results of a training run.

    Attributes:
        metrics: The metrics reported last, those of rank 0; None if nothing was reported.
        checkpoint: The latest checkpoint, or None.
        error: Why the run failed, or None. ``fit()`` raises it instead of returning.
        path: Path of the run's folder on ``filesystem``.
        best_checkpoints: The checkpoints that ``CheckpointConfig`` keeps, each with its metrics,
            the best last. Not the latest, which is kept to go on from, if others are better.
        return_value: What the train loop of rank 0 returned.
    """

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    error: TrainingFailedError | None
    path: str
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = dataclasses.field(
        default_factory=list
    )
    return_value: Any = None
    _storage: RunStorage | None = None
    _unfinished: str = ""

    @property
    def filesystem(self) -> Any:
        """The filesystem that holds ``path``: the user's own, else one of pyarrow."""
        return self._run.storage_filesystem

    @property
    def metrics_dataframe(self) -> Any:
        """All reported metrics as a pandas DataFrame, with a row for each report.

        Keys of nested dictionaries are joined by ``/``. None if nothing was reported.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError(
                "Result.metrics_dataframe needs pandas, which is not installed. Run "
                f"`pip install pandas`, or read the same rows from {self.path}/metrics.jsonl."
            ) from error
        rows = [flatten(row["metrics"]) for row in read_rows(self._run)]
        return pandas.DataFrame(rows) if rows else None

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint:
        """Return the kept checkpoint with the best value of a metric.

        Args:
            metric: Key of the metric; keys of nested dictionaries are joined by ``/``.
            mode: ``"max"`` or ``"min"``.

        Raises:
            ValueError: The mode is neither.
            RuntimeError: There is no checkpoint, or none with this metric.
        """
        if mode not in ("max", "min"):
            raise ValueError(f"The mode {mode!r} is not known. Use 'max' or 'min'.")
        if not self.best_checkpoints:
            raise RuntimeError(f"The run in {self.path} has no checkpoint.")
        scores = [
            (score(metrics, metric, mode), checkpoint)
            for checkpoint, metrics in self.best_checkpoints
            if lookup(metrics, metric) is not None
        ]
        if not scores:
            known = sorted(
                {key for _, metrics in self.best_checkpoints for key in flatten(metrics)}
            )
            raise RuntimeError(
                f"No checkpoint in {self.path} has the metric {metric!r}. "
                f"There are: {', '.join(known) or 'none'}."
            )
        _, best = max(scores, key=operator.itemgetter(0))
        return best

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """Return the results in the folder of a run.

        Only the result of ``fit()`` has the return value and the exceptions of ranks. A run that
        has not ended, or was killed with its driver, has no error; its text has its state.

        Args:
            path: The folder of the run: a local path, a URL, or a path on ``storage_filesystem``.
            storage_filesystem: An fsspec or pyarrow filesystem, or None.

        Raises:
            RuntimeError: There is no such folder, or no run in it.
        """
        storage = RunStorage.of_run(path, storage_filesystem)
        if not storage.exists():
            raise RuntimeError(
                f"{storage.path} is not the folder of a training run: it has no run.json."
                if storage.files.exists("")
                else f"{storage.path} does not exist: it is not the folder of a training run."
            )
        facts = storage.run_facts()
        rows = read_rows(storage)
        records = storage.records()
        # A run that was killed early may have checkpoints and no rows.
        newest = dict(records[-1].metrics) if records else None
        return cls.kept(
            storage,
            rows[-1]["metrics"] if rows else newest,
            records,
            _checkpoint_config(storage),
            error=_error(facts),
            _unfinished=_unfinished(facts),
        )

    @classmethod
    def kept(
        cls,
        storage: RunStorage,
        metrics: dict[str, Any] | None,
        records: Sequence[CheckpointRecord],
        config: CheckpointConfig,
        **others: Any,
    ) -> Result:
        """Return the results of a run whose checkpoints these are; ``others`` are fields."""
        book = CheckpointBook(config)
        book.restore(records)
        latest = book.latest
        return cls(
            metrics=metrics,
            checkpoint=storage.checkpoint(latest.name) if latest is not None else None,
            path=storage.path,
            best_checkpoints=[
                (storage.checkpoint(record.name), dict(record.metrics)) for record in book.best
            ],
            _storage=storage,
            **{"error": None, **others},
        )

    @property
    def _run(self) -> RunStorage:
        """The run's folder, also of a result that a user has made, as for a test."""
        return self._storage if self._storage is not None else RunStorage.of_run(self.path)

    def __repr__(self) -> str:
        lines = [f"path: {self.path}"]
        if self._unfinished:
            lines.append(f"state: {self._unfinished}")
        if self.error is not None:
            lines.append(f"error: {type(self.error).__name__}: {self.error}")
        if self.metrics is None:
            lines.append("metrics: none were reported")
        else:
            lines.append("metrics:")
            lines += [
                f"  {key}: {format_value(value)}" for key, value in flatten(self.metrics).items()
            ]
        names = [PurePosixPath(checkpoint.path).name for checkpoint, _ in self.best_checkpoints]
        if self.checkpoint is None:
            lines.append("checkpoint: none")
        else:
            lines.append(f"checkpoint: {self.checkpoint.path} (the latest)")
        if names:
            more = len(names) - _SHOWN
            others = f"{more} {'other' if more == 1 else 'others'}, then " if more > 0 else ""
            lines.append(f"kept: {others}{', '.join(names[-_SHOWN:])}")
        if self.return_value is not None:
            lines.append(f"return value: {shorten(repr(self.return_value))}")
        return "Result of a training run\n" + textwrap.indent("\n".join(lines), "  ")


def _checkpoint_config(storage: RunStorage) -> CheckpointConfig:
    """Return a run's rule for keeping checkpoints; the default if that can't be read."""
    try:
        given = json.loads(storage.files.read("config.json") or "")
        return CheckpointConfig(**given["run_config"]["checkpoint_config"])
    except (ValueError, TypeError, KeyError):
        logger.debug("%s tells no rule for checkpoints.", storage.path, exc_info=True)
        return CheckpointConfig()


def _error(facts: Mapping[str, Any]) -> TrainingFailedError | None:
    if facts.get("state") == RunState.ERRORED.value:
        return TrainingFailedError(facts.get("error"))
    if facts.get("state") == RunState.ABORTED.value:
        return TrainingFailedError(STOPPED)
    return None


def _unfinished(facts: Mapping[str, Any]) -> str:
    """Return what to say of a run that has not ended by itself; empty for others."""
    state = facts.get("state")
    if state not in {each.value for each in RunState if not each.terminal}:
        return ""
    return (
        f"{state} when this was last written; the run goes on, or was killed. fit() with the same "
        f"name and storage path takes it up"
    )
