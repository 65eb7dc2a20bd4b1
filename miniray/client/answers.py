"""What this process answers when its node's daemon asks; the I/O thread does, while user code runs.

Responsible for the way of an answer. A question costs nothing until it is asked.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.wire.node_link import NodeLink


class Answers:
    """The questions that this process can answer."""

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        #: By name: functions of the question's arguments, which run in the I/O thread. One that
        #: has much to look at returns a function, which a thread of its own runs for the answer.
        self.by_name: dict[str, Callable[..., Any]] = {}

    def on_asked(self, number: int, what: str, arguments: tuple[Any, ...], deadline: float) -> None:
        """Answer the daemon.

        Args:
            number: Of the question.
            what: Its name.
            arguments: Those of the function that answers it.
            deadline: When nobody waits any more, on the clock of this machine.
        """
        if time.monotonic() > deadline:
            return
        handler = self.by_name.get(what)
        if handler is None:
            self._tell(number, None, f"this process has no answer to {what!r}")
            return
        answer, missing = _result(handler, *arguments)
        if not callable(answer):
            self._tell(number, answer, missing)
            return

        def run() -> None:
            told = _result(answer)
            if time.monotonic() <= deadline:
                self._tell(number, *told)

        threading.Thread(target=run, name="miniray-answer", daemon=True).start()

    def _tell(self, number: int, answer: Any, missing: str) -> None:
        self._link.node_notice("answer", number, (answer, missing))


def _result(handler: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    try:
        return handler(*arguments), ""
    except Exception as error:  # noqa: BLE001 - it is the answer
        return None, f"{type(error).__name__}: {error}"
