"""``@remote``, for functions and classes alike."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, TypeVar, overload

import miniray.options as option_rules
from miniray._typing import Out_co, P, Remote
from miniray.actor import ActorClass
from miniray.common import runtime as _runtime
from miniray.system.option_checks import shown
from miniray.values.call_signature import CallSignature, Export, UnpicklableArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from miniray._typing import R, T_co
    from miniray.common.object_ref import ObjectRef
    from miniray.objects.object_ref_generator import ObjectRefGenerator

    class ClassOf(Protocol[P, T_co]):
        """A class, with the parameters of its constructor."""

        @property
        def __mro__(self) -> tuple[type, ...]: ...
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...

    class Decorator(Protocol):
        """What ``remote(...)`` with options returns."""

        # A class and a generator function are plain callables too; the first that fits wins.
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, target: ClassOf[P, R], /
        ) -> ActorClass[R, P]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, target: type[R], /
        ) -> ActorClass[R, ...]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, target: Callable[P, Iterator[R]], /
        ) -> RemoteFunction[P, ObjectRefGenerator[R]]: ...
        @overload
        def __call__(self, target: Callable[P, R], /) -> RemoteFunction[P, ObjectRef[R]]: ...

    class FunctionDecorator(Protocol[Out_co]):
        """What ``remote(num_returns=...)`` returns."""

        def __call__(self, target: Callable[P, Any], /) -> RemoteFunction[P, Out_co]: ...


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

    @property
    def _function(self) -> Callable[..., Any]:
        """The plain function, by the name that Ray's programs call it with in tests."""
        return self._export.target

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


T = TypeVar("T")


# A class and a generator function are plain callables too; the first overload that fits wins.
# pyright takes no class for a ``ClassOf``: for it, constructors take anything.
@overload
def remote(target: ClassOf[P, T], /) -> ActorClass[T, P]: ...  # type: ignore[overload-overlap]
@overload
def remote(target: type[T], /) -> ActorClass[T, ...]: ...  # type: ignore[overload-overlap]
@overload
def remote(  # type: ignore[overload-overlap]
    target: Callable[P, Iterator[T]], /
) -> RemoteFunction[P, ObjectRefGenerator[T]]: ...
@overload
def remote(target: Callable[P, T], /) -> RemoteFunction[P, ObjectRef[T]]: ...
@overload
def remote(*, num_returns: Literal[0], **options: Any) -> FunctionDecorator[None]: ...
@overload
def remote(*, num_returns: Literal[1, "streaming"] | None = None, **options: Any) -> Decorator: ...
@overload
def remote(*, num_returns: int, **options: Any) -> FunctionDecorator[list[ObjectRef[Any]]]: ...
@overload
def remote(*, num_returns: str, **options: Any) -> FunctionDecorator[Any]: ...
def remote(*args: Any, **options: Any) -> Any:
    """Make a function run as tasks, or a class as actors.

    Usable as ``@remote``, as ``@remote(num_cpus=2)`` and as ``remote(f)``.

    Args:
        *args: The function or class, when used without options.
        **options: For both: ``num_cpus`` (units), ``num_gpus`` (units, a fraction up to one
            or a whole number), ``memory`` (bytes), ``resources`` (units by name),
            ``accelerator_type``, ``label_selector``, ``fallback_strategy``,
            ``scheduling_strategy``, ``runtime_env``, ``name``. For functions:
            ``num_returns``, ``max_retries``, ``retry_exceptions``, ``max_calls``.
            For classes: ``namespace``, ``get_if_exists``, ``lifetime``,
            ``max_restarts``, ``max_task_retries``, ``max_concurrency``,
            ``concurrency_groups``, ``max_pending_calls``.

    Raises:
        TypeError: The target is neither a function nor a class, or a value is of a wrong type.
        ValueError: There is no such option, or its value is not allowed.
    """
    if not args:
        return lambda target: _make_remote(target, options)
    if len(args) > 1 or options:
        raise TypeError(
            "remote is used as @remote, @remote(num_cpus=2) or remote(num_cpus=2)(f), with options "
            f"by name; it was given {shown(args)}."
        )
    return _make_remote(args[0], {})


def _make_remote(target: Any, options: dict[str, Any]) -> Any:
    if inspect.isclass(target):
        return ActorClass(target, **options)
    if inspect.isroutine(target):
        return RemoteFunction(target, **options)
    if isinstance(target, RemoteFunction | ActorClass):
        raise TypeError(f"{target!r} is remote already; use its .options(...) for other options.")
    wrap = " Give it a function that calls this one." if callable(target) else ""
    raise TypeError(
        f"remote takes a function or a class, not {shown(target)} ({type(target).__name__}).{wrap}"
    )
