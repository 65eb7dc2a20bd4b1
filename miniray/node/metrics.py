"""What this machine and the processes of this node use now, and the metrics of its last hour."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import math
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.accelerators.host import DetectionError, ToolNotFoundError
from miniray.accelerators.nvidia import use_of_gpus
from miniray.common.process_state import stat_of
from miniray.system.machine import available_memory, memory_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.accelerators.host import Host
    from miniray.accelerators.node_resources import NodeAccelerators
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.relay.questions import Questions

logger = logging.getLogger(__name__)

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


#: Seconds between two points of the last hour, and how many points it has.
INTERVAL = 10
_POINTS = 360
#: Series of one metric, and metrics of programs, at most.
_MOST = 1000
#: Seconds that processes may take to tell what they have counted, and a driver's tool its use.
_SOON, _TOOL_TIMEOUT = 0.5, 1.5
_OVERFLOW = (("overflow", "true"),)

#: (kind, name, description, boundaries).
Metric = tuple[str, str, str, tuple[float, ...]]
#: By tags: a value, or of a histogram the counts of its buckets and the sum.
Values = dict[tuple[tuple[str, str], ...], list[float]]
Sample = list[tuple[str, dict[str, str], float]]


class DeviceUse:
    """Reads how much of this node's GPUs is used, until their driver fails once."""

    def __init__(self, accelerators: NodeAccelerators, host: Host) -> None:
        group = accelerators.devices.get("GPU")
        self._ids = group.ids if group is not None and group.family == "nvidia" else ()
        self._host = host

    def sample(self) -> Sample:
        """Return (name, labels, value) of each device; blocks while a tool is asked."""
        if not self._ids:
            return []
        try:
            use = use_of_gpus(self._host, _TOOL_TIMEOUT)
        except (DetectionError, ValueError) as error:
            self._ids = ()  # a driver that hangs would keep a process of each try
            if not isinstance(error, ToolNotFoundError):
                logger.warning("the use of devices is not told any more: %s", error)
            return []
        names = ("device_utilization_ratio", "device_memory_used_bytes", "device_memory_size_bytes")
        return [
            (name, {"resource": "GPU", "device": id}, value)
            for id in self._ids
            for name, value in zip(names, use.get(id, ()), strict=False)
            if value is not None
        ]


