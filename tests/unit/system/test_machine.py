"""Processors, memory and address that a container allows."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from miniray.system.machine import (
    address_for_others,
    available_memory,
    cpu_count,
    memory_limit,
    node_ip,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

GIB = 1 << 30
MEMINFO = f"""\
MemTotal:       {16 * GIB // 1024} kB
MemFree:        {2 * GIB // 1024} kB
MemAvailable:   {12 * GIB // 1024} kB
"""
#: What cgroup v1 shows where there is no limit.
NO_LIMIT = "9223372036854771712"


def eight(pid: int) -> Iterable[int]:
    return range(8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_a_machine_without_control_groups_has_all_it_has(root: Path) -> None:
    assert cpu_count(root, eight) == 8
    assert memory_limit(root) == 16 * GIB
    assert available_memory(root) == 12 * GIB


def test_affinity_limits_processors(root: Path) -> None:
    assert cpu_count(root, lambda pid: {2, 5}) == 2


@pytest.mark.parametrize(
    ("quota", "count"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
    ],
)
def test_a_quota_of_cgroup_v2_limits_processors(root: Path, quota: str, count: int) -> None:
    write(root, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})
    assert cpu_count(root, eight) == count


@pytest.mark.parametrize(("quota", "count"), [("-1", 8), ("300000", 3), ("20000", 1)])
def test_a_quota_of_cgroup_v1_limits_processors(root: Path, quota: str, count: int) -> None:
    write(
        root,
        {
            # Inside a container, the path is the host's and is not mounted.
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/3f2a\n4:memory:/docker/3f2a",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert cpu_count(root, eight) == count


def test_the_tightest_limit_on_the_way_up_counts(root: Path) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "0::/user.slice/job.scope",
            "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
            "sys/fs/cgroup/user.slice/job.scope/cpu.max": "max 100000",
            "sys/fs/cgroup/user.slice/memory.max": str(4 * GIB),
            "sys/fs/cgroup/user.slice/job.scope/memory.max": str(6 * GIB),
        },
    )
    assert cpu_count(root, eight) == 2
    assert memory_limit(root) == 4 * GIB


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 16), (str(4 * GIB), 4), (str(64 * GIB), 16)]
)
def test_a_limit_of_cgroup_v2_limits_memory(root: Path, limit: str, expected: int) -> None:
    write(root, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": limit})
    assert memory_limit(root) == expected * GIB


@pytest.mark.parametrize(("limit", "expected"), [(NO_LIMIT, 16), (str(4 * GIB), 4)])
def test_a_limit_of_cgroup_v1_limits_memory(root: Path, limit: str, expected: int) -> None:
    write(
        root,
        {
            "proc/self/cgroup": "4:memory:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
        },
    )
    assert memory_limit(root) == expected * GIB


@pytest.mark.parametrize(
    ("group", "limit", "used", "field"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_file_pages_that_can_be_dropped_are_available(
    root: Path, group: str, limit: str, used: str, field: str
) -> None:
    folder = f"sys/fs/cgroup/{group}"
    write(
        root,
        {
            "proc/self/cgroup": f"{4 if group else 0}:{group}:/",
            f"{folder}/{limit}": str(4 * GIB),
            f"{folder}/{used}": str(3 * GIB),
            f"{folder}/memory.stat": f"anon 5\n{field} {GIB}\nslab 7",
        },
    )
    assert available_memory(root) == 2 * GIB


def test_a_container_over_its_limit_has_nothing_available(root: Path) -> None:
    write(
        root,
        {
            "sys/fs/cgroup/memory.max": str(4 * GIB),
            "sys/fs/cgroup/memory.current": str(5 * GIB),
        },
    )
    assert available_memory(root) == 0


def test_the_machine_we_run_on() -> None:
    assert 1 <= cpu_count() <= len(os.sched_getaffinity(0))
    assert 0 < available_memory() <= memory_limit()
    ip = node_ip()
    assert not ip.startswith("127.") or ip == "127.0.0.1"
    socket.inet_pton(socket.AF_INET6 if ":" in ip else socket.AF_INET, ip)


def no_route(target: str) -> str | None:
    return None


def no_interfaces() -> list[str]:
    return []


def test_the_address_is_the_one_that_leads_to_the_head() -> None:
    routes = {"10.0.0.5": "10.0.0.7", "192.0.2.1": "172.17.0.1"}
    assert node_ip("10.0.0.5", routes.get) == "10.0.0.7"
    assert node_ip(None, routes.get) == "172.17.0.1"


def test_a_head_on_loopback_is_reached_from_loopback() -> None:
    assert node_ip("127.0.0.1") == "127.0.0.1"
    assert node_ip("localhost") == "127.0.0.1"
    assert node_ip("myhost", lambda target: "127.0.1.1") == "127.0.0.1"


def test_a_machine_without_a_way_out_uses_an_interface() -> None:
    found = ["127.0.0.1", "169.254.3.4", "192.168.7.2"]
    assert node_ip(None, no_route, lambda: found) == "192.168.7.2"
    assert node_ip("unknown.invalid", no_route, lambda: found) == "192.168.7.2"


def test_a_machine_without_a_network_uses_loopback() -> None:
    assert node_ip(None, no_route, no_interfaces) == "127.0.0.1"
    assert node_ip(None, lambda target: "127.0.1.1", no_interfaces) == "127.0.0.1"


def test_a_machine_with_only_ipv6_has_its_address() -> None:
    assert node_ip(None, {"2001:db8::1": "fd00::7"}.get) == "fd00::7"


def test_without_a_route_outside_others_are_told_the_only_address() -> None:
    found = ["127.0.0.1", "10.77.1.1", "169.254.3.4", "::1", "fe80::1%eth0", "fd00::7"]
    assert address_for_others(4, no_route, lambda: found) == "10.77.1.1"
    assert address_for_others(6, no_route, lambda: found) == "fd00::7"
    assert address_for_others(4, {"192.0.2.1": "10.0.0.7"}.get, lambda: found) == "10.0.0.7"


def test_of_several_addresses_without_a_route_outside_the_user_says_which() -> None:
    with pytest.raises(OSError, match=r"10\.77\.1\.1, 10\.78\.1\.1.*--node-ip-address") as raised:
        address_for_others(4, no_route, lambda: ["10.77.1.1", "10.78.1.1", "127.0.0.1"])
    assert "192.0.2.1" not in str(raised.value)
    with pytest.raises(OSError, match=r"no IPv4 address.*--host"):
        address_for_others(4, no_route, lambda: ["127.0.0.1"])
