"""Callbacks of a run: the base class, and ready ones.

Ready ones load their libraries when they are used. Names are loaded when they are
first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from miniray.train.config.run import Callback, RunContext, UserCallback

if TYPE_CHECKING:
    from miniray.train.callbacks.files import CSVCallback, JSONCallback
    from miniray.train.callbacks.progress import ProgressCallback
    from miniray.train.callbacks.trackers import MLflowCallback, TensorBoardCallback

_HOMES = {
    "CSVCallback": "files",
    "JSONCallback": "files",
    "MLflowCallback": "trackers",
    "ProgressCallback": "progress",
    "TensorBoardCallback": "trackers",
}

__all__ = [
    "CSVCallback",
    "Callback",
    "JSONCallback",
    "MLflowCallback",
    "ProgressCallback",
    "RunContext",
    "TensorBoardCallback",
    "UserCallback",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"miniray.train.callbacks.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
