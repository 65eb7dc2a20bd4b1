"""What there is in the cluster: nodes, actors, workers, jobs, placement groups, waiting demands.

Ray's ``ray.util.state``, as far as the head knows of it: single tasks and objects are
known to their owners only. Works without ``init()`` where a cluster runs on this machine.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, TypeVar

from miniray.core.runtime import runtime_or_none
from miniray.util.state_records import (
    ActorState,
    JobState,
    NodeState,
    PendingDemandState,
    PlacementGroupState,
    State,
    WorkerState,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ActorState",
    "JobState",
    "NodeState",
    "PendingDemandState",
    "PlacementGroupState",
    "WorkerState",
    "get_actor",
    "get_job",
    "get_node",
    "get_placement_group",
    "get_worker",
    "list_actors",
    "list_jobs",
    "list_nodes",
    "list_pending_demands",
    "list_placement_groups",
    "list_workers",
    "summarize_actors",
]

#: How many records a listing returns unless more are asked for.
DEFAULT_LIMIT = 100

#: (field, "=" or "!=", value); all of them must hold.
Filter = tuple[str, str, Any]

_StateT = TypeVar(
    "_StateT",
    ActorState,
    JobState,
    NodeState,
    PendingDemandState,
    PlacementGroupState,
    WorkerState,
)


def list_actors(
    address: str | None = None,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
) -> list[ActorState]:
    """The actors, then those that have died, the latest last.

    Args:
        address: ``HOST:PORT`` of the cluster; that of this process, or of this machine, if None.
        filters: Conditions such as ``("state", "=", "ALIVE")`` that all must hold. Texts are
            compared without regard to case, as in Ray.
        limit: The most records that are returned.

    Raises:
        ValueError: a filter names no field, or is malformed; or the limit is not positive.
        ConnectionError: there is no such cluster.
    """
    return _listing("actors", ActorState, address, filters, limit)


def list_nodes(
    address: str | None = None,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
) -> list[NodeState]:
    """The nodes, then those that were lost. Arguments and errors as for ``list_actors``."""
    return _listing("node_states", NodeState, address, filters, limit)


def list_workers(
    address: str | None = None,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
) -> list[WorkerState]:
    """The workers and drivers. Arguments and errors as for ``list_actors``."""
    return _listing("workers", WorkerState, address, filters, limit)


def list_placement_groups(
    address: str | None = None,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
) -> list[PlacementGroupState]:
    """The placement groups. Arguments and errors as for ``list_actors``."""
    return _listing("placement_groups", PlacementGroupState, address, filters, limit)


def list_jobs(
    address: str | None = None,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
) -> list[JobState]:
    """The jobs, ended ones included. Arguments and errors as for ``list_actors``."""
    return _listing("jobs", JobState, address, filters, limit)


def list_pending_demands(
    address: str | None = None,
    filters: Sequence[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
) -> list[PendingDemandState]:
    """What waits for resources, and why. Arguments and errors as for ``list_actors``.

    Tasks and actors that wait for their arguments do not wait for resources.
    """
    return _listing("pending", PendingDemandState, address, filters, limit)


def get_actor(id: str, address: str | None = None) -> ActorState | None:
    """The actor with this hex id, or None."""
    return _first(list_actors(address, [("actor_id", "=", id)], 1))


def get_node(id: str, address: str | None = None) -> NodeState | None:
    """The node with this hex id, or None."""
    return _first(list_nodes(address, [("node_id", "=", id)], 1))


def get_worker(id: str, address: str | None = None) -> WorkerState | None:
    """The worker or driver with this hex id, or None."""
    return _first(list_workers(address, [("worker_id", "=", id)], 1))


def get_placement_group(id: str, address: str | None = None) -> PlacementGroupState | None:
    """The placement group with this hex id, or None."""
    return _first(list_placement_groups(address, [("placement_group_id", "=", id)], 1))


def get_job(id: str, address: str | None = None) -> JobState | None:
    """The job with this hex id, or None."""
    return _first(list_jobs(address, [("job_id", "=", id)], 1))


def summarize_actors(address: str | None = None) -> dict[str, Any]:
    """How many actors of each class are in each state.

    Returns:
        Ray's form: ``{"cluster": {"summary": {CLASS: {"class_name": CLASS, "state_counts":
        {STATE: COUNT}}}, "total_actors": COUNT, "summary_by": "class"}}``.
    """
    actors = [ActorState.of(data) for data in _ask(address, "actors")]
    counts: dict[str, collections.Counter[str]] = {}
    for actor in actors:
        counts.setdefault(actor.class_name, collections.Counter())[actor.state] += 1
    summary = {
        name: {"class_name": name, "state_counts": dict(states)} for name, states in counts.items()
    }
    return {
        "cluster": {"summary": summary, "total_actors": len(actors), "summary_by": "class"},
    }


def _listing(
    what: str,
    kind: type[_StateT],
    address: str | None,
    filters: Sequence[Filter] | None,
    limit: int,
) -> list[_StateT]:
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}.")
    for condition in filters or ():
        _check(condition, kind)
    records = [kind.of(data) for data in _ask(address, what)]
    found = [record for record in records if all(_holds(record, each) for each in filters or ())]
    return found[:limit]


def _check(condition: Filter, kind: type[State]) -> None:
    if not isinstance(condition, (tuple, list)) or len(condition) != 3:
        raise ValueError(f"A filter is (field, '=' or '!=', value), not {condition!r}.")
    field, predicate, _ = condition
    known = sorted(kind.__dataclass_fields__)
    if field not in known:
        raise ValueError(f"{kind.__name__} has no field {field!r} to filter by; it has {known}.")
    if predicate not in ("=", "!="):
        raise ValueError(f"The predicate of a filter is '=' or '!=', not {predicate!r}.")


def _holds(record: State, condition: Filter) -> bool:
    field, predicate, value = condition
    return _same(record[field], value) == (predicate == "=")


def _same(actual: Any, wanted: Any) -> bool:
    """Texts match without regard to case, and may stand for numbers and truth, as in Ray."""
    if isinstance(wanted, str) and (actual is None or isinstance(actual, (str, int, float))):
        return str(actual).lower() == wanted.lower()
    return bool(actual == wanted)


def _first(found: list[_StateT]) -> _StateT | None:
    return found[0] if found else None


def _ask(address: str | None, what: str) -> list[dict[str, Any]]:
    """A listing of the head: of this process's cluster, or of one on this machine."""
    runtime = runtime_or_none()
    if runtime is not None and address in (None, "auto", runtime.context().address):
        listing: list[dict[str, Any]] = runtime.head_call("state", what)
        return listing
    from miniray.core.bootstrap import connect_for_cli
    from miniray.session import latest_cluster

    record = latest_cluster(None if address == "auto" else address)
    if record is None:
        where = f"at {address} " if address not in (None, "auto") else ""
        raise ConnectionError(
            f"No cluster {where}runs on this machine. Call miniray.init(), or start one with "
            "`miniray start --head`."
        )
    return connect_for_cli(record).listing(what)
