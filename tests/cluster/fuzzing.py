"""Sends a cluster what it should never get, and looks whether it minds.

``python tests/cluster/fuzzing.py --seconds 3600 --frames 1000000`` runs it for an hour; the seed is
printed, and ``--seed`` repeats it. It fails if the head or the daemon is gone, if they take more
memory than their bound, or if another driver's calls are not answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import random
import re
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raw_process import RawProcess, record_of

import miniray
from miniray._proto import common_pb2, head_pb2, node_pb2
from miniray.cluster_utils import Cluster
from miniray.common.specs import ActorSpec, LeaseSpec
from miniray.messages import plain
from miniray.messages import protocol as p
from miniray.node.relay import relayed as r
from miniray.options import ACTOR_OPTIONS, METHOD_OPTIONS, TASK_OPTIONS, checked
from miniray.security import channels
from miniray.security.token import JoinToken, TokenError, parse_token, read_token_file
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.system.session import ClusterRecord

#: Bytes that the head and the daemon may take beyond what they had.
MEMORY = 400 << 20
#: Seconds within which another driver's call is answered.
ANSWER = 60.0
#: Frames between two looks at the cluster.
_ROUND = 2000
#: How these requests end a node or take it out of use is what they are for.
_MEANT = {"shutdown", "drain_node", "forked"}
#: A key of a table.
_KEY = re.compile(r'^ +"(\w+)": ', re.MULTILINE)
_NUMBERS = (0, 1, -1, 7, 255, 2**31, 2**32 - 1, 2**63, -(2**63), 2**64, 2**200)
_FLOATS = (0.5, -1.0, 1e308, float("inf"), float("nan"))
_TEXTS = (
    "",
    "a",
    "CPU",
    "GPU",
    "nodes",
    "actors",
    "\x1b[2J",
    "\0",
    "x" * 5000,
    "\udc80",
    "..",
    "{}",
)


def names_of_requests() -> tuple[list[str], list[str]]:
    """What the head, and what the daemon, can be asked: names in quotes in their sources."""
    root = Path(miniray.__file__).parent
    head = (root / "head" / "head.py").read_text()
    node = "".join(path.read_text() for path in (root / "node").rglob("*.py"))
    asked = _KEY.findall(head)
    told = re.findall(r'clients\.(?:requests|quick|notices)\["(\w+)"\]', node)
    tables = re.findall(
        r"clients\.(?:requests|quick|notices)\.update\((.*?)\n        \)", node, re.DOTALL
    )
    told += [name for table in tables for name in _KEY.findall(table)]
    assert len(asked) > 30, "the head's requests are somewhere else"
    assert {"get_code", "map_segment", "forked", "unmapped"} <= set(told), (
        "the daemon's are elsewhere"
    )
    return sorted(set(asked) - _MEANT), sorted(set(told) - _MEANT)


_SPEC = LeaseSpec(name="name", resources={"CPU": 1e6}, max_calls=0).to_wire()
_ACTOR = ActorSpec(
    resources={"CPU": 1e6},
    placement_resources={"CPU": 1e6},
    class_key=b"key",
    class_name="A",
    info=b"",
    method_groups={},
    is_async=False,
    namespace="raw",
    detached=False,
    owner_node=b"12345678",
).to_wire()
#: Arguments that the head takes; an id stands for one of the asking process's.
_ID = b"an id of its own"
_GOOD: dict[str, tuple[Any, ...]] = {
    "create_actor": (_ID, _ACTOR, False),
    "start_actor": (_ID, (0, b"", ()), [], None),
    "subscribe_actor": (_ID,),
    "kill_actor": (_ID, True),
    "want_leases": (1, _SPEC, 3, b""),
    "return_lease": (1 << 40,),
    "hold_leases": ([1, 2],),
    "create_placement_group": (_ID, [{"CPU": 1e6}], "PACK", "name", "space", False, None),
    "remove_placement_group": (_ID,),
    "placement_group_table": (_ID,),
    "await_placement_group": (_ID,),
    "kv_put": ("space", b"key", b"value", True),
    "kv_get": ("space", b"key"),
    "kv_keys": ("space", b""),
    "get_actor": ("name", "raw"),
}


class Fuzzer:
    """Random messages, most of them nearly right."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        #: Id of the process that asks.
        self.process = bytes(8)
        self.head_requests, self.node_requests = names_of_requests()

    def value(self, depth: int = 3) -> Any:
        """Plain data of any kind."""
        rng = self.rng
        kind = rng.randrange(10 if depth else 7)
        if kind == 0:
            return rng.choice((None, True, False))
        if kind == 1:
            return rng.choice(_NUMBERS)
        if kind == 2:
            return rng.choice(_FLOATS)
        if kind == 3:
            return rng.choice(_TEXTS)
        if kind <= 6:
            return rng.randbytes(rng.choice((0, 1, 8, 16, 24, 300)))
        items = [self.value(depth - 1) for _ in range(rng.randrange(6))]
        if kind == 7:
            return items
        return tuple(items) if kind == 8 else {str(n): each for n, each in enumerate(items)}

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of a request."""
        return tuple(self.value() for _ in range(self.rng.randrange(8)))

    def nearly(self, good: Any) -> Any:
        """Data like this, in which something may be something else."""
        rng = self.rng
        if rng.random() < 0.05:
            return self.value()
        if good == _ID:
            return self.process + rng.randrange(20).to_bytes(8, "big")
        if isinstance(good, dict):
            return {key: self.nearly(each) for key, each in good.items() if rng.random() < 0.99}
        if isinstance(good, list | tuple):
            return type(good)(self.nearly(each) for each in good)
        return good

    def message(self) -> Any:
        """A message of a process to its daemon."""
        rng = self.rng
        number, kind = rng.randrange(1 << 30), rng.randrange(9)
        if kind >= 7:
            method = rng.choice(list(_GOOD))
            body = plain.dumps(self.nearly(_GOOD[method]))
            return (p.HEAD_REQUEST, number, method, body)
        if kind == 0:
            return (p.NODE_REQUEST, number, rng.choice(self.node_requests), self.arguments())
        if kind == 1:
            return (p.NODE_NOTICE, rng.choice(self.node_requests), self.arguments())
        if kind in (2, 3):
            body = self.body(self.arguments())
            return (p.HEAD_REQUEST, number, rng.choice(self.head_requests), body)
        if kind == 4:
            return (p.HEAD_NOTICE, rng.choice(self.head_requests), self.body(self.arguments()))
        if kind == 5:
            bodies = [self.body(self.arguments()) for _ in range(rng.randrange(4))]
            return (p.NODE_RELAY, rng.randbytes(8), rng.randbytes(8), bodies)
        return (rng.randrange(70), *self.arguments())

    def body(self, message: Any) -> bytes:
        """A message as bytes, now and then with something wrong in it."""
        data = plain.dumps(message)
        return self.changed(data) if self.rng.random() < 0.3 else data

    def changed(self, data: bytes) -> bytes:
        """The bytes with a few of them changed, cut out, doubled or claimed to be many."""
        rng = self.rng
        found = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(found) + 1)
            kind = rng.randrange(5)
            if kind == 0:
                found[at : at + 1] = rng.randbytes(1)
            elif kind == 1:
                del found[at : at + rng.randrange(1, 20)]
            elif kind == 2:
                found[at:at] = found[: rng.randrange(30)]
            elif kind == 3:
                found[at : at + 5] = rng.choice(b"([{<>suizZ)lrcy").to_bytes(
                    1, "big"
                ) + struct.pack("<I", rng.choice((0x7FFFFFFF, 0xFFFFFF, 100_000_000)))
            else:
                found[at:at] = rng.randbytes(rng.randrange(1, 9))
        return bytes(found)


def decoder(fuzzer: Fuzzer, count: int) -> None:
    """Frames are read, or refused with a ValueError."""
    for _ in range(count):
        with contextlib.suppress(ValueError):
            plain.loads(fuzzer.changed(plain.dumps(fuzzer.message())))


def tokens(fuzzer: Fuzzer, count: int) -> None:
    """A token is read, or refused without repeating its secret."""
    secret = fuzzer.rng.randbytes(32)
    good = str(JoinToken(bytes(32), secret))
    for _ in range(count):
        text = fuzzer.changed(good.encode()).decode("utf-8", "surrogateescape")
        said = ""
        try:
            parse_token(text)
        except TokenError as error:
            said = str(error)
        assert good[-20:] not in said


def options(fuzzer: Fuzzer, count: int) -> None:
    """Options are taken, or refused with a ValueError or TypeError."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            known = fuzzer.rng.choice((TASK_OPTIONS, ACTOR_OPTIONS, METHOD_OPTIONS))
            name = fuzzer.rng.choice(list(known))
            with contextlib.suppress(ValueError, TypeError):
                checked({name: fuzzer.value()}, known, "a fuzz test")


