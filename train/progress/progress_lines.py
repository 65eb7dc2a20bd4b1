"""What a run's news look like as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.base.state import RunState
from miniray.train.storage.metrics_log import flatten

if TYPE_CHECKING:
    from miniray.train.progress.progress_feed import Row

WORDS = {
    RunState.INITIALIZING: "opening the storage",
    RunState.SCHEDULING: "starting the workers",
    RunState.RUNNING: "training",
    RunState.RESTARTING: "starting the workers again",
    RunState.RESIZING: "starting more workers",
    RunState.FINISHED: "finished",
    RunState.ERRORED: "failed",
    RunState.ABORTED: "stopped",
}


#: Characters of a value that are shown.
_WIDTH = 200


def format_value(value: Any) -> str:
    """A metric as short text."""
    return f"{value:.4g}" if isinstance(value, float) else shorten(str(value))


def shorten(text: str) -> str:
    """The beginning of a text, if it is long."""
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]} ..."


def format_row(row: Row) -> str:
    """A step as one line: its number, its metrics, its checkpoint."""
    parts = [f"{key}={format_value(value)}" for key, value in flatten(row.metrics).items()]
    if row.checkpoint is not None:
        parts.append(f"-> {row.checkpoint}")
    return f"report {row.number}: {' '.join(parts)}"
