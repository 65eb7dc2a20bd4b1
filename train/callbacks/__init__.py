"""Callbacks of a run: their base class, and what they are told of."""

from __future__ import annotations

from miniray.train.config.run import Callback, ProgressCallback, RunContext, UserCallback

__all__ = ["Callback", "ProgressCallback", "RunContext", "UserCallback"]
