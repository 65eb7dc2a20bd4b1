"""Progress bars for tasks and actors, with the names of Ray's ``tqdm_ray``.

A worker's bar is one of tqdm's, on its standard error: the driver shows the bars of all workers
below each other (``logs/screen.py``), whether they are of ``tqdm`` or of this module. Without
tqdm in the process that has the bar nothing is shown, and a warning says so.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["safe_print", "tqdm"]


def safe_print(*args: Any, **kwargs: Any) -> None:
    """Print above the bars of this process, with the arguments of ``print``.

    In a driver a plain ``print`` is above the bars of workers too, and is not replaced by this.
    """
    real = _tqdm()
    if real is None or kwargs.get("file") not in (None, sys.stdout, sys.stderr):
        print(*args, **kwargs)  # noqa: T201 - what it is for
        return
    with real.external_write_mode(file=kwargs.get("file")):
        print(*args, **kwargs)  # noqa: T201 - what it is for


class tqdm:  # noqa: N801 - Ray's name, and tqdm's
    """A progress bar that works in tasks, actors and drivers.

    Args:
        iterable: What a loop over the bar goes through.
        desc: What stands before the bar.
        total: How many steps there are. Default: the length of ``iterable``, if it has one.
        unit: Of a step. Default: "it".
        position: Line of the bar, among those of this process; 0 is the uppermost.
        flush_interval_s: Seconds between two states that are shown. Default: 1.
    """

    DEFAULT_FLUSH_INTERVAL_SECONDS = 1.0

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str | None = None,
        total: int | None = None,
        unit: str | None = None,
        position: int | None = None,
        flush_interval_s: float | None = None,
    ) -> None:
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)  # type: ignore[arg-type]
        if flush_interval_s is None:
            flush_interval_s = self.DEFAULT_FLUSH_INTERVAL_SECONDS
        self._iterable = iterable
        self._total = total
        self._n = 0
        real = _tqdm()
        self._bar = real and real(
            desc=desc,
            total=total,
            unit=unit or "it",
            position=position,
            mininterval=flush_interval_s,
            miniters=1,
            file=sys.stderr,
        )

    @property
    def total(self) -> int | None:
        """How many steps there are, if that is known."""
        return self._total

    @total.setter
    def total(self, total: int | None) -> None:
        self._total = total
        if self._bar is not None:
            self._bar.total = total

    @property
    def n(self) -> int:
        """How many steps were made."""
        return self._n

    @n.setter
    def n(self, n: int) -> None:
        self._n = n
        if self._bar is not None:
            self._bar.n = n

    def update(self, n: int = 1) -> None:
        """Make ``n`` steps."""
        self._n += n
        if self._bar is not None:
            self._bar.update(n)

    def set_description(self, desc: str) -> None:
        """Set what stands before the bar."""
        if self._bar is not None:
            self._bar.set_description(desc)

    def refresh(self) -> None:
        """Show the bar as it is now."""
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Show the last state, which stays, and end the bar."""
        if self._bar is not None:
            self._bar.close()

    def __iter__(self) -> Iterator[Any]:
        if self._iterable is None:
            raise ValueError("This bar has nothing to loop over: give tqdm() an iterable.")
        try:
            for item in self._iterable:
                yield item
                self.update()
        finally:
            self.close()


@functools.cache
def _tqdm() -> Any:
    """Return the class of tqdm's bars; None if tqdm is not installed, which is logged once."""
    try:
        from tqdm import tqdm as real  # type: ignore[import-untyped]
    except ImportError:
        warnings.warn(
            "tqdm is not installed here, so that no progress bars are shown: pip install tqdm.",
            UserWarning,
            stacklevel=3,
        )
        return None
    return real
