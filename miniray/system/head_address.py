"""Whether others find a head at the address that they are told, and what to say if not.

An address that this machine does not have may lead to it all the same, where a router translates
addresses: only a connection tells. It can't where the head listens on loopback alone.
"""

from __future__ import annotations

import ipaddress

from miniray.common.host_port import is_own
from miniray.system.machine import own_addresses


def check_told(listening: str, told: str) -> None:
    """Refuse an address at which nobody can find a head that listens on loopback.

    Args:
        listening: Where the head listens.
        told: What others are told; a name is left to the connection.

    Raises:
        ValueError: It is not of loopback; the text tells what this machine has.
    """
    if _loopback(listening) and _loopback(told) is False:
        raise ValueError(not_found(listening, told))


def not_found(listening: str, told: str) -> str:
    """Why a head is not found at the address that others are told, and what to do."""
    reason = f"it listens on {listening}"
    if not is_own(told):
        reason = f"this machine has no such address; it has {', '.join(own_addresses())}"
    return (
        f"The head can't be reached at node_ip_address {told}: {reason}. Give an address of this "
        "machine, and as host the same one, or 0.0.0.0 to listen on all."
    )


def _loopback(host: str) -> bool | None:
    """None for a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True if host == "localhost" else None
