"""The actor of the rows about starting actors, and what pools call.

In a module of its own: each worker imports the module of its actor's class, and these rows are
not about how long the benchmark's own imports take.
"""

from __future__ import annotations


class Echo:
    """An actor that answers."""

    def echo(self, value: object = None) -> object:
        """Give back what came."""
        return value


def same(value: object) -> object:
    """What a pool calls with each item."""
    return value


def same_of_pair(value: object, _other: object) -> object:
    """What a pool calls with the items of each pair."""
    return value
