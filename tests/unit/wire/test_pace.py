"""When a waiting thread stays awake and when it sleeps, on a clock of the test's own."""

from __future__ import annotations

import pytest

from miniray.wire import poller as pace_module
from miniray.wire.poller import Pace

US = 1e-6


class World:
    """Something comes ``after`` seconds; looking takes a microsecond, sleeping takes its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due = 0.0
        self.slept = 0
        self.looked = 0

    def clock(self) -> float:
        return self.now

    def poll(self, timeout: float) -> list[str]:
        if timeout == 0:
            self.looked += 1
            self.now += US
            return ["event"] if self.now >= self.due else []
        self.slept += 1
        until = self.due if timeout < 0 else min(self.due, self.now + timeout)
        self.now = max(self.now, until) + 30 * US
        return ["event"] if self.now >= self.due else []

    def wait(self, pace: Pace, after: float, timeout: float = -1) -> list[str]:
        self.due = self.now + after
        self.slept = self.looked = 0
        return pace.wait(self.poll, timeout)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(pace_module.time, "perf_counter", world.clock)
    monkeypatch.setattr(pace_module, "_SEVERAL", True)
    return world


def test_after_a_short_wait_the_next_one_stays_awake(world: World) -> None:
    pace = Pace(80 * US, 120 * US)
    assert world.wait(pace, 50 * US) == ["event"]
    assert (world.slept, world.looked) == (1, 0)
    assert world.wait(pace, 50 * US) == ["event"]
    assert world.slept == 0
    assert world.looked > 10


def test_a_long_wait_sleeps_in_the_end_and_so_does_the_next(world: World) -> None:
    pace = Pace(80 * US, 120 * US)
    world.wait(pace, 50 * US)
    began = world.now
    world.wait(pace, 1.0)
    assert world.slept == 1
    assert world.looked < 100  # no longer awake than the 80 microseconds
    assert world.now - began < 1.001
    world.wait(pace, 50 * US)
    assert (world.slept, world.looked) == (1, 0)


def test_work_in_bulk_makes_it_sleep_for_a_while(world: World) -> None:
    pace = Pace(80 * US, 120 * US)
    world.wait(pace, 50 * US)
    pace.rest()
    for _ in range(5):
        world.wait(pace, 50 * US)
        assert (world.slept, world.looked) == (1, 0)
    for _ in range(20):
        world.wait(pace, 50 * US)
    assert world.slept == 0


def test_while_others_work_in_bulk_it_sleeps_if_they_take_the_processor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = True
    taken = 100 * US

    def others_run() -> None:
        world.now += taken

    monkeypatch.setattr(pace_module.os, "sched_yield", others_run)
    pace = Pace(250 * US, 400 * US)
    pace.give_way_while(lambda: busy)
    world.wait(pace, 50 * US)
    world.wait(pace, 300 * US)
    assert (world.slept, world.looked) == (1, 2)
    taken = 0.0
    world.wait(pace, 200 * US)
    assert world.slept == 0
    busy, taken = False, 100 * US
    world.wait(pace, 200 * US)
    assert world.slept == 0


def test_it_stays_awake_no_longer_than_the_timeout(world: World) -> None:
    pace = Pace(80 * US, 120 * US)
    world.wait(pace, 50 * US)
    began = world.now
    assert world.wait(pace, 1.0, timeout=10 * US) == []
    assert world.now - began < 60 * US


def test_a_timeout_of_zero_looks_once(world: World) -> None:
    pace = Pace(80 * US, 120 * US)
    world.wait(pace, 50 * US)
    assert world.wait(pace, 1.0, timeout=0) == []
    assert (world.slept, world.looked) == (0, 1)


def test_with_one_processor_it_always_sleeps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "_SEVERAL", False)
    pace = Pace(80 * US, 120 * US)
    for _ in range(3):
        world.wait(pace, 50 * US)
        assert (world.slept, world.looked) == (1, 0)
