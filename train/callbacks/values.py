"""What trackers take of a report: numbers by name, and the step that they belong to."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

from miniray.train.storage.metrics_log import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.train.callbacks.base import RunContext


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the metrics, keys of nested dictionaries joined by ``/``."""
    return {
        key: float(value)
        for key, value in flatten(metrics).items()
        if not isinstance(value, bool) and isinstance(value, numbers.Real)
    }


def step_of(
    callback: object, step_key: str | None, run_context: RunContext, metrics: Mapping[str, Any]
) -> int:
    """The step of a report: its number, or the metric of this key.

    Raises:
        ValueError: There is no such metric, or it is no whole number.
    """
    values = flatten(metrics)
    step = run_context.report_number if step_key is None else values.get(step_key)
    if type(step) is not int:
        raise ValueError(
            f"{type(callback).__name__}(step_key={step_key!r}) needs a whole number of this name "
            f"in each report; there are: {', '.join(values) or 'none'}."
        )
    return step