def frames(fuzzer: Fuzzer, record: ClusterRecord, count: int) -> None:
    """A driver says anything to its daemon and, through it, to the head."""
    process: RawProcess | None = None
    for _ in range(count):
        try:
            if process is None:
                process = RawProcess(record)
                fuzzer.process = process.id
            if fuzzer.rng.random() < 0.9:
                process.send(fuzzer.message())
            else:
                process.send_body(fuzzer.changed(plain.dumps(fuzzer.message())))
            process.drop_answers()
        except (OSError, struct.error):
            if process is not None:
                process.close()
            process = None
    if process is not None:
        process.close()


async def rpcs(fuzzer: Fuzzer, record: ClusterRecord, count: int) -> None:
    """A peer that knows the secret says anything to the services of head and daemon."""
    secret = read_token_file(record.session.token_file).grpc_secret
    folder = Path(record.socket_path).parent
    for path, methods in _services(folder):
        channel = channels.channel(f"unix:{path}", secret)
        try:
            for method in methods:
                await _stream(fuzzer, channel, method, count)
        finally:
            await channel.close()


def _services(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    head = ["Head/Session"]
    node = ["Node/Relay"]
    for path in folder.glob("*.sock"):
        if path.name.startswith("head"):
            yield path, head
        elif path.name.startswith("peer"):
            yield path, node


async def _stream(fuzzer: Fuzzer, channel: Any, method: str, count: int) -> None:
    import grpc

    call = channel.stream_stream(
        f"/miniray.v1.{method}", request_serializer=bytes, response_deserializer=bytes
    )()
    first = {
        "Head/Session": _hello(fuzzer),
        "Node/Relay": node_pb2.RelayBatch(node_id=fuzzer.rng.randbytes(8)).SerializeToString(),
    }.get(method)
    try:
        if first is not None:
            await asyncio.wait_for(call.write(first), 10)
        for _ in range(count):
            await asyncio.wait_for(call.write(_rpc_message(fuzzer, method)), 10)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.TimeoutError):
        pass  # it was refused
    finally:
        call.cancel()


