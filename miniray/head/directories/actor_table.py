"""Actors by id, name, lease and job, and the processes that subscribe to their addresses."""

from __future__ import annotations

import collections
import dataclasses
import time
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.names import short_name
from miniray.common.object_ref import owner_of
from miniray.common.state_types import DEAD, PENDING, RESTARTING
from miniray.exceptions import DeathCause
from miniray.messages.value import Death

if TYPE_CHECKING:
    from miniray.common.specs import ActorSpec
    from miniray.head.directories.clients import ClientDirectory, ProcessExit
    from miniray.head.directories.grants import Timers
    from miniray.head.directories.jobs import Job
    from miniray.head.directories.nodes import ClusterNode
    from miniray.head.scheduling.demands import Demand


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Actor:
    """An actor that is not dead."""

    id: bytes
    spec: ActorSpec
    job_id: bytes
    job: Job | None
    #: Name of the node that is preferred, which is its creator's.
    near: str
    #: -1: without end.
    restarts_left: int
    state: str = PENDING
    #: How often it was restarted.
    restarts: int = 0
    #: Marshalled (arguments value, refs); None until they have values.
    arguments: bytes | None = None
    demand: Demand | None = None
    #: Number of its request or lease; 0: none.
    lease: int = 0
    #: Where its lease is; None while it waits.
    node: ClusterNode | None = None
    process_id: bytes = b""
    pid: int = 0
    #: It ends itself with exit_actor.
    exiting: bool = False
    #: ``kill`` has requested the end of its process.
    killed: bool = False
    #: Once it is dead: why, and since when, in seconds since the epoch.
    death: Death | None = None
    died: float = 0.0
    #: When it came to where it is now: waiting, placed (its constructor runs), or alive.
    since: float = dataclasses.field(default_factory=time.time)

    @property
    def owner(self) -> bytes:
        return owner_of(self.id)

    @property
    def class_name(self) -> str:
        return self.spec.class_name

    @property
    def tag(self) -> tuple[str, str]:
        """Tag of the metrics of its class: as for calls, a local class has its own name only."""
        return "class", short_name(self.spec.class_name)

    @property
    def name(self) -> tuple[str, str] | None:
        name = self.spec.name
        return None if name is None else (self.spec.namespace, name)

    @property
    def location(self) -> tuple[bytes, bytes, bool, bytes]:
        """Return what a process needs to make a handle of this actor."""
        spec = self.spec
        return self.id, spec.owner_node, spec.detached, spec.info

    def cause_of_death(self, how: ProcessExit) -> DeathCause | None:
        """Return why the actor is dead as its process ended; None if it is to be restarted.

        A planned exit with code 0 (``sys.exit()`` in a method) is meant, so the actor stays dead,
        as in Ray.
        """
        if self.exiting:
            return DeathCause.EXIT_ACTOR
        meant = how.planned and how.code == 0 and not self.killed
        if self.restarts_left != 0 and not meant:
            return None
        return self.end_of_process(how)

    def end_of_process(self, how: ProcessExit) -> DeathCause:
        """Return what ended the process, which the actor had not requested."""
        if how.with_node:
            return DeathCause.NODE_LOST
        return DeathCause.KILLED if self.killed else DeathCause.EXITED

    def describe_death(
        self, cause: DeathCause, how: ProcessExit, creation: bytes | None = None
    ) -> Death:
        """Describe the actor's death for its callers; ``creation`` is its pickled error."""
        node_id = self.node.name if self.node is not None else ""
        detail = how.detail if cause in (DeathCause.EXITED, DeathCause.OWNER_DIED) else ""
        if cause is DeathCause.NODE_LOST and self.node is not None and self.node.reason:
            detail = f"{self.node.reason[0].upper()}{self.node.reason[1:]}."
        return Death(
            cause.name,
            self.class_name,
            how.code,
            how.pid or self.pid,
            node_id,
            detail,
            creation,
            self.restarts,
            self.spec.max_restarts,
        )

    def begin_restart(self) -> None:
        self.state, self.killed, self.since = RESTARTING, False, time.time()
        self.restarts += 1
        if self.restarts_left > 0:
            self.restarts_left -= 1

    def die(self, death: Death) -> None:
        self.state, self.death, self.died = DEAD, death, time.time()


#: Of an actor whose end was requested before it was registered.
NEVER_MADE = Death(DeathCause.KILLED.name, "")

#: Deaths with which programs end their actors: no news.
ORDINARY = frozenset({DeathCause.EXIT_ACTOR, DeathCause.OUT_OF_SCOPE, DeathCause.OWNER_DIED})
#: Deaths that a program requested, perhaps another one than the actor's: news, no alarm.
REQUESTED = frozenset({DeathCause.KILLED, DeathCause.GROUP_REMOVED})


class DeadActor(NamedTuple):
    """The record of a dead actor."""

    death: Death
    name: str = ""
    namespace: str = ""
    job_id: bytes = b""
    detached: bool = False
    #: When it died, in seconds since the epoch.
    when: float = 0.0


def remembered(actor: Actor) -> DeadActor:
    """Return what to remember of an actor that just died."""
    assert actor.death is not None
    return DeadActor(
        actor.death,
        actor.spec.name or "",
        actor.spec.namespace,
        actor.job_id,
        actor.spec.detached,
        actor.died,
    )


#: Dead actors that are remembered, so that late callers get the reason.
_REMEMBERED = 10_000


