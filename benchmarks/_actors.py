"""The actor of the rows about starting actors.

In a module of its own: each worker imports the module of its actor's class, and these rows are
not about how long the benchmark's own imports take.
"""

from __future__ import annotations


class Echo:
    """An actor that answers."""

    def echo(self, value: object = None) -> object:
        """Give back what came."""
        return value
