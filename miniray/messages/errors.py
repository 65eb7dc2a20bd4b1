"""Errors as they travel: those of daemons and the head, and why an actor is dead."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.task_error import last_line
from miniray.exceptions import ActorDiedError, DeathCause, MinirayError

if TYPE_CHECKING:
    from miniray.common.task_error import TaskError

#: Bytes of an error that travels: what it says of bad data must not be as large as that data.
_LARGEST = 1 << 20


class ActorExit(BaseException):
    """Raised in a method to end its actor; not an Exception, so that user code lets it pass."""


class Death(NamedTuple):
    """Why an actor is dead: as the head keeps it, and as it travels."""

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
