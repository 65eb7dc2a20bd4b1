"""Logs connections to a port and refusals there: once per minute and address."""

from __future__ import annotations

import collections
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds for which a logged address is only counted.
_EVERY = 60.0
#: Addresses that are logged one by one; further ones in that time are only counted.
_ADDRESSES = 32
#: What these are called; an entry of the table like any other.
_OTHERS = "one of many further addresses"
#: Seconds between two readings of the connections, unless ``_MANY`` have come since.
_SAMPLE, _MANY = 0.5, 64
#: The part of the files a process may have open above which new connections may soon fail.
_NEARLY_ALL = 0.9
#: What happens to a connection if no other line follows.
_NEEDS = "without the cluster's secret it gets no further"
#: The state of a listening socket.
_LISTEN = "0A"


class PeerLog:
    """Logs what addresses did, each once per minute; for one thread.

    Args:
        tell: Takes a line for people, as a logger's methods do.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        #: When each was logged, the earliest first, and how many came since.
        self._logged: collections.OrderedDict[str, tuple[float, int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._logged)

    def add(self, host: str, what: str) -> None:
        """Count a connection, and log what it did if this address was not logged lately."""
        now = time.monotonic()
        if host not in self._logged:
            while len(self._logged) >= _ADDRESSES and now - self._earliest() >= _EVERY:
                self._logged.popitem(last=False)
            if len(self._logged) >= _ADDRESSES:
                host = _OTHERS
        logged, since = self._logged.get(host, (-_EVERY, 0))
        if now - logged < _EVERY:
            self._logged[host] = (logged, since + 1)
            return
        more = f" ({since} more connections since the last such line)" if since else ""
        self._tell(f"{host} {what}{more}")
        self._logged[host] = (now, 0)
        self._logged.move_to_end(host)

    def _earliest(self) -> float:
        return next(iter(self._logged.values()))[0]


class Arrivals:
    """Logs who connects to a port of gRPC, which does not report whose handshakes fail.

    Called when a handshake begins, by whichever thread of gRPC's has it.
    """

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._log = PeerLog(tell)
        #: Set before any peer can connect.
        self.port = 0
        self._known: set[tuple[str, int]] = set()
        self._looked = -_SAMPLE
        self._since = 0

    def __call__(self) -> None:
        """Note that a handshake begins."""
        now = time.monotonic()
        self._since += 1
        if now - self._looked < _SAMPLE and self._since < _MANY:
            return  # of a flood, samples will do
        self._looked, self._since = now, 0
        count, most = open_files()
        if count > _NEARLY_ALL * most:
            files = f"{count} of the {most} files that it may have open (`ulimit -n`)"
            self._log.add("this process", f"has {files}: new connections may fail")
        try:
            there = connected_to(self.port)
        except OSError:  # there is no descriptor left to look with
            return
        for host, _ in there - self._known:
            self._log.add(host, f"connected to port {self.port}; {_NEEDS}")
        self._known = there


def open_files() -> tuple[int, int]:
    """Return how many files this process has open, and how many it may have."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()), most
    except OSError:  # there is none left to look with
        return most, most


def connected_to(port: int) -> set[tuple[str, int]]:
    """Return the addresses and ports of the other ends of a local port's connections."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:  # see proc_net_tcp in the kernel's documentation
            _, local, remote, state, *_ = line.split()
            if int(local.split(":")[-1], 16) == port and state != _LISTEN:
                host, _, other = remote.partition(":")
                found.add((_address(host), int(other, 16)))
    return found


def _address(text: str) -> str:
    """Return an address that the kernel writes as words of four bytes in the machine's order."""
    import ipaddress  # the head of a cluster without a network never needs it

    words = (bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8))
    data = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(data)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
