"""Functions and classes that were registered with the runtime of this process.

Also finds those that another process can import, because they are remote under their own
name in a module.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.runtime import Exported, Runtime


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
        # A reader that sees the session sees its export: it is set first.
        if self.session is not runtime.session or self.exported is None:
            self.exported = runtime.calls.export(self.target, self.name)
            self.session = runtime.session
        return self.exported


class CodeReference:
    """Unpickles as the function or class that is remote under a name in a module."""

    __slots__ = ("_module", "_name")

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return _imported, (self._module, self._name)


def reference_to(target: Callable[..., Any] | type) -> CodeReference | None:
    """Return how to import what a remote function or class was made of, if that is possible."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module is None or name is None or module == "__main__" or module not in sys.modules:
        return None
    try:
        found = _imported(module, name)
    except AttributeError:  # it has another name there, or is no remote function
        return None
    return CodeReference(module, name) if found is target else None


def _imported(module: str, name: str) -> Any:
    remote = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return operator.attrgetter("_export.target")(remote)
