"""Checked options as those of Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray._raylet import PlacementGroupID
from ray.util import client
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import PlacementGroup

from miniray.common.names import printable, short_name
from miniray.common.specs import Anywhere, BundleAffinity, NodeAffinity, Spread
from miniray.engines.capabilities import refuse
from miniray.engines.ray.errors import retried

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.specs import ActorOptions, MethodOptions, Placement, TaskOptions


def group_of(id: bytes) -> PlacementGroup:
    """Return Ray's handle of a placement group."""
    return PlacementGroup(PlacementGroupID(id))


def called(function: str, options: TaskOptions | MethodOptions) -> str:
    """Return how errors name a call, and where it was to run, which Ray's do not tell."""
    name, placement = options.name or short_name(function), getattr(options, "placement", None)
    if isinstance(placement, NodeAffinity):
        name += f" on node {placement.node_id}"
    elif isinstance(placement, BundleAffinity):
        name += f" in placement group {placement.placement_group_id.hex()}"
    return printable(name)


def _strategy(placement: Placement) -> Any:
    if isinstance(placement, NodeAffinity):
        return strategies.NodeAffinitySchedulingStrategy(placement.node_id, placement.soft)
    if isinstance(placement, BundleAffinity):
        return strategies.PlacementGroupSchedulingStrategy(
            group_of(placement.placement_group_id),
            placement.bundle_index,
            placement.capture_child_tasks,
        )
    return {Spread: "SPREAD", Anywhere: "DEFAULT"}[type(placement)]


#: How Ray wants the values of some fields, by the names that it has for them.
_THEIRS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "placement": ("scheduling_strategy", _strategy),
    "retry_exceptions": ("retry_exceptions", retried),
    "runtime_env": ("runtime_env", dict),
    "label_selector": ("label_selector", dict),
    "fallback_selectors": (
        "fallback_strategy",
        lambda selectors: [{"label_selector": dict(each)} for each in selectors],
    ),
    "generator_backpressure": ("_generator_backpressure_num_objects", int),
}
#: Fields that Ray gets elsewhere, or has nothing for.
_OTHERS = {"resources", "max_calls", "concurrency_groups"}
_OTHERS |= {"placement_resources", "preload", "preload_later"}


def as_ray(options: TaskOptions | ActorOptions | MethodOptions) -> dict[str, Any]:
    """Return options for Ray, without those that have their usual value."""
    if getattr(options, "num_returns", 1) == "streaming" and client.ray.is_connected():
        refuse("generators over ray://")
    made = {}
    for name, field in type(options).__dataclass_fields__.items():
        value = getattr(options, name)
        if name not in _OTHERS and (value != field.default or name == "num_returns"):
            theirs, convert = _THEIRS.get(name, (name, lambda same: same))
            made[theirs] = convert(value)
    if hasattr(options, "resources"):
        others = dict(options.resources)
        if others.keys() - {"memory"} or "CPU" not in getattr(options, "placement_resources", ()):
            made["num_cpus"] = others.pop("CPU", 0)
        # Else not given: Ray places an actor that gives nothing as miniray does.
        made |= {"num_gpus": others.pop("GPU", None), "memory": others.pop("memory", None)}
        made["resources"] = others or None
    return made
