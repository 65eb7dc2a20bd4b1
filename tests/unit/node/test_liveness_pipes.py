"""Memory that is mapped in processes which tell their daemon nothing."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from miniray.node.objects.liveness import Liveness
from miniray.node.store.segments import SegmentStore

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PARENT = b"parent00"
SIZE = 4096


class Clients:
    def __init__(self) -> None:
        self.quick: dict[str, Any] = {}
        self.notices: dict[str, Any] = {}


class Client:
    process_id = PARENT


class Names:
    def __init__(self) -> None:
        self.others: dict[bytes, str] = {}

    def of(self, process: bytes) -> str:
        return process.decode()


class Node:
    """A store with one value that one process has mapped."""

    def __init__(self) -> None:
        self.store = SegmentStore(1 << 20)
        self.clients, self.names = Clients(), Names()
        self.liveness = Liveness(self.store, self.clients, self.names)  # type: ignore[arg-type]
        self.number = self.store.create(SIZE, 0, PARENT, PARENT).number
        self.store.seal(self.number)
        self.store.map(self.number, PARENT)

    async def give(self, number: int) -> int:
        """The end of a pipe, as its process gets it."""
        result, fd = self.clients.quick["liveness"](Client, number)
        assert result is None
        copy = os.dup(fd)
        await asyncio.sleep(0)  # the daemon's own is closed
        return copy

    def fork(self, number: int) -> None:
        self.clients.notices["forked"](Client, number)

    def freed_and_unmapped(self) -> None:
        self.store.free(self.number)
        self.store.unmap([self.number], PARENT)


def on_a_node(test: Callable[[Node], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in an event loop, with a node of its own."""

    async def main() -> None:
        node = Node()
        try:
            await test(node)
        finally:
            node.liveness.close()
            node.store.close()

    def run() -> None:
        asyncio.run(main())

    return run


async def until_gone(node: Node) -> None:
    async def gone() -> None:
        while node.store.used:
            await asyncio.sleep(0.001)

    await asyncio.wait_for(gone(), 20)


@on_a_node
async def test_what_a_child_has_mapped_counts_until_it_ends(node: Node) -> None:
    pipe = await node.give(1)
    node.fork(1)
    node.freed_and_unmapped()
    assert node.store.used == SIZE
    [holder] = node.store.get(node.number).mappers
    assert node.names.others == {holder: "children of parent00"}
    os.close(pipe)
    await until_gone(node)
    assert node.names.others == {}
    assert len(node.liveness) == 0


@on_a_node
async def test_memory_that_a_child_had_mapped_is_not_written_again(node: Node) -> None:
    pipe = await node.give(1)
    node.fork(1)
    node.freed_and_unmapped()
    os.close(pipe)
    await until_gone(node)
    assert node.store.memories.pooled == 0


@on_a_node
async def test_a_child_has_not_what_its_parent_maps_later(node: Node) -> None:
    node.store.unmap([node.number], PARENT)
    pipe = await node.give(1)
    node.fork(1)
    node.store.map(node.number, PARENT)
    node.freed_and_unmapped()
    assert node.store.used == 0
    os.close(pipe)


@on_a_node
async def test_what_a_driver_looks_at_after_it_left_counts(node: Node) -> None:
    pipe = await node.give(1)
    node.liveness.process_left(PARENT, "the driver (pid 7)")
    node.store.process_died(PARENT)
    assert node.store.used == SIZE
    assert list(node.names.others.values()) == [
        "the driver (pid 7), which has left, or children of it"
    ]
    os.close(pipe)
    await until_gone(node)


@on_a_node
async def test_what_an_ended_process_had_mapped_is_free_at_once(node: Node) -> None:
    os.close(await node.give(1))  # the kernel does that before anybody hears of its end
    node.liveness.process_left(PARENT, "a worker (pid 7)")
    node.store.process_died(PARENT)
    assert node.store.used == 0
    assert len(node.liveness) == 0


@on_a_node
async def test_a_child_that_was_made_before_there_was_a_pipe_is_no_error(node: Node) -> None:
    node.fork(0)
    node.freed_and_unmapped()
    assert node.store.used == 0
    assert node.store.memories.pooled == 0


@on_a_node
async def test_who_writes_into_the_pipe_still_holds_it(node: Node) -> None:
    pipe = await node.give(1)
    node.fork(1)
    node.freed_and_unmapped()
    os.write(pipe, b"for somebody else")
    node.liveness.process_left(PARENT, "a worker (pid 7)")
    assert node.store.used == SIZE
    os.close(pipe)
    await until_gone(node)
