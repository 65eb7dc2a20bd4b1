"""Nodes of graphs that ``.bind()`` makes, and what happens when one is executed.

A node is a call that has not been made: what to call, and arguments among which are other nodes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.absent import AbsentAttribute

_NOT_COMPILED = "there are no compiled graphs; execute() runs the graph"


class Input(NamedTuple):
    """What was given to ``execute``, if that is not one value."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Run:
    """One execution of a graph: each node of it is executed once."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.input = args[0] if len(args) == 1 and not kwargs else Input(args, kwargs)
        self._results: dict[DAGNode, Any] = {}

    def result(self, node: DAGNode) -> Any:
        """Return a node's ref, actor or value."""
        if node not in self._results:
            self._results[node] = node._execute(self)
        return self._results[node]

    def replaced(self, value: Any) -> Any:
        """Return an argument with results for the nodes in it, in lists, tuples and dicts too."""
        if isinstance(value, DAGNode):
            return self.result(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.replaced, value))
        if type(value) is dict:
            return {key: self.replaced(item) for key, item in value.items()}
        return value


class DAGNode:
    """A node of a graph."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Run this node and all that it needs, each once, and actors anew.

        Args:
            *args: What the graph's ``InputNode`` stands for.
            **kwargs: The same, by name.

        Returns:
            A ref to the result; a handle of an actor for a class; a list for ``MultiOutputNode``.
        """
        return _Run(args, kwargs).result(self)

    def _execute(self, run: _Run) -> Any:
        raise NotImplementedError

    if not TYPE_CHECKING:
        experimental_compile = AbsentAttribute(_NOT_COMPILED)
        with_tensor_transport = AbsentAttribute(_NOT_COMPILED)


@dataclasses.dataclass(eq=False, repr=False)
class _CallNode(DAGNode):
    """A call of something with ``.remote``."""

    _target: Any
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]

    def _execute(self, run: _Run) -> Any:
        args, kwargs = run.replaced(self._args), run.replaced(self._kwargs)
        return self._target.remote(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target!r})"


class FunctionNode(_CallNode):
    """A task."""


class ClassNode(_CallNode):
    """An actor, made at each execution. Its attributes are methods that can be bound."""

    #: The call of a method that was bound last.
    _last: ClassMethodNode | None = None

    def __getattr__(self, name: str) -> _UnboundMethod:
        if name.startswith("_"):  # also while it is unpickled, and has no target yet
            raise AttributeError(f"ClassNode has no attribute {name!r}.", name=name, obj=self)
        if name not in self._target._info.methods:
            raise AttributeError(
                f"{self._target!r} has no method {name!r} to bind.", name=name, obj=self
            )
        return _UnboundMethod(self, name, {})


@dataclasses.dataclass(eq=False)
class _UnboundMethod:
    """A method of an actor that is not there yet."""

    _parent: ClassNode
    _name: str
    _options: dict[str, Any]

    def options(self, **options: Any) -> _UnboundMethod:
        """Return this method with other options."""
        return _UnboundMethod(self._parent, self._name, {**self._options, **options})

    def bind(self, *args: Any, **kwargs: Any) -> ClassMethodNode:
        """Return a call of it; those of the same actor that were bound before run before it."""
        node = ClassMethodNode(self._parent, self._name, self._options, args, kwargs)
        self._parent._last = node
        return node


@dataclasses.dataclass(eq=False, repr=False)
class ClassMethodNode(DAGNode):
    """A call of an actor's method."""

    _parent: Any
    _name: str
    _options: dict[str, Any]
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self._before = self._parent._last if isinstance(self._parent, ClassNode) else None

    def _execute(self, run: _Run) -> Any:
        method = self._parent
        if isinstance(method, ClassNode):
            if self._before is not None:
                run.result(self._before)
            method = getattr(run.result(method), self._name)
        if self._options:
            method = method.options(**self._options)
        return method.remote(*run.replaced(self._args), **run.replaced(self._kwargs))

    def __repr__(self) -> str:
        return f"ClassMethodNode({self._parent!r}.{self._name})"


class InputNode(DAGNode):
    """What is given to ``execute``; used as ``with InputNode() as given: ...``.

    It is the value if one was given. ``given[0]`` and ``given.name`` are what was given in this
    place or by this name if there were several, and else an item or an attribute of the value.
    """

    def __enter__(self) -> InputNode:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the node is used when the graph runs."""

    def _execute(self, run: _Run) -> Any:
        return run.input

    def __getitem__(self, key: Any) -> InputAttributeNode:
        return InputAttributeNode(self, key, True)

    def __getattr__(self, name: str) -> InputAttributeNode:
        if name.startswith("_"):
            raise AttributeError(f"InputNode has no attribute {name!r}.", name=name, obj=self)
        return InputAttributeNode(self, name, False)


@dataclasses.dataclass(eq=False)
class InputAttributeNode(DAGNode):
    """A part of what is given to ``execute``. Made by ``InputNode``."""

    _parent: InputNode
    _key: Any
    _is_item: bool

    def _execute(self, run: _Run) -> Any:
        value, key = run.result(self._parent), self._key
        if isinstance(value, Input):
            given: Any = value.args if isinstance(key, int) else value.kwargs
            try:
                return given[key]
            except LookupError:
                raise TypeError(
                    f"execute() was not given {key!r}, which the graph reads."
                ) from None
        return value[key] if self._is_item else getattr(value, key)


class MultiOutputNode(DAGNode):
    """Several nodes that are executed together, to a list of what they return.

    Args:
        args: The nodes.
    """

    def __init__(self, args: list[DAGNode] | tuple[DAGNode, ...]) -> None:
        self._outputs = list(args)

    def _execute(self, run: _Run) -> Any:
        return run.replaced(self._outputs)


def bound(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DAGNode:
    """Return the node of a call of a remote function, class, or method of an actor."""
    if target._is == "class":
        return ClassNode(target, args, kwargs)
    if target._is == "function":
        return FunctionNode(target, args, kwargs)
    return ClassMethodNode(target, "", {}, args, kwargs)
