"""What a rank can ask of the attempt in which it runs, and the carriers that bring its calls there.

The calls are the same wherever the controller runs: in an actor, in a thread of this process, or in
the process of rank 0. What they do is in ``controller/attempt.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

from miniray import api

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

    from miniray.common.object_ref import ObjectRef
    from miniray.train.base.exceptions import CollectiveError
    from miniray.train.base.failures import WorkerFailure
    from miniray.train.base.reports import Report
    from miniray.train.storage.manifests import CheckpointRecord

    T = TypeVar("T")
    #: Waits for the result of a call; raises if the controller is gone.
    Result: TypeAlias = Callable[[], T]


@dataclasses.dataclass(frozen=True)
class CollectiveOutcome:
    """What a rank gets from a collective: the pickled value of rank 0, or why it failed."""

    value: bytes = b""
    error: CollectiveError | None = None


class RankCalls(Protocol):
    """The methods of ``Attempt`` that ranks call, without the rank; it says what they do.

    Each begins its call at once, in the order called.
    """

    def report(self, index: int, report: Report) -> Result[None]: ...

    def announce_upload(self, index: int) -> Result[None]: ...

    def begin_upload(self, index: int, name: str, in_place: bool) -> Result[str]: ...

    def upload_failed(self, index: int, failure: WorkerFailure | None) -> Result[None]: ...

    def reported_checkpoints(
        self, count: int, timeout: float | None
    ) -> Result[tuple[list[CheckpointRecord], list[int]]]: ...

    def join(self, number: int, call: str, value: bytes) -> Result[CollectiveOutcome]: ...

    def use_keys(self, operation: str, *arguments: Any) -> Result[Any]: ...

    def stacks_wanted(self) -> Result[bool]: ...

    def show_stacks(self, stacks: str) -> Result[None]: ...


def rank_calls(carrier: Carrier, attempt: int, rank: int) -> RankCalls:
    return cast("RankCalls", _RankCalls(carrier, attempt, rank))


@dataclasses.dataclass(frozen=True)
class _RankCalls:
    """Passes each call on by its name, to ``TrainController.call``."""

    carrier: Carrier
    attempt: int
    rank: int

    def __getattr__(self, name: str) -> Callable[..., Result[Any]]:
        if name.startswith("_"):  # looked up by pickle
            raise AttributeError(name)
        return functools.partial(self.carrier.call, name, self.attempt, self.rank)


class Carrier(Protocol):
    """Brings calls to a controller; thread-safe."""

    def call(self, method: str, attempt: int, rank: int, *arguments: Any) -> Result[Any]:
        """Begin a call of ``TrainController.call``; those of one rank begin in order.

        Raises:
            MinirayError: It is known already that the controller is gone.
        """


@dataclasses.dataclass(frozen=True)
class ActorCarrier:
    """Brings calls to a controller that is an actor."""

    handle: Any

    def call(self, *arguments: Any) -> Result[Any]:
        return functools.partial(_wait, self.handle.call.remote(*arguments))


def _wait(ref: ObjectRef[Any]) -> Any:
    """Return the value of a ref, when it is there."""
    if threading.current_thread() is threading.main_thread():
        return api.get(ref)
    # get() would read this process's messages while it waits, to answer sooner: that is for the
    # train loop to do.
    return ref.future().result()


@dataclasses.dataclass(frozen=True)
class LocalCarrier:
    """Brings calls to a controller in a thread of this process, or of that of rank 0."""

    begin: Callable[..., concurrent.futures.Future[Any]]

    def call(self, *arguments: Any) -> Result[Any]:
        future = self.begin("call", *arguments)
        if future.done() and (error := future.exception()) is not None:
            raise error  # at once only when the controller is gone
        return future.result
