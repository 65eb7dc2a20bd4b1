"""Workers that wait for calls before a planned exit: what they hold must come back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until

import miniray
from miniray.common.runtime import current_runtime

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLUSTER = {"num_cpus": 4, "num_gpus": 1}


@pytest.fixture(scope="module", autouse=True)
def running(session_root: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_RESERVE_AFTER", "1")  # how long others wait
        request.getfixturevalue("cluster")
        yield


@miniray.remote(num_gpus=1, num_cpus=0)
def on_gpu() -> int:
    return os.getpid()


@miniray.remote(num_gpus=1, num_cpus=0)
class OnGpu:
    def pid(self) -> int:
        return os.getpid()


def test_what_a_task_with_a_gpu_has_put_outlives_its_worker() -> None:
    @miniray.remote(num_gpus=1, num_cpus=0)
    def make() -> Any:
        return os.getpid(), [miniray.put(bytes(number)) for number in (10, 1 << 20)]

    pid, refs = miniray.get(make.remote())
    wait_until(lambda: not is_alive(pid))
    assert [len(value) for value in miniray.get(refs)] == [10, 1 << 20]


def test_a_worker_is_forgotten_with_the_last_value_that_it_has_left() -> None:
    @miniray.remote(num_cpus=0, max_calls=1)
    def make() -> Any:
        return os.getpid(), [miniray.put(bytes(number)) for number in (10, 1 << 20)]

    peers = current_runtime().peers  # type: ignore[attr-defined]
    before = {peer.process_id for peer in peers.all()}
    pid, refs = miniray.get(make.remote())
    wait_until(lambda: not is_alive(pid))
    assert [len(value) for value in miniray.get(refs)] == [10, 1 << 20]
    assert {peer.process_id for peer in peers.all()} - before  # the daemon, in its name
    del refs
    wait_until(lambda: not {peer.process_id for peer in peers.all()} - before)


def test_a_call_that_needs_the_device_of_the_worker_which_waits_for_it_gets_it() -> None:
    @miniray.remote(num_gpus=1, num_cpus=0)
    def outer() -> Any:
        return os.getpid(), [on_gpu.remote()]

    pid, [inner] = miniray.get(outer.remote())
    assert miniray.get(inner, timeout=30) != pid
    wait_until(lambda: not is_alive(pid))
    assert miniray.get(on_gpu.remote(), timeout=30) != pid


def test_a_call_that_nobody_waits_for_does_not_keep_its_callers_device() -> None:
    @miniray.remote(num_gpus=1, num_cpus=0)
    def outer() -> None:
        on_gpu.remote()

    miniray.get(outer.remote())
    assert miniray.get(on_gpu.remote(), timeout=30) > 0


def test_an_actor_that_needs_the_device_of_the_worker_which_waits_for_it_gets_it() -> None:
    @miniray.remote(num_gpus=1, num_cpus=0)
    def outer() -> Any:
        return [OnGpu.remote().pid.remote()]

    [inner] = miniray.get(outer.remote())
    assert miniray.get(inner, timeout=30) > 0
    assert miniray.get(on_gpu.remote(), timeout=30) > 0


def test_a_task_gets_the_device_of_a_worker_that_waits_for_it_through_another_one() -> None:
    @miniray.remote(num_cpus=1)
    def between() -> int:
        return miniray.get(on_gpu.remote())

    @miniray.remote(num_gpus=1, num_cpus=0)
    def outer() -> Any:
        return [between.remote()]

    [inner] = miniray.get(outer.remote())
    assert miniray.get(inner, timeout=30) > 0
    assert miniray.get(on_gpu.remote(), timeout=30) > 0


def test_an_actor_that_has_ended_itself_lets_its_device_go_to_what_it_waits_for() -> None:
    @miniray.remote(num_gpus=1, num_cpus=0)
    class Outer:
        def __init__(self) -> None:
            self.inner = on_gpu.remote()

        def get(self) -> Any:
            return [self.inner]

        def leave(self) -> None:
            miniray.actor.exit_actor()

    actor = Outer.remote()
    [inner] = miniray.get(actor.get.remote())
    actor.leave.remote()
    assert miniray.get(inner, timeout=30) > 0


def test_what_does_not_need_the_device_is_waited_for(tmp_path: Path) -> None:
    go = tmp_path / "go"

    @miniray.remote(num_cpus=1, max_retries=0)
    def between() -> str:
        wait_for_file(go)
        return "there"

    @miniray.remote(num_gpus=1, num_cpus=0)
    def outer() -> Any:
        return [between.remote()]

    [inner] = miniray.get(outer.remote())
    assert miniray.get(on_gpu.remote(), timeout=30) > 0  # the device is not needed any more
    go.touch()
    assert miniray.get(inner, timeout=30) == "there"


def test_an_idle_worker_that_is_in_the_way_of_its_own_call_gives_way() -> None:
    @miniray.remote(num_gpus=0.6, num_cpus=0, max_calls=0)
    def outer() -> Any:
        return os.getpid(), [on_gpu.remote()]

    pid, [inner] = miniray.get(outer.remote())
    assert miniray.get(inner, timeout=30) != pid
    wait_until(lambda: not is_alive(pid))


def test_a_detached_actor_waits_for_a_ref_and_lets_its_creators_worker_end() -> None:
    @miniray.remote
    class Kept:
        def __init__(self, value: int) -> None:
            self.value = value

        def get(self) -> int:
            return self.value

    @miniray.remote(max_calls=1)
    def outer() -> int:
        Kept.options(name="kept", lifetime="detached").remote(later.remote())
        return os.getpid()

    @miniray.remote
    def later() -> int:
        return 7

    pid = miniray.get(outer.remote())
    wait_until(lambda: not is_alive(pid))
    kept = miniray.get_actor("kept")
    assert miniray.get(kept.get.remote(), timeout=30) == 7
    miniray.kill(kept)
