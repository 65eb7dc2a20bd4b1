"""Numbers of leases, as daemons know them, and the ids that they have in the scheduler."""

from __future__ import annotations

_NUMBER_LENGTH = 8


def lease_id(number: int) -> bytes:
    """The scheduler's id of a lease."""
    return number.to_bytes(_NUMBER_LENGTH, "big")


def lease_number(id: bytes) -> int:
    """The inverse of ``lease_id``."""
    return int.from_bytes(id, "big")
