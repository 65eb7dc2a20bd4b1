"""The admission queue: the order of claims, their time limit, and what becomes of those ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from open_files import open_memory
from stores import new_store

from miniray.common.config import config
from miniray.exceptions import ObjectStoreFullError
from miniray.node.store.admission_queue import AdmissionQueue, Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from miniray.node.store.segments import Segment

PAGE = 4096
ROOM = 8  # values of one page
NODE = b"node0000"
OWNER, HOLDER, A, B, C = b"owner000", b"holder00", b"asker-a0", b"asker-b0", b"asker-c0"


class Disk:
    """Where values leave to, as far as a test says."""

    def __init__(self) -> None:
        self.leaving = 0
        self.failure = ""

    def make_room(self, _target: int) -> int:
        return 0

    def move_out(self, _count: int) -> bool:
        return False

    def trouble(self, _since: float) -> str:
        return self.failure


class Node:
    """A store of eight pages."""

    def __init__(self) -> None:
        self.store = new_store(ROOM * PAGE)
        self.disk = Disk()
        self.described = 0
        self.queue = AdmissionQueue(self.store, self.disk, self._describe, NODE)

    def _describe(self) -> str:
        self.described += 1
        return "all"

    def held(self, process: bytes = HOLDER, pages: int = 1) -> Segment:
        """A value that a process looks at."""
        segment = self.store.create(pages * PAGE, 0, OWNER, OWNER)
        self.store.seal(segment.number)
        self.store.free(self.store.map(segment.number, process).number)
        return segment

    def let_go(self, segment: Segment, process: bytes = HOLDER) -> None:
        self.store.unmap([segment.number], process)

    def ask(self, process: bytes, pages: int = 1, *, waits: bool = True) -> asyncio.Future[Segment]:
        """Ask for a value's memory; who gets it writes from then on."""

        async def asking() -> Segment:
            memory = await self.queue.get(Claim(pages * PAGE, process, waits=waits))
            return self.store.create(pages * PAGE, 0, OWNER, process, memory)

        return asyncio.ensure_future(asking())


@pytest.fixture
def run() -> Run:
    """Runs a test's steps with a node."""

    def run(steps: Callable[[Node], Coroutine[None, None, None]]) -> None:
        async def whole() -> None:
            before = open_memory()
            node = Node()
            try:
                await asyncio.wait_for(steps(node), 20)
            finally:
                node.store.close()
            assert open_memory() == before

        asyncio.run(whole())

    return run


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody waits for others for more than 0.3 s."""
    monkeypatch.setenv("MINIRAY_STORE_FULL_TIMEOUT", "0.3")
    config.cache_clear()
    yield
    config.cache_clear()


Run = "Callable[[Callable[[Node], Coroutine[None, None, None]]], None]"


async def settled() -> None:
    """What is ready to run has run."""
    for _ in range(5):
        await asyncio.sleep(0)


# --- order -------------------------------------------------------------------------------
def test_claims_are_served_first_in_first_out(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        large, small = node.ask(A, 3), node.ask(B)
        await settled()
        for segment in held[:2]:
            node.let_go(segment)
            await settled()
            assert not large.done()
            assert not small.done()  # though there is room for it
        node.let_go(held[2])
        await large
        node.let_go(held[3])
        await small

    run(steps)


def test_a_process_that_holds_memory_overtakes_claims_that_wait_for_others(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM - 1)]
        mine = node.held(B)
        large, passing = node.ask(A, 2), node.ask(B)
        await settled()
        assert not passing.done()
        node.let_go(held[0])
        segment = await passing
        assert not large.done()
        node.store.process_died(B)  # it is done with both
        assert not node.store.has(segment)
        assert not node.store.has(mine)
        await large

    run(steps)


def test_two_copies_that_do_not_fit_together_arrive_one_after_the_other(run: Run) -> None:
    """Both are written by the daemon, for different readers."""

    async def steps(node: Node) -> None:
        arriving = await node.queue.get(Claim(5 * PAGE, A))
        first = node.store.create(5 * PAGE, 0, OWNER, b"daemon", arriving)
        second = asyncio.ensure_future(node.queue.get(Claim(5 * PAGE, B)))
        await settled()
        assert not second.done()
        node.store.seal(first.number)
        node.store.free(first.number)
        node.store.put_back(await second)

    run(steps)


def test_who_comes_next_waits_for_what_was_given_to_the_one_before(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = node.held(pages=ROOM)
        first, second = node.ask(A, ROOM), node.ask(B, ROOM)
        await settled()
        node.let_go(held)
        segment = await first
        await settled()
        assert not second.done()
        node.store.seal(segment.number)
        node.store.free(segment.number)
        await second

    run(steps)


def test_memory_that_was_granted_and_holds_no_value_yet_is_waited_for(run: Run) -> None:
    async def steps(node: Node) -> None:
        memory = await node.queue.get(Claim(ROOM * PAGE, A))
        waiting = node.ask(A)
        await settled()
        assert not waiting.done()  # it may be for somebody else
        node.store.map(node.store.create(ROOM * PAGE, 0, OWNER, A, memory).number, A)
        node.store.changed.set()
        with pytest.raises(ObjectStoreFullError):
            await waiting  # it was for the one that waits

    run(steps)


def test_a_claim_with_an_alternative_waits_for_the_disk_but_not_for_processes(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        node.disk.leaving = PAGE
        hasty = node.ask(A, waits=False)
        await settled()
        assert not hasty.done()
        node.let_go(held[0])  # as it leaves
        await hasty
        node.disk.leaving = 0
        with pytest.raises(ObjectStoreFullError):
            await node.ask(A, waits=False)
        assert not node.described  # nobody reads that error

    run(steps)


def test_a_claim_with_an_alternative_does_not_wait_behind_one_without(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM - 1)]
        patient = node.ask(A, 3)
        await settled()
        with pytest.raises(ObjectStoreFullError):
            await node.ask(B, waits=False)
        assert not patient.done()
        for segment in held[:2]:
            node.let_go(segment)
        await patient

    run(steps)


@pytest.mark.usefixtures("impatience")
def test_the_error_names_what_is_held_and_what_the_disk_has_refused(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        node.disk.failure = "The disk is on fire."
        with pytest.raises(
            ObjectStoreFullError, match=r"It holds all\. The disk is on fire"
        ) as full:
            await node.ask(A)
        assert f"does not fit into the object store of node {NODE.hex()}, which" in str(full.value)
        assert full.value.node_id == NODE.hex()
        assert held

    run(steps)


def test_many_refusals_cost_no_walk_over_all_values_and_claims_each(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that nobody looks at fill the store, and the disk takes none."""

    async def steps(node: Node) -> None:
        segments = [node.store.create(PAGE, 0, OWNER, OWNER) for _ in range(ROOM)]
        real, looks = node.store.has_memory_without_segment, 0

        def counted() -> bool:
            nonlocal looks
            looks += 1
            return real()

        monkeypatch.setattr(node.store, "has_memory_without_segment", counted)
        asked = [node.ask(b"asker%03d" % number) for number in range(100)]
        await settled()
        for segment in segments:
            node.store.seal(segment.number)
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(result, ObjectStoreFullError) for result in results)
        assert looks <= 2 * len(asked)

    run(steps)


