"""Which other node has a copy of a segment whose own node is gone.

For a transfer that broke off with that node: it goes on from the copy, where it was.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from miniray.common.config import config
from miniray.node.base.question import Question
from miniray.node.relay import relayed as r
from miniray.node.relay.relayed import Relayed

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from miniray.node.relay.relay import RelayHub
    from miniray.node.transfer.arriving import Key


def _none(_key: Key) -> int:
    """There are no copies here."""
    return 0


class OtherCopies:
    """Asks the other nodes, and answers them.

    Args:
        relay: The way to them.
    """

    def __init__(self, relay: RelayHub) -> None:
        self._relay = relay
        #: The segment of this node that is a copy of one of another node, 0 if there is none.
        self.number_of: Callable[[Key], int] = _none
        self._numbers = itertools.count(1).__next__
        self._questions: dict[int, Question] = {}
        relay.notices[r.COPY_ASKED] = self._answer
        relay.notices[r.COPY_TOLD] = self._answered

    async def find(self, key: Key, tried: Container[Key]) -> Key | None:
        """The first copy that a node tells of, as that node and its segment there.

        Args:
            key: The node that is gone, and the segment there.
            tried: Copies that are of no use.
        """

        def serves(node: bytes, copy: int) -> bool:
            return bool(copy) and (node, copy) not in tried

        number = self._numbers()
        nodes = [node for node in self._relay.nodes() if self._relay.can_dial(node)]
        question = self._questions[number] = Question(nodes, enough=serves)
        try:
            for node in nodes:
                if not self._relay.send(node, Relayed(notice=r.COPY_ASKED, items=(number, *key))):
                    question.ended(node)
            await question.wait(config().transfer_stall)
        finally:
            del self._questions[number]
        return next((told for told in question.answers.items() if serves(*told)), None)

    def _answer(self, node_id: bytes, message: Relayed) -> None:
        number, gone, segment = message.items
        copy = self.number_of((gone, segment))
        self._relay.send(node_id, Relayed(notice=r.COPY_TOLD, items=(number, copy)))

    def _answered(self, node_id: bytes, message: Relayed) -> None:
        number, copy = message.items
        question = self._questions.get(number)
        if question is not None:
            question.answered(node_id, copy)

    def node_unreachable(self, node_id: bytes) -> None:
        """A node is gone, or messages to or from it were lost."""
        for question in self._questions.values():
            question.ended(node_id)
