"""Allocations and numbers of leases as they travel between head and daemons."""

from __future__ import annotations

import json
from typing import Any

from miniray.head.scheduling.resources import Allocation

_NUMBER_LENGTH = 8


def lease_id(number: int) -> bytes:
    """The scheduler's id of a lease."""
    return number.to_bytes(_NUMBER_LENGTH, "big")


def lease_number(id: bytes) -> int:
    """The inverse of ``lease_id``."""
    return int.from_bytes(id, "big")


def allocation_json(allocation: Allocation) -> bytes:
    """What a lease holds, for its daemon; ``exact`` is for a head that restarts."""
    bundle = allocation.bundle
    return json.dumps(
        {
            "resources": allocation.resources(),
            "devices": {name: [id for id, _ in shares] for name, shares in allocation.devices},
            "bundle": None if bundle is None else [bundle[0].hex(), bundle[1]],
            "exact": [allocation.scalars, allocation.devices],
        }
    ).encode()


def allocation_from_json(node_id: str, data: bytes) -> Allocation:
    """The inverse of ``allocation_json``; ValueError or KeyError if it is malformed."""
    told: dict[str, Any] = json.loads(data)
    scalars, devices = told["exact"]
    bundle = told["bundle"]
    return Allocation(
        node_id,
        tuple((name, units) for name, units in scalars),
        tuple((name, tuple((id, units) for id, units in shares)) for name, shares in devices),
        None if bundle is None else (bytes.fromhex(bundle[0]), bundle[1]),
    )
