"""Functions, classes and methods at the caller: what is registered, which arguments fit.

Calls are checked where they are made, so that a mistake is an error at ``.remote()`` and not in a
worker. A signature travels with every actor handle; annotations and default values stay behind.
"""

from __future__ import annotations

import functools
import importlib
import inspect
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


_Kind = inspect._ParameterKind
_POSITIONAL = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)


class UnpicklableArgumentError(TypeError):
    """An argument of a call cannot be pickled. Users get ``CallSignature.unpicklable`` of it."""

    def __init__(self, where: int | str, fault: str) -> None:
        argument = f"argument {where + 1 if isinstance(where, int) else repr(where)}"
        super().__init__(argument + fault)
        #: Its position, from 0, or its name.
        self.where = where
        #: What is wrong with it, which follows its name.
        self.fault = fault


class CallSignature:
    """Names and kinds of parameters.

    A call with only positional arguments fits if their number is from ``least`` to
    ``most``, which callers test themselves before they call ``check``.
    """

    __slots__ = ("is_generator", "least", "most", "parameters")

    def __init__(
        self, parameters: tuple[tuple[str, int, bool], ...], is_generator: bool = False
    ) -> None:
        #: Name, kind and whether it may be left out, of each parameter.
        self.parameters = parameters
        #: Whether the function yields its results.
        self.is_generator = is_generator
        positional = [optional for _, kind, optional in parameters if kind in _POSITIONAL]
        kinds = {kind for _, kind, _ in parameters}
        needs_keyword = any(
            kind == _Kind.KEYWORD_ONLY and not optional for _, kind, optional in parameters
        )
        self.least = sys.maxsize if needs_keyword else positional.count(False)
        self.most = sys.maxsize if _Kind.VAR_POSITIONAL in kinds else len(positional)

    @classmethod
    def of(cls, target: Callable[..., Any], *, skip_first: bool = False) -> CallSignature:
        """Inspect a function or class; anything goes where its signature can't be known."""
        unwrapped = inspect.unwrap(target)
        is_generator = inspect.isgeneratorfunction(unwrapped) or inspect.isasyncgenfunction(
            unwrapped
        )
        try:
            found = list(inspect.signature(target).parameters.values())
        except (TypeError, ValueError):  # written in C, without a text signature
            return cls(_ANYTHING, is_generator)
        if skip_first and found and found[0].kind != _Kind.VAR_POSITIONAL:
            found = found[1:]
        return cls(
            tuple((p.name, int(p.kind), p.default is not p.empty) for p in found), is_generator
        )

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the arguments of a call.

        Raises:
            TypeError: They don't fit; the message names the function and what it takes.
        """
        signature = inspect.Signature(
            [
                inspect.Parameter(
                    parameter, _Kind(kind), default=None if optional else inspect.Parameter.empty
                )
                for parameter, kind, optional in self.parameters
            ]
        )
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            taken = str(signature).replace("=None", "=...")
            wrong = str(error)
            verb = {"got": "", "missing": "is "}.get(wrong.partition(" ")[0], "got ")
            raise TypeError(f"{name}.remote() {verb}{wrong}. {name} takes {taken}.") from None

    def unpicklable(self, name: str, error: UnpicklableArgumentError) -> TypeError:
        """Make the error of a call of ``name`` with an argument that cannot be pickled."""
        where = error.where
        if isinstance(where, int):
            names = [name for name, kind, _ in self.parameters if kind in _POSITIONAL]
            argument = f"`{names[where]}`" if where < len(names) else str(where + 1)
        else:
            argument = f"`{where}`"
        return TypeError(f"argument {argument} of {name}(){error.fault}")

    def __reduce__(self) -> tuple[type[CallSignature], tuple[Any, ...]]:
        return CallSignature, (self.parameters, self.is_generator)


_ANYTHING = (
    ("args", int(_Kind.VAR_POSITIONAL), False),
    ("kwargs", int(_Kind.VAR_KEYWORD), False),
)
