"""The ready callbacks: reported metrics as JSON lines, as CSV, in MLflow and in TensorBoard.

A file that exists is continued. The libraries of trackers are loaded when they are used.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import mmap
import numbers
import os
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from miniray.train.base.states import RunState
from miniray.train.config.run import Callback
from miniray.train.storage.metrics_log import flat_row, flatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from miniray.train.config.run import RunContext
    from miniray.train.storage.checkpoint import Checkpoint


class JsonLinesFile:
    """Appends rows as lines of JSON; values without a JSON form are written as text."""

    def __init__(self, path: Path) -> None:
        _cut_half_a_line(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; they are with the operating system when this returns."""
        self._file.writelines(f"{json.dumps(row, default=str)}\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class CsvFile:
    """Appends rows as CSV.

    A row with a new key adds a column: the file is rewritten once, with empty cells in earlier
    rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = path.with_name(f".{path.name}.part")
        _cut_half_a_line(path)
        with path.open(newline="", encoding="utf-8") as existing:
            self._columns = next(csv.reader(existing), [])
        self._open()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows; they are with the operating system when this returns."""
        for row in rows:
            # A line is a row, so that half a row is recognised.
            cells = {_one_line(key): _one_line(value) for key, value in flat_row(row).items()}
            added = [key for key in cells if key not in self._columns]
            if added:
                self._widen(added)
            self._writer.writerow(cells)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file: TextIO = self._path.open("a", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")

    def _widen(self, added: list[str]) -> None:
        """Give the file more columns; a reader sees the old file or the new one."""
        self._file.close()
        self._columns = [*self._columns, *added]
        with (
            self._path.open(newline="", encoding="utf-8") as old,
            self._part.open("w", newline="", encoding="utf-8") as new,
        ):
            writer = csv.DictWriter(new, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(csv.DictReader(old))
        self._part.replace(self._path)
        self._open()


def _one_line(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return value.replace("\\", "\\\\").replace("\n", "\\n") if "\n" in value else value


def _cut_half_a_line(path: Path) -> None:
    """Make the file if there is none, and remove what follows its last line break."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            with mmap.mmap(file.fileno(), 0) as content:
                keep = content.rfind(b"\n") + 1
            file.truncate(keep)


class _FileCallback(Callback):
    """Writes a row for each report."""

    _kind: ClassVar[type[JsonLinesFile | CsvFile]]

    def __init__(self, path: str | os.PathLike[str], *, all_ranks: bool = False) -> None:
        name = type(self).__name__
        text = os.fspath(path)
        if "://" in text:
            raise ValueError(
                f"{name}({text!r}) must be a local path. What the run itself keeps, in the "
                f"storage path, has its metrics too."
            )
        self.path = Path(text).expanduser().absolute()
        if self.path.is_dir():
            raise ValueError(f"{name}({text!r}) is a folder; name the file to write.")
        self.all_ranks = all_ranks
        self._file: JsonLinesFile | CsvFile | None = None

    def on_start(self, run_context: RunContext) -> None:
        self._file = self._kind(self.path)

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        assert self._file is not None
        about = {
            "number": run_context.report_number,
            "time": time.time(),
            "checkpoint": PurePosixPath(checkpoint.path).name if checkpoint else None,
        }
        self._file.append(
            {**about, **({"rank": rank} if self.all_ranks else {}), "metrics": values}
            for rank, values in enumerate(metrics if self.all_ranks else metrics[:1])
            if values or checkpoint is not None
        )

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class JSONCallback(_FileCallback):
    """Writes each report as a line of JSON: number, time, checkpoint, metrics.

    Args:
        path: A local path on the machine of the driver. A file that exists is continued.
        all_ranks: Write a row for each rank, with a column ``rank``; otherwise for rank 0 only.

    Raises:
        ValueError: The path is not a file of this machine.
    """

    _kind = JsonLinesFile


class CSVCallback(_FileCallback):
    """Writes each report as a row of CSV, with a column for each metric.

    Keys of nested dictionaries are joined by ``/``. A metric that appears later gets a column
    then; earlier rows are empty in it. The arguments are those of ``JSONCallback``.
    """

    _kind = CsvFile


def choose(callback: str, choices: Mapping[str, Sequence[str]], install: str) -> str:
    """Return the first module whose packages are all installed, without an import.

    Raises:
        ImportError: No module is complete.
    """
    for module, needed in choices.items():
        if all(importlib.util.find_spec(package) is not None for package in needed):
            return module
    raise ImportError(
        f"{callback} needs {' or '.join(choices)}, which is not installed. "
        f"Run `pip install {install}`."
    )


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among the metrics, keys of nested dictionaries joined by ``/``."""
    return {
        key: float(value)
        for key, value in flatten(metrics).items()
        if not isinstance(value, bool) and isinstance(value, numbers.Real)
    }


def step_of(
    callback: object, step_key: str | None, run_context: RunContext, metrics: Mapping[str, Any]
) -> int:
    """Return the step of a report: its number, or the metric of this key.

    Raises:
        ValueError: There is no such metric, or it is not a whole number.
    """
    values = flatten(metrics)
    step = run_context.report_number if step_key is None else values.get(step_key)
    if type(step) is not int:
        raise ValueError(
            f"{type(callback).__name__}(step_key={step_key!r}) needs a whole number of this name "
            f"in each report; there are: {', '.join(values) or 'none'}."
        )
    return step


#: By which a run that goes on is found again in MLflow: a hash of the path of its folder, which
#: itself may hold quotes that MLflow's search does not take.
_RUN_TAG = "miniray.run"

_MLFLOW = {"mlflow": ["mlflow"]}

#: MLflow takes this many metrics in one request.
_MOST_METRICS = 1000

_STATUS = {
    RunState.FINISHED: "FINISHED",
    RunState.ERRORED: "FAILED",
    RunState.ABORTED: "KILLED",
}


@dataclasses.dataclass(eq=False)
class MLflowCallback(Callback):
    """Makes a run in MLflow and logs the numbers that rank 0 reports.

    Keys of nested dictionaries are joined by ``/``; what is not a number is left out. A run that
    continues an older one of the same name and storage path goes on in the same MLflow run.

    Args:
        tracking_uri: Server or folder of MLflow. Default: what MLflow itself uses.
        experiment_name: Experiment of the run; made if there is none. Default: the run's name.
        params: Values to log as parameters beside the number of workers and their resources.
        tags: Tags of the run.
        step_key: A metric that counts steps, to be used in place of the number of the report.

    Raises:
        ImportError: MLflow is not installed.
    """

    tracking_uri: str | None = dataclasses.field(default=None, repr=False)  # may hold a password
    experiment_name: str | None = None
    _: dataclasses.KW_ONLY
    params: Mapping[str, Any] | None = None
    tags: Mapping[str, str] | None = None
    step_key: str | None = None
    _client: Any = dataclasses.field(default=None, init=False, repr=False)
    _run_id: str = dataclasses.field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        choose("MLflowCallback", _MLFLOW, "mlflow")

    def on_start(self, run_context: RunContext) -> None:
        mlflow = importlib.import_module("mlflow")
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
        tags = {_RUN_TAG: mark, "miniray.path": run_context.path, **(self.tags or {})}
        run = client.create_run(experiment_id, run_name=run_context.name, tags=tags)
        self._run_id = run.info.run_id
        scaling = dataclasses.asdict(run_context.scaling_config)
        known = {key: value for key, value in scaling.items() if value is not None}
        for key, value in {**known, **(self.params or {})}.items():
            client.log_param(self._run_id, key, value)

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
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
        self._client.set_tag(self._run_id, "miniray.checkpoint", checkpoint.path)

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        if not self._run_id:
            return
        if error is not None:
            self._client.set_tag(self._run_id, "miniray.error", error[:5000])
        self._client.set_terminated(self._run_id, status=_STATUS[state])


#: Seconds after which what was written is in the file; a controller that is killed loses no more.
_FLUSH_AFTER = 10


def _writer_module() -> str:
    # tensorboardX comes first: PyTorch would be loaded into the controller for nothing else.
    choices = {
        "tensorboardX": ["tensorboardX"],
        "torch.utils.tensorboard": ["torch", "tensorboard"],
    }
    return choose("TensorBoardCallback", choices, "tensorboardX")


@dataclasses.dataclass(eq=False)
class TensorBoardCallback(Callback):
    """Writes the numbers that rank 0 reports, as scalars over the number of the report.

    Keys of nested dictionaries are joined by ``/``; what is not a number is left out. Why workers
    failed is written as text.

    Args:
        log_dir: A local folder for the events. Default: ``tensorboard`` in the run's folder.
        step_key: A metric that counts steps, to be used in place of the number of the report.

    Raises:
        ImportError: Neither tensorboardX nor tensorboard is installed.
    """

    log_dir: str | os.PathLike[str] | None = None
    _: dataclasses.KW_ONLY
    step_key: str | None = None
    _writer: Any = dataclasses.field(default=None, init=False, repr=False)
    _step: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        _writer_module()
        if self.log_dir is not None:
            self.log_dir = str(Path(self.log_dir).expanduser().absolute())

    def on_start(self, run_context: RunContext) -> None:
        writer = importlib.import_module(_writer_module()).SummaryWriter
        self._writer = writer(self._folder(run_context), flush_secs=_FLUSH_AFTER)

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        self._step = step_of(self, self.step_key, run_context, metrics[0])
        for key, value in scalars(metrics[0]).items():
            self._writer.add_scalar(key, value, self._step)

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, BaseException]
    ) -> None:
        lines = [f"rank {rank}: {error!r}" for rank, error in sorted(worker_exceptions.items())]
        self._writer.add_text("failure", "\n\n".join(lines), self._step)

    def on_end(self, run_context: RunContext, state: RunState, error: str | None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _folder(self, run_context: RunContext) -> str:
        if self.log_dir is not None:
            return str(self.log_dir)
        from miniray.train.storage.filesystem import is_local

        if not is_local(run_context.filesystem):
            raise ValueError(
                f"The run is stored in {run_context.path}, which is not local. Say where to write "
                f"events: TensorBoardCallback(log_dir=...)."
            )
        return f"{run_context.path}/tensorboard"
