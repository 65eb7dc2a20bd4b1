"""Callbacks of a run: their base class, and the caller of their hooks, one at a time.

An exception in a hook becomes a ``CallbackError``, which names the callback and the hook. When
which hook is called is the controller's and the recorder's part.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from miniray.train.base.exceptions import CallbackError
from miniray.train.callbacks.ready import (
    CSVCallback,
    JSONCallback,
    MLflowCallback,
    TensorBoardCallback,
)
from miniray.train.config.run import Callback, ProgressCallback, RunContext, UserCallback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.train.base.states import RunState
    from miniray.train.storage.checkpoint import Checkpoint

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

logger = logging.getLogger(__name__)


class CallbackRunner:
    """The callbacks of one run. Not thread-safe: one thread calls it."""

    def __init__(self, callbacks: Sequence[Callback], context: RunContext) -> None:
        self._callbacks = list(callbacks)
        self._context = context
        self._started: list[Callback] = []

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def start(self) -> None:
        """Call ``on_start`` of each callback; those called get ``on_end`` later."""
        for callback in self._callbacks:
            self._started.append(callback)
            self._call(callback, "on_start", self._context)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of each callback.

        Raises:
            CallbackError: One of them failed; those after it were not called.
        """
        for callback in self._callbacks:
            self._call(callback, hook, self._context, *arguments)

    def tell_report(
        self, number: int, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """Call the hooks of a complete report, those of its checkpoint first.

        Raises:
            CallbackError: A callback failed; those after it were not called.
        """
        context = dataclasses.replace(self._context, report_number=number)
        for callback in self._callbacks:
            if checkpoint is not None:
                self._call(callback, "after_checkpoint", context, checkpoint, metrics[0])
            self._call(callback, "after_report", context, metrics, checkpoint)

    def end(self, state: RunState, error: str | None) -> None:
        """Call ``on_end`` of each callback that was started, also when one of them fails.

        Raises:
            CallbackError: Of the first that failed.
        """
        failures: list[CallbackError] = []
        started, self._started = self._started, []
        for callback in started:
            try:
                self._call(callback, "on_end", self._context, state, error)
            except CallbackError as failure:  # noqa: PERF203 - each is called
                logger.warning("%s", failure)
                failures.append(failure)
        if failures:
            raise failures[0]

    def _call(self, callback: Callback, hook: str, *arguments: Any) -> None:
        try:
            getattr(callback, hook)(*arguments)
        except (Exception, SystemExit) as error:
            raise CallbackError(type(callback).__qualname__, hook, error) from error
