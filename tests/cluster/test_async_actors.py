"""Asyncio actors: methods that are coroutines share one event loop."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until

import miniray
from miniray.exceptions import ActorDiedError, RayActorError, TaskCancelledError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")


@miniray.remote
class Signal:
    """Lets callers wait for an event."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.waiting = 0
        self.most = 0

    async def wait(self) -> str:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await self.event.wait()
        finally:
            self.waiting -= 1
        return "done"

    async def send(self) -> None:
        self.event.set()

    async def count(self) -> int:
        return self.waiting

    async def peak(self) -> int:
        return self.most

    def plain(self) -> bool:
        return asyncio.get_running_loop().is_running()

    async def thread(self) -> str:
        return threading.current_thread().name

    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("async failure")

    async def pid(self) -> int:
        return os.getpid()

    async def leave(self) -> None:
        miniray.actor.exit_actor()

    async def leave_in_a_coroutine(self, *, wait: bool) -> str:
        leaving = asyncio.create_task(self.leave())
        if wait:
            await asyncio.gather(leaving, return_exceptions=True)
        else:
            self.leaving = leaving  # or it might be collected before it runs
        return "still here"


@miniray.remote
def number(n: int) -> int:
    return n


def test_calls_that_wait_do_not_hold_up_others() -> None:
    signal = Signal.remote()
    waiting = [signal.wait.remote() for _ in range(20)]
    wait_until(lambda: miniray.get(signal.count.remote()) == 20)
    miniray.get(signal.send.remote())
    assert miniray.get(waiting) == ["done"] * 20


def test_max_concurrency_limits_the_calls_at_once(tmp_path: Path) -> None:
    @miniray.remote(max_concurrency=3)
    class Busy:
        def __init__(self) -> None:
            self.running = 0
            self.most = 0

        async def work(self, meeting: Path) -> int:
            self.running += 1
            self.most = max(self.most, self.running)
            if self.running == 3:
                meeting.touch()
            while not meeting.exists():
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
            self.running -= 1
            return self.most

    busy = Busy.remote()
    assert max(miniray.get([busy.work.remote(tmp_path / "three") for _ in range(12)])) == 3


def test_plain_methods_of_an_asyncio_actor_run_in_its_loop() -> None:
    assert miniray.get(Signal.remote().plain.remote()) is True


def test_all_calls_run_in_the_same_thread() -> None:
    signal = Signal.remote()
    assert len(set(miniray.get([signal.thread.remote() for _ in range(10)]))) == 1


def test_an_async_method_may_await_refs() -> None:
    @miniray.remote
    class Awaiter:
        async def total(self, numbers: list[int]) -> int:
            refs = [number.remote(n) for n in numbers]
            return await refs[0] + sum(await asyncio.gather(*refs[1:]))

    assert miniray.get(Awaiter.remote().total.remote([1, 2, 3])) == 6


def test_an_async_method_may_await_another_actor() -> None:
    @miniray.remote
    class Relay:
        async def wait(self, signal: Any) -> str:
            return await signal.wait.remote()

    signal, relay = Signal.remote(), Relay.remote()
    ref = relay.wait.remote(signal)
    wait_until(lambda: miniray.get(signal.count.remote()) == 1)
    miniray.get(signal.send.remote())
    assert miniray.get(ref) == "done"


def test_an_error_of_a_coroutine_reaches_the_caller() -> None:
    signal = Signal.remote()
    with pytest.raises(ValueError, match="async failure"):
        miniray.get(signal.fail.remote())
    assert miniray.get(signal.count.remote()) == 0


def test_cancel_ends_a_waiting_coroutine() -> None:
    signal = Signal.remote()
    ref = signal.wait.remote()
    wait_until(lambda: miniray.get(signal.count.remote()) == 1)
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref)
    wait_until(lambda: miniray.get(signal.count.remote()) == 0)


def test_a_coroutine_may_clean_up_when_it_is_cancelled(tmp_path: Path) -> None:
    @miniray.remote
    class Careful:
        async def work(self, started: Path, cleaned: Path) -> None:
            started.touch()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cleaned.touch()
                raise

    ref = Careful.remote().work.remote(tmp_path / "started", tmp_path / "cleaned")
    wait_for_file(tmp_path / "started")
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref)
    wait_for_file(tmp_path / "cleaned")


def test_exit_actor_ends_an_asyncio_actor() -> None:
    signal = Signal.remote()
    pid = miniray.get(signal.pid.remote())
    with pytest.raises(RayActorError):
        miniray.get(signal.leave.remote())
    wait_until(lambda: not is_alive(pid))


