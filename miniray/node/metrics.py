"""Metrics: what this machine and this node's processes use now, and used in the last hour."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.accelerators.host import DetectionError, ToolNotFoundError
from miniray.accelerators.registry import FAMILIES
from miniray.common.process_state import stat_of
from miniray.common.series import COUNTED, Series
from miniray.system.machine import available_memory, memory_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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


def open_files(pid: int) -> int:
    """Return how many files a process has open; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


#: Seconds between two points of the last hour, and how many points it has.
INTERVAL = 10
_POINTS = 360
#: The label that names the kind of a node's accelerators.
_MODEL = "miniray.io/accelerator-type"
#: Seconds that processes may take to report their counts, and a device driver's tool its use.
_SOON, _TOOL_TIMEOUT = 0.5, 1.5

#: (name, labels, value).
Sample = tuple[str, dict[str, str], float]


class DeviceUse:
    """Reads how much of this node's devices is used, of each family until its driver fails once."""

    def __init__(
        self, accelerators: NodeAccelerators, labels: Mapping[str, str], host: Host
    ) -> None:
        self._host = host
        #: Known facts of each device, without a call of its driver.
        model = labels.get(_MODEL, "")
        self.infos = {
            (resource, id): {"resource": resource, "device": id, "model": model, "uuid": ""}
            for resource, group in accelerators.devices.items()
            for id in group.ids
        }
        known = {family.name: family for family in FAMILIES}
        #: By resource: its family, and the ids of its devices.
        self._groups = {
            resource: (known[group.family], group.ids)
            for resource, group in accelerators.devices.items()
            if group.family in known
        }

    def sample(self) -> Iterator[Sample]:
        """Yield (name, labels, value) of each device; blocks while the tools run."""
        for resource, (family, ids) in [*self._groups.items()]:
            try:
                use = family.use(self._host, _TOOL_TIMEOUT)
            except (DetectionError, ValueError, OSError) as error:
                self._groups.pop(resource, None)  # one that hangs would keep a process of each try
                if not isinstance(error, ToolNotFoundError):
                    text = "the use of %s devices is no longer reported: %s"
                    logger.warning(text, resource, error)
                continue
            for id in ids:
                labels = {"resource": resource, "device": id}
                for (name, kind), value in use.get(id, {}).items():
                    if name == "info":
                        self.infos[resource, id]["uuid"] = kind
                        continue
                    yield f"device_{name}", labels | ({"kind": kind} if kind else {}), value


