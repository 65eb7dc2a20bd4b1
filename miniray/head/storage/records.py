"""What of actors, placement groups and jobs is kept: plain data, and back.

Responsible for the form only; ``storage.py`` keeps it.
"""

from __future__ import annotations

import marshal

from miniray.common.specs import ActorSpec, Allocation, JobSpec, field_names
from miniray.head.directories.actor import Actor
from miniray.head.directories.actor_states import DeadActor, remembered
from miniray.head.directories.jobs import Job
from miniray.head.directories.placement_groups import PlacementGroupEntry
from miniray.head.scheduling.bundles import GroupPlacement
from miniray.messages.actor_death import Death

_ACTOR_FIELDS = (
    "id",
    "spec",
    "job_id",
    "near",
    "restarts_left",
    "state",
    "restarts",
    "arguments",
    "lease",
    "process_id",
    "pid",
)
_GROUP_FIELDS = (
    "id",
    "name",
    "namespace",
    "detached",
    "strategy",
    "bundles",
    "selectors",
    "asked",
    "placed",
)


def actor_record(actor: Actor) -> bytes:
    """An actor as it is kept."""
    fields = {name: getattr(actor, name) for name in _ACTOR_FIELDS}
    fields["spec"] = actor.spec.to_wire()
    return marshal.dumps((fields, actor.node.id if actor.node is not None else b""))


def read_actor(record: bytes) -> tuple[Actor, bytes]:
    """An actor without its job, and the node that it was on (empty: none)."""
    fields, node_id = marshal.loads(record)
    fields["spec"] = ActorSpec.from_wire(fields["spec"])
    return Actor(job=None, **fields), node_id


def dead_actor_record(actor: Actor) -> bytes:
    """An actor that is dead as it is remembered."""
    dead = remembered(actor)
    return marshal.dumps((actor.id, tuple(dead.death), *dead[1:]))


def read_dead_actor(record: bytes) -> tuple[bytes, DeadActor]:
    """Id and fate of an actor that is dead."""
    id, death, *others = marshal.loads(record)
    return id, DeadActor(Death(*death), *others)


def group_record(group: PlacementGroupEntry) -> bytes:
    """A placement group as it is kept, with what its bundles hold."""
    fields = {name: getattr(group, name) for name in _GROUP_FIELDS}
    state = group.state
    # What this head still awaits the next one has to await too.
    placed = state.allocations | state.awaited if state is not None else {}
    bundles = {index: tuple(allocation) for index, allocation in placed.items()}
    return marshal.dumps((fields, bundles))


def read_group(record: bytes) -> PlacementGroupEntry:
    """A group whose bundles await their nodes."""
    fields, bundles = marshal.loads(record)
    group = PlacementGroupEntry(**fields)
    group.state = GroupPlacement.of(group.id, group.bundles, group.strategy, group.selectors)
    group.state.awaited = {index: Allocation(*data) for index, data in bundles.items()}
    return group


def job_record(job: Job) -> bytes:
    """A job as it is kept."""
    fields = {name: getattr(job, name) for name in field_names(Job)}
    return marshal.dumps({**fields, "spec": job.spec.to_wire()})


def read_job(record: bytes) -> Job:
    """The inverse of ``job_record``."""
    fields = marshal.loads(record)
    return Job(**{**fields, "spec": JobSpec.from_wire(fields["spec"])})
