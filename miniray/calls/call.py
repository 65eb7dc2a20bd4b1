"""Calls of this process: each with its arguments, its channel, and its record for a repeat.

Refs among the arguments themselves, not inside them, are taken out: the executor gets their values.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.names import short_name
from miniray.common.object_ref import ObjectRef
from miniray.common.series import COUNTED, how_many, no_values, took
from miniray.common.task_error import MinirayError, text_only, wrap_pickled
from miniray.messages.protocol import STREAM_AGAIN, VALUE_ERROR, VALUE_PICKLE
from miniray.messages.value import NOTHING, is_shared, payload_of
from miniray.values.serialization import Serialized, serialize_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.messages.value import Value
    from miniray.objects.object_ref_generator import StreamState
    from miniray.wire.peers import Peer

#: Where a top-level ref goes in the arguments, its id, its owner's node and, if known, its value.
RefArgument = tuple["int | str", bytes, bytes, "Value | None"]


class Channel:
    """Sends calls: the client of an actor, or the leases of tasks.

    ``CallTable`` owns the life of a call and instructs its channel. A channel that
    finds that a call has failed forgets it first, and then reports it to the table.
    """

    #: Whether ``force`` may end the process of a call that is cancelled.
    takes_force = True
    #: Where calls that have a result are counted, by name.
    finished: dict[str, list[float]] = {}  # noqa: RUF012 - of those that have none

    def submit(self, call: Call, ready: bool) -> None:
        """Send a new call, or queue it.

        Args:
            call: What to send.
            ready: Whether all refs among its arguments have values; if not, ``ready`` follows.
        """
        if ready:
            self.ready(call)

    def ready(self, call: Call) -> None:
        """Send a call that was kept, when its turn comes: its refs have values (or errors)."""
        raise NotImplementedError

    def answered(self, call: Call, seconds: float | None) -> None:
        """Forget a call whose executor has answered.

        Args:
            call: The call.
            seconds: How long it took there; None if it did not run, as its arguments were lost.
        """

    def put_back(self, call: Call) -> None:
        """Keep a call that was sent and is to be sent again; ``ready`` follows."""

    def cancel(self, call: Call, force: bool, recursive: bool) -> None:
        """Fail a call that was not sent, or send its executor a request to cancel it."""


@dataclasses.dataclass(eq=False, repr=False)
class Origin:
    """A task or an actor's call that has run: all that is needed to run it once more."""

    number: int
    channel: Channel
    target: Any
    name: str
    #: Of a generator: its items so far, which one more run makes as results.
    return_ids: Sequence[bytes]
    arguments: Value
    #: Top-level refs; small ones with their values.
    refs: list[RefArgument]
    #: What must exist for it to run: (object id, its owner's node).
    needs: tuple[tuple[bytes, bytes], ...]
    #: Options of its channel: the shape of a lease, or an actor's group and name.
    options: Any
    #: How often it may still run again; -1: any number of times.
    retries: int
    retry_exceptions: bool | tuple[type[BaseException], ...]
    #: Refs among its arguments that live as long as this is kept, and some that need not.
    pins: list[ObjectRef[Any]]
    #: Whether what no task can make again is kept alive for it.
    keeps: bool
    #: Whether ``return_ids`` are items of a generator, which may make more.
    of_stream: bool
    #: Its results that live, and origins kept here that need one of its results.
    users: int = 0
    #: Bytes of arguments that it keeps in this process.
    size: int = 0
    #: Calls of it that have not ended, and one more while it is kept: until there are none, its
    #: arguments and ``pins`` are held.
    uses: int = 1

    @property
    def has_large_arguments(self) -> bool:
        return is_shared(self.arguments)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Call:
    """One call, from its submission to its result."""

    #: Method name, or the key of the function.
    target: Any
    #: For messages.
    name: str
    channel: Channel
    #: System failures that may still be survived; -1 is no limit.
    retries: int = 0
    retry_exceptions: bool | tuple[type[BaseException], ...] = False
    #: Further data for its channel.
    options: Any = None
    #: Its results can be made again by running it again.
    repeatable: bool = False
    number: int = 0
    arguments: Value = NOTHING
    refs: Sequence[RefArgument] = ()
    #: Refs that the arguments hold, alive until the reply.
    pins: list[ObjectRef[Any]] | None = None
    return_ids: tuple[bytes, ...] = ()
    stream: StreamState | None = None
    #: Its record for a repeat, which keeps its arguments; None if there is none.
    origin: Origin | None = None
    #: How often it was begun, or will have been.
    tries: int = 1
    #: How many top-level refs have no value yet.
    waiting: int = 0
    #: Where it was sent.
    peer: Peer | None = None
    cancelled: bool = False
    #: If a running call has made it: all calls of that one that have not ended, by number.
    siblings: dict[int, Call] | None = None

    def join(self, siblings: dict[int, Call]) -> None:
        """Enter this call among the calls that the running call has made."""
        self.siblings = siblings
        siblings[self.number] = self

    def try_again(self, *, crashed: bool = False) -> float:
        """Count one more run; return how many seconds after the last it is due."""
        COUNTED.count("task_retries_total", (("function", short_name(self.name)),))
        steps = self.tries - crashed
        self.tries += 1
        if self.retries > 0:
            self.retries -= 1
        return config().retry_delay * (0.0, 0.5, 1.0)[min(steps, 2)]

    @property
    def repeats(self) -> bool:
        """Return whether it runs a call that has ended once more, to make lost values again."""
        return self.origin is not None and self.stream is None

    @property
    def streams(self) -> int | None:
        """Return the limit of a stream, STREAM_AGAIN for one made again, None for plain results."""
        if self.stream is not None:
            return self.stream.limit
        return STREAM_AGAIN if self.origin is not None and self.origin.of_stream else None

    @property
    def max_retries(self) -> int | None:
        """The option; None for a task that runs to make a lost value again."""
        if self.origin is not None:
            return None
        return self.retries if self.retries < 0 else self.retries + self.tries - 1

    @property
    def status(self) -> str:
        """Its state, in Ray's names for the states of tasks."""
        if self.waiting:
            return "PENDING_ARGS_AVAIL"
        return "PENDING_NODE_ASSIGNMENT" if self.peer is None else "SUBMITTED_TO_WORKER"

    @property
    def cancel_ids(self) -> tuple[bytes, ...]:
        """Ids by which it can be cancelled: of its results, or of its stream."""
        return self.return_ids if self.stream is None else (self.stream.id,)


