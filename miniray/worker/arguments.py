"""Arguments of calls: fetched ahead while the call is queued, and loaded when its turn has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.calls.recovery import is_shared
from miniray.exceptions import ObjectLostError
from miniray.messages import protocol as p
from miniray.values.serialization import deserialize
from miniray.worker.work import NOT_ERRORS, ArgumentLostError, Work, raise_as_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miniray.calls.call import RefArgument
    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.object_ref import ObjectRef
    from miniray.objects.objects import Value


def load_arguments(runtime: ClusterRuntime, work: Work) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a piece of work; refs in them are borrowed for its time.

    Raises:
        ValueRaisedError: unpickling has raised what is no error by itself.
    """
    form, payload, contained = work.arguments
    if not contained and not work.refs and form != p.VALUE_SHARED:  # they came with the call
        try:
            return deserialize(form, payload)  # type: ignore[no-any-return]
        except NOT_ERRORS as error:
            raise_as_error(error)
    for _, _, _, value in work.refs:
        if value is not None and value[2]:
            contained = (*contained, *value[2])
    if contained:
        adopt = runtime.table.adopt
        work.held = [adopt(id, node)[0] if node else _plain_ref(id) for id, node in contained]
    try:
        return _load_all(runtime, work)
    except NOT_ERRORS as error:
        raise_as_error(error)
    finally:
        forget_arguments(runtime, work)


def load_for_constructor(
    runtime: ClusterRuntime, name: str, arguments: Value, refs: list[RefArgument]
) -> tuple[tuple[Any, ...], dict[str, Any], list[ObjectRef[Any]]]:
    """The arguments of an actor's constructor, and their refs, which are to be held while it runs.

    What is in shared memory is got as by any borrower: where it was when the actor was made is a
    first guess. If it was lost, as with the node on which the actor was before, its owner knows
    better, or makes it again.

    Raises:
        MinirayError: a value is lost for good, or its owner is.
    """
    large: list[RefArgument] = []
    small: list[RefArgument] = []
    for ref in refs:
        (large if ref[3] is None or is_shared(ref[3]) else small).append(ref)
    values = [arguments, *(value for *_, value in refs if value is not None)]
    # These refs live as long as this process wants, not as long as a call.
    held = runtime.borrowing.hold([ref for value in values for ref in value[2]])
    wanted = runtime.borrowing.hold([(id, node) for _, id, node, _ in large])
    for _, id, _, value in large:
        if value is not None:
            runtime.table.set_value(id, value, runtime.borrowing.hold(value[2]))
    work = Work(None, 0, "", name, name, (*arguments[:2], ()), small, ())  # type: ignore[arg-type]
    args, kwargs = load_arguments(runtime, work)
    if large:
        try:
            found = runtime.get(wanted, None)
        except NOT_ERRORS as error:
            raise_as_error(error)
        args = _put_in(args, kwargs, zip((where for where, *_ in large), found, strict=True))
    return args, kwargs, [*held, *wanted]


def _put_in(
    args: tuple[Any, ...], kwargs: dict[str, Any], values: Iterable[tuple[int | str, Any]]
) -> tuple[Any, ...]:
    """Put the values of refs where these stood; returns the positional arguments."""
    positional = list(args)
    for where, value in values:
        if isinstance(where, int):
            positional[where] = value
        else:
            kwargs[where] = value
    return tuple(positional)


def _values(work: Work) -> Iterator[Value]:
    yield work.arguments
    for *_, value in work.refs:
        if value is not None:
            yield value


def reads_shared_memory(work: Work) -> bool:
    """Whether loading the arguments may take a while: they may be on disk or on another node."""
    if work.refs:
        return any(map(is_shared, _values(work)))
    return work.arguments[0] == p.VALUE_SHARED


def fetch_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """Begin to move what a piece of work will read; it may wait for a while in the queue."""
    if not work.refs and work.arguments[0] != p.VALUE_SHARED:
        return
    values = [value for value in _values(work) if is_shared(value)]
    if values:
        work.ahead = runtime.shared_memory.fetches.prefetch(values)


def forget_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """What ``fetch_arguments`` began is not needed any more, or in use."""
    if work.ahead:
        ahead, work.ahead = work.ahead, []
        runtime.shared_memory.fetches.withdraw(ahead)


def _load_all(runtime: ClusterRuntime, work: Work) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = _load(runtime, work.arguments)
    if work.refs:
        args = _put_in(args, kwargs, _ref_values(runtime, work))
    return args, kwargs


def _ref_values(runtime: ClusterRuntime, work: Work) -> Iterator[tuple[int | str, Any]]:
    for where, id, _node, value in work.refs:
        if value is None:  # it was lost when the call was sent: the caller makes it again
            raise ArgumentLostError(id, None)
        yield where, _load(runtime, value, id)


def _load(runtime: ClusterRuntime, value: Value, id: bytes | None = None) -> Any:
    """The Python value of a value that came with a message.

    Args:
        runtime: That of the process.
        value: The value.
        id: Of the object whose value it is, if it is an object's.

    Raises:
        ArgumentLostError: an object's value is gone. What unpickling raises is the call's error, an
            ObjectLostError of another value too.
    """
    if not is_shared(value):
        return deserialize(value[0], value[1])
    try:
        mapping, block = runtime.shared_memory.map(value[1])
    except ObjectLostError as error:
        if id is None:
            raise
        raise ArgumentLostError(id, value[1]) from error
    return deserialize(mapping.form, memoryview(block).cast("B"), mapped=True)


def _plain_ref(id: bytes) -> ObjectRef[Any]:
    from miniray.common.object_ref import ObjectRef

    return ObjectRef(id, b"")