@dataclasses.dataclass(eq=False, repr=False)
class NodeMetrics:
    """Adds up the reports of processes, and reads the machine's use."""

    _clients: ClientServer
    _questions: Questions
    #: Where this node keeps its files.
    _folder: str
    #: Returns what other parts of the daemon count, to any thread.
    _figures: Callable[[], Iterable[Sample]]
    _devices: DeviceUse
    #: Returns the class or the function that a process runs, by its id.
    _work_of: Callable[[bytes], str]

    def __post_init__(self) -> None:
        #: The reports of living processes, and the sums of those that have ended.
        self._reported: dict[bytes, Series] = {}
        self._ended = Series()
        #: CPU time of living processes that is counted.
        self._cpu_seconds: dict[bytes, float] = {}
        #: Of the last hour: the number of each point, and its figures.
        self._points: collections.deque[tuple[int, dict[str, float | None]]] = collections.deque(
            maxlen=_POINTS
        )
        self._before: dict[str, float] = {}
        self._clients.notices["metrics"] = self._take_last
        self._questions.answers.update(
            metrics=self._report,
            history=lambda _seconds: list(self._points),
            # /proc of many processes takes its time, and a disk that is away longer.
            usage=lambda _seconds: asyncio.to_thread(self._usage),
            process_usage=lambda _seconds, pid: of_process(int(pid)),
        )

    async def _report(self, _seconds: float) -> tuple[list[Any], list[Sample]]:
        """Return what processes count, and what the machine does: a disk may take its time."""
        clients = [each for each in self._clients.clients.values() if not each.is_command]
        told = await self._questions.ask_processes(clients, "metrics", (), _SOON)
        for client, (_, rows, missing) in zip(clients, told, strict=True):
            if client.process_id in self._clients.clients:  # else it has ended
                self.count_cpu(client)
                if not missing:
                    self._take(client, rows)
        found = await asyncio.to_thread(lambda: [*self._figures(), *self._sample()])
        total = Series()
        for each in (COUNTED, self._ended, *self._reported.values()):
            total.add(each.rows())
        return total.rows(), found

    # --- reports of processes --------------------------------------------------------
    def _take(self, client: Client, rows: list[Any]) -> None:
        """Take what a process has counted, in place of its earlier numbers for these metrics.

        Metrics that it no longer reports, as of a train loop that has ended, stay, but for gauges.
        """
        counted = Series()
        counted.add(rows)
        for metric, series in self._reported.get(client.process_id, Series()).known.items():
            if metric[0] != "gauge":
                counted.known.setdefault(metric, series)
        self._reported[client.process_id] = counted

    def _take_last(self, client: Client, rows: list[Any]) -> None:
        """Do so for a process whose values have changed: of equal gauges, its one is the last."""
        self._take(client, rows)
        self._reported[client.process_id] = self._reported.pop(client.process_id)

    def ended(self, process_id: bytes) -> None:
        """Keep what a process counted; its gauges go."""
        self._cpu_seconds.pop(process_id, None)
        told = self._reported.pop(process_id, Series())
        self._ended.add(row for row in told.rows() if row[0] != "gauge")

    def count_cpu(self, client: Client) -> None:
        """Add the CPU time that a process has used since this was done last, or before it ends."""
        known, (now, _) = self._cpu_seconds.get(client.process_id, 0.0), of_process(client.pid)
        if now > known:  # else it is gone
            self._cpu_seconds[client.process_id] = now
            tags = (("role", client.role), ("name", self._work_of(client.process_id)))
            COUNTED.count("process_cpu_seconds_total", tags, now - known)

    # --- the machine -----------------------------------------------------------------
    def _sample(self) -> Iterator[Sample]:
        """Yield (name, labels, value) of what the node and its machine do now."""
        for mode, seconds in _cpu().items():
            yield "node_cpu_seconds_total", {"mode": mode}, seconds
        used, limit = _memory()
        yield "node_load1", {}, os.getloadavg()[0]
        yield "node_memory_used_bytes", {}, used
        yield "node_memory_limit_bytes", {}, limit
        for resource in ("cpu", "memory", "io"):
            for kind, seconds in _pressure(resource).items():
                yield "node_pressure_seconds_total", {"resource": resource, "kind": kind}, seconds
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(self._folder)
            yield "node_disk_free_bytes", {"place": "session"}, disk.free
            yield "node_disk_size_bytes", {"place": "session"}, disk.total
        received, sent = _network()
        yield "node_network_receive_bytes_total", {}, received
        yield "node_network_transmit_bytes_total", {}, sent
        sums: collections.Counter[tuple[str, str, str]] = collections.Counter()
        for role, name, pid in self._processes():
            sums["processes", role, ""] += 1
            sums["process_open_fds", role, ""] += open_files(pid)
            _, memory = of_process(pid)
            sums["process_memory_bytes", role, name] += memory
        for (metric, role, name), value in sums.items():
            yield metric, {"role": role} | ({"name": name} if name else {}), value
        yield "process_cpu_seconds_total", {"role": "daemon", "name": ""}, time.process_time()
        yield from self._devices.sample()
        yield from (("device_info", labels, 1) for labels in self._devices.infos.values())

    def _processes(self) -> list[tuple[str, str, int]]:
        """Return role, work and pid of this daemon and its processes."""
        clients = [each for each in list(self._clients.clients.values()) if not each.is_command]
        known = [(each.role, self._work_of(each.process_id), each.pid) for each in clients]
        return [("daemon", "", os.getpid()), *known]

    def _usage(self) -> dict[str, Any]:
        """Return what the machine and its devices use."""
        used, limit = _memory()
        share = _busy_share(self._before, _counts())
        devices: dict[str, dict[str, float]] = collections.defaultdict(dict)
        for name, labels, value in self._devices.sample():
            use = devices[f"{labels['resource']}/{labels['device']}"]
            use[name.removeprefix("device_")] = value
        return {
            "cpu_percent": share and round(100 * share, 1),
            "memory_used": used,
            "memory_total": limit,
            "disk_free": shutil.disk_usage(self._folder).free,
            "processes": len(self._processes()) - 1,
            "devices": dict(devices),
        }

    # --- the last hour -----------------------------------------------------------------
    def look(self, used: float, spilled: float) -> None:
        """Record a point of the last hour, if it is time: called with each heartbeat.

        Args:
            used: Bytes of the object store that are in use.
            spilled: Bytes of values that are on disk.
        """
        slot = int(time.time() // INTERVAL)
        if self._points and self._points[-1][0] == slot:
            return
        # That no file can be opened now must not end the heartbeats.
        with contextlib.suppress(OSError):
            self._points.append((slot, {**self._point(), "store": used, "spilled": spilled}))

    def _point(self) -> dict[str, float | None]:
        """Return the figures of a moment; rates are of the time since the last one."""
        before, now = self._before, _counts()
        self._before = now
        used, limit = _memory()
        workers = [of_process(pid) for role, _, pid in self._processes() if role == "worker"]
        point = {
            "load": os.getloadavg()[0],
            "memory": used / limit if limit else None,
            "workers": len(workers),
            "workers_memory": sum(memory for _, memory in workers),
        }
        if before and (passed := now["time"] - before["time"]) > 0:
            point["cpu"] = _busy_share(before, now)
            point["received"] = (now["received"] - before["received"]) / passed
            point["sent"] = (now["sent"] - before["sent"]) / passed
        return point


def _read(path: str) -> str:
    with contextlib.suppress(OSError):  # not on this kernel, or not in this container
        return Path(path).read_text(encoding="ascii", errors="replace")
    return ""


def _cpu() -> dict[str, float]:
    """Return the machine's CPU time by mode, in seconds."""
    modes = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = _read("/proc/stat").partition("\n")[0].split()[1:]
    return {mode: int(count) / _TICKS for mode, count in zip(modes, ticks, strict=False)}


def _counts() -> dict[str, float]:
    """Return what only grows: time, seconds of processors, and bytes of the network."""
    cpu = _cpu()
    received, sent = _network()
    idle = cpu.get("idle", 0.0) + cpu.get("iowait", 0.0)
    busy = {"idle": idle, "all": sum(cpu.values())}
    return {"time": time.time(), **busy, "received": received, "sent": sent}


def _busy_share(before: dict[str, float], now: dict[str, float]) -> float | None:
    """Return for which part of the time between two counts the processors were busy, if known."""
    passed = now["all"] - before["all"] if before else 0.0
    return 1 - (now["idle"] - before["idle"]) / passed if passed > 0 else None


def _memory() -> tuple[float, float]:
    """Return the bytes that are used, and how many this container, or the machine, may use."""
    limit = memory_limit()
    return float(limit - available_memory()), float(limit)


def _pressure(resource: str) -> dict[str, float]:
    """Return for how long some, or all, tasks have waited for a resource, in seconds."""
    lines = (line.split() for line in _read(f"/proc/pressure/{resource}").splitlines())
    return {kind: int(total.removeprefix("total=")) / 1e6 for kind, *_, total in lines}


def _network() -> tuple[float, float]:
    """Return the bytes that were received and sent, not over loopback."""
    received = sent = 0.0
    for line in _read("/proc/net/dev").splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() != "lo":
            got, put = counts.split()[:9:8]
            received, sent = received + int(got), sent + int(put)
    return received, sent