def _hello(fuzzer: Fuzzer) -> bytes:
    hello = head_pb2.NodeHello(
        node_id=fuzzer.rng.randbytes(8),
        version=VERSION,
        python=platform.python_version(),
        address="m|/s|",
        drivers_only=True,
        resources=plain.dumps({"scalars": {}}),
    )
    data: bytes = head_pb2.FromNode(hello=hello).SerializeToString()
    return data


def _rpc_message(fuzzer: Fuzzer, method: str) -> bytes:
    rng = fuzzer.rng
    message: Any
    if method == "Head/Session":
        request = common_pb2.ClientRequest(
            process_id=rng.randbytes(8),
            request=rng.randrange(3),
            method=rng.choice(fuzzer.head_requests),
            body=fuzzer.body(fuzzer.arguments()),
        )
        attached = head_pb2.ProcessAttached(
            process_id=rng.randbytes(8), driver=rng.random() < 0.5, details=rng.choice(_DETAILS)
        )
        kinds = [{"request": request}, {"attached": attached}]
        message = head_pb2.FromNode(**rng.choice(kinds))
    else:
        notice = rng.choice([r.ANSWER, r.FREED, r.COPIED])
        what = rng.choice(["fetch", "read", "question"])
        told = [
            (rng.randbytes(8), rng.randbytes(8), [b"x"], "", ()),
            (b"", b"", [], notice, fuzzer.arguments()),
            (b"", b"", [], r.REQUEST, (rng.randrange(3), what, *fuzzer.arguments())),
            fuzzer.arguments(),
        ]
        message = node_pb2.RelayBatch(
            messages=fuzzer.body(told), first=rng.randrange(100), outbox=1
        )
    data: bytes = message.SerializeToString()
    return fuzzer.changed(data) if rng.random() < 0.3 else data


_DETAILS = (
    b"",
    b"{",
    *map(plain.dumps, ({}, [], 5, {"namespace": 5}, {"cwd": None, "sys_path": 7})),
)


@miniray.remote
def _echo(what: int) -> int:
    return what


def run(seed: int, seconds: float, count: int) -> int:
    """Fuzz the cluster of this driver for so long, or with so many frames; returns how many."""
    fuzzer = Fuzzer(seed)
    record = record_of(miniray.get_runtime_context().get_node_id())
    processes = {name: record.processes[name].pid for name in ("head", "boot")}
    limits = {pid: resident(pid) + MEMORY for pid in processes.values()}
    end = time.monotonic() + seconds
    sent = 0
    while sent < count and time.monotonic() < end:
        size = min(_ROUND, count - sent)
        frames(fuzzer, record, size // 2)
        asyncio.run(rpcs(fuzzer, record, size // 10))
        decoder(fuzzer, size)
        tokens(fuzzer, size // 10)
        options(fuzzer, size // 10)
        sent += size
        for name, pid in processes.items():
            assert resident(pid) < limits[pid], (
                f"seed {seed}: the {name} takes {resident(pid)} bytes"
            )
        began = time.monotonic()
        assert miniray.get(_echo.remote(sent), timeout=ANSWER) == sent, f"seed {seed}"
        for what in ("actors", "nodes", "jobs", "placement_groups", "workers"):
            getattr(__import__("miniray.util.state").util.state, f"list_{what}")()
        waited = time.monotonic() - began
        print(f"{sent} frames, another driver waited {waited:.2f} s", flush=True)
    return sent


def resident(pid: int) -> int:
    """The most memory that a process has had, in bytes; fails if it is gone."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def main() -> None:
    """Fuzz a cluster of this program's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--frames", type=int, default=sys.maxsize)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    miniray.init(address=cluster.address)
    try:
        print(f"{run(given.seed, given.seconds, given.frames)} frames")
    finally:
        miniray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
