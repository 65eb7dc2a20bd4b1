"""One actor as the head knows it, and what follows when its process ends. Does no I/O."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from miniray.common.ids import owner_of
from miniray.exceptions import DeathCause
from miniray.messages.errors import Death

if TYPE_CHECKING:
    from miniray.common.specs import ActorSpec
    from miniray.head.directories.clients import ProcessExit
    from miniray.head.directories.jobs import Job
    from miniray.head.directories.nodes import ClusterNode
    from miniray.head.scheduling.demands import Demand


#: States of an actor.
PENDING = "PENDING"
ALIVE = "ALIVE"
RESTARTING = "RESTARTING"
DEAD = "DEAD"


@dataclasses.dataclass(eq=False, slots=True)
class Actor:
    """An actor that is not dead."""

    id: bytes
    spec: ActorSpec
    job_id: bytes
    job: Job | None
    #: Name of the node that is preferred, which is its creator's.
    near: str
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
    exiting: bool = False
    killed: bool = False
    #: Once it is dead: why, and since when, in seconds since the epoch.
    death: Death | None = None
    died: float = 0.0

    @property
    def owner(self) -> bytes:
        return owner_of(self.id)

    @property
    def class_name(self) -> str:
        return self.spec.class_name

    @property
    def name(self) -> tuple[str, str] | None:
        """(namespace, name), or None."""
        name = self.spec.name
        return None if name is None else (self.spec.namespace, name)

    @property
    def location(self) -> tuple[bytes, bytes, bool, bytes]:
        """What a process needs to make a handle of this actor."""
        spec = self.spec
        return self.id, spec.owner_node, spec.detached, spec.info


#: Of an actor whose end was asked for before it was registered.
NEVER_MADE = Death(DeathCause.KILLED.name, "")

#: Deaths with which programs end their actors: no news.
ORDINARY = frozenset({DeathCause.EXIT_ACTOR, DeathCause.OUT_OF_SCOPE, DeathCause.OWNER_DIED})
#: Deaths that a program asked for, perhaps another one than the actor's: news, no alarm.
REQUESTED = frozenset({DeathCause.KILLED, DeathCause.GROUP_REMOVED})


class DeadActor(NamedTuple):
    """What is remembered of a dead actor."""

    death: Death
    name: str = ""
    namespace: str = ""
    job_id: bytes = b""
    detached: bool = False
    #: When it died, in seconds since the epoch.
    when: float = 0.0


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What is known of an actor when its process ends."""

    #: Restarts that are left; -1: without end.
    restarts_left: int
    #: It ended itself with exit_actor.
    exiting: bool = False
    #: ``kill`` asked for it.
    killed: bool = False


def cause_of_death(exit: ProcessExit, actor: Circumstances) -> DeathCause | None:
    """Return why an actor whose process ended is dead; None if it is to be restarted.

    A planned exit with code 0 (``sys.exit()`` in a method) is meant, so the actor stays dead, as
    in Ray.
    """
    if actor.exiting:
        return DeathCause.EXIT_ACTOR
    meant = exit.planned and exit.code == 0 and not actor.killed
    if actor.restarts_left != 0 and not meant:
        return None
    return how_it_ended(exit, actor)


def how_it_ended(exit: ProcessExit, actor: Circumstances) -> DeathCause:
    """Return what ended the process of an actor that had not asked for it."""
    if exit.with_node:
        return DeathCause.NODE_LOST
    return DeathCause.KILLED if actor.killed else DeathCause.EXITED


def death_of(actor: Actor, cause: DeathCause, how: ProcessExit, creation: bytes | None) -> Death:
    """Describe an actor's death for its callers."""
    node_id = actor.node.name if actor.node is not None else ""
    detail = how.detail if cause in (DeathCause.EXITED, DeathCause.OWNER_DIED) else ""
    if cause is DeathCause.NODE_LOST and actor.node is not None and actor.node.reason:
        detail = f"{actor.node.reason[0].upper()}{actor.node.reason[1:]}."
    return Death(
        cause.name,
        actor.class_name,
        how.code,
        how.pid or actor.pid,
        node_id,
        detail,
        creation,
        actor.restarts,
        actor.spec.max_restarts,
    )


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
