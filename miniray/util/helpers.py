"""Functions that programs would otherwise write by hand: loops over many refs, a node's address.

They are calls of the public API and nothing else; nothing here depends on how a runtime works.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from miniray import api
from miniray.runtime_context import own_node
from miniray.system.option_checks import whole
from miniray.values.serialization import at_fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TextIO

    from miniray._typing import Remote
    from miniray.common.object_ref import ObjectRef

T = TypeVar("T")

#: Results that are taken at once unless the caller says otherwise, as in Ray.
CHUNK_SIZE = 10
#: Tasks of ``map_unordered`` that are under way at the same time, as in Ray.
BACKPRESSURE_SIZE = 100


@overload
def as_completed(
    refs: Sequence[ObjectRef[T]],
    *,
    chunk_size: int = ...,
    yield_obj_refs: Literal[False] = ...,
    fetch_local: bool = ...,
) -> Iterator[T]: ...
@overload
def as_completed(
    refs: Sequence[ObjectRef[T]],
    *,
    chunk_size: int = ...,
    yield_obj_refs: Literal[True],
    fetch_local: bool = ...,
) -> Iterator[ObjectRef[T]]: ...
def as_completed(
    refs: Sequence[ObjectRef[Any]],
    *,
    chunk_size: int = CHUNK_SIZE,
    yield_obj_refs: bool = False,
    fetch_local: bool = True,
) -> Iterator[Any]:
    """Yield the values of refs as they become ready, in no particular order.

    Args:
        refs: Refs, each once.
        chunk_size: How many are waited for at a time: 1 gives each as soon as it is there.
        yield_obj_refs: Give the refs instead of the values.
        fetch_local: Whether values count only once they are on this node.

    Raises:
        TypeError: ``refs`` holds something else than refs, or ``chunk_size`` is not a whole number.
        ValueError: ``chunk_size`` is below 1, or a ref is there twice.
        TaskError: The task of a ref failed; those that were not taken yet are lost to the loop.
    """
    whole(1)("chunk_size", chunk_size)
    return _results(list(refs), None, (), None, chunk_size, yield_obj_refs, fetch_local)


def map_unordered(
    fn: Remote[ObjectRef[T]],
    items: Iterable[Any],
    *,
    backpressure_size: int | None = BACKPRESSURE_SIZE,
    chunk_size: int = CHUNK_SIZE,
    yield_obj_refs: bool = False,
    fetch_local: bool = True,
) -> Iterator[Any]:
    """Run a task for each item; the results as they become ready, in no particular order.

    Items are read only as tasks finish, so there may be endlessly many.

    Args:
        fn: A remote function, or a method of an actor, that takes one item.
        items: What it is called with.
        backpressure_size: How many calls are under way at the same time at most; None: any.
        chunk_size: How many results are waited for at a time.
        yield_obj_refs: Give the refs instead of the values.
        fetch_local: Whether values count only once they are on this node.

    Raises:
        TypeError: ``fn`` is not remote, or a number is not a whole number.
        ValueError: A number is below 1.
        TaskError: A call failed.
    """
    whole(1)("chunk_size", chunk_size)
    if backpressure_size is not None:
        whole(1)("backpressure_size", backpressure_size)
    if not hasattr(fn, "remote"):
        raise TypeError(f"fn must be a remote function or a method of an actor, not {fn!r}.")
    return _results([], fn, items, backpressure_size, chunk_size, yield_obj_refs, fetch_local)


def _results(
    refs: list[ObjectRef[Any]],
    fn: Any,
    items: Iterable[Any],
    most: int | None,
    chunk_size: int,
    yield_obj_refs: bool,
    fetch_local: bool,
) -> Iterator[Any]:
    """Yield the values of refs, or of ``fn`` applied to the items, as they become ready."""

    def ready() -> Iterator[Any]:
        nonlocal refs
        count = min(chunk_size, len(refs))
        found, refs = api.wait(refs, num_returns=count, fetch_local=fetch_local)
        yield from found if yield_obj_refs else api.get(found)

    for item in items:
        refs.append(fn.remote(item))
        if most is not None and len(refs) >= most:
            yield from ready()
    while refs:
        yield from ready()


def get_node_ip_address() -> str:
    """Return the address of this process's node, as the others reach it.

    A cluster that only this machine has, as ``init()`` starts it, has a loopback address.
    """
    return str(own_node()["NodeManagerAddress"])


@dataclasses.dataclass(frozen=True, eq=False)
class FailureTuple:
    """What cannot be pickled, and where it is.

    Attributes:
        obj: The thing itself.
        name: Where it is: an attribute, an item, a variable of a function.
        parent: What was inspected.
    """

    obj: Any
    name: str
    parent: Any


def inspect_serializability(
    base_obj: Any,
    name: str | None = None,
    depth: int = 3,
    print_file: TextIO | None = None,
) -> tuple[bool, set[FailureTuple]]:
    """Return whether something can be pickled, and print which part of it can not.

    Args:
        base_obj: A function, a class or a value.
        name: What it is called in the text. Default: its own name, or its type.
        depth: How deep parts of parts are looked at.
        print_file: Where the text is printed. Default: standard output.

    Returns:
        Whether it can be pickled, and the innermost part at fault, if not.
    """
    told = name or str(getattr(base_obj, "__qualname__", type(base_obj).__qualname__))
    found = at_fault(base_obj, depth)
    if found is None:
        print(f"{told} can be pickled.", file=print_file)
        return True, set()
    place, part, error = found
    where = f": {place} is a {type(part).__qualname__}" if place else ""
    print(f"{told} cannot be pickled{where} ({type(error).__name__}: {error}).", file=print_file)
    return False, {FailureTuple(part, place or told, base_obj)}
