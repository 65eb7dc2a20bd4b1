"""Actors: classes made by ``@remote``, the handles of their actors, and methods.

A handle only holds a counted ref and a description of the class: the actor ends
when the last ref goes. Calls are checked here and sent by the runtime.
"""

from __future__ import annotations

import inspect
import types
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, overload

import miniray.options as option_rules
from miniray._typing import ActorPs, Out_co, P, Remote
from miniray.actor_classes import (
    BUILT_IN,
    METHOD_ATTRIBUTE,
    ActorClassDetails,
    describe,
    with_options,
)
from miniray.common import runtime as _runtime
from miniray.common.runtime import BoundMethod
from miniray.common.specs import MethodOptions
from miniray.system.option_checks import suggestion
from miniray.values.call_signature import CallSignature, Export, UnpicklableArgumentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping

    from typing_extensions import Never

    from miniray._typing import ManyMethodDecorator, Method, MethodDecorator, MethodOf
    from miniray.common.object_ref import ObjectRef
    from miniray.common.runtime import ActorClassInfo
    from miniray.objects.object_ref_generator import ObjectRefGenerator

T = TypeVar("T")
R = TypeVar("R")

_DEFAULT_METHOD = MethodOptions()
_ANY_CALL = CallSignature.of(lambda *args, **kwargs: None)


class ActorMethod(Remote[Out_co], Generic[P, Out_co]):
    """A method of an actor: ``handle.method.remote(...)``.

    It keeps the actor alive like a handle.
    """

    __slots__ = ("_bound", "_least", "_most", "_signature")

    def __init__(self, bound: BoundMethod, signature: CallSignature) -> None:
        # Not to the handle: a handle caches its methods, and a cycle would keep the actor
        # alive until the garbage collector runs.
        self._bound = bound
        self._signature = signature
        self._least = signature.least
        self._most = signature.most

    if TYPE_CHECKING:

        @property
        def _call(self) -> Callable[P, object]: ...

    else:

        def remote(self, /, *args, **kwargs):
            """Call the method with these arguments; refs among them are replaced by their values.

            Returns:
                A ref to the result; a list of refs for ``num_returns`` above 1, None for 0,
                and a generator of refs for generator methods.

            Raises:
                TypeError: The arguments don't fit the method.
                PendingCallsLimitExceededError: Too many calls are unfinished.
            """
            if kwargs or not self._least <= len(args) <= self._most:
                self._signature.check(self._full_name(), args, kwargs)
            runtime = _runtime._current or _runtime.runtime_of("actor handle")
            try:
                return runtime.calls.submit_actor_call(self._bound, args, kwargs)
            except UnpicklableArgumentError as error:
                raise self._signature.unpicklable(self._full_name(), error) from error.__cause__

    @overload
    def options(
        self, *, num_returns: Literal[1], **options: Any
    ) -> ActorMethod[P, ObjectRef[Any]]: ...
    @overload
    def options(self, *, num_returns: Literal[0], **options: Any) -> ActorMethod[P, None]: ...
    @overload
    def options(
        self, *, num_returns: int, **options: Any
    ) -> ActorMethod[P, list[ObjectRef[Any]]]: ...
    @overload
    def options(self, *, num_returns: str, **options: Any) -> ActorMethod[P, Any]: ...
    @overload
    def options(self, *, num_returns: None = None, **options: Any) -> ActorMethod[P, Out_co]: ...
    def options(self, **options: Any) -> ActorMethod[P, Any]:
        """Return the same method with other options: those of ``@method``, and ``name``.

        Raises:
            ValueError: There is no such option, or its value is not allowed.
            TypeError: A value is of a wrong type.
        """
        merged = option_rules.method_options(
            option_rules.check_method(options),
            is_generator=self._signature.is_generator,
            base=self._bound.options,
        )
        return ActorMethod(self._bound._replace(options=merged), self._signature)

    def _full_name(self) -> str:
        return f"{self._bound.info.name}.{self._bound.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse; methods are called with ``.remote``."""
        raise TypeError(
            f"An actor's method can't be called directly: use {self._bound.name}.remote(...) "
            f"instead of {self._bound.name}(...)."
        )

    def __repr__(self) -> str:
        return f"ActorMethod({self._full_name()}, {_id_of(self._bound.actor).hex()})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ActorMethod, (self._bound, self._signature)


def _id_of(actor: Any) -> bytes:
    id: bytes = getattr(actor, "_actor_id", actor).binary()
    return id


if TYPE_CHECKING:

    class _BareHandle(Generic[T]):
        """A handle without methods: in an ``ActorProxy`` the class beside it has them."""

        def __getattr__(self, name: str) -> Never: ...

else:
    _BareHandle = Generic


