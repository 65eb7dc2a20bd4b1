"""What a class offers as an actor: its methods, their options and signatures.

Reads the class once, at the decorator. Calling the methods is ``actor.py``'s business.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import miniray.options as option_rules
from miniray.common.runtime import ActorClassInfo
from miniray.values.call_signature import CallSignature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.common.specs import ActorOptions, MethodOptions

#: Attribute of a method that holds the checked options of ``@method``.
METHOD_ATTRIBUTE = "__miniray_method__"

#: Methods that every actor has, by the names that handles offer.
BUILT_IN = {
    "__miniray_ready__": "__miniray_ready__",
    "__miniray_terminate__": "__miniray_terminate__",
    "__miniray_call__": "__miniray_call__",
    "__ray_ready__": "__miniray_ready__",
    "__ray_terminate__": "__miniray_terminate__",
    "__ray_call__": "__miniray_call__",
}

#: Names that handles use themselves.
_RESERVED = ("_info", "_ref")


@dataclasses.dataclass(eq=False, repr=False)
class ActorClassDetails(ActorClassInfo):
    """Adds what handles need to check calls before they are sent."""

    signatures: Mapping[str, CallSignature] = dataclasses.field(default_factory=dict)


def describe(cls: type, given: Mapping[str, Any]) -> ActorClassDetails:
    """Find the methods of a class.

    Args:
        cls: The class.
        given: Checked options of the actor.

    Raises:
        TypeError: A method has a name that handles use themselves.
        ValueError: A method names a concurrency group that the options don't have.
    """
    methods: dict[str, MethodOptions] = {}
    signatures: dict[str, CallSignature] = {}
    is_async = False
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        if getattr(object, name, None) is attribute or not _is_method(attribute):
            continue
        if name in _RESERVED:
            raise TypeError(
                f"{cls.__qualname__}.{name} can't be a method of an actor, since handles have an "
                f"attribute of that name. Rename the method."
            )
        is_static = isinstance(attribute, staticmethod)
        function = getattr(attribute, "__func__", attribute)
        signatures[name] = CallSignature.of(function, skip_first=not is_static)
        methods[name] = option_rules.method_options(
            getattr(attribute, METHOD_ATTRIBUTE, {}), is_generator=signatures[name].is_generator
        )
        unwrapped = inspect.unwrap(function)
        is_async |= inspect.iscoroutinefunction(unwrapped) or inspect.isasyncgenfunction(unwrapped)
    _check_groups(cls, methods, given.get("concurrency_groups", {}))
    return ActorClassDetails(
        name=cls.__qualname__,
        module=cls.__module__,
        methods=methods,
        is_async=is_async,
        signatures=signatures,
    )


def with_options(details: ActorClassDetails, options: ActorOptions) -> ActorClassDetails:
    """Return the details of an actor that is made with these options."""
    return dataclasses.replace(
        details,
        max_task_retries=options.max_task_retries,
        max_pending_calls=options.max_pending_calls,
    )


def _is_method(attribute: Any) -> bool:
    if isinstance(attribute, staticmethod | classmethod):
        return True
    return inspect.isroutine(attribute) or (
        callable(attribute) and hasattr(attribute, "__wrapped__")  # as functools.lru_cache makes
    )


def _check_groups(
    cls: type, methods: Mapping[str, MethodOptions], groups: Mapping[str, int]
) -> None:
    for name, options in methods.items():
        if options.concurrency_group is not None and options.concurrency_group not in groups:
            known = ", ".join(map(repr, groups)) or "none"
            raise ValueError(
                f"{cls.__qualname__}.{name} is in the concurrency group "
                f"{options.concurrency_group!r}, which the actor does not have. Its "
                f"concurrency_groups: {known}."
            )