class ActorChanges:
    """Actors that have changed; empty while there are no watchers."""

    def __init__(self) -> None:
        self._ids: dict[bytes, None] | None = None

    def watch(self) -> None:
        if self._ids is None:
            self._ids = {}

    def unwatch(self) -> None:
        self._ids = None

    def add(self, id: bytes) -> None:
        if self._ids is not None:
            self._ids[id] = None

    def take(self) -> list[bytes]:
        """Return the ids of those that changed since this was called, and forget them."""
        found = list(self._ids or ())
        if found:
            self._ids = {}
        return found


class ActorTable:
    """Living actors by id, (namespace, name), lease, process and owner; dead ones by id.

    The tables are for reading; the methods change them.
    """

    def __init__(self) -> None:
        self.living: dict[bytes, Actor] = {}
        self.by_name: dict[tuple[str, str], Actor] = {}
        self.by_process: dict[bytes, Actor] = {}
        #: By the lease that an actor has, or has requested.
        self.by_lease: dict[int, Actor] = {}
        #: Actors that end with the process that created them, in order; no empty entries.
        self.owned: dict[bytes, dict[bytes, None]] = {}
        #: The latest last.
        self.dead: collections.OrderedDict[bytes, DeadActor] = collections.OrderedDict()
        self.changes = ActorChanges()

    def take_owned(self, owner: bytes) -> list[Actor]:
        ids = self.owned.pop(owner, {})
        return [self.living[id] for id in ids if id in self.living]

    def enter(self, actor: Actor) -> None:
        """Add a new actor, which has no lease yet."""
        self.living[actor.id] = actor
        self.changes.add(actor.id)
        if actor.name is not None:
            self.by_name[actor.name] = actor
        # Only the creator can supply a detached actor's arguments while they have no values.
        if not actor.spec.detached or actor.arguments is None:
            self.owned.setdefault(actor.owner, {})[actor.id] = None

    def leased(self, actor: Actor, number: int) -> None:
        actor.lease = number
        self.changes.add(actor.id)
        self.by_lease[number] = actor

    def lives_in(self, actor: Actor, process_id: bytes, pid: int = 0) -> None:
        """Record an actor's process, and its pid if that is known."""
        self.by_process.pop(actor.process_id, None)
        actor.process_id, actor.pid = process_id, pid or actor.pid
        self.by_process[process_id] = actor
        self.changes.add(actor.id)

    def leave_place(self, actor: Actor) -> None:
        self.by_lease.pop(actor.lease, None)
        self.by_process.pop(actor.process_id, None)
        actor.lease, actor.node, actor.process_id, actor.pid = 0, None, b"", 0
        self.changes.add(actor.id)

    def died(self, actor: Actor) -> None:
        del self.living[actor.id]
        if actor.name is not None:
            del self.by_name[actor.name]
        self.disown(actor)
        self.enter_dead(actor.id, remembered(actor))

    def enter_dead(self, id: bytes, dead: DeadActor) -> None:
        self.dead[id] = dead
        self.changes.add(id)
        if len(self.dead) > _REMEMBERED:
            self.changes.add(self.dead.popitem(last=False)[0])

    def disown(self, actor: Actor) -> None:
        owned = self.owned.get(actor.owner)
        if owned is not None:
            owned.pop(actor.id, None)
            if not owned:
                del self.owned[actor.owner]


#: A handle can be quicker than the notice that its actor exists; it waits this long, in seconds.
_EARLY_WAIT = 10.0
#: Of an unknown actor.
UNKNOWN = Death(
    cause=DeathCause.UNKNOWN.name,
    class_name="",
    detail="This cluster does not know the actor: it is one of another cluster, or ended long ago.",
)


class ActorSubscribers:
    """The processes that are notified of each actor's state."""

    def __init__(self, clients: ClientDirectory, timers: Timers) -> None:
        self._clients = clients
        self._timers = timers
        #: In the order in which they are notified.
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
        """Notify the subscribers of an unknown actor, unless it is registered soon."""
        if actor_id not in self._awaited:
            self._awaited.add(actor_id)
            self._timers.call_later(_EARLY_WAIT, lambda: self._stop_waiting(actor_id))

    def came(self, actor_id: bytes) -> None:
        self._awaited.discard(actor_id)

    def _stop_waiting(self, actor_id: bytes) -> None:
        if actor_id in self._awaited:
            self._awaited.discard(actor_id)
            self.tell_death(actor_id, UNKNOWN)

    # --- notices -----------------------------------------------------------------
    def tell(self, process_id: bytes, actor: Actor, died: Death | None = None) -> None:
        node_id = actor.node.id if actor.node is not None else b""
        self._clients.push(
            process_id,
            "actor",
            actor.id,
            actor.state,
            node_id,
            actor.process_id,
            actor.restarts,
            None if died is None else tuple(died),
        )

    def tell_all(self, actor: Actor, died: Death | None = None) -> None:
        """Notify all subscribers where an actor is; if it restarts, how its process ended."""
        for process_id in self._of_actor.get(actor.id, ()):
            self.tell(process_id, actor, died)

    def tell_dead(self, process_id: bytes, actor_id: bytes, death: Death) -> None:
        self._clients.push(process_id, "actor", actor_id, DEAD, b"", b"", 0, tuple(death))

    def tell_death(self, actor_id: bytes, death: Death) -> None:
        """Notify all subscribers why an actor is dead, and drop them."""
        for process_id in self._of_actor.pop(actor_id, {}):
            self._of_process.get(process_id, set()).discard(actor_id)
            self.tell_dead(process_id, actor_id, death)