def test_exit_actor_fails_all_calls_of_an_asyncio_actor() -> None:
    signal = Signal.remote()
    waiting = signal.wait.remote()
    for ref in (signal.leave.remote(), waiting, signal.count.remote()):
        with pytest.raises(ActorDiedError, match="exit_actor"):
            miniray.get(ref, timeout=30)


@pytest.mark.parametrize("wait", [True, False])
def test_exit_actor_in_another_coroutine_ends_an_asyncio_actor(wait: bool) -> None:
    signal = Signal.remote()
    pid = miniray.get(signal.pid.remote())
    ref = signal.leave_in_a_coroutine.remote(wait=wait)
    if wait:
        with pytest.raises(ActorDiedError, match="exit_actor"):
            miniray.get(ref, timeout=30)
    else:
        assert miniray.get(ref, timeout=30) == "still here"
    wait_until(lambda: not is_alive(pid))


def test_an_async_actor_may_have_a_constructor_that_blocks() -> None:
    @miniray.remote
    class Prepared:
        def __init__(self) -> None:
            self.value = miniray.get(number.remote(4))

        async def get(self) -> int:
            return self.value

    assert miniray.get(Prepared.remote().get.remote()) == 4


@pytest.mark.parametrize("is_async", [True, False])
def test_an_actor_is_told_to_lack_a_module_that_its_methods_options_need(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_the_driver_has_it.py").write_text("class Refused(Exception): pass")
    monkeypatch.syspath_prepend(tmp_path)
    refused = importlib.import_module("only_the_driver_has_it").Refused

    def read(_self: object) -> None:
        """Never runs."""

    async def read_later(_self: object) -> None:
        """Never runs."""

    method = miniray.method(retry_exceptions=[refused], max_task_retries=1)
    reader = type("Reader", (), {"read": method(read_later if is_async else read)})
    actor = miniray.remote(max_concurrency=2)(reader).remote()
    with pytest.raises(ActorDiedError, match="No module named 'only_the_driver_has_it'"):
        miniray.get(actor.read.remote(), timeout=30)


def test_a_constructor_may_be_a_coroutine() -> None:
    @miniray.remote
    class Prepared:
        async def __init__(self, value: int) -> None:
            await asyncio.sleep(0)
            self.value = value + await number.remote(4)

        async def get(self) -> int:
            return self.value

    @miniray.remote
    class Unprepared:
        async def __init__(self) -> None:
            await asyncio.sleep(0)
            raise ValueError("not ready")

        async def get(self) -> None:
            """Never runs."""

    prepared = Prepared.remote(3)
    assert miniray.get([prepared.get.remote() for _ in range(3)], timeout=30) == [7] * 3
    with pytest.raises(ActorDiedError, match="not ready"):
        miniray.get(Unprepared.remote().get.remote(), timeout=30)


def test_concurrency_groups_of_an_asyncio_actor_have_limits_of_their_own() -> None:
    @miniray.remote(concurrency_groups={"narrow": 1})
    class Grouped:
        def __init__(self) -> None:
            self.is_open = False

        @miniray.method(concurrency_group="narrow")
        async def narrow(self) -> str:
            # No asyncio.Event: each group may have an event loop of its own.
            while not self.is_open:
                await asyncio.sleep(0.005)
            return "narrow"

        async def open(self) -> None:
            self.is_open = True

    actor = Grouped.remote()
    refs = [actor.narrow.remote() for _ in range(3)]
    assert miniray.wait(refs, timeout=0.1)[0] == []
    miniray.get(actor.open.remote(), timeout=30)
    assert miniray.get(refs, timeout=30) == ["narrow"] * 3


@miniray.remote(concurrency_groups={"io": 2, "health": 1})
class Grouped:
    """An asyncio actor whose groups can be blocked one by one."""

    async def block(self, started: Path, go: Path) -> str:
        started.touch()
        wait_for_file(go)
        return "went on"

    def thread(self) -> int:
        return threading.get_ident()

    @miniray.method(concurrency_group="io")
    async def io_thread(self) -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    @miniray.method(concurrency_group="io")
    async def count(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            await asyncio.sleep(0)
            yield number

    @miniray.method(concurrency_group="io")
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @miniray.method(concurrency_group="io")
    async def leave(self) -> None:
        miniray.actor.exit_actor()

    @miniray.method(concurrency_group="health")
    def is_well(self, _of: Any = None) -> bool:
        return True


@pytest.mark.parametrize("group", [None, "io"])
def test_a_method_that_blocks_holds_up_its_group_only(group: str | None, tmp_path: Path) -> None:
    actor = Grouped.remote()
    block = actor.block.options(concurrency_group=group) if group else actor.block
    blocked = block.remote(tmp_path / "started", tmp_path / "go")
    wait_for_file(tmp_path / "started")
    behind = (actor.io_thread if group else actor.thread).remote()
    assert miniray.get(actor.is_well.remote(b"x" * 200_000), timeout=30)
    assert miniray.wait([behind], timeout=0)[0] == []
    (tmp_path / "go").touch()
    assert miniray.get(blocked, timeout=30) == "went on"
    miniray.get(behind, timeout=30)


def test_the_calls_of_a_group_share_a_thread_of_their_own() -> None:
    actor = Grouped.remote()
    main = miniray.get([actor.thread.remote() for _ in range(3)], timeout=30)
    io = miniray.get([actor.io_thread.remote() for _ in range(3)], timeout=30)
    moved = miniray.get(actor.thread.options(concurrency_group="io").remote(), timeout=30)
    assert {*io, moved} == {io[0]}
    assert {*main} == {main[0]} != {io[0]}


def test_streams_cancels_and_ends_work_in_a_group() -> None:
    actor = Grouped.remote()
    numbers = actor.count.remote(5)
    assert [miniray.get(ref, timeout=30) for ref in numbers] == list(range(5))
    waits = [actor.wait.remote() for _ in range(3)]
    for ref in reversed(waits):  # the last one waits for room
        miniray.cancel(ref)
        with pytest.raises(TaskCancelledError):
            miniray.get(ref, timeout=30)
    with pytest.raises(RayActorError, match="exit_actor"):
        miniray.get(actor.leave.remote(), timeout=30)


def test_asyncio_callers_use_many_actors_at_once() -> None:
    signals = [Signal.remote() for _ in range(2)]

    async def main() -> list[str]:
        waiting = [asyncio.ensure_future(_wait(signal)) for signal in signals]
        await asyncio.gather(*(signal.send.remote() for signal in signals))
        return await asyncio.gather(*waiting)

    async def _wait(signal: Any) -> str:
        return await signal.wait.remote()

    assert asyncio.run(main()) == ["done", "done"]


def test_a_call_cancelled_before_it_has_begun_is_answered_and_leaves_its_place() -> None:
    actor = Signal.options(max_concurrency=2).remote()
    miniray.get(actor.__ray_ready__.remote())
    for _ in range(50):
        ref = actor.wait.remote()
        miniray.cancel(ref)
        with pytest.raises(TaskCancelledError):
            miniray.get(ref, timeout=30)
    waits = actor.wait.remote()
    miniray.get(actor.send.remote(), timeout=30)
    assert miniray.get(waits, timeout=30) == "done"


def test_a_call_for_which_there_is_no_room_is_cancelled_before_its_turn() -> None:
    actor = Signal.options(max_concurrency=1).remote()
    running, waiting, last = (actor.wait.remote() for _ in range(3))
    miniray.cancel(waiting)
    with pytest.raises(TaskCancelledError):
        miniray.get(waiting, timeout=30)
    miniray.cancel(running)
    miniray.cancel(last)
    for ref in (running, last):
        with pytest.raises(TaskCancelledError):
            miniray.get(ref, timeout=30)
    assert miniray.get(actor.count.remote(), timeout=30) == 0


#: An actor that leaves while calls run, wait for their arguments, for their turn and for room.
LEAVING = """
import asyncio
import miniray

class Leaving:
    async def leave(self):
        await asyncio.sleep(0)
        miniray.actor.exit_actor()

    async def pause(self, _value=None):
        await asyncio.sleep(0)

miniray.init("local", num_cpus=2)
large = miniray.put(bytes(200_000))
for concurrency in (2, 1000):
    actor = miniray.remote(Leaving).options(max_concurrency=concurrency).remote()
    miniray.get(actor.pause.remote())
    refs = [actor.pause.remote(large if n % 7 == 0 else None) for n in range(300)]
    refs.append(actor.leave.remote())
    refs += [actor.pause.remote(large if n % 7 == 0 else None) for n in range(300)]
    while len(refs) < 20_000 and not miniray.wait([refs[300]], timeout=0)[0]:
        refs.append(actor.pause.remote())
    for ref in refs[300:]:
        try:
            miniray.get(ref, timeout=60)
        except miniray.exceptions.ActorDiedError:
            continue
"""


def test_an_actor_that_leaves_with_calls_queued_prints_nothing() -> None:
    driver = subprocess.run(
        [sys.executable, "-c", LEAVING], check=False, capture_output=True, text=True, timeout=120
    )
    assert (driver.stdout, driver.stderr, driver.returncode) == ("", "", 0)
