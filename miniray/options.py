"""The options of tasks, actors and methods: which exist, and what they add up to.

This is the one place where options are checked, at the decorator and at
``.options()``. What users write becomes ``TaskOptions``, ``ActorOptions`` and
``MethodOptions``; single values are checked by ``system/option_checks.py``.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, Any

from miniray.common.names import user_stacklevel
from miniray.common.specs import (
    ActorOptions,
    Anywhere,
    BundleAffinity,
    MethodOptions,
    NodeAffinity,
    Placement,
    Spread,
    TaskOptions,
    field_names,
)
from miniray.system import option_checks as check
from miniray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Checks = dict[str, "Callable[[str, Any], Any]"]

_NO_END = "-1 is without end"
#: Amount of ``accelerator_type:X`` that a task demands to be placed where X is.
_TYPE_SHARE = 0.001


def _cpus(name: str, value: Any) -> float:
    return check.amount(name, value, "CPU")


def _gpus(name: str, value: Any) -> float:
    return check.amount(name, value, "GPU")


def _backpressure(name: str, value: Any) -> int:
    if value == 0:
        raise ValueError(f"{name} must be positive, or -1 for no limit, not 0.")
    return check.whole(-1, "-1 is no limit")(name, value)


def _strategy(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return check.one_of("DEFAULT", "SPREAD")(name, value)
    classes = (
        PlacementGroupSchedulingStrategy,
        NodeAffinitySchedulingStrategy,
        NodeLabelSchedulingStrategy,
    )
    if not isinstance(value, classes):
        names = ", ".join(cls.__name__ for cls in classes)
        raise check.wrong_type(name, value, f'"DEFAULT", "SPREAD" or one of {names}')
    return value


def _group(name: str, value: Any) -> Any:
    from miniray.util.placement_group import PlacementGroup

    if value not in (None, "default") and not isinstance(value, PlacementGroup):
        raise check.wrong_type(name, value, "a PlacementGroup")
    return value


def _no_effect(name: str, value: Any) -> Any:
    """Warn of an option that asks only for less, or for records that miniray does not keep."""
    warnings.warn(
        f"The option {name}={check.shown(value)} has no effect in miniray.",
        UserWarning,
        stacklevel=user_stacklevel(),
    )
    return value


_COMMON: Checks = {
    "num_cpus": _cpus,
    "num_gpus": _gpus,
    "memory": check.memory,
    "resources": check.resources,
    "accelerator_type": check.text,
    "name": check.text,
    "runtime_env": check.runtime_env,
    "label_selector": check.label_selector,
    "fallback_strategy": check.fallbacks,
    "scheduling_strategy": _strategy,
    "placement_group": _group,
    "placement_group_bundle_index": check.whole(-1, "-1 is any bundle"),
    "placement_group_capture_child_tasks": check.boolean,
    "enable_task_events": _no_effect,
    "_metadata": _no_effect,
    "_labels": _no_effect,
}

TASK_OPTIONS: Checks = {
    **_COMMON,
    "name": check.call_name,
    "num_returns": check.num_returns,
    "max_retries": check.whole(-1, _NO_END),
    "retry_exceptions": check.exceptions,
    "max_calls": check.whole(0, "0 is no limit", most=2**31 - 1),
    "_generator_backpressure_num_objects": _backpressure,
    # Module names that the processes of such tasks are forked with, loaded: for large libraries.
    "_preload": check.names,
}

ACTOR_OPTIONS: Checks = {
    **_COMMON,
    "namespace": check.text,
    "get_if_exists": check.boolean,
    "lifetime": check.one_of("detached", "non_detached"),
    "max_restarts": check.whole(-1, _NO_END),
    "max_task_retries": check.whole(-1, _NO_END),
    "max_concurrency": check.whole(1, most=check.LARGEST_COUNT),
    "concurrency_groups": check.concurrency_groups,
    "max_pending_calls": check.whole(-1, "-1 is no limit"),
    "object_store_memory": _no_effect,
    "allow_out_of_order_execution": _no_effect,
    # As of tasks.
    "_preload": check.names,
    # More of them, for which the first processes do not wait: those that start later have them.
    "_preload_later": check.names,
}

METHOD_OPTIONS: Checks = {
    "name": check.call_name,
    "num_returns": check.num_returns,
    "concurrency_group": check.text,
    "max_task_retries": check.whole(-1, _NO_END),
    "retry_exceptions": check.exceptions,
    "enable_task_events": _no_effect,
    "_generator_backpressure_num_objects": _backpressure,
    "_labels": _no_effect,
}

#: Options of Ray that mean something which miniray does not have.
_UNSUPPORTED = {
    "enable_tensor_transport": "pass tensors as values; they are read without a copy",
    "tensor_transport": "pass tensors as values; they are read without a copy",
    "_num_objects_per_yield": "yield tuples",
    "_actor_generator_backpressure_num_objects": "use _generator_backpressure_num_objects",
}


def checked(
    given: Mapping[str, Any], known: Checks, what: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Check what a user gave and put it over ``base``; other options have their defaults.

    Args:
        given: Option names and values as the user wrote them. None means the default, but for
            ``placement_group``: no group, though the caller's captures what it starts.
        known: The options there are, with their checks.
        what: Their subject, for messages: "a task", "an actor".
        base: Checked options that hold for those not in ``given``.

    Raises:
        ValueError: There is no such option, or its value is not allowed.
        TypeError: A value is of a wrong type.
    """
    options = dict(base or {})
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, known, what)
        options.pop(name, None)
        if value is not None or name == "placement_group":
            found = known[name](name, value)
            if known[name] is not _no_effect:
                options[name] = found
    return options


