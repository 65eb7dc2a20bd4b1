"""How shares are put on devices so that all of them find room at once.

Responsible for the search alone, over plain amounts. Whether many shares fit on some devices is
the bin packing problem: to try every way can take for ever, so the search has a limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Patience:
    """How many steps a search, or several together, may still take."""

    def __init__(self, steps: int) -> None:
        self.steps = steps


def pack_shares(free: Sequence[int], shares: Sequence[int], patience: Patience) -> list[int] | None:
    """Find a device for every share, if there is a way.

    A share that fills a device exactly goes there, as any other way can be changed into one where
    it does. Otherwise the fullest device is tried first. Of devices with the same room one is
    tried, and a state that turned out hopeless is not entered again.

    Args:
        free: what each device has.
        shares: what is needed, each of one device; above 0.
        patience: its steps are used up.

    Returns:
        For each share the position of its device; None if there is no way, or none was found
        before the patience ended.
    """
    order = sorted(range(len(shares)), key=lambda index: -shares[index])
    sizes = [shares[index] for index in order]
    rest = [sum(sizes[level:]) for level in range(len(sizes))]
    left = list(free)
    chosen: list[int] = []
    choices: list[Iterator[int]] = []
    states: list[tuple[int, ...]] = []
    hopeless: set[tuple[int, ...]] = set()
    while len(chosen) < len(sizes):
        level = len(chosen)
        if len(choices) == level:
            patience.steps -= 1
            if patience.steps < 0:
                return None
            state = (level, *sorted(left))
            states.append(state)
            may_work = state not in hopeless and _room(left, sizes[-1]) >= rest[level]
            choices.append(_devices_to_try(left, sizes[level]) if may_work else iter(()))
        position = next(choices[level], None)
        if position is not None:
            left[position] -= sizes[level]
            chosen.append(position)
            continue
        hopeless.add(states.pop())
        choices.pop()
        if not chosen:
            return None
        left[chosen.pop()] += sizes[level - 1]
    found = [0] * len(shares)
    for index, position in zip(order, chosen, strict=True):
        found[index] = position
    return found


def _room(left: list[int], smallest: int) -> int:
    """What there is on devices that can take any share at all."""
    return sum(free for free in left if free >= smallest)


def _devices_to_try(left: list[int], size: int) -> Iterator[int]:
    """Positions of the devices for a share of this size, one of each amount of room."""
    if size in left:
        return iter((left.index(size),))
    rooms = sorted({free for free in left if free > size})
    return iter([left.index(free) for free in rooms])
