"""The event log: what nodes and the head remember of what has happened, with its cause."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from cluster_helpers import wait_until
from running_cluster import running_cluster
from unkillable import ALLOW_TRACING, Unkillable

import miniray
from miniray._proto import head_pb2, head_pb2_grpc
from miniray.exceptions import MinirayError
from miniray.system.session import find_clusters
from miniray.util.state import list_cluster_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.util.state import ClusterEventState

pytestmark = pytest.mark.engine("miniray")

STORE = 60 << 20


@pytest.fixture(scope="module", autouse=True)
def _nodes(session_root: Path) -> Iterator[None]:
    """One node with a GPU and little memory, which gives a process up soon after it was killed."""
    variables = {"MINIRAY_QUARANTINE_AFTER": "0.3", "MINIRAY_STOP_GRACE": "0.3"}
    node = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": STORE}
    with running_cluster(node, variables=variables):
        yield


@miniray.remote(num_cpus=0)
class Holder:
    def __init__(self) -> None:
        exec(ALLOW_TRACING)

    def pid(self) -> int:
        return os.getpid()

    def use_memory(self, group: str) -> None:
        """Have the kernel kill this process; where no group limits it, do it in its place."""
        if group:
            Path(group, "cgroup.procs").write_text(str(os.getpid()))
            bytearray(b"x") * (1 << 30)
        os.kill(os.getpid(), signal.SIGKILL)


def told(source: str, event: str) -> list[ClusterEventState]:
    filters = [("source_type", "=", source), ("event_type", "=", event)]
    return list_cluster_events(filters=filters, limit=1000)


def the_only(source: str, event: str) -> ClusterEventState:
    """The event, once there is one; it is of the only node, and of now."""
    wait_until(lambda: told(source, event))
    [found] = told(source, event)
    assert time.time() - 60 < found.time <= time.time()
    return found


def node_id() -> str:
    [node] = miniray.nodes()
    return str(node["NodeID"])


def test_values_that_go_to_disk_are_told_once_a_minute() -> None:
    refs: list[Any] = [miniray.put(np.zeros(STORE // 3, np.uint8)) for _ in range(6)]
    event = the_only("OBJECT", "spilled")
    assert (event.severity, event.custom_fields) == ("WARNING", {"node_id": node_id()})
    assert event.message.startswith(f"Node {node_id()} has no memory for all objects: ")
    refs += [miniray.put(np.zeros(STORE // 3, np.uint8)) for _ in range(2)]
    assert len(told("OBJECT", "spilled")) == 1


def test_a_device_of_a_process_that_cannot_be_killed_is_out_of_service_and_back_again() -> None:
    holder = Holder.options(num_gpus=1).remote()
    pid = miniray.get(holder.pid.remote())
    with Unkillable(pid):
        miniray.kill(holder)
        event = the_only("DEVICE", "quarantined")
        assert (event.severity, event.custom_fields) == ("ERROR", {"node_id": node_id()})
        assert event.message.startswith(f"GPU 0 of node {node_id()} is out of service: ")
        assert str(pid) in event.message
        assert told("DEVICE", "released") == []
    event = the_only("DEVICE", "released")
    assert event.message == f"GPU 0 of node {node_id()} is back in service."


def test_a_worker_that_the_kernel_kills_for_memory_is_told_as_that(memory_group: str) -> None:
    holder = Holder.remote()
    pid = miniray.get(holder.pid.remote())
    with pytest.raises(MinirayError):
        miniray.get(holder.use_memory.remote(memory_group))
    event = the_only("WORKER", "killed_for_memory" if memory_group else "crashed")
    assert event.severity == ("ERROR" if memory_group else "WARNING")
    assert event.message.startswith(f"Worker {pid} of Holder was ended by signal 9 (SIGKILL)")
    if memory_group:
        assert "because memory ran out" in event.message


def test_who_does_not_have_the_secret_is_told_with_the_address() -> None:
    [record] = find_clusters()
    socket = record.session.socket_dir / "head.sock"
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        session = head_pb2_grpc.HeadStub(channel).Session  # type: ignore[no-untyped-call]
        for secret in ("", "wrong"):
            with pytest.raises(grpc.RpcError) as caught:
                next(session(iter([head_pb2.FromNode()]), metadata=[("authorization", secret)]))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    event = the_only("SECURITY", "wrong_secret")
    assert event.severity == "WARNING"
    assert event.message == "this machine was refused: it does not have the cluster's secret."
