"""Metrics as they travel and are stored: plain Python values."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics with NumPy numbers as Python ones.

    Raises:
        TypeError: They are not a dictionary with string keys, or hold what can't be sent or kept.
        ValueError: They hold a tensor.
    """
    if not hasattr(metrics, "items"):
        raise TypeError(
            f"report() got metrics of type {type(metrics).__name__}; "
            f'metrics are a dictionary, such as {{"loss": 0.1}}.'
        )
    plain = {}
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"report() got the key {key!r}; keys of metrics are strings.")
        plain[key] = _plain(key, value)
    return plain


def _plain(key: str, value: Any) -> Any:
    if type(value) in (int, float, str, bool, type(None)):
        return value
    if isinstance(value, dict):
        # JSON has only string keys.
        return {str(name): _plain(f"{key}/{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    # What was never imported can't be the type of a value.
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    if torch is not None and isinstance(value, torch.Tensor):
        raise ValueError(
            f"report() got a tensor as the metric {key!r}. Report a number "
            f"(`{key.rsplit('/', 1)[-1]}.item()`), or save the tensor in a checkpoint."
        )
    _check(key, value)
    return value


def _check(key: str, value: Any) -> None:
    """Raise TypeError for a value that can't be sent to the controller, or kept as text."""
    from miniray.values.serialization import pickled

    try:
        pickled(value)  # refs in it are not kept, as it is only looked at
        str(value)
    except Exception as error:  # whatever a user's class raises
        raise TypeError(
            f"report() got a {type(value).__name__} as the metric {key!r}, which can't be pickled "
            f"and kept as text ({type(error).__name__}: {error}). Metrics are numbers, strings, "
            f"lists and dictionaries; other things belong into checkpoints."
        ) from error
