"""What a machine, or the container that we are in, has: processors, memory, addresses.

Accelerators are found in ``miniray/accelerators``. Usage over time is reported
elsewhere; here are the totals that a node announces when it starts.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.common.host_port import is_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Routing addresses of no host (RFC 5737, RFC 3849) by version: they lead to the default route.
_ELSEWHERE = {4: "192.0.2.1", 6: "2001:db8::1"}
_CGROUPS = "sys/fs/cgroup"


def cpu_count(
    root: Path = Path("/"), affinity: Callable[[int], Iterable[int]] = os.sched_getaffinity
) -> int:
    """Return the number of processors that we may use: the least of affinity, cpuset and quota.

    A quota is rounded down, as work on the last part of a processor would be
    throttled, but never below 1.

    Args:
        root: What ``/proc`` and ``/sys`` are below.
        affinity: Processors that a process (0: this one) may run on. The kernel
            takes those of the cpuset off it.
    """
    count = len(set(affinity(0)))
    quotas = [
        quota
        for quota in (
            *(_quota_v2(folder) for folder in _folders(root, "")),
            *(_quota_v1(folder) for folder in _folders(root, "cpu")),
        )
        if quota is not None
    ]
    return max(1, min([count, *(int(quota) for quota in quotas)]))


def memory_limit(root: Path = Path("/")) -> int:
    """Return the bytes of memory that we may use: the machine's, or a control group's limit."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _memory_groups(root))])


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that we could allocate now without swapping or reaching a limit."""
    left = (max(0, limit - used) for limit, used in _memory_groups(root))
    return min([_meminfo(root, "MemAvailable"), *left])


def node_ip(
    head: str | None = None,
    route: Callable[[str], str | None] | None = None,
    interfaces: Callable[[], list[str]] | None = None,
) -> str:
    """Return the address at which other machines of the cluster reach this one.

    The name of a machine is not asked for: where it stands in ``/etc/hosts`` as
    127.0.1.1, that answer would be of no use to others.

    Args:
        head: Host name or address of the cluster's head, if there is one.
        route: Gives the local address from which another is reached.
        interfaces: Gives the addresses of the interfaces that are up.

    Returns:
        127.0.0.1 where the head is on loopback or there is no network.
    """
    find = route or _local_address
    towards = (head,) if head is not None else _ELSEWHERE.values()
    for address in filter(None, (find(target) for target in towards)):
        if not ipaddress.ip_address(address).is_loopback:
            return address
        if head is not None:
            return "127.0.0.1"
    found = [*reachable_addresses(4, interfaces), *reachable_addresses(6, interfaces)]
    return next(iter(found), "127.0.0.1")


def address_for_others(
    version: int,
    route: Callable[[str], str | None] | None = None,
    interfaces: Callable[[], list[str]] | None = None,
) -> str:
    """Return the address for other machines, for a head that listens on all of its own.

    Args:
        version: Of IP, 4 or 6.
        route: As of ``node_ip``.
        interfaces: As of ``node_ip``.

    Raises:
        OSError: No route leads outside, and of other addresses there are none, or several.
    """
    outwards = (route or _local_address)(_ELSEWHERE[version])
    if outwards is not None:
        return outwards
    found = reachable_addresses(version, interfaces)
    if not found:
        raise OSError(
            f"This machine has no IPv{version} address at which others could reach it. Leave "
            "--host out, for a head on this machine alone, or give --node-ip-address."
        )
    if len(found) > 1:
        raise OSError(
            "This machine has no default route, so it is not known which of its addresses others "
            f"can reach: {', '.join(found)}. Give one of them as --node-ip-address."
        )
    return found[0]


def reachable_addresses(
    version: int, interfaces: Callable[[], list[str]] | None = None
) -> list[str]:
    """Return the addresses of this machine at which others may reach it.

    Args:
        version: Of IP, 4 or 6.
        interfaces: As of ``node_ip``.
    """
    found = {each: ipaddress.ip_address(each) for each in (interfaces or own_addresses)()}
    return [
        each
        for each, ip in found.items()
        if ip.version == version and not ip.is_loopback and not ip.is_link_local
    ]


def address_towards(target: str) -> str:
    """Return which of our addresses the kernel would send from; nothing is sent.

    Raises:
        OSError: There is no such host, or no route to it.
    """
    # Of text, Python would load a codec for other alphabets first, which takes 2 ms.
    host = target.encode() if target.isascii() else target
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of a datagram socket: only looks up the route
        return str(probe.getsockname()[0])


def _local_address(target: str) -> str | None:
    try:
        return address_towards(target)
    except OSError:
        return None  # the caller has other ways


def own_addresses() -> list[str]:
    """Return the addresses of the interfaces that are up, those of IPv4 first."""
    import psutil

    states = psutil.net_if_stats()
    return [
        address.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for name, addresses in sorted(psutil.net_if_addrs().items())
        if name in states and states[name].isup
        for address in addresses
        if address.family == family
    ]


def _meminfo(root: Path, field: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise ValueError(f"{root / 'proc/meminfo'} has no field {field}")


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield our control group's folder and those above it, each of which may set a limit.

    Args:
        root: What ``/proc`` and ``/sys`` are below.
        controller: A controller of cgroup v1, or "" for the one tree of v2.
    """
    base = root / _CGROUPS / controller
    path = _own_group(root, controller)
    # Inside a container the path may be the host's, and only its end is mounted
    # here, at the root: folders that do not exist are skipped.
    for folder in (base / path, *(base / parent for parent in path.parents)):
        if folder.is_dir():
            yield folder


def _own_group(root: Path, controller: str) -> Path:
    """Return the path of our control group, from lines such as ``4:memory:/docker/3f2a``."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return Path()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(path.lstrip("/"))
    return Path()


def _number(path: Path) -> int | None:
    """Return a file's number; None where there is no file, or it says there is no limit."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return int(text) if text.lstrip("-").isdecimal() else None


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except FileNotFoundError:
        return None
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: Path) -> float | None:
    quota = _number(folder / "cpu.cfs_quota_us")
    period = _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and use in bytes of each control group that limits our memory.

    File pages that the kernel drops first when memory runs short are not counted as
    used.
    """
    files = (
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for controller, limit_file, usage_file, cache_field in files:
        for folder in _folders(root, controller):
            limit = _number(folder / limit_file)
            # The first version writes "no limit" as the largest number of pages.
            if limit is not None and 0 < limit < 1 << 62:
                used = _number(folder / usage_file) or 0
                yield limit, max(0, used - _stat(folder / "memory.stat", cache_field))


def _stat(path: Path, field: str) -> int:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return 0
    facts = dict(line.split(" ", 1) for line in text.splitlines())
    return int(facts.get(field, 0))


def check_told(listening: str, told: str) -> None:
    """Refuse an address at which a head that listens on loopback cannot be found.

    Args:
        listening: Where the head listens.
        told: The address that is announced to others; a name is left to the connection.

    Raises:
        ValueError: The address is not of loopback; the text names this machine's addresses.
    """
    if _loopback(listening) and _loopback(told) is False:
        raise ValueError(not_found(listening, told))


def not_found(listening: str, told: str) -> str:
    """Say why a head is not found at its advertised address, and what to do."""
    reason = f"it listens on {listening}"
    if not is_own(told):
        reason = f"this machine has no such address; it has {', '.join(own_addresses())}"
    return (
        f"The head can't be reached at node_ip_address {told}: {reason}. Give an address of this "
        "machine, and as host the same one, or 0.0.0.0 to listen on all."
    )


def _loopback(host: str) -> bool | None:
    """Return whether an address is of loopback; None for a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True if host == "localhost" else None
