"""Values and errors as they travel between processes, daemons and the head."""

from __future__ import annotations

import logging
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.task_error import last_line
from miniray.exceptions import ActorDiedError, DeathCause, MinirayError
from miniray.messages.protocol import VALUE_ERROR, VALUE_PICKLE, VALUE_SHARED

if TYPE_CHECKING:
    from miniray.common.task_error import TaskError

#: Most bytes of an error that travels: a report of bad data must not be as large as the data.
_LARGEST = 1 << 20


class ActorExit(BaseException):
    """Raised in a method to end its actor; not an Exception, so that user code lets it pass."""


class Death(NamedTuple):
    """An actor's cause of death: as the head keeps it, and as it travels."""

    #: Name of a DeathCause.
    cause: str
    class_name: str
    exit_code: int | None = None
    pid: int = 0
    #: Hex id of its last node, or empty.
    node_id: str = ""
    detail: str = ""
    #: Pickled error of its creation.
    creation: bytes | None = None
    #: How often it was started again, and might have been (-1: without end).
    restarts: int = 0
    max_restarts: int = 0

    def error(self, actor_id: bytes, creation_error: TaskError | None = None) -> ActorDiedError:
        """Make the error of callers, with that of its creation if that was loaded."""
        detail = self.detail
        if creation_error is None and self.creation is not None:
            detail = last_line(self.creation)
        return ActorDiedError(
            DeathCause[self.cause],
            actor_id=actor_id.hex(),
            class_name=self.class_name,
            exit_code=self.exit_code,
            pid=self.pid,
            node_id=self.node_id,
            creation_error=creation_error,
            detail=detail,
            restarts=self.restarts,
            max_restarts=self.max_restarts,
        )


def encode_error(error: BaseException) -> bytes:
    """Pickle an exception; one that cannot be pickled becomes one of its class name and text."""
    try:
        data = pickle.dumps(error, 5)
    except Exception:  # noqa: BLE001 - whatever the error holds; its text says what matters
        data = b""
    if not 0 < len(data) <= _LARGEST:
        data = pickle.dumps(MinirayError(f"{type(error).__name__}: {error!s:.2000}"), 5)
    return data


def rebuild_error(error: BaseException | bytes) -> BaseException:
    """Load the exception that a daemon or the head answered with; others are returned."""
    if isinstance(error, BaseException):
        return error
    rebuilt = pickle.loads(error)
    assert isinstance(rebuilt, BaseException)
    return rebuilt


logger = logging.getLogger(__name__)

#: Form, payload, refs inside as (object id, owner's node).
Value = tuple[int, Any, "tuple[tuple[bytes, bytes], ...]"]
#: Payload of a value in shared memory: the node on which it was written, its segment there, the
#: node of its owner, whose daemon knows where it is, and its size in bytes. It never changes.
Location = tuple[bytes, int, bytes, int]

#: An empty value, for a message that needs one although it is not read.
NOTHING: Value = (VALUE_PICKLE, b"", ())
#: The value of refs that only signal that something has happened.
TRUE: Value = (VALUE_PICKLE, pickle.dumps(True, 5), ())


def is_shared(value: Value | None) -> bool:
    """Return whether a value is in the shared memory of some node, and so can be lost."""
    return value is not None and value[0] == VALUE_SHARED


def is_error(value: Value | None) -> bool:
    """Return whether reading a value raises an exception."""
    return value is not None and value[0] == VALUE_ERROR


def payload_of(value: Value) -> Any:
    """Return the bytes of a value, or its ``Location``, by which a reader names a value."""
    _, payload, _ = value
    return payload


def location_of(value: Value) -> Location:
    """Return where a value in shared memory is."""
    _, location, _ = value
    return location  # type: ignore[no-any-return]


def key_of(value: Value) -> tuple[bytes, int, bytes]:
    """Return the name of a value in shared memory: its location without the size."""
    node, segment, home, _ = location_of(value)
    return node, segment, home


def node_of(value: Value) -> bytes:
    """Return the node on which a value in shared memory was written."""
    node, *_ = location_of(value)
    return node


def size_of(value: Value | None) -> int:
    """Return the bytes of a value; 0 if there is none."""
    if value is None:
        return 0
    form, payload, _ = value
    if form != VALUE_SHARED:
        return len(payload)
    *_, size = payload
    return int(size)


def place_of(value: Value | None) -> tuple[bytes, int, int]:
    """Return node, segment (b"" and 0 if it is not in shared memory) and size of a value."""
    if value is not None and is_shared(value):
        node, segment, _, size = location_of(value)
        return node, segment, size
    return b"", 0, size_of(value)


def refs_in(value: Value) -> tuple[tuple[bytes, bytes], ...]:
    """Return the refs inside a value, as (object id, owner's node)."""
    _, _, contained = value
    return contained


def error_value(error: BaseException) -> Value:
    """Make a value of an exception, so that `get` raises it."""
    return (VALUE_ERROR, pickle.dumps(error, 5), ())


def load_error(value: Value) -> BaseException | None:
    """Return the exception of an error value; None if its class cannot be loaded here."""
    try:
        error: BaseException = pickle.loads(payload_of(value))
    except Exception:
        logger.exception("an error value cannot be unpickled")
        return None
    return error
