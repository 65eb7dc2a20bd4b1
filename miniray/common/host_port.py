"""Addresses of heads (``HOST:PORT``) and of daemons as text: parsed, completed, compared.

Only names that have to be compared are looked up; no address is contacted.
"""

from __future__ import annotations

import re
import socket
from typing import NamedTuple

#: The port of a head started by the command line, as Ray's, and of an address that gives none.
DEFAULT_PORT = 6379
_MAX_PORT = 65535
#: A name or an IPv4 address, or an IPv6 address in brackets; then a port, perhaps.
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9a-fA-F:.%]+)\]|(?P<host>[^\s:/\[\]]+))(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)


def parse_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (``[::1]:PORT`` for IPv6) into its parts; the port may be left out.

    Raises:
        ValueError: It has another form; the text shows the right one.
    """
    match = _ADDRESS.fullmatch(address)
    port = int(match["port"] or DEFAULT_PORT) if match is not None else 0
    if match is None or not 0 < port <= _MAX_PORT:
        raise ValueError(
            f"An address has the form HOST:PORT, such as 10.0.0.1:{DEFAULT_PORT} or "
            f"[::1]:{DEFAULT_PORT}, or HOST for port {DEFAULT_PORT}, not {address!r}."
        )
    return match["ipv6"] or match["host"], port


def join_host_port(host: str, port: int) -> str:
    """Write ``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def full_address(address: str) -> str:
    """Return the address with its port; ValueError as of ``parse_address``."""
    return join_host_port(*parse_address(address))


def same_address(one: str, other: str) -> bool:
    """Return whether two addresses lead to the same port of the same machine.

    Names are looked up, and all addresses of this machine are the same.
    """
    if one == other:
        return True
    try:
        (host, port), (other_host, other_port) = parse_address(one), parse_address(other)
    except ValueError:
        return False  # an embedded cluster's is the path of a socket
    if port != other_port:
        return False
    if host.lower() == other_host.lower():
        return True
    here, there = _looked_up(host), _looked_up(other_host)
    return bool(here & there) or (any(map(is_own, here)) and any(map(is_own, there)))


def is_own(host: str) -> bool:
    """Return whether the kernel would listen on this address, which no interface need have."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _looked_up(host: str) -> frozenset[str]:
    """Return the addresses of a host; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter: no name could be like this
        return frozenset()
    return frozenset(str(address[0]) for _family, _type, _protocol, _name, address in found)


class DaemonAddress(NamedTuple):
    """Where a daemon can be dialled: by Unix socket on its own machine, by TLS from others.

    As text, ``machine|socket path|host:port``; the last part is empty in a cluster without a
    network (an embedded one).
    """

    #: Tells machines and containers apart.
    machine: str
    socket_path: str
    host_port: str = ""

    def __str__(self) -> str:
        return f"{self.machine}|{self.socket_path}|{self.host_port}"

    @classmethod
    def parse(cls, text: str) -> DaemonAddress:
        """Undo ``str``."""
        machine, socket_path, host_port = text.rsplit("|", 2)
        return cls(machine, socket_path, host_port)

    def target_from(self, machine: str) -> str:
        """Return what a daemon on ``machine`` gives to gRPC; "" if it cannot dial this one."""
        return f"unix:{self.socket_path}" if machine == self.machine else self.host_port
