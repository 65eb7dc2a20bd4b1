"""The thread of a rank that answers the controller while the train loop runs in the main thread."""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING

from miniray.train.base.questions import Question
from miniray.train.base.stacks import stacks_of_this_process
from miniray.train.controller.stalls import watch_for_stall

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.train.worker.controller_client import ControllerClient

logger = logging.getLogger(__name__)


class RankWatch:
    """Answers questions about the train loop of the calling thread until it is closed.

    Args:
        client: The controller.
        stall_patience: Seconds after which a train loop that only waits counts as stalled.
    """

    def __init__(self, client: ControllerClient, stall_patience: float) -> None:
        self._client = client
        self._stall_patience = stall_patience
        self._train_loop = threading.get_ident()
        self._ended = threading.Event()
        self._start("train-watch", self._serve)

    def close(self) -> None:
        """The train loop has ended."""
        self._ended.set()

    def _serve(self) -> None:
        heard = 0
        while (question := self._client.await_question(heard)) is not None:
            heard += 1
            if question is Question.STACKS:
                self._client.show_stacks(stacks_of_this_process())
            else:
                watch = functools.partial(
                    watch_for_stall,
                    self._train_loop,
                    self._ended,
                    self._client.tell_stall,
                    self._stall_patience,
                )
                self._start("train-stall-watch", watch)

    @staticmethod
    def _start(name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception:  # the controller is gone, and with it who would ask
                logger.debug("the watch of the train loop has ended", exc_info=True)

        threading.Thread(target=run, name=name, daemon=True).start()
