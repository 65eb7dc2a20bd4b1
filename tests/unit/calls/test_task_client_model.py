"""A task client in random company: users, workers, and a head whose messages are under way."""

from __future__ import annotations

import collections
import heapq
import itertools
import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest
from process_doubles import NODE, Caller, packed

from miniray.calls.task_client import TaskClient
from miniray.common.specs import LeaseSpec, NodeAffinity, Spread
from miniray.messages import protocol as p
from miniray.messages.value import error_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.calls.call import Call
    from miniray.calls.task_groups import HeldLease, TaskGroup

NODES = [NODE, b"node0001", b"node0002"]
GONE = b"nodegone"
SIZES = [1 << 18, 1 << 20, 1 << 26, 1 << 31]
#: By name: resources, max_calls, placement.
SHAPES: dict[str, tuple[dict[str, float], int, Any]] = {
    "cpu": ({"CPU": 1}, 0, None),
    "gpu": ({"GPU": 1}, 1, None),
    "gpu again": ({"GPU": 1}, 0, None),
    "few": ({"CPU": 1}, 3, None),
    "spread": ({"CPU": 1}, 0, Spread()),
    "there": ({"CPU": 1}, 0, NodeAffinity(NODES[1].hex())),
}


class Time:
    """A clock, and a loop that runs by it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.soon: collections.deque[Callable[[], None]] = collections.deque()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Callable[[], None]:
        timer = (self.now + delay, next(self._numbers), callback)
        heapq.heappush(self.timers, timer)
        return lambda: self.timers.remove(timer) if timer in self.timers else None

    def run(self) -> None:
        while self.soon:
            self.soon.popleft()()

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        while self.timers and self.timers[0][0] <= self.now:
            heapq.heappop(self.timers)[2]()
        self.run()


class FakeHead:
    """Grants one lease at a time; what it hears and says is under way for a while."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self.heard: collections.deque[tuple[Any, ...]] = collections.deque()
        self.said: collections.deque[tuple[Any, ...]] = collections.deque()
        self.free = {node: choice.choice([0, 1, 2, 4]) for node in NODES}
        #: By group: how many are wanted, its spec, and the node near which.
        self.wanted: dict[int, tuple[int, dict[str, Any], bytes]] = {}
        #: By number: group and node.
        self.leases: dict[int, tuple[int, bytes]] = {}
        self._numbers = itertools.count(1)

    def notice(self, method: str, *args: Any) -> None:
        self.heard.append((method, *args))

    def hear(self) -> bool:
        if not self.heard:
            return False
        method, *args = self.heard.popleft()
        if method == "want_leases":
            group, told, total, near = args
            spec = LeaseSpec.from_wire(told)
            self.wanted[group] = (total, spec, near)
        elif method == "return_lease":
            group, node = self.leases.pop(args[0])  # each once
            self.free[node] += 1
            if group in self.wanted:
                total, *rest = self.wanted[group]
                self.wanted[group] = (max(0, total - 1), *rest)  # type: ignore[assignment]
        return True

    def grant(self) -> bool:
        groups = list(self.wanted)
        self._choice.shuffle(groups)
        for group in groups:
            total, spec, near = self.wanted[group]
            if total <= sum(held == group for held, _ in self.leases.values()):
                continue
            bound = isinstance(spec.placement, NodeAffinity)
            room = [node for node in (NODES[1:2] if bound else NODES) if self.free[node] > 0]
            if room:
                node = near if near in room else self._choice.choice(room)
                number = next(self._numbers)
                self.leases[number] = (group, node)
                self.free[node] -= 1
                worker = b"w%07d" % number
                self.said.append(("granted", group, number, node, worker, spec.max_calls))
                return True
        return False

    def restart(self, known: set[int]) -> None:
        """What was under way is lost; leases that the client does not have are free."""
        for messages in (self.heard, self.said):
            messages.clear()
        self.wanted.clear()
        for number in set(self.leases) - known:
            self.free[self.leases.pop(number)[1]] += 1
        self.leases = {number: (-1, node) for number, (_, node) in self.leases.items()}


