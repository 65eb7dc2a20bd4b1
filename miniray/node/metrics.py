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
from miniray.accelerators.registry import FAMILIES
from miniray.common.process_state import stat_of
from miniray.common.series import COUNTED, MOST, Series
from miniray.system.machine import available_memory, memory_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.accelerators.host import Host
    from miniray.accelerators.node_resources import NodeAccelerators
    from miniray.node.base.clients import Client, ClientServer
    from miniray.node.relay.questions import Questions

logger = logging.getLogger(__name__)

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Fields of /proc/PID/stat, as ``stat_of`` returns them: CPU time of user and system, memory.
_USER, _SYSTEM, _RESIDENT = 11, 12, 21


def of_process(pid: int) -> tuple[float, int]:
    """Return CPU seconds and bytes of memory of a process; zeros if it is gone."""
    fields = stat_of(pid)
    if fields is None:
        return 0.0, 0
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS, int(fields[_RESIDENT]) * _PAGE


#: Seconds between two points of the last hour, and how many points it has.
INTERVAL = 10
_POINTS = 360
#: Seconds that processes may take to tell what they have counted, and a driver's tool its use.
_SOON, _TOOL_TIMEOUT = 0.5, 1.5

#: (name, labels, value).
Sample = list[tuple[str, dict[str, str], float]]


class DeviceUse:
    """Reads how much of this node's devices is used, of each family until its driver fails once."""

    def __init__(self, accelerators: NodeAccelerators, host: Host) -> None:
        self._host = host
        known = {family.name: family for family in FAMILIES}
        #: By resource: its family, and the ids of its devices.
        self._groups = {
            resource: (known[group.family], group.ids)
            for resource, group in accelerators.devices.items()
            if group.family in known
        }

    def sample(self) -> Sample:
        """Return (name, labels, value) of each device; blocks while tools are asked."""
        found: Sample = []
        for resource, (family, ids) in [*self._groups.items()]:
            try:
                use = family.use(self._host, _TOOL_TIMEOUT)
            except (DetectionError, ValueError, OSError) as error:
                self._groups.pop(resource, None)  # one that hangs would keep a process of each try
                if not isinstance(error, ToolNotFoundError):
                    text = "the use of %s devices is not told any more: %s"
                    logger.warning(text, resource, error)
                continue
            for id in ids:
                labels = {"resource": resource, "device": id}
                for (name, kind), value in use.get(id, {}).items():
                    of_kind = {"kind": kind} if kind else {}
                    found.append((f"device_{name}", labels | of_kind, value))
        return found


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
        self._told: dict[bytes, Series] = {}
        self._ended = Series()
        self._rings: dict[str, array.array[float]] = {}
        self._slot = 0
        self._before: tuple[float, dict[str, float]] = (0.0, {})
        clients.notices["metrics"] = self._take
        questions.answers["metrics"] = self._tell
        questions.answers["history"] = lambda _seconds: self._history()
        questions.answers["usage"] = self._usage

    async def _tell(self, _seconds: float) -> tuple[list[Any], Sample]:
        """Return what processes count, and what the machine does: a disk may take its time."""
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        told = await self._questions.ask_processes(clients, "metrics", (), _SOON)
        gauges: list[Any] = []
        for client, (_, rows, _) in zip(clients, told, strict=True):
            if rows and client.process_id in self._clients.clients:  # else it has ended meanwhile
                gauges += [row for row in rows if row[0] == "gauge"]
                counted = Series()
                for row in rows:
                    if row[0] != "gauge":
                        counted.put(*row)
                # In place of all that it has told of a metric: names that it has folded into others
                # would count twice.
                self._told.setdefault(client.process_id, Series()).known.update(counted.known)
        found = self._figures() + await asyncio.to_thread(self._sample)
        total = Series()
        for each in (COUNTED, self._ended, *self._told.values()):
            total.add(each.rows())
        return total.rows() + gauges[:MOST], found

    # --- what processes tell ---------------------------------------------------------
    def _take(self, client: Client, rows: list[Any]) -> None:
        # Taken out and put in again: the process that told last comes last, and its gauges count.
        told = self._told[client.process_id] = self._told.pop(client.process_id, Series())
        for row in rows:
            told.put(*row)

    def ended(self, process_id: bytes) -> None:
        """Keep what a process counted; its gauges go."""
        told = self._told.pop(process_id, Series())
        self._ended.add(row for row in told.rows() if row[0] != "gauge")

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
        return found + self._devices.sample()

    async def _usage(self, _seconds: float) -> dict[str, Any]:
        """Return what the machine and each process use; two answers tell rates."""
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        # /proc of many processes takes its time, and a disk that is away longer.
        return await asyncio.to_thread(self._used, clients)

    def _used(self, clients: list[Client]) -> dict[str, Any]:
        (used, limit), disk = _memory(), shutil.disk_usage(self._folder)
        return {
            **_busy_and_all(),
            "load1": os.getloadavg()[0],
            "memory_total": limit,
            "memory_used": used,
            "disk_size": disk.total,
            "disk_free": disk.free,
            "processes": [(client.pid, *of_process(client.pid)) for client in clients],
        }

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
        received, sent = _network()
        counts = {**_busy_and_all(), "in": received, "out": sent}
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
            point["cpu"] = past["cpu_busy"] / past["cpu_all"] if past["cpu_all"] else math.nan
            point["received"] = past["in"] / (now - when)
            point["sent"] = past["out"] / (now - when)
        return point

    def _history(self) -> tuple[int, dict[str, list[float]]]:
        """Return the number of the last point, and of each series the points up to it."""
        begin = (self._slot + 1) % _POINTS
        series = {name: [*ring[begin:], *ring[:begin]] for name, ring in self._rings.items()}
        return self._slot, series


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


def _busy_and_all() -> dict[str, float]:
    """Return for how long the machine's processors were busy, and how long there were some."""
    cpu = _cpu()
    busy = sum(seconds for mode, seconds in cpu.items() if mode not in ("idle", "iowait"))
    return {"cpu_busy": busy, "cpu_all": sum(cpu.values())}


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
            got, put = counts.split()[:9:8]
            received, sent = received + int(got), sent + int(put)
    return received, sent