# --- time --------------------------------------------------------------------------------
@pytest.mark.usefixtures("impatience")
def test_waiting_for_others_ends_whatever_happens_meanwhile(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        waiting = node.ask(A, 3)
        while not waiting.done():  # somebody comes and goes
            node.let_go(held.pop())
            await asyncio.sleep(0.005)
            held.append(node.held())
        with pytest.raises(ObjectStoreFullError):
            await waiting

    run(steps)


@pytest.mark.usefixtures("impatience")
def test_all_who_came_together_give_up_together(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        refused = await asyncio.gather(
            *(node.ask(b"asker%03d" % count) for count in range(50)), return_exceptions=True
        )
        assert {type(error) for error in refused} == {ObjectStoreFullError}
        assert loop.time() - began < 50 * 0.3  # and not one after the other
        assert held

    run(steps)


@pytest.mark.usefixtures("impatience")
def test_no_claim_is_refused_while_values_leave_memory(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        node.disk.leaving = PAGE
        waiting = node.ask(A)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 1)  # a slow disk
        node.let_go(held[0])
        await waiting

    run(steps)


# --- leaving -----------------------------------------------------------------------------
def test_who_leaves_makes_way(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        large, small = node.ask(A, 3), node.ask(B)
        await settled()
        node.let_go(held[0])
        await settled()
        assert not small.done()
        large.cancel()
        await small
        assert not len(node.queue)

    run(steps)


def test_memory_that_comes_too_late_for_who_waited_is_not_lost(run: Run) -> None:
    async def steps(node: Node) -> None:
        segment = node.held(pages=ROOM)
        waiting = node.ask(A)
        await settled()
        node.let_go(segment)
        while len(node.queue):
            await asyncio.sleep(0)
        waiting.cancel()  # it has memory, and has not heard of it
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not node.store.used
        node.store.put_back(await node.queue.get(Claim(ROOM * PAGE, B)))

    run(steps)


def test_a_process_that_ended_makes_way_unless_others_need_the_same(run: Run) -> None:
    async def steps(node: Node) -> None:
        held = [node.held() for _ in range(ROOM)]
        shared = Claim(3 * PAGE, A)
        shared.join(B)
        waiting = [asyncio.ensure_future(node.queue.get(shared)), node.ask(C)]
        await settled()
        node.queue.process_died(A)
        shared.leave(A)  # as whoever asked for it tells later
        node.let_go(held[0])
        await settled()
        assert not any(one.done() for one in waiting)
        node.queue.process_died(B)
        with pytest.raises(ConnectionError):
            await waiting[0]
        await waiting[1]

    run(steps)


def test_a_value_larger_than_the_store_is_refused_at_once(run: Run) -> None:
    async def steps(node: Node) -> None:
        named = f"larger than the object store of node {NODE.hex()}"
        with pytest.raises(ObjectStoreFullError, match=named):
            await node.ask(A, ROOM + 1)

    run(steps)