class World:
    """The client, all others, and what must hold between any two steps."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choice = random.Random(seed)
        self.time = Time()
        monkeypatch.setattr("miniray.calls.task_client.time", self.time)
        monkeypatch.setattr("miniray.calls.task_groups.time", self.time)
        self.me = Caller(self.time)
        self.me.calls.recover = lambda _entry, _value: "gone"
        self.head = FakeHead(self.choice)
        monkeypatch.setattr(self.me.link, "head_notice", self.head.notice)
        self.told: list[str] = []
        self.client = TaskClient(
            self.me.calls,
            self.me.peers,  # type: ignore[arg-type]
            self.me.link,  # type: ignore[arg-type]
            self.time,  # type: ignore[arg-type]
            self.told.append,
            self.time.monotonic,
        )
        self.groups = [self._group(name) for name in SHAPES]
        self.calls: list[Call] = []
        self.pending: list[Any] = []

    def _group(self, name: str) -> TaskGroup:
        resources, max_calls, placement = SHAPES[name]
        spec = LeaseSpec(name="", resources=resources, max_calls=max_calls, placement=placement)
        return self.client.group(name, lambda: spec)

    # --- what happens ----------------------------------------------------------------
    def submit(self) -> None:
        group = self.choice.choice([*self.groups[:2] * 3, *self.groups])
        refs = [self._ref() for _ in range(self.choice.choice([0, 0, 1, 1, 2, 3]))]
        retries, often = self.choice.choice([0, 1, -1]), self.choice.random() < 0.3
        call = self.me.call(
            self.client, *refs, options=group, retries=retries, retry_exceptions=often
        )
        self.calls.append(call)
        self.me.calls.submit(call)

    def _ref(self) -> Any:
        table, id = self.me.table, self.me.table.new_id()
        kind = self.choice.random()
        if kind < 0.15:
            self.pending.append(table.create(id))
            return self.pending[-1]
        if kind < 0.2:
            return table.create_with_value(id, error_value(ValueError()), None)
        if kind < 0.3:
            return table.create_with_value(id, packed(1), None)
        return table.create_with_value(id, self._stored(), None)

    def _stored(self) -> Any:
        place = (self.choice.choice([*NODES, GONE]), self.me.calls.next_number())
        return (p.VALUE_SHARED, (*place, place[0], self.choice.choice(SIZES)), ())

    def make_a_value(self) -> None:
        if self.pending:
            ref = self.pending.pop(self.choice.randrange(len(self.pending)))
            self.me.table.set_value(ref.binary(), self._stored(), None, "")

    def head_hears(self) -> None:
        self.head.hear()

    def head_grants(self) -> None:
        self.head.grant()

    def client_hears(self) -> bool:
        if not self.head.said:
            return False
        kind, *args = self.head.said.popleft()
        getattr(self.client, f"on_{kind}")(*args)
        return True

    def reply(self) -> None:
        busy = [lease for lease in self.leases() if lease.calls]
        if not busy:
            return
        lease = self.choice.choice(busy)
        call = next(iter(lease.calls.values()))
        seconds = self.choice.choice([1e-4, 1e-4, 3e-3, 0.05])
        peer: Any = lease.peer
        kind = self.choice.random()
        if kind < 0.8 or call.cancelled:
            self.me.answer(peer, call, p.STATUS_OK, (packed(None),), seconds=seconds)
        elif kind < 0.95:
            values = (error_value(ValueError()),)
            self.me.answer(peer, call, p.STATUS_ERROR, values, seconds=seconds)
        else:
            self.me.answer(peer, call, p.STATUS_LOST, ())

    def recall(self) -> None:
        busy = [lease for lease in self.leases() if lease.calls]
        if busy:
            lease = self.choice.choice(busy)
            begun = self.choice.choice([0, 1, 1, 1])
            message = (p.PEER_RECALLED, list(lease.calls)[begun:])
            self.client.on_recalled(lease.peer, message)

    def cancel(self) -> None:
        call = self.choice.choice(self.calls) if self.calls else None
        if call is not None and call.number in self.me.calls.open and not call.cancelled:
            call.cancelled = True
            self.client.cancel(call, force=False, recursive=True)

    def lose(self) -> None:
        leases = self.leases()
        if leases:
            peer = self.choice.choice(leases).peer
            peer.lost = True
            self.client.on_peer_lost(peer)

    def ask_back(self) -> None:
        if self.head.leases:
            number = self.choice.choice(list(self.head.leases))
            self.head.said.append(("revoked", number, self.head.leases[number][0]))

    def refuse(self) -> None:
        group = self.choice.choice(self.groups).id
        self.head.said.append(("failed", group, pickle.dumps(ValueError("never"))))

    def restart_the_head(self) -> None:
        self.head.restart({lease.id for lease in self.leases()})
        self.client.on_head_back()

    def wait(self) -> None:
        self.time.pass_by(self.choice.choice([0.001, 0.05, 0.1, 0.3, 1.0]))

    def leases(self) -> list[HeldLease]:
        return [lease for group in self.groups for lease in group.leases.values()]

    # --- what must hold ------------------------------------------------------------------
    def check(self) -> None:
        places: collections.Counter[int] = collections.Counter()
        for group in self.groups:
            places.update(self._places(group))
            self._check_leases(group)
            self._check_that_nothing_waits_for_ever(group)
        assert {lease.peer.process_id: lease for lease in self.leases()} == self.client._by_peer
        expected = {call.number for call in self.me.calls.open.values() if not call.waiting}
        missing = expected - set(places)
        rest = {number for number in missing if self.me.calls.open[number].tries > 1}
        assert len(rest) <= len(self.time.timers)  # they run once more after a while
        assert len(missing - rest) <= len(self.time.soon)  # those end next
        assert set(places) <= expected
        assert not places or max(places.values()) == 1

    @staticmethod
    def _places(group: TaskGroup) -> Iterator[int]:
        for call in group.queue:
            assert call.peer is None
            yield call.number
        for lease in group.leases.values():
            for number, call in lease.calls.items():
                assert call.peer is lease.peer
                yield number

    @staticmethod
    def _check_leases(group: TaskGroup) -> None:
        leases = group.leases
        assert group.with_capacity == sorted(i for i, lease in leases.items() if lease.has_capacity)
        for lease in leases.values():
            assert lease.open or lease.calls
            assert lease.has_capacity or not takes_more(lease)
        assert set(group.wishes) <= {call.number for call in group.queue}

    def _check_that_nothing_waits_for_ever(self, group: TaskGroup) -> None:
        """Where a lease has room, what waits does so for a certain node, and not for long."""
        roomy = [lease for lease in group.leases.values() if takes_more(lease)]
        if roomy and group.queue:
            assert group.next_look in [when for when, *_ in self.time.timers]
            for lease in roomy:
                assert group.first_for(lease.peer.node_id, self.time.now) is None
        assert group.asked or not group.queue

    def finish(self) -> None:
        """Whatever has happened, all tasks end, and then all leases go back."""
        while self.pending:
            self.make_a_value()
        for node in NODES:
            self.head.free[node] += 1
        for _ in range(5000):
            if not (self.me.calls.open or self.head.leases or self.time.timers):
                break
            self.all_messages()
            self.head.grant()
            self.reply()
            self.time.pass_by(0.05)
            self.check()
        assert not self.me.calls.open
        assert not self.leases()
        assert not self.head.leases
        assert not self.time.timers
        assert not any(group.asked or group.wishes for group in self.groups)

    def all_messages(self) -> None:
        while self.head.hear() or self.client_hears():
            self.time.run()


def takes_more(lease: HeldLease) -> bool:
    return lease.open and len(lease.calls) < lease.window


STEPS = {
    World.submit: 30,
    World.make_a_value: 4,
    World.head_hears: 30,
    World.head_grants: 25,
    World.client_hears: 30,
    World.reply: 30,
    World.recall: 4,
    World.cancel: 4,
    World.lose: 2,
    World.ask_back: 4,
    World.refuse: 0.3,
    World.restart_the_head: 0.3,
    World.wait: 8,
}


@pytest.mark.parametrize("seed", range(16))
def test_every_task_ends_whatever_happens_to_leases(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed, monkeypatch)
    for step in world.choice.choices(list(STEPS), list(STEPS.values()), k=300):
        step(world)
        world.check()
        world.time.run()
    world.finish()
