"""How a node introduces itself to the head: what it has, and what runs on it."""

from __future__ import annotations

import json
import os
import platform
import socket
from typing import TYPE_CHECKING, Any

from miniray._proto import head_pb2
from miniray.messages import plain
from miniray.version import VERSION

if TYPE_CHECKING:
    from miniray.node.base.clients import Client
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.workers.worker import NodeLease, Worker
    from miniray.node.workers.workers import WorkerPool


def hello(node: NodeConfig, pool: WorkerPool, lately: head_pb2.FromNodeBatch) -> head_pb2.NodeHello:
    """The first message of a session: after a restart of the head it is where leases come from."""
    devices = node.accelerators.devices
    return head_pb2.NodeHello(
        node_id=node.node_id,
        version=VERSION,
        python=platform.python_version(),
        host=node.host,
        address=node.address,
        hostname=socket.gethostname(),
        pid=os.getpid(),
        resources=json.dumps(
            {
                "scalars": node.scalars,
                "devices": {name: list(group.ids) for name, group in devices.items()},
                "fractional": {name: group.fractional for name, group in devices.items()},
                "labels": node.labels,
            }
        ).encode(),
        leases=[
            head_pb2.RunningLease(
                lease=lease.number,
                epoch=lease.epoch,
                process_id=lease.worker.process_id if lease.worker is not None else b"",
                owner=lease.owner,
                actor_id=lease.actor_id or b"",
                allocation=plain.dumps(tuple(lease.allocation)),
            )
            for lease in pool.leases.values()
        ],
        session_dir=str(node.session_dir),
        socket_path=node.socket_path,
        is_head_node=node.is_head,
        drivers_only=node.drivers_only,
        quarantines=pool.quarantines(),
        lately=lately,
    )


def attached(client: Client, machine: str) -> head_pb2.FromNode:
    """A process of this node has connected."""
    message = head_pb2.ProcessAttached(
        process_id=client.process_id, pid=client.pid, job_id=client.job_id
    )
    if client.is_driver:
        message.driver = True
        message.details = json.dumps({**client.details, "machine": machine})
    return head_pb2.FromNode(attached=message)


def blocked_report(worker: Worker, lease: NodeLease) -> head_pb2.FromNode:
    """Say whether what runs on a lease waits for others, and whether it does so before it exits."""
    leaving = worker.process_id if worker.finishing else b""
    return head_pb2.FromNode(
        blocked=head_pb2.LeaseBlocked(lease=lease.number, blocked=lease.blocked, leaving=leaving)
    )


def actor_report(worker: Worker, lease: NodeLease, **facts: Any) -> head_pb2.FromNode:
    """An actor runs, or has failed, or is about to end."""
    return head_pb2.FromNode(
        actor=head_pb2.ActorReported(
            actor_id=lease.actor_id,
            lease=lease.number,
            process_id=worker.process_id,
            pid=worker.pid,
            **facts,
        )
    )
