"""What a rank can ask of its controller.

The calls are the same wherever the controller runs; a carrier brings them there: to an
actor, to a thread of this process, or to the process of rank 0.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.object_ref import ObjectRef
    from miniray.train.base.failures import WorkerFailure
    from miniray.train.base.questions import Question
    from miniray.train.base.reports import Report
    from miniray.train.controller.attempt import UploadPlace
    from miniray.train.controller.rendezvous import CollectiveOutcome
    from miniray.train.storage.checkpoint_book import CheckpointRecord


class Carrier(Protocol):
    """Brings calls to a controller; thread-safe."""

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a call; calls of one rank begin in order.

        Returns:
            What waits for the result. It raises when the controller is gone.

        Raises:
            MinirayError: It is known already that the controller is gone.
        """


class ActorCarrier:
    """Brings calls to a controller that is an actor.

    Args:
        handle: The actor's handle.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def call(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Begin a call."""
        return functools.partial(_wait, getattr(self._handle, method).remote(*arguments))


def _wait(ref: ObjectRef[Any]) -> Any:
    """The value of a ref, when it is there."""
    import miniray

    if threading.current_thread() is threading.main_thread():
        return miniray.get(ref)
    # get() would read this process's messages while it waits, to answer sooner: that is for the
    # train loop to do.
    return ref.future().result()


class ControllerClient:
    """The controller as a rank sees it.

    Args:
        carrier: The way to the controller.
        attempt: Number of the attempt in which the rank runs.
        rank: Its world rank.
    """

    def __init__(self, carrier: Carrier, attempt: int, rank: int) -> None:
        self._carrier = carrier
        self._attempt = attempt
        self._rank = rank

    def report(self, index: int, report: Report) -> Callable[[], None]:
        """Send a report; what is returned waits until the controller has it."""
        return self._begin("report", index, report)

    def announce_upload(self, index: int) -> None:
        """Tell that the checkpoint of a report will be uploaded in the background."""
        self._begin("announce_upload", index)

    def begin_upload(self, index: int, name: str, *, in_place: bool) -> UploadPlace:
        """Ask where to upload the checkpoint of a report.

        Args:
            index: Number of the report.
            name: Name of the checkpoint's folder.
            in_place: Files of the checkpoint are in that folder already.
        """
        place: UploadPlace = self._begin("begin_upload", index, name, in_place)()
        return place

    def upload_failed(self, index: int, failure: WorkerFailure | None) -> None:
        """Tell that an upload has ended in vain; with a failure, that the rank has failed by it."""
        self._begin("upload_failed", index, failure)

    def join(self, number: int, call: str, value: bytes) -> CollectiveOutcome:
        """Wait in a collective call for the other ranks."""
        outcome: CollectiveOutcome = self._begin("join", number, call, value)()
        return outcome

    def use_keys(self, operation: str, *arguments: Any) -> Any:
        """Do something with the keys of the attempt; the operations are those of ``GroupKeys``."""
        return self._begin("use_keys", operation, *arguments)()

    def reported_checkpoints(
        self, count: int, timeout: float | None
    ) -> tuple[list[CheckpointRecord], list[int]]:
        """The run's checkpoints once so many reports are recorded, and who has not made them."""
        found: tuple[list[CheckpointRecord], list[int]] = self._begin(
            "reported_checkpoints", count, timeout
        )()
        return found

    def await_question(self, heard: int) -> Question | None:
        """Wait for what the controller asks after so many questions; None if nothing more."""
        question: Question | None = self._begin("await_question", heard)()
        return question

    def show_stacks(self, stacks: str) -> None:
        """Answer where this rank is."""
        self._begin("show_stacks", stacks)

    def tell_stall(self, stacks: str) -> None:
        """Tell that this rank only waits for others, and where; that it goes on, if empty."""
        self._begin("tell_stall", stacks)

    def _begin(self, method: str, *arguments: Any) -> Callable[[], Any]:
        return self._carrier.call(method, self._attempt, self._rank, *arguments)
