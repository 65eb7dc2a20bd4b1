"""Stores of shared memory without the rest of a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.node.store.segments import SegmentStore
from miniray.node.store.spill_files import SpillFiles

if TYPE_CHECKING:
    from collections.abc import Callable

#: Made only when a value is spilled, which tests without a folder of their own do not do.
_NO_FOLDER = Path("/nonexistent/spilled")


def nobody(_process: bytes, _topic: str, _body: tuple[Any, ...]) -> None:
    """Take the pushes of a store that has no processes."""


class Pushes(list[tuple[bytes, Any]]):
    """What processes are told of one topic: (process, body)."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def __call__(self, process: bytes, topic: str, body: tuple[Any, ...]) -> None:
        if topic == self._topic:
            self.append((process, *body))


def new_store(
    capacity: int, folder: Path = _NO_FOLDER, push: Callable[..., object] = nobody
) -> SegmentStore:
    return SegmentStore(capacity, SpillFiles(folder), push)