def check_task(given: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Check options of a task; errors as for ``checked``."""
    if base is not None and "max_calls" in given:
        raise ValueError("max_calls belongs to the decorator; .options() can't change it.")
    return checked(given, TASK_OPTIONS, "a task", base)


def check_actor(given: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Check options of an actor; errors as for ``checked``."""
    if base is not None and "concurrency_groups" in given:
        raise ValueError("concurrency_groups belong to the decorator; .options() can't change it.")
    return checked(given, ACTOR_OPTIONS, "an actor", base)


def check_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check options of a method; errors as for ``checked``."""
    return checked(given, METHOD_OPTIONS, "a method")


def _unknown(name: str, known: Checks, what: str) -> ValueError:
    if name in _UNSUPPORTED:
        return ValueError(f"The option {name} is not supported by miniray: {_UNSUPPORTED[name]}.")
    kinds = {"tasks": TASK_OPTIONS, "actors": ACTOR_OPTIONS, "methods": METHOD_OPTIONS}
    owners = [kind for kind, options in kinds.items() if name in options]
    if owners:
        return ValueError(f"{name!r} is an option of {' and '.join(owners)}, not of {what}.")
    public = [option for option in known if not option.startswith("_")]
    return ValueError(
        f"{name!r} is not an option of {what}.{check.suggestion(name, known)} "
        f"The options are {', '.join(public)}."
    )


#: Fields of the options' classes that are called otherwise than the options they come from.
_FIELDS = {
    "_generator_backpressure_num_objects": "generator_backpressure",
    "_preload": "preload",
    "_preload_later": "preload_later",
}


def _given(options: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Return the options that are fields of a class, by the names of the fields."""
    known = field_names(cls)
    named = ((_FIELDS.get(name, name), value) for name, value in options.items())
    return {field: value for field, value in named if field in known}


def task_options(options: Mapping[str, Any], *, is_generator: bool = False) -> TaskOptions:
    """Fill in the defaults of checked options, and check that they go together."""
    resources = _demand(options)
    if "num_cpus" not in options:
        resources["CPU"] = 1
    returns = _returns(options, is_generator)
    given = {**options, "num_returns": returns}
    made = {"resources": resources, "num_returns": returns, "given": given}
    return TaskOptions(**_given(options, TaskOptions) | _placement(options, resources) | made)


def actor_options(options: Mapping[str, Any]) -> ActorOptions:
    """Fill in the defaults of checked options, and check that they go together."""
    if options.get("get_if_exists") and "name" not in options:
        raise ValueError("get_if_exists=True needs the option name: which actor to look for.")
    if options.get("lifetime") == "detached" and "name" not in options:
        warnings.warn(
            'An actor with lifetime="detached" and no name can only be reached while handles of '
            "it exist; give it a name to find it again.",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
    resources = _demand(options)
    to_place = dict(resources)
    if "num_cpus" not in options:
        to_place["CPU"] = 1
    made = {"resources": resources, "placement_resources": to_place, "given": options}
    return ActorOptions(**_given(options, ActorOptions) | _placement(options, to_place) | made)


def method_options(
    options: Mapping[str, Any], *, is_generator: bool = False, base: MethodOptions | None = None
) -> MethodOptions:
    """Put checked options over those of ``base``, or over the defaults."""
    fields = _given(options, MethodOptions)
    given = {**base.given, **options} if base else dict(options)
    if base is None or "num_returns" in options:
        fields["num_returns"] = _returns(options, is_generator)
        if fields["num_returns"] != 1:
            given["num_returns"] = fields["num_returns"]
    return dataclasses.replace(base or MethodOptions(), **fields, given=given)


def _returns(options: Mapping[str, Any], is_generator: bool) -> int | str:
    given: int | str | None = options.get("num_returns")
    if given is None:
        return "streaming" if is_generator else 1
    if isinstance(given, str) and not is_generator:
        raise ValueError(
            f'num_returns="{given}" is for generator functions (those that use yield), '
            f"which this one is not."
        )
    return given


def _demand(options: Mapping[str, Any]) -> dict[str, float]:
    """Return what must be free, by resource name; amounts of 0 are left out."""
    demand: dict[str, float] = {
        "CPU": options.get("num_cpus", 0),
        "GPU": options.get("num_gpus", 0),
        "memory": options.get("memory", 0),
        **options.get("resources", {}),
    }
    if "accelerator_type" in options:
        demand[f"accelerator_type:{options['accelerator_type']}"] = _TYPE_SHARE
    return {resource: amount for resource, amount in demand.items() if amount}


def _placement(options: Mapping[str, Any], resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the placement, and which labels a node must have, the best choice first."""
    strategy = _strategy_of(options)
    selectors: tuple[dict[str, str], ...] = (
        options.get("label_selector", {}),
        *options.get("fallback_strategy", ()),
    )
    placement: Placement = None
    if isinstance(strategy, PlacementGroupSchedulingStrategy):
        if strategy.placement_group != "default":
            placement = _bundle(strategy, resources)
    elif isinstance(strategy, NodeAffinitySchedulingStrategy):
        placement = NodeAffinity(strategy.node_id, strategy.soft)
    elif isinstance(strategy, NodeLabelSchedulingStrategy):
        placement, selectors = Anywhere(), _by_labels(strategy, selectors)
    elif strategy == "SPREAD":
        placement = Spread()
    elif strategy == "DEFAULT" or options.get("placement_group", "default") is None:
        placement = Anywhere()
    first, *others = selectors
    return {
        "placement": placement,
        "label_selector": first,
        "fallback_selectors": tuple(others),
    }


def _strategy_of(options: Mapping[str, Any]) -> Any:
    """Return the strategy as it is given, or as the options of a placement group say it."""
    strategy = options.get("scheduling_strategy")
    group = options.get("placement_group", "default")
    index = options.get("placement_group_bundle_index", -1)
    if group in (None, "default"):
        if index != -1:
            raise ValueError("placement_group_bundle_index needs the option placement_group.")
        return strategy
    if strategy is not None:
        raise ValueError(
            "placement_group and scheduling_strategy can't be given together; use "
            "scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=...)."
        )
    captures = options.get("placement_group_capture_child_tasks")
    return PlacementGroupSchedulingStrategy(group, index, captures)


def _by_labels(
    strategy: NodeLabelSchedulingStrategy, selectors: tuple[dict[str, str], ...]
) -> tuple[dict[str, str], ...]:
    """Add the strategy's conditions to each selector: with its soft ones, then without."""
    found = []
    for selector in selectors:
        must = {**selector, **strategy.hard}
        wished = must | {
            key: f"{must[key]}&{wish}" if key in must else wish
            for key, wish in strategy.soft.items()
        }
        found += [wished, must] if strategy.soft else [must]
    return tuple(found)


def _bundle(
    strategy: PlacementGroupSchedulingStrategy, resources: Mapping[str, float]
) -> BundleAffinity | Anywhere:
    from miniray.util.placement_group import PlacementGroup, check_fits

    group = strategy.placement_group
    if group is None:
        return Anywhere()
    if not isinstance(group, PlacementGroup):
        raise check.wrong_type("placement_group", group, "a PlacementGroup")
    index = check.whole(-1, "-1 is any bundle")(
        "placement_group_bundle_index", strategy.placement_group_bundle_index
    )
    if group.is_empty:
        if index != -1:
            raise ValueError(
                f"placement_group_bundle_index must be -1 for an empty group, not {index}."
            )
        return Anywhere()
    captures = strategy.placement_group_capture_child_tasks
    if captures is not None:
        check.boolean("placement_group_capture_child_tasks", captures)
    check_fits(group, index, resources)
    return BundleAffinity(group.id, index, captures)
