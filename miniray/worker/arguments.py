"""Arguments of calls: fetched ahead while the call is queued, and loaded when its turn has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import ObjectRef
from miniray.common.spans import SPANS
from miniray.exceptions import ObjectLostError
from miniray.messages import protocol as p
from miniray.messages.value import is_shared, refs_in
from miniray.values.serialization import deserialize
from miniray.worker.work import NOT_ERRORS, ArgumentLostError, raise_as_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miniray.calls.call import RefArgument
    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.messages.value import Value
    from miniray.worker.work import Work

#: Positional arguments, and the others.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def load_arguments(runtime: ClusterRuntime, work: Work) -> Arguments:
    """Load the arguments of a piece of work; refs in them are borrowed for its time.

    Raises:
        ValueRaisedError: Unpickling has raised what is no error by itself.
    """
    form, payload, contained = work.arguments
    if not contained and not work.refs and form != p.VALUE_SHARED:  # they came with the call
        try:
            return deserialize(form, payload)  # type: ignore[no-any-return]
        except NOT_ERRORS as error:
            raise_as_error(error)
    return _load_these(runtime, work)


def _load_held(runtime: ClusterRuntime, work: Work) -> Arguments:
    """Load arguments, some of which are refs or in shared memory."""
    _, _, contained = work.arguments
    for _, _, _, value in work.refs:
        if value is not None:
            contained = (*contained, *refs_in(value))
    if contained:
        adopt = runtime.table.adopt
        work.held = [adopt(id, node)[0] if node else ObjectRef(id, b"") for id, node in contained]
    try:
        return _load_all(runtime, work.arguments, work.refs)
    except NOT_ERRORS as error:
        raise_as_error(error)


def _load_timed(runtime: ClusterRuntime, work: Work) -> Arguments:
    with SPANS.timed("arguments", work.name):
        return _load_held(runtime, work)


def _switch(recorded: bool) -> None:
    global _load_these
    _load_these = _load_timed if recorded else _load_held


_load_these = _load_held
SPANS.switches.add(_switch)


def load_for_constructor(
    runtime: ClusterRuntime, arguments: Value, refs: list[RefArgument]
) -> tuple[tuple[Any, ...], dict[str, Any], list[ObjectRef[Any]]]:
    """Load the arguments of an actor's constructor.

    What is in shared memory is got as by any borrower: where it was when the actor was made is a
    first guess. If it was lost, as with the node on which the actor was before, its owner knows
    better, or makes it again.

    Returns:
        Positional arguments, the others, and their refs, which are to be held while it runs. These
        live as long as this process wants, not as long as a call.

    Raises:
        MinirayError: A value is lost for good, or its owner is.
    """
    held: list[ObjectRef[Any]] = []

    def hold_inside(value: Value) -> list[ObjectRef[Any]]:
        refs = runtime.borrowing.hold(refs_in(value))
        held.extend(refs)
        return refs

    hold_inside(arguments)
    small: list[RefArgument] = []
    large: list[RefArgument] = []
    for ref in refs:
        _, _, _, value = ref
        (large if value is None or is_shared(value) else small).append(ref)
    wanted = runtime.borrowing.hold([(id, node) for _, id, node, _ in large])
    for _, id, _, value in large:
        if value is not None:
            runtime.table.set_value(id, value, hold_inside(value))
    for _, _, _, value in small:
        if value is not None:
            hold_inside(value)
    try:
        args, kwargs = _load_all(runtime, arguments, small)
        if wanted:
            found = runtime.objects.get(wanted, None)
            places = (where for where, _, _, _ in large)
            args = _put_in(args, kwargs, zip(places, found, strict=True))
    except NOT_ERRORS as error:
        raise_as_error(error)
    return args, kwargs, [*held, *wanted]


def _put_in(
    args: tuple[Any, ...], kwargs: dict[str, Any], values: Iterable[tuple[int | str, Any]]
) -> tuple[Any, ...]:
    """Put the values of refs where these stood; return the positional arguments."""
    positional = list(args)
    for where, value in values:
        if isinstance(where, int):
            positional[where] = value
        else:
            kwargs[where] = value
    return tuple(positional)


def _shared(work: Work) -> list[Value]:
    """Return the values among the arguments that are in shared memory."""
    values = [value for _, _, _, value in work.refs if value is not None and is_shared(value)]
    return [work.arguments, *values] if is_shared(work.arguments) else values


def reads_shared_memory(work: Work) -> bool:
    """Return whether loading the arguments may wait for a disk or another node."""
    return bool(_shared(work)) if work.refs else is_shared(work.arguments)


def fetch_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """Begin to move what a piece of work will read, as it may wait in the queue."""
    if work.refs or is_shared(work.arguments):
        values = _shared(work)
        if values:
            work.ahead = runtime.shared_memory.fetches.prefetch(values)


def forget_arguments(runtime: ClusterRuntime, work: Work) -> None:
    """Withdraw what ``fetch_arguments`` has asked for and is not needed."""
    if work.ahead:
        ahead, work.ahead = work.ahead, []
        runtime.shared_memory.fetches.withdraw(ahead)


def _load_all(runtime: ClusterRuntime, arguments: Value, refs: list[RefArgument]) -> Arguments:
    args, kwargs = _load(runtime, arguments)
    if refs:
        args = _put_in(args, kwargs, _ref_values(runtime, refs))
    return args, kwargs


def _ref_values(
    runtime: ClusterRuntime, refs: list[RefArgument]
) -> Iterator[tuple[int | str, Any]]:
    for where, id, _node, value in refs:
        if value is None:  # it was lost when the call was sent: the caller makes it again
            raise ArgumentLostError(id, None)
        yield where, _load(runtime, value, id)


def _load(runtime: ClusterRuntime, value: Value, id: bytes | None = None) -> Any:
    """Load a value that came with a message.

    Args:
        runtime: That of the process.
        value: The value.
        id: Of the object whose value it is, if it is an object's.

    Raises:
        ArgumentLostError: An object's value is gone. What unpickling raises is the call's error, an
            ObjectLostError of another value too.
    """
    form, payload, _ = value
    if form != p.VALUE_SHARED:
        return deserialize(form, payload)
    try:
        form, block = runtime.shared_memory.map(payload)
    except ObjectLostError as error:
        if id is None:
            raise
        raise ArgumentLostError(id, payload) from error
    return deserialize(form, memoryview(block).cast("B"), mapped=True)