class ActorHandle(_BareHandle[T]):
    """A handle to an actor. Its attributes are the actor's methods.

    Handles can be passed to tasks and actors and compare by the actor's id. The
    actor ends when all its handles are gone, unless it is detached.
    """

    _ref: ObjectRef[Any]
    _info: ActorClassInfo

    def __init__(self, ref: ObjectRef[Any], info: ActorClassInfo) -> None:
        self._ref = ref
        self._info = info

    @property
    def _actor_id(self) -> bytes:
        """Id of the actor; ``.hex()`` is its text form."""
        return _id_of(self._ref)

    def __getattr__(  # type: ignore[override]
        self, name: str
    ) -> ActorMethod[..., ObjectRef[Any]]:
        info = self._info
        target = BUILT_IN.get(name, name)
        options = info.methods.get(target)
        signature = _ANY_CALL
        if options is None:
            if target is name and name not in BUILT_IN:
                raise AttributeError(_no_method(info, name), name=name, obj=self)
            options = _DEFAULT_METHOD
        elif isinstance(info, ActorClassDetails):
            signature = info.signatures.get(target, _ANY_CALL)
        bound = BoundMethod(self._ref, info, target, options)
        method: ActorMethod[..., ObjectRef[Any]] = ActorMethod(bound, signature)
        self.__dict__[name] = method  # the next lookup does not come here
        return method

    def __dir__(self) -> list[str]:
        return [*self._info.methods, *(name for name in BUILT_IN if name.startswith("__ray_"))]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and self._ref == other._ref

    def __hash__(self) -> int:
        return hash(self._ref)

    def __repr__(self) -> str:
        return f"Actor({self._info.name}, {self._actor_id.hex()})"

    def __copy__(self) -> ActorHandle[T]:
        return self

    def __deepcopy__(self, _memo: object) -> ActorHandle[T]:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ActorHandle, (self._ref, self._info)


if TYPE_CHECKING:
    ActorProxy = _BareHandle[T] | type[T]
else:
    #: The type of ``ActorClass.remote``'s result, to annotate. Type checkers see methods marked
    #: with ``@method`` by it, and no others. Those of an ``ActorHandle[Counter]`` take and return
    #: anything; with miniray's plugin for mypy the two are one, and all methods are exact.
    ActorProxy = ActorHandle[T] | type[T]


class ActorClassInheritanceException(TypeError):  # noqa: N818 -- Ray's name
    """A class cannot inherit from a remote class."""


def _no_method(info: ActorClassInfo, name: str) -> str:
    hint = ""
    if not name.startswith("__"):
        hint = suggestion(name, info.methods) or (
            " Attributes live in the actor's process; add a method that returns this one."
        )
    return f"The actor class {info.name} has no method {name!r}.{hint}"