class NodeMetrics:
    """Adds up what processes tell, and looks at the machine."""

    def __init__(
        self,
        clients: ClientServer,
        questions: Questions,
        folder: str,
        figures: Callable[[], Sample],
        devices: DeviceUse,
    ) -> None:
        """Register what it answers.

        Args:
            clients: The processes of this node.
            questions: Passes on what is asked.
            folder: Where this node keeps its files.
            figures: Returns what other parts of the daemon count.
            devices: Of this node.
        """
        self._clients = clients
        self._questions = questions
        self._folder = folder
        self._figures = figures
        self._devices = devices
        #: What the living have told, and the sums of those that have ended.
        self._told: dict[bytes, dict[Metric, Values]] = {}
        self._ended: dict[Metric, Values] = {}
        self._exits: dict[str, int] = {}
        self._rings: dict[str, array.array[float]] = {}
        self._slot = 0
        self._before: tuple[float, dict[str, float]] = (0.0, {})
        clients.notices["metrics"] = self._take
        questions.answers["metrics"] = self._tell
        questions.answers["history"] = lambda _seconds: self._history()

    async def _tell(self, _seconds: float) -> tuple[list[Any], Sample]:
        """Return what processes count, and what the machine does: a disk may take its time."""
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        told = await self._questions.ask_processes(clients, "metrics", (), _SOON)
        gauges: list[Any] = []
        for client, (_, rows, _) in zip(clients, told, strict=True):
            if rows and client.process_id in self._clients.clients:  # else it has ended meanwhile
                gauges += [row for row in rows if row[0] == "gauge"]
                counted: dict[Metric, Values] = {}
                _enter(counted, [row for row in rows if row[0] != "gauge"])
                self._told.setdefault(client.process_id, {}).update(counted)
        found = self._figures() + await asyncio.to_thread(self._sample)
        return self._rows() + gauges[:_MOST], found

    # --- what processes tell ---------------------------------------------------------
    def _take(self, client: Client, rows: list[Any]) -> None:
        # Taken out and put in again: the process that told last comes last, and its gauges count.
        told = self._told[client.process_id] = self._told.pop(client.process_id, {})
        _enter(told, rows)

    def ended(self, process_id: bytes) -> None:
        """Keep what a process counted; its gauges go."""
        told = self._told.pop(process_id, {})
        _add(self._ended, {metric: each for metric, each in told.items() if metric[0] != "gauge"})

    def worker_ended(self, cause: str) -> None:
        """Count the end of a worker."""
        self._exits[cause] = self._exits.get(cause, 0) + 1

    def _rows(self) -> list[tuple[Any, ...]]:
        """Return (kind, name, description, boundaries, tags, value) of each series."""
        total: dict[Metric, Values] = {}
        for told in (self._ended, *self._told.values()):
            _add(total, told)
        return [
            (*metric, tags, value)
            for metric, values in total.items()
            for tags, value in values.items()
        ]

    # --- the machine -----------------------------------------------------------------
    def _sample(self) -> Sample:
        """Return (name, labels, value) of what the node and its machine do now."""
        found: Sample = []
        for mode, seconds in _cpu().items():
            found.append(("node_cpu_seconds_total", {"mode": mode}, seconds))
        used, limit = _memory()
        found += [
            ("node_load1", {}, os.getloadavg()[0]),
            ("node_memory_used_bytes", {}, used),
            ("node_memory_limit_bytes", {}, limit),
        ]
        for resource in ("cpu", "memory", "io"):
            for kind, seconds in _pressure(resource).items():
                labels = {"resource": resource, "kind": kind}
                found.append(("node_pressure_seconds_total", labels, seconds))
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(self._folder)
            found.append(("node_disk_free_bytes", {"place": "session"}, disk.free))
            found.append(("node_disk_size_bytes", {"place": "session"}, disk.total))
        received, sent = _network()
        found.append(("node_network_receive_bytes_total", {}, received))
        found.append(("node_network_transmit_bytes_total", {}, sent))
        for role, (count, memory, cpu) in self._processes().items():
            found.append(("processes", {"role": role}, count))
            found.append(("process_memory_bytes", {"role": role}, memory))
            found.append(("process_cpu_seconds", {"role": role}, cpu))
        for cause, ends in self._exits.copy().items():  # this is a thread of its own
            found.append(("worker_exits_total", {"cause": cause}, ends))
        return found + self._devices.sample()

    def _processes(self) -> dict[str, tuple[int, float, float]]:
        """Return how many processes of each role there are, their memory and CPU time."""
        found: dict[str, tuple[int, float, float]] = {}
        seconds, size = of_process(os.getpid())
        found["daemon"] = (1, float(size), seconds)
        for client in list(self._clients.clients.values()):
            if not client.is_command:
                count, memory, cpu = found.get(client.role, (0, 0.0, 0.0))
                used, resident = of_process(client.pid)
                found[client.role] = (count + 1, memory + resident, cpu + used)
        return found

    # --- the last hour -----------------------------------------------------------------
    def look(self) -> None:
        """Note a point of the last hour, if it is time: called with each heartbeat."""
        now = time.time()
        slot = int(now // INTERVAL)
        if slot == self._slot:
            return
        gap = min(slot - self._slot - 1, _POINTS) if self._slot else 0
        try:
            point = self._point(now)
        except OSError:  # no file can be opened now, which must not end the heartbeats
            point = dict.fromkeys(self._rings, math.nan)
        for name, value in point.items():
            ring = self._rings.setdefault(name, array.array("f", [math.nan] * _POINTS))
            for missed in range(gap):
                ring[(self._slot + 1 + missed) % _POINTS] = math.nan
            ring[slot % _POINTS] = value
        self._slot = slot

    def _point(self, now: float) -> dict[str, float]:
        """Return the figures of a moment; rates are of the time since the last one."""
        cpu = _cpu()
        busy = sum(seconds for mode, seconds in cpu.items() if mode not in ("idle", "iowait"))
        received, sent = _network()
        counts = {"busy": busy, "all": sum(cpu.values()), "in": received, "out": sent}
        when, before = self._before
        self._before = now, counts
        used, limit = _memory()
        workers, workers_memory, _ = self._processes().get("worker", (0, 0.0, 0.0))
        figures = {name: value for name, _, value in self._figures()}
        point = {
            "load": os.getloadavg()[0],
            "memory": used / limit if limit else math.nan,
            "workers": workers,
            "workers_memory": workers_memory,
            "store": figures["object_store_used_bytes"],
            "spilled": figures["object_store_spilled_bytes"],
        }
        if before and now > when:
            past = {name: counts[name] - value for name, value in before.items()}
            point["cpu"] = past["busy"] / past["all"] if past["all"] else math.nan
            point["received"] = past["in"] / (now - when)
            point["sent"] = past["out"] / (now - when)
        return point

    def _history(self) -> tuple[int, dict[str, list[float]]]:
        """Return the number of the last point, and of each series the points up to it."""
        begin = (self._slot + 1) % _POINTS
        series = {name: [*ring[begin:], *ring[:begin]] for name, ring in self._rings.items()}
        return self._slot, series


def _enter(told: dict[Metric, Values], rows: list[Any]) -> None:
    """Enter series as a process tells them; a value takes the place of the one before."""
    for kind, name, description, boundaries, tags, value in rows:
        metric = (kind, name, description, tuple(boundaries))
        if metric not in told and len(told) >= _MOST:
            continue  # names that are made of values
        told.setdefault(metric, {})[tuple(map(tuple, tags))] = value


def _add(total: dict[Metric, Values], told: dict[Metric, Values]) -> None:
    """Add what was told to a total; of gauges, the last value counts."""
    for metric, values in told.items():
        if metric not in total and len(total) >= _MOST:
            continue
        known = total.setdefault(metric, {})
        for given, value in values.items():
            has_room = len(known) - (_OVERFLOW in known) < _MOST
            tags = given if given in known or has_room else _OVERFLOW
            before = known.get(tags)
            if before is None or metric[0] == "gauge":
                known[tags] = list(value)
            else:
                known[tags] = [a + b for a, b in zip(before, value, strict=True)]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:  # not on this kernel, or not in this container
        return ""


def _cpu() -> dict[str, float]:
    """Return the machine's CPU time by mode, in seconds."""
    modes = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = _read("/proc/stat").partition("\n")[0].split()[1:]
    return {mode: int(count) / _TICKS for mode, count in zip(modes, ticks, strict=False)}


def _memory() -> tuple[float, float]:
    """Return the bytes that are used, and how many this container, or the machine, may use."""
    limit = memory_limit()
    return float(limit - available_memory()), float(limit)


def _pressure(resource: str) -> dict[str, float]:
    """Return for how long some, or all, tasks have waited for a resource, in seconds."""
    lines = (line.split() for line in _read(f"/proc/pressure/{resource}").splitlines())
    return {kind: int(total.partition("=")[2]) / 1e6 for kind, *_, total in lines}


def _network() -> tuple[float, float]:
    """Return the bytes that were received and sent, not over loopback."""
    received = sent = 0.0
    for line in _read("/proc/net/dev").splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() != "lo":
            fields = counts.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent
