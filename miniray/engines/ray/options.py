"""Checked options as those of Ray."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ray._raylet import PlacementGroupID
from ray.util import client
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import PlacementGroup

from miniray.common.specs import Anywhere, BundleAffinity, NodeAffinity, Spread
from miniray.engines.capabilities import refuse
from miniray.engines.ray.errors import retried

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.common.specs import ActorOptions, MethodOptions, Placement, TaskOptions


def group_of(id: bytes) -> PlacementGroup:
    """Return Ray's handle of a placement group."""
    return PlacementGroup(PlacementGroupID(id))


def _strategy(placement: Placement) -> Any:
    if isinstance(placement, NodeAffinity):
        return strategies.NodeAffinitySchedulingStrategy(placement.node_id, placement.soft)
    if isinstance(placement, BundleAffinity):
        return strategies.PlacementGroupSchedulingStrategy(
            group_of(placement.placement_group_id),
            placement.bundle_index,
            placement.capture_child_tasks,
        )
    return {Spread: "SPREAD", Anywhere: "DEFAULT"}.get(type(placement))


def _demand(options: TaskOptions | ActorOptions) -> dict[str, Any]:
    """Return what tasks and actors ask for alike; what is None is left to Ray."""
    others = dict(options.resources)
    return {
        "num_cpus": others.pop("CPU", 0),
        "num_gpus": others.pop("GPU", None),
        "memory": others.pop("memory", None),
        "resources": others or None,
        "scheduling_strategy": _strategy(options.placement),
        "label_selector": options.label_selector or None,
        "fallback_strategy": [{"label_selector": dict(each)} for each in options.fallback_selectors]
        or None,
        "runtime_env": options.runtime_env and dict(options.runtime_env),
        "name": options.name or None,
    }


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def for_task(options: TaskOptions) -> dict[str, Any]:
    """Return the options of a task."""
    own = {
        "num_returns": options.num_returns,
        "max_retries": options.max_retries,
        "retry_exceptions": retried(options.retry_exceptions),
        **_backpressure(options),
    }
    return _given(_demand(options) | own)


def for_actor(options: ActorOptions) -> dict[str, Any]:
    """Return the options of an actor."""
    demand = _demand(options)
    if options.resources.keys() <= {"memory"} and "CPU" in options.placement_resources:
        del demand["num_cpus"]  # not given: Ray places such an actor as miniray does
    own = {
        "namespace": options.namespace,
        "get_if_exists": options.get_if_exists or None,
        "lifetime": options.lifetime,
        "max_restarts": options.max_restarts,
        "max_task_retries": options.max_task_retries,
        "max_concurrency": options.max_concurrency,
        "max_pending_calls": options.max_pending_calls,
    }
    return _given(demand | own)


@functools.lru_cache(maxsize=1024)
def for_method(options: MethodOptions) -> dict[str, Any]:
    """Return the options of a call of an actor; empty if they are the usual ones."""
    streams = options.num_returns == "streaming"
    own = {
        "num_returns": None if options.num_returns == 1 or streams else options.num_returns,
        "concurrency_group": options.concurrency_group,
        "max_task_retries": options.max_task_retries,
        "retry_exceptions": retried(options.retry_exceptions) or None,
        "name": options.name or None,
        **_backpressure(options),
    }
    return _given(own)


def _backpressure(options: TaskOptions | MethodOptions) -> dict[str, Any]:
    limit = options.generator_backpressure
    if options.num_returns == "streaming" and client.ray.is_connected():
        refuse("generators over ray://")
    return {"_generator_backpressure_num_objects": limit} if limit >= 0 else {}
