"""What the head has to know of actors and of the leases of tasks, as it travels."""

from __future__ import annotations

from typing import TypedDict

#: ("node", id, soft), ("bundle", group, index, captures), ("spread",), or None: anywhere.
PlacementData = tuple[str, bytes, bool] | tuple[str, bytes, int, bool | None] | tuple[str] | None


class _Optional(TypedDict, total=False):
    #: Labels that will do where those of ``labels`` have no room.
    fallback_labels: list[dict[str, str]]
    preload: list[str]
    preload_later: list[str]


class _Spec(_Optional):
    resources: dict[str, float]
    placement: PlacementData
    #: JSON; empty: none.
    runtime_env: str
    labels: dict[str, str] | None


class TaskSpec(_Spec):
    """Of the leases of one shape of tasks."""

    max_calls: int | None
    name: str


class ActorSpec(_Spec):
    """Of one actor."""

    class_key: bytes
    class_name: str
    #: Pickled ``ActorClassInfo``.
    info: bytes
    #: What has to be free where it is placed.
    placement_resources: dict[str, float]
    name: str | None
    namespace: str
    detached: bool
    max_restarts: int
    max_concurrency: int | None
    concurrency_groups: dict[str, int]
    is_async: bool
    owner_node: bytes
