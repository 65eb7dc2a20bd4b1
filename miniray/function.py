"""Remote functions: what ``@remote`` makes of a function, and how its tasks start.

Checks and defaults of options are ``options.py``'s business, running tasks the
runtime's.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, overload

from miniray import options as option_rules
from miniray._typing import Out_co, P, Remote
from miniray.common import runtime as _runtime
from miniray.values.call_signature import CallSignature, UnpicklableArgumentError
from miniray.values.exports import Export

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.common.object_ref import ObjectRef


class RemoteFunction(Remote[Out_co], Generic[P, Out_co]):
    """A function whose calls run as tasks in the cluster: ``f.remote(...)``."""

    _is = "function"

    def __init__(self, function: Callable[P, Any], **given: Any) -> None:
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise ValueError(
                f"{function.__qualname__} is an async function, which can't be a task. Use a "
                f"plain function that calls asyncio.run(...), or an actor with async methods."
            )
        name = getattr(function, "__qualname__", repr(function))
        self._setup(
            Export(function, name), CallSignature.of(function), option_rules.check_task(given)
        )

    def _setup(self, export: Export, signature: CallSignature, given: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, export.target)
        self._export = export
        self._signature = signature
        self._least = signature.least
        self._most = signature.most
        self._given = given
        self._options = option_rules.task_options(given, is_generator=signature.is_generator)

    if TYPE_CHECKING:

        @property
        def _call(self) -> Callable[P, object]: ...

    else:

        def remote(self, /, *args, **kwargs):
            """Start a task with these arguments; refs among them are replaced by their values.

            Returns:
                A ref to the result; a list of refs for ``num_returns`` above 1, None for 0,
                and a generator of refs for generator functions.

            Raises:
                TypeError: The arguments don't fit the function.
            """
            if kwargs or not self._least <= len(args) <= self._most:
                self._signature.check(self._export.name, args, kwargs)
            runtime = _runtime._current or _runtime.current_runtime()
            export = self._export
            if export.session is not runtime.session:
                export.to(runtime)
            try:
                return runtime.calls.submit_task(export.exported, args, kwargs, self._options)
            except UnpicklableArgumentError as error:
                raise self._signature.unpicklable(export.name, error) from error.__cause__

    @overload
    def options(
        self, *, num_returns: Literal[1], **options: Any
    ) -> RemoteFunction[P, ObjectRef[Any]]: ...
    @overload
    def options(self, *, num_returns: Literal[0], **options: Any) -> RemoteFunction[P, None]: ...
    @overload
    def options(
        self, *, num_returns: int, **options: Any
    ) -> RemoteFunction[P, list[ObjectRef[Any]]]: ...
    @overload
    def options(self, *, num_returns: str, **options: Any) -> RemoteFunction[P, Any]: ...
    @overload
    def options(self, *, num_returns: None = None, **options: Any) -> RemoteFunction[P, Out_co]: ...
    def options(self, **options: Any) -> RemoteFunction[P, Any]:
        """Return the same function with other options, as ``remote`` takes them.

        Raises:
            ValueError: There is no such option, or its value is not allowed.
            TypeError: A value is of a wrong type.
        """
        other: RemoteFunction[P, Any] = RemoteFunction.__new__(RemoteFunction)
        given = option_rules.check_task(options, self._given)
        other._setup(self._export, self._signature, given)
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse; tasks are started with ``.remote``."""
        name = self._export.name
        raise TypeError(
            f"A remote function can't be called directly: use {name}.remote(...) instead of "
            f"{name}(...). The plain function is {name}.__wrapped__."
        )

    def __repr__(self) -> str:
        return f"RemoteFunction({self._export.name})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild, (self._export.target, self._export.name, self._signature, self._given)


def _rebuild(
    target: Callable[..., Any], name: str, signature: CallSignature, given: Mapping[str, Any]
) -> RemoteFunction[..., Any]:
    function: RemoteFunction[..., Any] = RemoteFunction.__new__(RemoteFunction)
    function._setup(Export(target, name), signature, given)
    return function
