"""``@remote``, for functions and classes alike."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from miniray.actor import ActorClass
from miniray.function import RemoteFunction
from miniray.system.option_checks import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray._typing import Out_co, P, R, T_co
    from miniray.common.object_ref import ObjectRef
    from miniray.objects.object_ref_generator import ObjectRefGenerator

T = TypeVar("T")

if TYPE_CHECKING:

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
        TypeError: It is neither a function nor a class, or a value is of a wrong type.
        ValueError: There is no such option, or its value is not allowed.
    """
    if not args:
        return lambda target: _make_remote(target, options)
    if len(args) > 1 or options:
        raise TypeError(
            "remote is used as @remote or as @remote(num_cpus=2), with options by name; it was "
            f"given {shown(args)}."
        )
    return _make_remote(args[0], {})


def _make_remote(target: Any, options: dict[str, Any]) -> Any:
    if inspect.isclass(target):
        return ActorClass(target, **options)
    if inspect.isroutine(target):
        return RemoteFunction(target, **options)
    if isinstance(target, RemoteFunction | ActorClass):
        raise TypeError(f"{target!r} is remote already; use its .options(...) for other options.")
    raise TypeError(
        f"remote takes a function or a class, not {shown(target)} ({type(target).__name__})."
    )
