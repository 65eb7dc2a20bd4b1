"""The items of a call that streams: of a generator, as a rule, but of any iterator too.

A function that yields may have a decorator that returns something else. What becomes of the items
is the executor's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def items_of(result: Any, name: str) -> Iterator[Any]:
    """What a call that streams has returned, as an iterator; ``close_items`` is to follow.

    Args:
        result: What it returned.
        name: Of the call, for the error.

    Raises:
        TypeError: It has no items.
    """
    if hasattr(result, "__next__"):
        return result  # type: ignore[no-any-return]
    if not hasattr(result, "__iter__"):
        raise TypeError(
            f'{name} has num_returns="streaming" but returned a '
            f"{type(result).__name__}, which cannot be iterated."
        )
    return iter(result)


def close_items(items: Iterator[Any]) -> None:
    """No more items are wanted: a generator runs its ``finally`` blocks, a file is closed."""
    close = getattr(items, "close", None)
    if close is not None:
        close()
