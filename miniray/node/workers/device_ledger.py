"""Which processes of this machine have which real devices, on disk: for nodes that start later.

A node that is killed cannot tell anybody that a process of its hangs in a driver and keeps a
device. Responsible for the records, and for ending and watching what is left of earlier nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

from miniray.common.config import config
from miniray.common.ids import new_id
from miniray.node.workers.origins import WORKER_VARIABLE
from miniray.node.workers.quarantine import Quarantine
from miniray.security.token import write_private
from miniray.system.session import ProcessId, machine_identity, processes_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.accelerators import NodeAccelerators
    from miniray.node.workers.worker import Worker

logger = logging.getLogger(__name__)


class DeviceLedger:
    """The records of one node in a folder that all nodes of the user on this machine share."""

    def __init__(self, folder: Path, accelerators: NodeAccelerators, template_pid: int) -> None:
        """Use a folder, which need not exist.

        Args:
            folder: of the records.
            accelerators: of the node. Those that the machine does not have are not recorded:
                other nodes may have logical devices of the same names.
            template_pid: of the process that stays as long as anything of a worker is left.
        """
        self._folder = folder
        self._kinds = {
            resource: [group.family, str(config().device_root)]
            for resource, group in accelerators.devices.items()
            if group.detected
        }
        self._ids = {resource: set(accelerators.devices[resource].ids) for resource in self._kinds}
        self._template_pid = template_pid

    def enter(self, worker: Worker) -> None:
        """A worker's process was started."""
        devices = self._real(worker)
        if not devices:
            return
        try:
            keepers = [ProcessId.of(pid) for pid in (worker.pid, self._template_pid)]
            node = ProcessId.of(os.getpid())
            self._folder.mkdir(mode=0o700, exist_ok=True)
            record = {
                "machine": machine_identity(),
                "node": [node.pid, node.start],
                "keepers": [[keeper.pid, keeper.start] for keeper in keepers],
                "name": worker.name,
                "devices": [[*self._kinds[name], name, ids] for name, ids in devices.items()],
            }
            write_private(self._path(worker), json.dumps(record).encode())
        except ProcessLookupError:
            pass  # it has ended again
        except OSError as error:
            logger.warning("the devices of worker %d are not recorded: %s", worker.pid, error)

    def remove(self, worker: Worker) -> None:
        """A worker is gone, with all that it had started."""
        if self._kinds and worker.devices:
            with contextlib.suppress(OSError):
                self._path(worker).unlink(missing_ok=True)

    def _path(self, worker: Worker) -> Path:
        return self._folder / f"{worker.process_id.hex()}.json"

    def _real(self, worker: Worker) -> dict[str, list[str]]:
        devices: dict[str, list[str]] = {}
        for resource, id in sorted(worker.devices):
            if resource in self._kinds:
                devices.setdefault(resource, []).append(id)
        return devices

    def left(self, on_gone: Callable[[], None]) -> list[LeftDevices]:
        """What processes of nodes that are gone still have of this node's devices.

        Args:
            on_gone: called when one of them has none any more.
        """
        if not self._kinds:
            return []
        found = []
        strays = functools.cache(lambda: processes_by(WORKER_VARIABLE))
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = json.loads(path.read_bytes())
                if (
                    record["machine"] != list(machine_identity())
                    or ProcessId(*record["node"]).alive()
                ):
                    continue
                left = self._read(path, record, strays, on_gone)
            except (OSError, KeyError, TypeError, ValueError) as error:
                logger.warning("the record %s is damaged and was left out: %r", path, error)
                continue
            if left is not None:
                found.append(left)
        return found

    def prune(self) -> None:
        """Remove the records of processes that are gone."""
        if not self._kinds:
            return
        strays = functools.cache(lambda: processes_by(WORKER_VARIABLE))
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, KeyError, TypeError, ValueError):  # left() tells
                record = json.loads(path.read_bytes())
                if record["machine"] == list(machine_identity()):
                    keepers = _keepers(record)
                    for _, fd in keepers:
                        os.close(fd)
                    if not keepers and path.stem not in strays():
                        path.unlink(missing_ok=True)

    def _read(
        self,
        path: Path,
        record: dict[str, Any],
        strays: Callable[[], dict[str, list[ProcessId]]],
        on_gone: Callable[[], None],
    ) -> LeftDevices | None:
        """A record of a node that is gone; it is removed if its processes are too."""
        keepers = _keepers(record) or _end(strays().get(path.stem, []))
        devices = {
            resource: tuple(id for id in ids if id in self._ids[resource])
            for family, root, resource, ids in record["devices"]
            if self._kinds.get(resource) == [family, root]
        }
        if not keepers:
            path.unlink(missing_ok=True)
        if not keepers or not any(devices.values()):
            for _, fd in keepers:
                os.close(fd)
            return None
        worker = record["keepers"][0][0]
        pid = worker if worker in dict(keepers) else keepers[0][0]
        quarantine = Quarantine(
            new_id(),
            b"",
            ((pid, f"{record['name']}, of a node that is gone"),),
            devices,
            time.time(),
        )
        logger.error("worker %d of a node that is gone still has %s", pid, devices)
        return LeftDevices(quarantine, path, keepers, on_gone)


class LeftDevices:
    """Devices that processes of an earlier node still have."""

    def __init__(
        self,
        quarantine: Quarantine,
        path: Path,
        keepers: list[tuple[int, int]],
        on_gone: Callable[[], None],
    ) -> None:
        self.quarantine = quarantine
        #: Whether they have ended.
        self.gone = False
        self._path = path
        self._waiting: set[int] = set()
        self._on_gone = on_gone
        self._watch(keepers)

    def _watch(self, keepers: list[tuple[int, int]]) -> None:
        for _, fd in keepers:
            self._waiting.add(fd)
            asyncio.get_running_loop().add_reader(fd, self._ended, fd)

    def _ended(self, fd: int) -> None:
        self._forget(fd)
        if not self._waiting:
            self._watch(_end(processes_by(WORKER_VARIABLE).get(self._path.stem, [])))
        if not self._waiting:
            self.gone = True
            self._path.unlink(missing_ok=True)
            logger.warning("devices of a node that is gone are free: %s", self.quarantine.devices)
            self._on_gone()

    def _forget(self, fd: int) -> None:
        self._waiting.discard(fd)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        """Look no more."""
        for fd in tuple(self._waiting):
            self._forget(fd)


def _keepers(record: dict[str, Any]) -> list[tuple[int, int]]:
    """The processes that keep devices and are not gone, each with a pidfd."""
    return [held for pid, start in record["keepers"] if (held := _hold(pid, start))]


def _end(strays: list[ProcessId]) -> list[tuple[int, int]]:
    """Kill what a worker that is gone had started; those that are not gone yet, with pidfds."""
    held = [held for stray in strays if (held := _hold(stray.pid, stray.start))]
    for _, fd in held:
        with contextlib.suppress(OSError):  # it has ended meanwhile, or has another user by now
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    return held


def _hold(pid: int, start: int) -> tuple[int, int] | None:
    """A process with a pidfd of it; None if it is gone, with all of its threads."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        same = ProcessId.of(pid).start == start
    except ProcessLookupError:
        same = False
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if same and not poll.poll(0):
        return pid, fd
    os.close(fd)
    return None
