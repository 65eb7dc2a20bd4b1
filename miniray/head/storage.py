"""What of the head's state survives it: when it is kept, and in which form.

The database is in ``sqlite_storage.py``.
"""

from __future__ import annotations

import dataclasses
import marshal
import time
from typing import TYPE_CHECKING

from miniray.common.specs import ActorSpec, Allocation, CommandSpec, JobSpec, field_names
from miniray.head.directories.actor_table import Actor, DeadActor, remembered
from miniray.head.directories.jobs import Job
from miniray.head.directories.placement_groups import PlacementGroupEntry
from miniray.head.directories.submitted_job import SubmittedJob
from miniray.head.scheduling.bundles import GroupPlacement
from miniray.messages.errors import Death

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.head.directories.jobs import Key


class Storage:
    """Keeps what must survive the head; this one nothing, as an embedded cluster ends with it."""

    #: Where the logs of submitted jobs are kept.
    job_logs: Path | None = None

    def actor(self, actor: Actor) -> None:
        """Keep an actor that can start or has moved; forget one that died."""

    def placement_group(self, group: PlacementGroupEntry) -> None:
        """Keep a group that was created or placed; forget one that was removed."""

    def job(self, job: Job) -> None:
        """Keep a job that began or ended."""

    def job_forgotten(self, job_id: bytes) -> None:
        """Forget a job."""

    def submitted_job(self, job: SubmittedJob) -> None:
        """Keep a submitted job that is new or has changed."""

    def submitted_job_forgotten(self, name: str) -> None:
        """Forget a submitted job."""

    def key_value(self, namespace: str, key: Key, value: bytes | None) -> None:
        """Keep a value; None forgets it."""

    def when_written(self, then: Callable[[], object]) -> None:
        """Call back when all changes up to now are kept, or cannot be."""
        then()


@dataclasses.dataclass(frozen=True)
class Saved:
    """What was kept by the heads of this cluster before."""

    cluster_id: str
    #: Of this start; the first one is 1.
    epoch: int
    actors: list[bytes]
    groups: list[bytes]
    jobs: list[bytes]
    #: (namespace, key, value)
    values: list[tuple[str, Key, bytes]]
    #: Actors that died lately, and groups that were removed: daemons may ask for them again.
    dead_actors: list[bytes] = dataclasses.field(default_factory=list)
    removed_groups: list[bytes] = dataclasses.field(default_factory=list)
    #: When the first head started, in seconds since the epoch.
    started: float = dataclasses.field(default_factory=time.time)
    submitted_jobs: list[bytes] = dataclasses.field(default_factory=list)


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
    fields = {name: getattr(actor, name) for name in _ACTOR_FIELDS}
    fields["spec"] = actor.spec.to_wire()
    return marshal.dumps((fields, actor.node.id if actor.node is not None else b""))


def read_actor(record: bytes) -> tuple[Actor, bytes]:
    """Decode an actor, without its job, and the id of its node (empty: none)."""
    fields, node_id = marshal.loads(record)
    fields["spec"] = ActorSpec.from_wire(fields["spec"])
    return Actor(job=None, **fields), node_id


def dead_actor_record(actor: Actor) -> bytes:
    dead = remembered(actor)
    return marshal.dumps((actor.id, tuple(dead.death), *dead[1:]))


def read_dead_actor(record: bytes) -> tuple[bytes, DeadActor]:
    id, death, *others = marshal.loads(record)
    return id, DeadActor(Death(*death), *others)


def group_record(group: PlacementGroupEntry) -> bytes:
    fields = {name: getattr(group, name) for name in _GROUP_FIELDS}
    state = group.state
    # What this head still awaits the next one has to await too.
    placed = state.allocations | state.awaited if state is not None else {}
    bundles = {index: tuple(allocation) for index, allocation in placed.items()}
    return marshal.dumps((fields, bundles))


def read_group(record: bytes) -> PlacementGroupEntry:
    """Decode a group, whose bundles await their nodes."""
    fields, bundles = marshal.loads(record)
    group = PlacementGroupEntry(**fields)
    group.state = GroupPlacement.of(group.id, group.bundles, group.strategy, group.selectors)
    group.state.awaited = {index: Allocation(*data) for index, data in bundles.items()}
    return group


def job_record(job: Job) -> bytes:
    fields = {name: getattr(job, name) for name in field_names(Job)}
    return marshal.dumps({**fields, "spec": job.spec.to_wire()})


def read_job(record: bytes) -> Job:
    fields = marshal.loads(record)
    return Job(**{**fields, "spec": JobSpec.from_wire(fields["spec"])})


def submitted_job_record(job: SubmittedJob) -> bytes:
    """Encode a submitted job."""
    fields = {name: getattr(job, name) for name in field_names(SubmittedJob)}
    return marshal.dumps({**fields, "spec": job.spec.to_wire()})


def read_submitted_job(record: bytes) -> SubmittedJob:
    """Decode a submitted job."""
    fields = marshal.loads(record)
    return SubmittedJob(**{**fields, "spec": CommandSpec.from_wire(fields["spec"])})
