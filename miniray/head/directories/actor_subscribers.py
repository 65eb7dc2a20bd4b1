"""Who wants to know where actors are: subscriptions by actor and by process, and the news."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.exceptions import DeathCause
from miniray.head.directories.actor import DEAD
from miniray.messages.actor_death import Death

if TYPE_CHECKING:
    from miniray.head.directories.actor import Actor
    from miniray.head.directories.clients import ClientDirectory
    from miniray.head.directories.grants import Timers

#: A handle can be quicker than the notice that its actor exists; it waits this long, in seconds.
_EARLY_WAIT = 10.0
#: Of an actor that nothing is known of.
UNKNOWN = Death(
    cause=DeathCause.UNKNOWN.name,
    class_name="",
    detail="This cluster does not know the actor: it is one of another cluster, or ended long ago.",
)


class ActorSubscribers:
    """Subscriptions of attached processes."""

    def __init__(self, clients: ClientDirectory, timers: Timers) -> None:
        self._clients = clients
        self._timers = timers
        #: In the order in which they are told.
        self._of_actor: dict[bytes, dict[bytes, None]] = {}
        self._of_process: dict[bytes, set[bytes]] = {}
        #: Actors that are subscribed to before the head has heard of them.
        self._awaited: set[bytes] = set()

    def add(self, process_id: bytes, actor_id: bytes) -> None:
        """A process, or a daemon, wants to know; one that is not attached cannot."""
        if self._clients.node_of(process_id) is not None:
            self._of_actor.setdefault(actor_id, {})[process_id] = None
            self._of_process.setdefault(process_id, set()).add(actor_id)

    def _leave(self, process_id: bytes, actor_id: bytes) -> None:
        processes = self._of_actor.get(actor_id, {})
        processes.pop(process_id, None)
        if not processes:
            self._of_actor.pop(actor_id, None)

    def process_ended(self, process_id: bytes) -> None:
        """A process is gone."""
        for actor_id in self._of_process.pop(process_id, set()):
            self._leave(process_id, actor_id)

    def wait_for(self, actor_id: bytes) -> None:
        """An actor is not known yet: it comes soon, or its subscribers hear that it does not."""
        if actor_id not in self._awaited:
            self._awaited.add(actor_id)
            self._timers.call_later(_EARLY_WAIT, lambda: self._stop_waiting(actor_id))

    def came(self, actor_id: bytes) -> None:
        """An actor is known now."""
        self._awaited.discard(actor_id)

    def _stop_waiting(self, actor_id: bytes) -> None:
        if actor_id in self._awaited:
            self._awaited.discard(actor_id)
            self.tell_death(actor_id, UNKNOWN)

    # --- telling -----------------------------------------------------------------
    def tell(self, process_id: bytes, actor: Actor) -> None:
        """Tell one process where an actor is."""
        node_id = actor.node.id if actor.node is not None else b""
        self._clients.push(
            process_id,
            "actor",
            actor.id,
            actor.state,
            node_id,
            actor.process_id,
            actor.restarts,
            None,
        )

    def tell_all(self, actor: Actor) -> None:
        """Tell all subscribers where an actor is."""
        for process_id in self._of_actor.get(actor.id, ()):
            self.tell(process_id, actor)

    def tell_dead(self, process_id: bytes, actor_id: bytes, death: Death) -> None:
        """Tell one process why an actor is dead."""
        self._clients.push(process_id, "actor", actor_id, DEAD, b"", b"", 0, tuple(death))

    def tell_death(self, actor_id: bytes, death: Death) -> None:
        """Tell all subscribers why an actor is dead; it is the last they hear of it."""
        for process_id in self._of_actor.pop(actor_id, {}):
            self._of_process.get(process_id, set()).discard(actor_id)
            self.tell_dead(process_id, actor_id, death)
