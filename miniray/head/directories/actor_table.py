"""The actors by all that they are looked up by, and the processes that are told where they are."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from miniray.exceptions import DeathCause
from miniray.head.directories.actor import DEAD, remembered
from miniray.messages.errors import Death

if TYPE_CHECKING:
    from miniray.head.directories.actor import Actor, DeadActor
    from miniray.head.directories.clients import ClientDirectory
    from miniray.head.directories.grants import Timers


#: Dead actors that are remembered, so that late callers learn why.
_REMEMBERED = 10_000


class ActorTable:
    """Living actors by id, (namespace, name), lease, process and owner; dead ones by id.

    The tables are for reading; the methods change them.
    """

    def __init__(self) -> None:
        self.living: dict[bytes, Actor] = {}
        self.by_name: dict[tuple[str, str], Actor] = {}
        self.by_process: dict[bytes, Actor] = {}
        #: By the lease that an actor has, or has asked for.
        self.by_lease: dict[int, Actor] = {}
        #: Actors that end with the process that created them, in order; none without any.
        self.owned: dict[bytes, dict[bytes, None]] = {}
        #: The latest last.
        self.dead: collections.OrderedDict[bytes, DeadActor] = collections.OrderedDict()

    def take_owned(self, owner: bytes) -> list[Actor]:
        ids = self.owned.pop(owner, {})
        return [self.living[id] for id in ids if id in self.living]

    def enter(self, actor: Actor) -> None:
        """Add a new actor, which has no lease yet."""
        self.living[actor.id] = actor
        if actor.name is not None:
            self.by_name[actor.name] = actor
        # Only the creator can supply a detached actor's arguments while they have no values.
        if not actor.spec.detached or actor.arguments is None:
            self.owned.setdefault(actor.owner, {})[actor.id] = None

    def leased(self, actor: Actor, number: int) -> None:
        actor.lease = number
        self.by_lease[number] = actor

    def lives_in(self, actor: Actor, process_id: bytes, pid: int = 0) -> None:
        """Note an actor's process, and its pid if that is known."""
        self.by_process.pop(actor.process_id, None)
        actor.process_id, actor.pid = process_id, pid or actor.pid
        self.by_process[process_id] = actor

    def leave_place(self, actor: Actor) -> None:
        self.by_lease.pop(actor.lease, None)
        self.by_process.pop(actor.process_id, None)
        actor.lease, actor.node, actor.process_id, actor.pid = 0, None, b"", 0

    def died(self, actor: Actor) -> None:
        del self.living[actor.id]
        if actor.name is not None:
            del self.by_name[actor.name]
        self.disown(actor)
        self.enter_dead(actor.id, remembered(actor))

    def enter_dead(self, id: bytes, dead: DeadActor) -> None:
        self.dead[id] = dead
        if len(self.dead) > _REMEMBERED:
            self.dead.popitem(last=False)

    def disown(self, actor: Actor) -> None:
        """Let an actor outlive its creator."""
        owned = self.owned.get(actor.owner)
        if owned is not None:
            owned.pop(actor.id, None)
            if not owned:
                del self.owned[actor.owner]


#: A handle can be quicker than the notice that its actor exists; it waits this long, in seconds.
_EARLY_WAIT = 10.0
#: Of an actor that nothing is known of.
UNKNOWN = Death(
    cause=DeathCause.UNKNOWN.name,
    class_name="",
    detail="This cluster does not know the actor: it is one of another cluster, or ended long ago.",
)


class ActorSubscribers:
    """The processes that are told where each actor is."""

    def __init__(self, clients: ClientDirectory, timers: Timers) -> None:
        self._clients = clients
        self._timers = timers
        #: In the order in which they are told.
        self._of_actor: dict[bytes, dict[bytes, None]] = {}
        self._of_process: dict[bytes, set[bytes]] = {}
        #: Actors that are subscribed to and not registered yet.
        self._awaited: set[bytes] = set()

    def add(self, process_id: bytes, actor_id: bytes) -> None:
        """Subscribe a process, or a daemon; one that is not attached is ignored."""
        if self._clients.node_of(process_id) is not None:
            self._of_actor.setdefault(actor_id, {})[process_id] = None
            self._of_process.setdefault(process_id, set()).add(actor_id)

    def _leave(self, process_id: bytes, actor_id: bytes) -> None:
        processes = self._of_actor.get(actor_id, {})
        processes.pop(process_id, None)
        if not processes:
            self._of_actor.pop(actor_id, None)

    def process_ended(self, process_id: bytes) -> None:
        for actor_id in self._of_process.pop(process_id, set()):
            self._leave(process_id, actor_id)

    def wait_for(self, actor_id: bytes) -> None:
        """Tell the subscribers of an unknown actor so, unless it is registered soon."""
        if actor_id not in self._awaited:
            self._awaited.add(actor_id)
            self._timers.call_later(_EARLY_WAIT, lambda: self._stop_waiting(actor_id))

    def came(self, actor_id: bytes) -> None:
        self._awaited.discard(actor_id)

    def _stop_waiting(self, actor_id: bytes) -> None:
        if actor_id in self._awaited:
            self._awaited.discard(actor_id)
            self.tell_death(actor_id, UNKNOWN)

    # --- telling -----------------------------------------------------------------
    def tell(self, process_id: bytes, actor: Actor) -> None:
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
        for process_id in self._of_actor.get(actor.id, ()):
            self.tell(process_id, actor)

    def tell_dead(self, process_id: bytes, actor_id: bytes, death: Death) -> None:
        self._clients.push(process_id, "actor", actor_id, DEAD, b"", b"", 0, tuple(death))

    def tell_death(self, actor_id: bytes, death: Death) -> None:
        """Tell all subscribers why an actor is dead, and drop them."""
        for process_id in self._of_actor.pop(actor_id, {}):
            self._of_process.get(process_id, set()).discard(actor_id)
            self.tell_dead(process_id, actor_id, death)
