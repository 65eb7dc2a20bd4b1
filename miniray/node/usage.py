"""What this machine and the processes of this node use now: looked at only when somebody asks."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from miniray.common.process_state import stat_of

if TYPE_CHECKING:
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.relay.questions import Questions

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Fields of /proc/PID/stat, as ``stat_of`` returns them: CPU time of user and system, memory.
_USER, _SYSTEM, _RESIDENT = 11, 12, 21


class Usage:
    """Answers the question "usage"; whoever asks twice can tell rates from the differences."""

    def __init__(self, node: NodeConfig, clients: ClientServer, questions: Questions) -> None:
        self._node = node
        self._clients = clients
        questions.answers["usage"] = self._usage

    async def _usage(self, _seconds: float) -> dict[str, Any]:
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        # /proc of many processes takes its time, and a disk that is away longer.
        return await asyncio.to_thread(self._look, clients)

    def _look(self, clients: list[Client]) -> dict[str, Any]:
        from miniray.system.machine import available_memory, cpu_count, memory_limit

        limit = memory_limit()
        disk = os.statvfs(self._node.session_dir)
        busy, idle = _cpu_seconds()
        return {
            "time": time.monotonic(),
            "cpu_busy": busy,
            "cpu_idle": idle,
            "cpus": cpu_count(),
            "load1": os.getloadavg()[0],
            "memory_total": limit,
            "memory_used": limit - available_memory(),
            "disk_size": disk.f_frsize * disk.f_blocks,
            "disk_free": disk.f_frsize * disk.f_bavail,
            "processes": [(client.pid, *of_process(client.pid)) for client in clients],
        }


def _cpu_seconds() -> tuple[float, float]:
    """Return for how long the machine's processors were busy and idle, added up."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, idle, iowait, *rest = map(int, file.readline().split()[1:9])
    return (user + nice + system + sum(rest)) / _TICKS, (idle + iowait) / _TICKS


def of_process(pid: int) -> tuple[float, int]:
    """Return CPU seconds and bytes of memory of a process; zeros if it is gone."""
    fields = stat_of(pid)
    if fields is None:
        return 0.0, 0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS, int(fields[_RESIDENT]) * _PAGE
