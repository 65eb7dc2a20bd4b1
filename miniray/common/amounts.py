"""Amounts of resources in fixed point, and the rules for valid amounts.

Responsible for conversion and checks. Amounts are integers of 1/10000 of a unit.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: One unit of a resource (one CPU, one device, one byte of memory) in fixed point.
UNIT = 10_000

#: Device resources of the accelerator families; a node may declare others with devices.
ACCELERATORS = frozenset({"GPU", "neuron_cores", "TPU", "HPU", "NPU"})
#: Device resources that a demand must take in whole devices.
WHOLE_ONLY = frozenset({"neuron_cores", "TPU", "HPU"})
#: Device resources whose devices stand in a grid: a demand must take a block of it.
GRIDS = frozenset({"TPU"})

#: Amounts wanted or held: (name, fixed-point units) sorted by name, without zeros.
Needs = tuple[tuple[str, int], ...]


def to_units(amount: float, name: str = "a resource") -> int:
    """Convert an amount in units to fixed point, rounded to four decimals.

    Args:
        amount: in units, such as 0.5 GPUs or bytes of memory.
        name: the resource, for messages.

    Raises:
        ValueError: the amount is negative, not finite, or above 0 but below 0.0001.
    """
    if not math.isfinite(amount):
        raise ValueError(f"the amount of {name} is {amount}; it must be a finite number")
    if amount < 0:
        raise ValueError(f"the amount of {name} is {amount}; it must be 0 or more")
    units = amount * UNIT if isinstance(amount, int) else round(amount * UNIT)
    if units == 0 and amount > 0:
        raise ValueError(f"the amount of {name} is {amount}; the smallest amount is 0.0001")
    return units


def from_units(units: int) -> float:
    """Convert fixed point to an amount in units."""
    return units / UNIT


def parse_needs(resources: Mapping[str, float]) -> Needs:
    """Check the amounts that a demand or a bundle names and convert them.

    Args:
        resources: amount per resource name, in units.

    Returns:
        Sorted fixed-point amounts; zeros are left out.

    Raises:
        ValueError: an amount is malformed, or breaks its resource's rule on fractions.
    """
    needs = []
    for name in sorted(resources):
        units = to_units(resources[name], name)
        if name in ACCELERATORS:
            check_device_amount(name, units)
        if units:
            needs.append((name, units))
    return tuple(needs)


def check_device_amount(name: str, units: int) -> None:
    """Raise ValueError if devices of this resource can't be taken in this amount."""
    if units % UNIT == 0:
        return
    amount = from_units(units)
    if name in WHOLE_ONLY:
        raise ValueError(
            f"{name} {amount:g} is not possible: {name} can't be shared, ask for whole devices"
        )
    if units > UNIT:
        raise ValueError(
            f"{name} {amount:g} is not possible: above 1 the amount must be whole, "
            f"ask for {math.floor(amount)} or {math.ceil(amount)}"
        )


def sum_amounts(amounts: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Return sums of fixed-point amounts per resource, in units."""
    sums: collections.Counter[str] = collections.Counter()
    for each in amounts:
        sums.update(each)
    return {name: from_units(units) for name, units in sums.items()}
