"""One bad message harms that message only: between nodes, of a driver, at the head."""

from __future__ import annotations

import marshal
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from raw_process import RawProcess, record_of
from running_cluster import running_cluster

import miniray
import miniray.util.state
from miniray.common.specs import ActorSpec, field_names
from miniray.messages import plain
from miniray.messages import protocol as p

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster


@pytest.fixture(scope="module")
def two_nodes(session_root: Any) -> Iterator[Cluster]:
    with running_cluster({"num_cpus": 2}, {"num_cpus": 2, "resources": {"far": 4}}) as cluster:
        yield cluster


pytestmark = pytest.mark.usefixtures("two_nodes")


@pytest.fixture
def raw() -> Iterator[RawProcess]:
    """A driver on the head's node that sends what it likes."""
    process = RawProcess(record_of(miniray.get_runtime_context().get_node_id()))
    yield process
    process.close()


@miniray.remote
class Echo:
    def say(self, what: int) -> int:
        return what

    def node(self) -> str:
        return miniray.get_runtime_context().get_node_id()


#: What cannot be messages between two processes, in place of (process, messages).
BAD = [(["no id"], [b""]), (b"12345678", [5]), (b"12345678", "text"), ({}, {}), (None, None)]


def test_bad_messages_of_one_driver_to_another_node_lose_no_call_of_another(
    raw: RawProcess,
) -> None:
    actor = Echo.options(resources={"far": 1}).remote()
    there = bytes.fromhex(miniray.get(actor.node.remote()))
    for _ in range(20):
        for process, messages in BAD:
            raw.send((p.NODE_RELAY, there, process, messages))
        refs = [actor.say.remote(n) for n in range(50)]
        assert miniray.get(refs, timeout=30) == list(range(50))


@pytest.mark.parametrize(
    "message",
    [
        (p.NODE_REQUEST, 7, "no such request", ()),
        (p.NODE_REQUEST, 7, ["no name"], ()),
        (p.NODE_REQUEST, 7, "map", 5),
        (p.NODE_REQUEST, 7, "map"),
        (p.HEAD_REQUEST, 7, "no such request", plain.dumps(())),
        (p.HEAD_REQUEST, 7, "kv_get", b""),
        (p.HEAD_REQUEST, 7, "kv_get", plain.dumps(5)),
        (p.HEAD_REQUEST, 7, "kv_get", "no bytes"),
        (p.HEAD_REQUEST, 7, 5, b""),
    ],
    ids=repr,
)
def test_a_request_that_cannot_be_handled_is_answered_with_the_reason(
    raw: RawProcess, message: tuple[Any, ...]
) -> None:
    raw.send(message)
    while (reply := raw.read())[0] not in (p.NODE_REPLY, p.HEAD_REPLY):
        pass
    assert reply[1] == 7
    assert isinstance(pickle.loads(reply[2]), Exception)


def test_notices_that_cannot_be_handled_harm_neither_their_driver_nor_another(
    raw: RawProcess,
) -> None:
    raw.send((p.NODE_NOTICE, "watch", (5,)))
    raw.send((p.NODE_NOTICE, "no such notice", ()))
    raw.send((p.HEAD_NOTICE, "create_actor", b""))
    raw.send((99, "no such kind"))
    raw.send(("text",))
    raw.send((["no kind"], 1))
    error, body = raw.ask_head("kv_exists", "space", b"key")
    assert error is None
    assert marshal.loads(body) is False
    assert miniray.get(Echo.remote().say.remote(1), timeout=30) == 1


def test_an_answer_that_is_too_large_for_a_message_is_refused_and_the_node_stays(
    raw: RawProcess,
) -> None:
    for _ in range(70):
        error, _body = raw.ask_head("kv_put", "large", os.urandom(1 << 20), b"", True)
        assert error is None
    error, _body = raw.ask_head("kv_keys", "large", b"")
    assert "Ask for less at once" in str(pickle.loads(error))
    error, body = raw.ask_head("kv_keys", "small", b"")
    assert error is None
    assert marshal.loads(body) == []


#: A frame of five bytes that claims two thousand million items.
BOMB = b"(" + b"\xff\xff\xff\x7f"


def test_a_message_that_claims_to_be_large_takes_no_memory(raw: RawProcess) -> None:
    record = record_of(miniray.get_runtime_context().get_node_id())
    processes = [record.processes["head"].pid, record.processes["boot"].pid]
    before = [resident(pid) for pid in processes]
    number = 1_000_000
    raw.send((p.HEAD_REQUEST, number, "kv_get", BOMB))
    while (reply := raw.read())[:2] != (p.HEAD_REPLY, number):
        pass
    assert "plain data" in str(pickle.loads(reply[2]))
    raw.send_body(BOMB)
    with pytest.raises(ConnectionError):
        raw.read()
    for pid, size in zip(processes, before, strict=True):
        assert resident(pid) < size + (100 << 20)


def resident(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


SPEC = ActorSpec(
    resources={"CPU": 1000},
    placement_resources={"CPU": 1000},
    class_key=b"key",
    class_name="A",
    info=b"",
    method_groups={},
    is_async=False,
    namespace="raw",
    detached=False,
    owner_node=b"12345678",
).to_wire()


@pytest.mark.parametrize("field", field_names(ActorSpec))
def test_a_malformed_actor_is_refused_and_leaves_nothing_behind(
    raw: RawProcess, field: str
) -> None:
    for value in (5, "text", b"bytes", {1: 2}, [None], None, [], object):
        at = field_names(ActorSpec).index(field)
        spec = (*SPEC[:at], *([] if value is object else [value]), *SPEC[at + 1 :])
        raw.ask_head("create_actor", raw.id + os.urandom(8), spec, False)
        raw.send((p.HEAD_NOTICE, "create_actor", plain.dumps((os.urandom(16), spec, False))))
    error, _ = raw.ask_head("create_actor", raw.id + os.urandom(8), {}, False)
    assert "spec" in str(pickle.loads(error))
    assert miniray.util.state.list_actors() is not None


@pytest.mark.parametrize("method", ["create_placement_group", "create_actor", "want_leases"])
def test_a_notice_with_a_malformed_id_leaves_nothing_behind(raw: RawProcess, method: str) -> None:
    for id in (1.5, 5, "text", None, [1]):
        raw.send((p.HEAD_NOTICE, method, plain.dumps((id, {}, 1))))
    raw.ask_head("nodes")  # is answered after them
    assert miniray.util.state.list_placement_groups() == []
    assert miniray.util.state.list_actors() is not None
    assert miniray.util.state.list_pending_demands() is not None


@pytest.mark.parametrize("arguments", [("space", 5, b""), (5, b"key", b""), ("space", b"key", 5)])
def test_a_key_value_of_a_wrong_type_is_refused(raw: RawProcess, arguments: Any) -> None:
    error, _ = raw.ask_head("kv_put", *arguments, True)
    assert "must be" in str(pickle.loads(error))
