"""States of an actor, and what follows when its process ends. Pure decisions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from miniray.exceptions import DeathCause
from miniray.messages.actor_death import Death

if TYPE_CHECKING:
    from miniray.head.directories.actor import Actor
    from miniray.head.directories.clients import ProcessExit


#: Of an actor whose end was asked for before the head had heard of it.
NEVER_MADE = Death(DeathCause.KILLED.name, "")

#: Deaths with which programs end their actors: no news.
ORDINARY = frozenset({DeathCause.EXIT_ACTOR, DeathCause.OUT_OF_SCOPE, DeathCause.OWNER_DIED})
#: Deaths that a program asked for, perhaps another one than the actor's: news, no alarm.
REQUESTED = frozenset({DeathCause.KILLED, DeathCause.GROUP_REMOVED})


class DeadActor(NamedTuple):
    """What is remembered of an actor that is dead."""

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
    """Why an actor whose process ended is dead; None if it is to be restarted.

    A process that ends by rule with code 0 (``sys.exit()`` in a method) means it, so the
    actor stays dead, as in Ray.
    """
    if actor.exiting:
        return DeathCause.EXIT_ACTOR
    meant = exit.planned and exit.code == 0 and not actor.killed
    if actor.restarts_left != 0 and not meant:
        return None
    return how_it_ended(exit, actor)


def how_it_ended(exit: ProcessExit, actor: Circumstances) -> DeathCause:
    """What has ended the process of an actor that had not asked for it."""
    if exit.with_node:
        return DeathCause.NODE_LOST
    return DeathCause.KILLED if actor.killed else DeathCause.EXITED


def death_of(actor: Actor, cause: DeathCause, how: ProcessExit, creation: bytes | None) -> Death:
    """What callers of an actor hear of its death."""
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
    """What is remembered of an actor that is dead."""
    assert actor.death is not None
    return DeadActor(
        actor.death,
        actor.spec.name or "",
        actor.spec.namespace,
        actor.job_id,
        actor.spec.detached,
        actor.died,
    )
