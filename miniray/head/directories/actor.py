"""One actor as the head knows it, and what follows when its process ends. Does no I/O."""

from __future__ import annotations

import dataclasses
import time
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
    #: ``kill`` asked for the end of its process.
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
        """Return what ended the process, as the actor had not asked for it."""
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
        self.state, self.killed = RESTARTING, False
        self.restarts += 1
        if self.restarts_left > 0:
            self.restarts_left -= 1

    def die(self, death: Death) -> None:
        self.state, self.death, self.died = DEAD, death, time.time()


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
