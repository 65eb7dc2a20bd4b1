"""What a process answers when it is asked what it does (``client/answers.py``)."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def probe(what: str, *args: Any) -> Any:
    """Answer a question, in the I/O thread; a function that is returned is run in one of its own.

    Args:
        what: A key of ``_PROBES``.
        args: Of its function.
    """
    return _PROBES[what](*args)


def _stacks() -> Any:
    from miniray.profiling.stacks import stacks

    return _rank(), stacks()


def _rank() -> int | None:
    """Return which rank of a training run this process is; None: of none."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() and "miniray.train" in sys.modules else None


_PROBES: dict[str, Callable[..., Any]] = {"stack": _stacks}
