"""The controller of a run in a thread of the driver's process, for local mode.

The thread has an event loop of its own; other threads reach the controller by
calls that return futures, as they would reach an actor.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import threading
from typing import TYPE_CHECKING, Any, cast

from miniray.train.base.exceptions import ControllerLostError
from miniray.train.controller.controller import TrainController
from miniray.train.controller.outcome import STOPPING
from miniray.train.progress.display import PAUSE, make_display
from miniray.train.progress.feed import Seen
from miniray.train.worker.controller_client import run_has_ended

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.controller.outcome import RunOutcome
    from miniray.train.controller.run_spec import RunSpec
    from miniray.train.controller.worker_group import WorkerGroup
    from miniray.train.run.local_group import LocalGroup

logger = logging.getLogger(__name__)

#: Seconds that a run gets to end after Ctrl-C, when no upload runs any more.
ABORT_TIMEOUT = 10.0

#: Seconds after which the user is told what a run that is to stop waits for.
TELL_AFTER = 0.5


class ControllerThread:
    """A controller and the thread that it runs in.

    Args:
        spec: The run.
        group: The processes of all its attempts.
    """

    def __init__(self, spec: RunSpec, group: LocalGroup) -> None:
        self._name = spec.name
        self._user_callbacks = spec.run_config.callbacks or ()
        self._controller = TrainController(spec, lambda *_: cast("WorkerGroup", group))
        self._group = group
        self._machine = asyncio.new_event_loop()
        self._outcome: concurrent.futures.Future[RunOutcome] = concurrent.futures.Future()
        self._lock = threading.Lock()
        self._over = False

    def start(self, loop: Any, when_over: Callable[[], None]) -> None:
        """Start the run."""

        def serve() -> None:
            try:
                self._outcome.set_result(self._machine.run_until_complete(self._run(loop)))
            except BaseException as error:  # noqa: BLE001 - raised by outcome()
                self._outcome.set_exception(error)
            finally:
                self._close()
                when_over()

        threading.Thread(target=serve, name="train-controller", daemon=True).start()

    def outcome(self) -> RunOutcome:
        return self._outcome.result()

    def call(self, method: str, *arguments: Any) -> concurrent.futures.Future[Any]:
        """Call a method of the controller; from any thread.

        Returns:
            What becomes of it: it is cancelled if the run ends meanwhile.

        Raises:
            ControllerLostError: The run has ended.
        """
        with self._lock:
            if self._over:
                raise run_has_ended()
            coroutine = getattr(self._controller, method)(*arguments)
            return asyncio.run_coroutine_threadsafe(coroutine, self._machine)

    def abort(self, *, at_once: bool = False) -> None:
        """Stop the run once the uploads that ranks have begun have ended; wait for its end.

        Raises:
            KeyboardInterrupt: The user did not want to wait for them any more, and the run has
                ended without.
        """
        try:
            self._stop(at_once=at_once)
        except KeyboardInterrupt:
            self._stop(at_once=True)
            raise

    def _stop(self, *, at_once: bool) -> None:
        with contextlib.suppress(ControllerLostError):  # it has ended already
            stopping = self.call("abort", at_once)
            _, waits = concurrent.futures.wait([stopping], TELL_AFTER)
            if waits:
                logger.warning(STOPPING)
                concurrent.futures.wait([stopping])
        _, runs = concurrent.futures.wait([self._outcome], ABORT_TIMEOUT)
        if runs:
            logger.warning("Run %s did not end within %s s.", self._name, ABORT_TIMEOUT)

    async def _run(self, loop: Any) -> RunOutcome:
        shown = asyncio.ensure_future(self._show())
        self._group.serve(self._controller)
        try:
            carrier = functools.partial(self.call, "call")
            outcome = await self._controller.run(carrier, [loop])
        finally:
            await asyncio.wait({shown}, timeout=1)
            shown.cancel()
        # The main thread may wait where no other rank will come to. A rank that is told of a
        # failure ends its process, and torchrun ends this one.
        await self._group.part(outcome)
        return outcome

    async def _show(self) -> None:
        # Lines, also on a terminal: a debugger in the train loop needs the screen.
        display = make_display(self._name, self._user_callbacks, live=False)
        seen, over = Seen(), False
        while not over:
            progress = await self._controller.progress(seen)
            display.show(progress)
            seen, over = progress.seen, progress.state.terminal
            if not over:
                await asyncio.sleep(PAUSE)
        display.close()

    def _close(self) -> None:
        """Take no more calls, and end those that are under way: someone may wait for them."""
        with self._lock:
            self._over = True
        self._machine.run_until_complete(_end_all())
        self._machine.close()


async def _end_all() -> None:
    await asyncio.sleep(0)  # calls that were handed over become tasks
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
