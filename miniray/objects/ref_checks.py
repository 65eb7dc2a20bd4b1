"""Checks of what ``get`` and ``wait`` are given: refs, timeouts, numbers."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import TYPE_CHECKING, Any

from miniray.common.object_ref import ObjectRef
from miniray.system.option_checks import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

_ref_id = operator.attrgetter("_id")


def refs_only(function: str, refs: Sequence[Any]) -> None:
    """Refuse a list that holds something else than refs; ``wait`` takes generators too.

    Raises:
        TypeError: It does; the message names the item.
    """
    for index, ref in enumerate(refs):
        if not isinstance(ref, ObjectRef) and not (function == "wait" and is_generator(ref)):
            nested = isinstance(ref, list | tuple)
            raise TypeError(
                f"{function} takes a list of refs, but item {index} is {shown(ref)} "
                f"({type(ref).__name__}).{' Put them all into one flat list.' * nested}"
            )


def unique_refs(refs: Sequence[ObjectRef[Any]]) -> None:
    """Refuse a list for ``wait`` that holds a ref twice, or something else.

    Raises:
        TypeError: It holds something else than refs.
        ValueError: A ref is there twice.
    """
    try:
        distinct = len(set(map(_ref_id, refs)))  # in C: there may be many
    except AttributeError:
        refs_only("wait", refs)  # raises, unless what has no id is a generator
        distinct = len(set(refs))
    if distinct != len(refs):
        raise ValueError("wait takes a list of unique refs, but this one holds a ref twice.")


def timeout_of(function: str, timeout: Any) -> float | None:
    """Return a timeout in seconds; None if it is infinite.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, or NaN.
    """
    if not isinstance(timeout, Real):
        raise TypeError(
            f"The timeout of {function} must be a number of seconds, or None for no end, not "
            f"{shown(timeout)} ({type(timeout).__name__})."
        )
    seconds = float(timeout)
    if not seconds >= 0:
        raise ValueError(f"The timeout of {function} must be at least 0 seconds, not {timeout}.")
    return None if seconds == math.inf else seconds


def number_of_returns(given: Any) -> int:
    """Return how many refs ``wait`` waits for; NumPy's numbers are taken too.

    Raises:
        TypeError: It is no whole number.
    """
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(
            f"num_returns of wait must be a whole number, not {shown(given)} "
            f"({type(given).__name__})."
        ) from None


def is_generator(value: Any) -> bool:
    from miniray.objects.object_ref_generator import ObjectRefGenerator

    return isinstance(value, ObjectRefGenerator)
