"""Remembers that a function or class was registered with the runtime of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.core.runtime import Exported, Runtime


class Export:
    """A function or class, and what the runtime of ``session`` knows it as.

    All option variants of a function share one, so that it is pickled once.
    """

    __slots__ = ("exported", "name", "session", "target")

    def __init__(self, target: Callable[..., Any], name: str) -> None:
        self.target = target
        self.name = name
        self.session: object = None
        self.exported: Exported | None = None

    def to(self, runtime: Runtime) -> Exported:
        """Register the target, if this runtime does not know it yet."""
        # A reader that sees the session sees its export: it is set first.
        if self.session is not runtime.session or self.exported is None:
            self.exported = runtime.export(self.target, self.name)
            self.session = runtime.session
        return self.exported
