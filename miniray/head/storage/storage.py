"""What a head tells its storage, and finds there when it starts again."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from miniray.head.directories.actor import Actor
    from miniray.head.directories.jobs import Job
    from miniray.head.directories.kv import Key
    from miniray.head.directories.placement_groups import PlacementGroupEntry


class Storage(Protocol):
    """Hears of every change that must survive."""

    def actor(self, actor: Actor) -> None:
        """An actor can start, moved, or died."""

    def placement_group(self, group: PlacementGroupEntry) -> None:
        """A group was asked for, placed, or removed."""

    def job(self, job: Job) -> None:
        """A job began or ended."""

    def job_forgotten(self, job_id: bytes) -> None:
        """A job that is over is remembered no longer."""

    def key_value(self, namespace: str, key: Key, value: bytes | None) -> None:
        """A value was set, or removed."""


class NoStorage:
    """Keeps nothing: for clusters that end with their head."""

    def actor(self, actor: Actor) -> None:
        """Nothing is kept."""

    def placement_group(self, group: PlacementGroupEntry) -> None:
        """Nothing is kept."""

    def job(self, job: Job) -> None:
        """Nothing is kept."""

    def job_forgotten(self, job_id: bytes) -> None:
        """Nothing is kept."""

    def key_value(self, namespace: str, key: Key, value: bytes | None) -> None:
        """Nothing is kept."""


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
