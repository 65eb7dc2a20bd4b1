"""How amounts of resources are shown to a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

_IN_BYTES = frozenset({"memory", "object_store_memory"})
#: Most looked for first; others follow by name.
_ORDER = {"CPU": 0, "GPU": 1}
#: Every node has its own; it says nothing of how busy the node is.
_HIDDEN_PREFIX = "node:"


def visible_resources(*amounts: Mapping[str, float]) -> list[str]:
    """The resource names worth showing, in the order to show them in."""
    names = {name for mapping in amounts for name in mapping}
    shown = (name for name in names if not name.startswith(_HIDDEN_PREFIX))
    return sorted(shown, key=lambda name: (_ORDER.get(name, 2), name in _IN_BYTES, name))


def format_amount(name: str, amount: float) -> str:
    """One amount: ``0.5``, or ``1.5 GiB`` for what is counted in bytes."""
    if name in _IN_BYTES:
        return format_bytes(amount)
    return f"{amount:.4f}".rstrip("0").rstrip(".")


def describe_amounts(amounts: Mapping[str, float]) -> str:
    """``2 CPU, 0.5 GPU, 1.5 GiB memory``."""
    names = visible_resources(amounts)
    return ", ".join(f"{format_amount(name, amounts[name])} {name}" for name in names)


def describe_usage(used: Mapping[str, float], total: Mapping[str, float]) -> str:
    """``CPU 2/8, GPU 0.5/2``."""
    return ", ".join(
        f"{name} {format_amount(name, used.get(name, 0))}/{format_amount(name, total.get(name, 0))}"
        for name in visible_resources(total)
    )
