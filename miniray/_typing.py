"""The types of ``.remote(...)``: functions, classes and methods as type checkers see them.

Every parameter of type T takes a T or an ``ObjectRef[T]``. Python can't say this of
a ParamSpec, so there is one overload per number of arguments by position that may be
refs, matched against the function itself (``_call``); later ones, and those given by name, are
plain values. Nothing here runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from typing import Concatenate

    from typing_extensions import ParamSpec, Self

    from miniray.common.object_ref import ObjectRef
    from miniray.objects.object_ref_generator import ObjectRefGenerator

    #: Parameters of an actor class's constructor; ``ActorClass[Counter]`` leaves them open.
    ActorPs = ParamSpec("ActorPs", default=...)
else:
    from typing import ParamSpec

    ActorPs = ParamSpec("ActorPs")

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)
#: What ``.remote()`` returns.
Out_co = TypeVar("Out_co", covariant=True)
T0 = TypeVar("T0")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")
T5 = TypeVar("T5")
T6 = TypeVar("T6")
T7 = TypeVar("T7")
T8 = TypeVar("T8")
T9 = TypeVar("T9")
#: What is called, as a ``Callable``.
Call_co = TypeVar("Call_co", covariant=True)
#: The parameters that no overload of ``remote`` names.
Rest = ParamSpec("Rest")

if TYPE_CHECKING:

    class _Calls(Protocol[Call_co]):
        """Something whose ``.remote(...)`` takes what this callable takes."""

        @property
        def _call(self) -> Call_co: ...


class Remote(Generic[Out_co]):
    """Something with a ``.remote(...)`` that returns ``Out_co``."""

    __slots__ = ()
    #: What kind of node a graph has for it.
    _is: ClassVar[Literal["function", "class", "method"]] = "method"

    if not TYPE_CHECKING:  # else a type checker takes any arguments for right

        def _remote(self, *_arguments, **_options):
            """Refuse Ray's own way to give options and arguments at once."""
            raise TypeError("miniray has no '_remote': use .options(...).remote(...).")

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Make a node of a graph, which calls this with these arguments when it is executed.

        Args:
            *args: Values, or nodes that make them.
            **kwargs: Values, or refs of them, by name.
        """
        from miniray.dag.nodes import bound

        return bound(self, args, kwargs)

    if TYPE_CHECKING:

        @overload
        def remote(
            self: _Calls[Callable[Rest, object]], *args: Rest.args, **kwargs: Rest.kwargs
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, Rest], object]],
            a0: T0 | ObjectRef[T0],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, T2, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, T2, T3, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, T2, T3, T4, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, T2, T3, T4, T5, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, T2, T3, T4, T5, T6, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            a6: T6 | ObjectRef[T6],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, T2, T3, T4, T5, T6, T7, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            a6: T6 | ObjectRef[T6],
            a7: T7 | ObjectRef[T7],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[Callable[Concatenate[T0, T1, T2, T3, T4, T5, T6, T7, T8, Rest], object]],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            a6: T6 | ObjectRef[T6],
            a7: T7 | ObjectRef[T7],
            a8: T8 | ObjectRef[T8],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Calls[
                Callable[Concatenate[T0, T1, T2, T3, T4, T5, T6, T7, T8, T9, Rest], object]
            ],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            a6: T6 | ObjectRef[T6],
            a7: T7 | ObjectRef[T7],
            a8: T8 | ObjectRef[T8],
            a9: T9 | ObjectRef[T9],
            /,
            *args: Rest.args,
            **kwargs: Rest.kwargs,
        ) -> Out_co: ...
        # mypy does not see that any arguments are those of a ParamSpec too.
        def remote(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[misc]


if TYPE_CHECKING:

    class _OfSelf(Protocol[P, R_co]):
        """A method whose first parameter may be given by name, as Python allows."""

        def __call__(_, self: Any, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: N805

    #: A plain method. Both are needed: ``**kwargs`` could hold a "self" given by name, so a
    #: method with them is no ``Callable[Concatenate[...]]``; and self may have another name.
    MethodOf = _OfSelf[P, R] | Callable[Concatenate[Any, P], R]

    class Method(Remote[Out_co], Generic[P, R_co, Out_co]):
        """What type checkers see of a method marked with ``@method``.

        Inside the actor it is the plain method, through a handle it has ``.remote``.
        """

        @property
        def _call(self) -> Callable[P, object]: ...
        @overload
        def __get__(self, instance: None, owner: type, /) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type, /) -> Callable[P, R_co]: ...
        def __get__(self, instance: Any, owner: type, /) -> Any: ...
        def __call__(self, instance: Any, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
        @overload
        def options(
            self, *, num_returns: Literal[1], **options: Any
        ) -> Method[P, R_co, ObjectRef[Any]]: ...
        @overload
        def options(self, *, num_returns: Literal[0], **options: Any) -> Method[P, R_co, None]: ...
        @overload
        def options(
            self, *, num_returns: int, **options: Any
        ) -> Method[P, R_co, list[ObjectRef[Any]]]: ...
        @overload
        def options(self, *, num_returns: str, **options: Any) -> Method[P, R_co, Any]: ...
        @overload
        def options(
            self, *, num_returns: None = None, **options: Any
        ) -> Method[P, R_co, Out_co]: ...
        def options(self, **options: Any) -> Any: ...

    class MethodDecorator(Protocol):
        """What ``method(...)`` with options returns."""

        # Coroutine and generator functions are plain callables too; the first that fits wins.
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, method: staticmethod[P, R], /
        ) -> Method[P, R, ObjectRef[R]]: ...
        @overload
        def __call__(
            self, method: MethodOf[P, Coroutine[Any, Any, R]], /
        ) -> Method[P, Coroutine[Any, Any, R], ObjectRef[R]]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, method: MethodOf[P, AsyncIterator[R]], /
        ) -> Method[P, AsyncIterator[R], ObjectRefGenerator[R]]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, method: MethodOf[P, Iterator[R]], /
        ) -> Method[P, Iterator[R], ObjectRefGenerator[R]]: ...
        @overload
        def __call__(self, method: MethodOf[P, R], /) -> Method[P, R, ObjectRef[R]]: ...

    class ManyMethodDecorator(Protocol[Out_co]):
        """What ``method(num_returns=...)`` returns."""

        def __call__(self, method: MethodOf[P, R], /) -> Method[P, R, Out_co]: ...