class ActorClass(Remote["ActorProxy[T]"], Generic[T, ActorPs]):
    """A class whose instances run as actors in the cluster: ``Class.remote(...)``."""

    _is = "class"

    def __init__(self, cls: type[T], **given: Any) -> None:
        checked = option_rules.check_actor(given)
        self._setup(
            Export(cls, cls.__qualname__), CallSignature.of(cls), describe(cls, checked), checked
        )

    def _setup(
        self,
        export: Export,
        signature: CallSignature,
        details: ActorClassDetails,
        given: Mapping[str, Any],
    ) -> None:
        self._export = export
        self._signature = signature
        self._given = given
        self._options = option_rules.actor_options(given)
        self._info = with_options(details, self._options)
        self.__name__ = export.target.__name__
        self.__qualname__ = export.target.__qualname__
        self.__module__ = export.target.__module__
        self.__doc__ = export.target.__doc__

    def __class_getitem__(cls, item: Any) -> Any:
        # ActorClass[Counter] is enough; the constructor's parameters are for type checkers.
        return types.GenericAlias(cls, item)

    if TYPE_CHECKING:

        @property
        def _call(self) -> Callable[ActorPs, object]: ...

    else:

        def remote(self, /, *args, **kwargs):
            """Start an actor and return a handle at once.

            An error in the constructor reaches the calls of the actor's methods.

            Raises:
                TypeError: The arguments don't fit the constructor.
                ActorAlreadyExistsError: The name is taken.
            """
            self._signature.check(self._export.name, args, kwargs)
            runtime = _runtime.current_runtime()
            exported = self._export.to(runtime)
            try:
                location = runtime.calls.create_actor(
                    exported, self._info, args, kwargs, self._options
                )
            except UnpicklableArgumentError as error:
                raise self._signature.unpicklable(self._export.name, error) from error.__cause__
            return ActorHandle(location.ref, location.info)

    def options(self, **options: Any) -> ActorClass[T, ActorPs]:
        """Return the same class with other options, as ``remote`` takes them.

        Raises:
            ValueError: There is no such option, or its value is not allowed.
            TypeError: A value is of a wrong type.
        """
        other: ActorClass[T, ActorPs] = ActorClass.__new__(ActorClass)
        given = option_rules.check_actor(options, self._given)
        other._setup(self._export, self._signature, self._info, given)
        return other

    @property
    def __wrapped__(self) -> type[T]:
        """The plain class."""
        cls: Any = self._export.target
        return cls  # type: ignore[no-any-return]

    @property
    def __ray_actor_class__(self) -> type[T]:
        """The plain class, by Ray's name."""
        return self.__wrapped__

    def __getattr__(self, name: str) -> Any:
        """Look up constants, static methods and the like in the plain class."""
        if name.startswith("_"):
            raise AttributeError(
                f"The remote class has no attribute {name!r}.", name=name, obj=self
            )
        found = inspect.getattr_static(self._export.target, name, None)
        if inspect.isfunction(found):
            # Besides, cloudpickle must not find methods here: it would pickle them by name.
            raise AttributeError(
                f"{name} is a method of the actors of {self._export.name}: make one with "
                f"{self._export.name}.remote(...) and call it there.",
                name=name,
                obj=self,
            )
        return getattr(self._export.target, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._info.methods]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse; actors are made with ``.remote``."""
        name = self._export.name
        raise TypeError(
            f"A remote class can't be instantiated directly: use {name}.remote(...) instead of "
            f"{name}(...). The plain class is {name}.__wrapped__."
        )

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> NoReturn:
        name = self._export.name
        raise ActorClassInheritanceException(
            f"A class can't inherit from the remote class {name}. Keep the plain class apart: "
            f"class Base: ..., then {name} = miniray.remote(Base), and inherit from Base."
        )

    def __repr__(self) -> str:
        return f"ActorClass({self._export.name})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _rebuild_class, (self._export.target, self._signature, self._info, self._given)


def _rebuild_class(
    cls: type[T],
    signature: CallSignature,
    details: ActorClassDetails,
    given: Mapping[str, Any],
) -> ActorClass[T, ...]:
    actor_class: ActorClass[T, ...] = ActorClass.__new__(ActorClass)
    actor_class._setup(Export(cls, cls.__qualname__), signature, details, given)
    return actor_class


# Coroutine and generator functions are plain callables too; the first overload that fits wins.
@overload
def method(  # type: ignore[overload-overlap]
    function: staticmethod[P, R], /
) -> Method[P, R, ObjectRef[R]]: ...
@overload
def method(
    function: MethodOf[P, Coroutine[Any, Any, R]], /
) -> Method[P, Coroutine[Any, Any, R], ObjectRef[R]]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: MethodOf[P, AsyncIterator[R]], /
) -> Method[P, AsyncIterator[R], ObjectRefGenerator[R]]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: MethodOf[P, Iterator[R]], /
) -> Method[P, Iterator[R], ObjectRefGenerator[R]]: ...
@overload
def method(function: MethodOf[P, R], /) -> Method[P, R, ObjectRef[R]]: ...
@overload
def method(*, num_returns: Literal[0], **options: Any) -> ManyMethodDecorator[None]: ...
@overload
def method(
    *, num_returns: Literal[1, "streaming"] | None = None, **options: Any
) -> MethodDecorator: ...
@overload
def method(*, num_returns: int, **options: Any) -> ManyMethodDecorator[list[ObjectRef[Any]]]: ...
@overload
def method(*, num_returns: str, **options: Any) -> ManyMethodDecorator[Any]: ...
def method(*args: Any, **options: Any) -> Any:
    """Give a method of an actor class its types and options.

    Type checkers see the exact types of marked methods. Others have exact types only with miniray's
    plugin for mypy; without it, those of an ``ActorHandle`` return ``ObjectRef[Any]``.

    Usable as ``@method`` and ``@method(num_returns=2)``.

    Args:
        *args: The method, when used without options.
        **options: ``num_returns``, ``concurrency_group``, ``max_task_retries``,
            ``retry_exceptions``, ``enable_task_events``.

    Raises:
        ValueError: There is no such option, or its value is not allowed.
        TypeError: A value is of a wrong type.
    """
    if args:
        if len(args) > 1 or options or not (callable(args[0]) or hasattr(args[0], "__func__")):
            raise TypeError(
                "method is used as @method or as @method(num_returns=2), with options by name; "
                f"it was given {args!r}."
            )
        return method()(args[0])
    checked = option_rules.check_method(options)

    def mark(function: Any) -> Any:
        target = getattr(function, "__func__", function)
        is_generator = inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target)
        option_rules.method_options(checked, is_generator=is_generator)  # refuses what can't be
        setattr(function, METHOD_ATTRIBUTE, checked)
        return function

    return mark


def exit_actor() -> NoReturn:
    """End the current actor, from one of its methods. Calls that wait will fail.

    If its class has a method ``__miniray_shutdown__``, that runs before the process ends: here, and
    when the actor ends by ``__miniray_terminate__`` or with its last handle, but not by ``kill``.
    It has five seconds.

    Raises:
        TypeError: This is not an actor.
    """
    runtime = _runtime.runtime_or_none()
    if runtime is None or runtime.context().actor_id is None:
        raise TypeError("exit_actor() can only be called in a method of an actor.")
    runtime.exit_actor()
    raise AssertionError("Runtime.exit_actor raises")
