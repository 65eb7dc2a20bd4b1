"""How a worker ends by rule: exit_actor, a lease's end, the daemon's word."""

from __future__ import annotations


class ActorExit(BaseException):
    """Raised in a method to end its actor; not an Exception, so that user code lets it pass."""
