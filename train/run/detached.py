"""The controller of a detached run: a named actor that outlives the driver that made it.

It begins by itself, also when it was started again after a kill, stores how the run ended, and
is gone then. What drivers do with it is in ``attach.py``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray import api
from miniray.runtime_context import get_runtime_context
from miniray.train.controller.controller import TrainController
from miniray.train.controller.outcome import read_outcome, write_outcome
from miniray.train.controller.run_spec import pause_after
from miniray.train.storage.filesystem import protocols

if TYPE_CHECKING:
    from miniray.train.base.policies import RunState
    from miniray.train.controller.outcome import RunOutcome
    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.storage.storage import RunStorage
    from miniray.train.worker.controller_client import Carrier
    from miniray.train.worker.worker import PackedLoop

logger = logging.getLogger(__name__)

#: Where the names of controllers are.
NAMESPACE = "miniray-train"


def controller_name(storage: RunStorage) -> str:
    """Return the name of the controller of a run: of the same folder, the same name."""
    path = os.path.realpath(storage.path) if storage.files.is_local else storage.path
    place = f"{min(protocols(storage.filesystem))}:{path}"
    return f"train:{storage.name}:{hashlib.sha256(place.encode()).hexdigest()[:12]}"


class Opened(NamedTuple):
    """What a driver that finds a controller wants to know first.

    Attributes:
        run_id: Id of the run.
        over: Whether it has ended, so that the controller is about to be gone.
    """

    run_id: str
    over: bool


class DetachedController(TrainController):
    """Runs one training run without a driver."""

    def __init__(self, spec: RunSpec, loop: PackedLoop) -> None:
        super().__init__(spec)
        self._packed: PackedLoop | None = loop
        #: The ref of the train loop, once it is in the store.
        self._loop: list[Any] = []
        self._opened = asyncio.Event()
        self._ended = asyncio.Event()
        self._end: RunOutcome | None = None
        self._waiting = 0  # drivers that are to be told how the run ended
        self._all_told = asyncio.Event()
        self._life = asyncio.create_task(self._live())

    async def run_id(self) -> str:
        """Return the id of the run, by which its starter recognizes it."""
        return self._spec.run_id

    async def opened(self) -> Opened:
        """Wait until the run has its folder, or has ended."""
        await self._opened.wait()
        return Opened(self._spec.run_id, self._ended.is_set())

    async def outcome(self) -> RunOutcome:
        self._waiting += 1
        try:
            await self._ended.wait()
        finally:
            # The answer is sent in the same step of the event loop as this.
            self._waiting -= 1
            if not self._waiting:
                self._all_told.set()
        assert self._end is not None
        return self._end

    async def gone(self) -> None:
        """Never returns: the call fails when the controller is gone."""
        await asyncio.Event().wait()

    async def leave(self) -> None:
        from miniray.actor import exit_actor

        exit_actor()

    async def _live(self) -> None:
        own = get_runtime_context().current_actor
        try:
            self._end = await self._run_to_end(own.call.remote)
        except Exception as error:
            logger.exception("Run %s ended with its controller.", self._spec.name)
            self._fail(error)
            self._end = self._outcome()
        self._ended.set()
        self._opened.set()
        while self._waiting:
            self._all_told.clear()
            await self._all_told.wait()
        # A task can't end its actor, but a call can.
        await own.leave.remote()

    async def _run_to_end(self, carrier: Carrier) -> RunOutcome:
        earlier = await self._blocking(self._ended_before)
        if earlier is not None:
            return earlier
        return await self.run(carrier, self._loop)

    def _ended_before(self) -> RunOutcome | None:
        """Return how the run ended, if this controller was killed just after it had stored that."""
        storage = self._spec.storage
        outcome = read_outcome(storage, self._spec.run_id)
        facts = storage.run_facts()
        if outcome is not None and facts.get("run_id") == self._spec.run_id:
            self._facts.take_up(facts)
            self._state, self._message = outcome.state, outcome.message
            self._run_board.write(self._state, self._message)
        return outcome

    async def _initialize(self) -> RunState:
        following = await super()._initialize()
        self._opened.set()
        self._loop.append(await self._blocking(self._put_loop))
        if self._facts.start_failures:
            self._feed.note(
                "The controller was lost and was started again. The run goes on from its newest "
                "checkpoint."
            )
            # Whatever ends controllers at their start is given time to go by.
            await asyncio.sleep(pause_after(self._facts.start_failures))
        return following

    def _put_loop(self) -> Any:
        """Put the train loop into the store: this process owns it, and not the driver."""
        packed, self._packed = self._packed, None
        assert packed is not None
        return api.put(packed.published(api.put))

    def _keep_outcome(self, outcome: RunOutcome) -> None:
        write_outcome(self._spec.storage, self._spec.run_id, outcome)
