"""The types of ``.remote(...)``: what type checkers see of functions, classes and methods.

Every parameter of type T takes a T or an ``ObjectRef[T]``. Python can't say this of
a ParamSpec, so there is one overload per number of positional arguments, matched
against the function itself (``_call``); a first overload takes plain values with
keywords and defaults. Nothing here runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
    from typing import Concatenate

    from typing_extensions import ParamSpec, Self

    from miniray.actor import ActorClass
    from miniray.function import RemoteFunction
    from miniray.object_ref import ObjectRef
    from miniray.object_ref_generator import ObjectRefGenerator

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
T0_contra = TypeVar("T0_contra", contravariant=True)
T1_contra = TypeVar("T1_contra", contravariant=True)
T2_contra = TypeVar("T2_contra", contravariant=True)
T3_contra = TypeVar("T3_contra", contravariant=True)
T4_contra = TypeVar("T4_contra", contravariant=True)
T5_contra = TypeVar("T5_contra", contravariant=True)
T6_contra = TypeVar("T6_contra", contravariant=True)
T7_contra = TypeVar("T7_contra", contravariant=True)
T8_contra = TypeVar("T8_contra", contravariant=True)
T9_contra = TypeVar("T9_contra", contravariant=True)

if TYPE_CHECKING:

    class _Takes(Protocol[P]):
        @property
        def _call(self) -> Callable[P, object]: ...

    class _Takes1(Protocol[T0_contra]):
        @property
        def _call(self) -> Callable[[T0_contra], object]: ...

    class _Takes2(Protocol[T0_contra, T1_contra]):
        @property
        def _call(self) -> Callable[[T0_contra, T1_contra], object]: ...

    class _Takes3(Protocol[T0_contra, T1_contra, T2_contra]):
        @property
        def _call(self) -> Callable[[T0_contra, T1_contra, T2_contra], object]: ...

    class _Takes4(Protocol[T0_contra, T1_contra, T2_contra, T3_contra]):
        @property
        def _call(self) -> Callable[[T0_contra, T1_contra, T2_contra, T3_contra], object]: ...

    class _Takes5(Protocol[T0_contra, T1_contra, T2_contra, T3_contra, T4_contra]):
        @property
        def _call(
            self,
        ) -> Callable[[T0_contra, T1_contra, T2_contra, T3_contra, T4_contra], object]: ...

    class _Takes6(Protocol[T0_contra, T1_contra, T2_contra, T3_contra, T4_contra, T5_contra]):
        @property
        def _call(
            self,
        ) -> Callable[
            [T0_contra, T1_contra, T2_contra, T3_contra, T4_contra, T5_contra], object
        ]: ...

    class _Takes7(
        Protocol[T0_contra, T1_contra, T2_contra, T3_contra, T4_contra, T5_contra, T6_contra]
    ):
        @property
        def _call(
            self,
        ) -> Callable[
            [T0_contra, T1_contra, T2_contra, T3_contra, T4_contra, T5_contra, T6_contra], object
        ]: ...

    class _Takes8(
        Protocol[
            T0_contra, T1_contra, T2_contra, T3_contra, T4_contra, T5_contra, T6_contra, T7_contra
        ]
    ):
        @property
        def _call(
            self,
        ) -> Callable[
            [
                T0_contra,
                T1_contra,
                T2_contra,
                T3_contra,
                T4_contra,
                T5_contra,
                T6_contra,
                T7_contra,
            ],
            object,
        ]: ...

    class _Takes9(
        Protocol[
            T0_contra,
            T1_contra,
            T2_contra,
            T3_contra,
            T4_contra,
            T5_contra,
            T6_contra,
            T7_contra,
            T8_contra,
        ]
    ):
        @property
        def _call(
            self,
        ) -> Callable[
            [
                T0_contra,
                T1_contra,
                T2_contra,
                T3_contra,
                T4_contra,
                T5_contra,
                T6_contra,
                T7_contra,
                T8_contra,
            ],
            object,
        ]: ...

    class _Takes10(
        Protocol[
            T0_contra,
            T1_contra,
            T2_contra,
            T3_contra,
            T4_contra,
            T5_contra,
            T6_contra,
            T7_contra,
            T8_contra,
            T9_contra,
        ]
    ):
        @property
        def _call(
            self,
        ) -> Callable[
            [
                T0_contra,
                T1_contra,
                T2_contra,
                T3_contra,
                T4_contra,
                T5_contra,
                T6_contra,
                T7_contra,
                T8_contra,
                T9_contra,
            ],
            object,
        ]: ...


class Remote(Generic[Out_co]):
    """Something with a ``.remote(...)`` that returns ``Out_co``."""

    __slots__ = ()

    if not TYPE_CHECKING:  # else a type checker takes any arguments for right

        def _remote(self, *_arguments, **_options):
            """Refuses: Ray's own way to give options and arguments at once."""
            raise TypeError("miniray has no '_remote': use .options(...).remote(...).")

    if TYPE_CHECKING:

        @overload
        def remote(self: _Takes[P], *args: P.args, **kwargs: P.kwargs) -> Out_co: ...
        @overload
        def remote(
            self: _Takes1[T0],
            a0: T0 | ObjectRef[T0],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes2[T0, T1],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes3[T0, T1, T2],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes4[T0, T1, T2, T3],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes5[T0, T1, T2, T3, T4],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes6[T0, T1, T2, T3, T4, T5],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes7[T0, T1, T2, T3, T4, T5, T6],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            a6: T6 | ObjectRef[T6],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes8[T0, T1, T2, T3, T4, T5, T6, T7],
            a0: T0 | ObjectRef[T0],
            a1: T1 | ObjectRef[T1],
            a2: T2 | ObjectRef[T2],
            a3: T3 | ObjectRef[T3],
            a4: T4 | ObjectRef[T4],
            a5: T5 | ObjectRef[T5],
            a6: T6 | ObjectRef[T6],
            a7: T7 | ObjectRef[T7],
            /,
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes9[T0, T1, T2, T3, T4, T5, T6, T7, T8],
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
        ) -> Out_co: ...
        @overload
        def remote(
            self: _Takes10[T0, T1, T2, T3, T4, T5, T6, T7, T8, T9],
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
        ) -> Out_co: ...
        def remote(self, *args: Any, **kwargs: Any) -> Any: ...


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
            self, target: Callable[P, Iterator[R]], /
        ) -> RemoteFunction[P, ObjectRefGenerator[R]]: ...
        @overload
        def __call__(self, target: Callable[P, R], /) -> RemoteFunction[P, ObjectRef[R]]: ...

    class FunctionDecorator(Protocol[Out_co]):
        """What ``remote(num_returns=...)`` returns."""

        def __call__(self, target: Callable[P, Any], /) -> RemoteFunction[P, Out_co]: ...

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
            self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
        ) -> Method[P, Coroutine[Any, Any, R], ObjectRef[R]]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, method: Callable[Concatenate[Any, P], AsyncIterator[R]], /
        ) -> Method[P, AsyncIterator[R], ObjectRefGenerator[R]]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, method: Callable[Concatenate[Any, P], Iterator[R]], /
        ) -> Method[P, Iterator[R], ObjectRefGenerator[R]]: ...
        @overload
        def __call__(
            self, method: Callable[Concatenate[Any, P], R], /
        ) -> Method[P, R, ObjectRef[R]]: ...

    class ManyMethodDecorator(Protocol[Out_co]):
        """What ``method(num_returns=...)`` returns."""

        def __call__(self, method: Callable[Concatenate[Any, P], R], /) -> Method[P, R, Out_co]: ...
