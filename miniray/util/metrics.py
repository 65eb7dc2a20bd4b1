"""``Counter``, ``Gauge`` and ``Histogram`` with Ray's names, for programs, tasks and actors.

A process keeps its values beside those that miniray counts there, and reports them to its node two
seconds after a change, when the cluster's ``/metrics`` (``miniray metrics``) are read, and when it
leaves. Counts of a process that was killed are at most two seconds short.
"""

from __future__ import annotations

import re
import threading
import warnings
from typing import TYPE_CHECKING, Any

from miniray.common.runtime import runtime_or_none
from miniray.common.series import COUNTED
from miniray.engines import refuse_on_ray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Counter", "Gauge", "Histogram"]

#: Seconds after a change until the node receives it.
_INTERVAL = 2.0
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")


#: Sends changes to the node in a moment; a forked child, which lacks its thread, makes another.
_timer: threading.Timer | None = None


def _tell_later() -> None:
    global _timer
    if _timer is None or not _timer.is_alive():
        refuse_on_ray("util.metrics")
        _timer = threading.Timer(_INTERVAL, _tell)
        _timer.daemon = True
        _timer.start()


def _tell() -> None:
    global _timer
    _timer = None  # first: another one sends what changes from here on
    runtime = runtime_or_none()
    if runtime is not None:
        runtime.tell_counts()


class Metric:
    """What the kinds of metrics have in common."""

    _kind = ""
    _boundaries: tuple[float, ...] = ()

    def __init__(
        self, name: str, description: str = "", tag_keys: tuple[str, ...] | None = None
    ) -> None:
        """Make a metric; those of one name, in any process, are one.

        Args:
            name: Letters, digits, ``_`` and ``:``. Else the metric is discarded, with a warning.
            description: For readers of the metrics.
            tag_keys: Keys of its tags; each value has to give all of them.

        Raises:
            ValueError: The name is empty.
            TypeError: ``tag_keys`` is not a tuple of strings.
        """
        if not name:
            raise ValueError("Empty name is not allowed. Please provide a metric name.")
        self._discarded = _NAME.match(name) is None
        if self._discarded:
            warnings.warn(
                f"Invalid metric name: {name}. The metric is discarded: names have letters, "
                "digits, _ and :, and do not begin with a digit.",
                UserWarning,
                stacklevel=2,
            )
        self._name, self._description = name, description
        self._default_tags: dict[str, str] = {}
        self._tag_keys: tuple[str, ...] = tag_keys or ()
        if not isinstance(self._tag_keys, tuple):
            raise TypeError(f"tag_keys should be a tuple type, got: {type(tag_keys)}")
        for key in self._tag_keys:
            if not isinstance(key, str):
                raise TypeError(f"Tag keys must be str, got {type(key)}.")

    def set_default_tags(self, default_tags: Mapping[str, str]) -> Any:
        """Set the tags of values that name none; returns the metric.

        Raises:
            ValueError: A key is not among the metric's.
            TypeError: A value is not a string.
        """
        for key, value in default_tags.items():
            if key not in self._tag_keys:
                raise ValueError(f"Unrecognized tag key {key}.")
            if not isinstance(value, str):
                raise TypeError(f"Tag values must be str, got {type(value)}.")
        self._default_tags = dict(default_tags)
        return self

    def _record(self, value: float, tags: Mapping[str, str] | None) -> None:
        if not isinstance(value, (int, float)):
            raise TypeError(f"value must be int or float, got {type(value)}.")
        if self._discarded:
            return
        for each in (tags or {}).values():
            if not isinstance(each, str):
                raise TypeError(f"Tag values must be str, got {type(each)}.")
        given = {**self._default_tags, **tags} if tags else self._default_tags
        missing = [key for key in self._tag_keys if key not in given]
        if missing:
            raise ValueError(f"Missing value for tag key(s): {','.join(missing)}.")
        metric = (self._kind, self._name, self._description, self._boundaries)
        COUNTED.change(metric, tuple([(key, given[key]) for key in self._tag_keys]), float(value))
        _tell_later()

    @property
    def info(self) -> dict[str, Any]:
        """Name, description, keys of tags and default tags."""
        return {
            "name": self._name,
            "description": self._description,
            "tag_keys": self._tag_keys,
            "default_tags": self._default_tags,
        }


class Counter(Metric):
    """A sum that only grows."""

    _kind = "counter"

    def inc(self, value: float = 1.0, tags: Mapping[str, str] | None = None) -> None:
        """Add to the sum.

        Args:
            value: Above 0.
            tags: Tags that differ from the default ones.

        Raises:
            ValueError: The value is not above 0, or a tag is missing.
            TypeError: The value is not a number, or a tag's value not a string.
        """
        if isinstance(value, (int, float)) and value <= 0:
            raise ValueError(f"value must be >0, got {value}")
        self._record(value, tags)


class Gauge(Metric):
    """A value that goes up and down: the one that any process set last."""

    _kind = "gauge"

    def set(self, value: float | None, tags: Mapping[str, str] | None = None) -> None:
        """Set the value; None changes nothing. Arguments and errors as for ``Counter.inc``."""
        if value is not None:
            self._record(value, tags)


class Histogram(Metric):
    """How many values there were up to each of some boundaries."""

    _kind = "histogram"

    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: Sequence[float] | None = None,
        tag_keys: tuple[str, ...] | None = None,
    ) -> None:
        """Make a histogram; ``boundaries`` are above 0. Else as for the other kinds.

        Raises:
            ValueError: There are no boundaries, or one is not above 0.
        """
        super().__init__(name, description, tag_keys)
        if not boundaries:
            raise ValueError(
                "boundaries argument should be provided when using the Histogram class. e.g., "
                'Histogram("name", boundaries=[1.0, 2.0])'
            )
        for index, boundary in enumerate(boundaries):
            if boundary <= 0:
                raise ValueError(
                    f"Invalid `boundaries` argument at index {index}, {boundaries}. Use positive "
                    "values for the arguments."
                )
        self.boundaries = list(boundaries)
        self._boundaries = tuple(sorted(map(float, boundaries)))

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        """Count a value. Arguments and errors as for ``Counter.inc``; it may be 0 or below."""
        self._record(value, tags)

    @property
    def info(self) -> dict[str, Any]:
        """The fields of other kinds, and the boundaries."""
        return {**super().info, "boundaries": self.boundaries}
