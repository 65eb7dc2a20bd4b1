"""Callbacks of a run: the base class, and ready ones, which load their libraries when used."""

from __future__ import annotations

from miniray.train.callbacks.files import CSVCallback, JSONCallback
from miniray.train.callbacks.trackers import MLflowCallback, TensorBoardCallback
from miniray.train.config.run import Callback, ProgressCallback, RunContext, UserCallback

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