#: Names under which ended calls are counted apart; calls of further names are counted together.
_MAX_NAMES = 1000
#: The name for the others, which no function has.
OTHERS = "(others)"


#: By the name under which calls were made: how long they took (``no_values``, common/series.py).
Times = dict[str, list[float]]


class EndedCalls:
    """Numbers and durations of ended calls, by name."""

    def __init__(self) -> None:
        #: Finished and failed ones by name (of actors ``Class.method``), by Ray's name for a kind.
        self.by_kind: dict[str, tuple[Times, Times]] = {
            kind: ({}, {}) for kind in ("NORMAL_TASK", "ACTOR_TASK")
        }

    def failed(self, call: Call, seconds: float) -> None:
        """Count a call that has an error."""
        _, failed = self.by_kind["NORMAL_TASK" if isinstance(call.target, bytes) else "ACTOR_TASK"]
        count(failed, call.name, seconds)

    def told(self) -> dict[str, list[dict[str, int]]]:
        """Return the counts, as ``by_kind``."""
        return {
            kind: [{name: how_many(times) for name, times in [*each.items()]} for each in ended]
            for kind, ended in self.by_kind.items()
        }


def count(counts: Times, name: str, seconds: float) -> None:
    """Add one; when there are too many names, the oldest is folded into ``OTHERS``."""
    if name not in counts:
        if len(counts) >= _MAX_NAMES:
            oldest = counts.pop(next(each for each in counts if each != OTHERS))
            others = counts.get(OTHERS) or no_values()
            counts[OTHERS] = [one + more for one, more in zip(others, oldest, strict=True)]
        counts[name] = no_values()
    took(counts[name], seconds)


# --- arguments -------------------------------------------------------------------------

NO_ARGUMENTS = Serialized(VALUE_PICKLE, [pickle.dumps(((), {}), 5)])
#: The value of no arguments, as it travels in a message.
NO_VALUES: Value = (VALUE_PICKLE, NO_ARGUMENTS.payload(), ())


def serialize_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Serialized, list[RefArgument], list[ObjectRef[Any]] | None]:
    """Serialize arguments: the value, its top-level refs, and what must stay alive.

    User code may run in it; if a signal ends it, it leaves no trace.
    """
    if not args and not kwargs:
        return NO_ARGUMENTS, [], None
    refs: list[RefArgument] = []
    pins: list[ObjectRef[Any]] | None = None
    for argument in args:
        if type(argument) is ObjectRef:
            args, kwargs, refs, pins = _take_refs(args, kwargs)
            break
    else:
        for argument in kwargs.values():
            if type(argument) is ObjectRef:
                args, kwargs, refs, pins = _take_refs(args, kwargs)
                break
    serialized = serialize_arguments(args, kwargs)
    if serialized.refs:
        pins = [*(pins or ()), *serialized.refs]
    if serialized.size > config().large_closure_warning:
        from miniray.values.closures import warn_large_arguments

        warn_large_arguments(args, kwargs, serialized.size)
    return serialized, refs, pins


def _take_refs(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], list[RefArgument], list[ObjectRef[Any]]]:
    """Take the top-level refs out of the arguments, and leave None in their places."""
    positional = list(args)
    named = dict(kwargs)
    refs: list[RefArgument] = []
    pins: list[ObjectRef[Any]] = []
    places: list[tuple[Any, int | str]] = [(positional, i) for i in range(len(positional))]
    places += [(named, name) for name in named]
    for container, place in places:
        argument = container[place]
        if type(argument) is ObjectRef:
            container[place] = None
            refs.append((place, argument.binary(), argument._owner_node, None))
            pins.append(argument)
    return tuple(positional), named, refs, pins


def error_of_call(value: Value, name: str, where: int | str) -> Value:
    """Make the error value of a call that did not run: one of its arguments has an error.

    It is a ``TaskError`` that names the call, and of the argument's class too. Errors that a task
    or a method has raised name what raised them, and are passed on as they are.

    Args:
        value: The argument's value.
        name: The call's name.
        where: The argument's position, from 0, or its name.
    """
    pickled = payload_of(value)
    error = text_only(pickled)  # to load it whole would run user code in the thread that sends
    if not isinstance(error, MinirayError):
        return value
    argument = f"argument {where + 1 if isinstance(where, int) else repr(where)}"
    text = f"{error}\n{short_name(name)}() did not run: this is the error of its {argument}."
    return (VALUE_ERROR, wrap_pickled(name, text, error, pickled), ())
