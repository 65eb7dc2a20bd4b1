"""``get``, ``put``, ``wait``, and refs as objects, futures and awaitables."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import wait_for_file

import miniray
from miniray.exceptions import GetTimeoutError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cluster")

MIB = 1024 * 1024


@miniray.remote(num_cpus=0)
def wait_and_return(path: Path, value: Any) -> Any:
    wait_for_file(path)
    return value


@miniray.remote
def fail() -> None:
    raise KeyError("missing")


@pytest.mark.parametrize(
    "value",
    [None, 0, "text", b"bytes", [1, {"a": (2, 3)}], {1, 2}, float("inf"), b"x" * MIB],
    ids=lambda value: str(value)[:12],
)
def test_a_put_value_comes_back_equal(value: Any) -> None:
    assert miniray.get(miniray.put(value)) == value


def test_a_list_of_refs_gives_a_list_of_values() -> None:
    assert miniray.get([miniray.put(n) for n in range(10)]) == list(range(10))
    assert miniray.get([]) == []


@pytest.mark.parametrize("wrong", [1, "x", None, [1], ["x"]])
def test_get_refuses_what_is_no_ref(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        miniray.get(wrong)


@pytest.mark.parametrize("others", [1, 20])
def test_get_raises_as_soon_as_one_of_many_has_failed(others: int, tmp_path: Path) -> None:
    waiting = [wait_and_return.remote(tmp_path / "go", n) for n in range(others)]
    refs = [*waiting, miniray.put("there")]
    for given in ([*refs, fail.remote()], [fail.remote(), *refs]):
        with pytest.raises(KeyError):
            miniray.get(given, timeout=60)
    failed = fail.remote()
    miniray.wait([failed])
    with pytest.raises(KeyError):
        miniray.get([*refs, failed], timeout=60)
    (tmp_path / "go").touch()
    assert miniray.get(waiting, timeout=60) == list(range(others))


def test_put_refuses_a_ref() -> None:
    with pytest.raises(TypeError, match=r"ObjectRef"):
        miniray.put(miniray.put(1))


def test_each_get_of_a_small_value_gives_a_copy_of_its_own() -> None:
    ref = miniray.put([1, 2])
    miniray.get(ref).append(3)
    assert miniray.get(ref) == [1, 2]


class Connection:
    """Holds something that cannot be pickled."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lock = threading.Lock()


def test_a_class_can_have_a_serializer_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    @miniray.remote
    def address(connections: list[Connection]) -> str:
        assert not connections[0].lock.locked()
        return connections[0].address

    connection = Connection("a:1")
    assert not miniray.util.inspect_serializability(connection)[0]
    assert "lock is a lock" in capsys.readouterr().out
    miniray.util.register_serializer(
        Connection, serializer=lambda each: each.address, deserializer=lambda at: Connection(at)
    )
    try:
        assert miniray.get(address.remote([connection])) == "a:1"
        assert miniray.get(miniray.put(connection)).address == "a:1"
    finally:
        miniray.util.deregister_serializer(Connection)
    with pytest.raises(TypeError, match="lock"):
        miniray.put(connection)


def test_programs_can_pickle_as_calls_do() -> None:
    from miniray import cloudpickle

    ref = miniray.put(20)
    blob = cloudpickle.dumps(lambda: miniray.get(ref) + 1)

    @miniray.remote
    def run(blob: bytes) -> int:
        return cloudpickle.loads(blob)()

    assert miniray.get(run.remote(blob)) == 21


def test_a_large_array_is_read_without_a_copy_and_is_read_only() -> None:
    ref = miniray.put(np.arange(MIB, dtype=np.int64))
    array = miniray.get(ref)
    assert not array.flags.writeable
    assert not array.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert int(array.sum()) == MIB * (MIB - 1) // 2


def test_a_large_value_passes_between_tasks_and_driver() -> None:
    @miniray.remote
    def double(array: Any) -> Any:
        return array * 2

    ref = double.remote(double.remote(miniray.put(np.ones(MIB, dtype=np.int32))))
    result = miniray.get(ref)
    assert result.shape == (MIB,)
    assert (result == 4).all()


def test_an_array_stays_valid_after_its_ref_is_gone() -> None:
    array = miniray.get(miniray.put(np.full(MIB, 7, dtype=np.int64)))
    for _ in range(5):
        miniray.get(miniray.put(np.zeros(MIB, dtype=np.int64)))
    assert (array == 7).all()


def test_a_structure_of_arrays_and_bytes_keeps_its_parts() -> None:
    value = {"a": np.arange(MIB), "b": [np.zeros((3, 5)), b"y" * MIB], "c": "text"}
    found = miniray.get(miniray.put(value))
    assert (found["a"] == value["a"]).all()
    assert found["b"][0].shape == (3, 5)
    assert found["b"][1] == value["b"][1]
    assert found["c"] == "text"


def test_get_gives_up_after_its_timeout(tmp_path: Path) -> None:
    ref = wait_and_return.remote(tmp_path / "go", 5)
    told = "^The value of ObjectRef.*, the result of wait_and_return, was not ready within"
    for timeout in (0, 0.05):
        with pytest.raises(GetTimeoutError, match=told):
            miniray.get(ref, timeout=timeout)
    with pytest.raises(TimeoutError):
        miniray.get(ref, timeout=0.05)
    (tmp_path / "go").touch()
    assert miniray.get(ref, timeout=30) == 5


def test_wait_splits_ready_from_not_ready_in_the_order_given(tmp_path: Path) -> None:
    slow = wait_and_return.remote(tmp_path / "go", 0)
    done = [miniray.put(n) for n in range(3)]
    refs = [done[0], slow, done[1], done[2]]
    assert miniray.wait(refs, num_returns=3) == (done, [slow])
    (tmp_path / "go").touch()
    assert miniray.wait(refs, num_returns=4) == (refs, [])


def test_wait_returns_no_more_than_was_asked_for() -> None:
    refs = [miniray.put(n) for n in range(5)]
    ready, rest = miniray.wait(refs, num_returns=2)
    assert len(ready) == 2
    assert {*ready, *rest} == {*refs}


def test_wait_gives_up_after_its_timeout(tmp_path: Path) -> None:
    slow = wait_and_return.remote(tmp_path / "go", 0)
    assert miniray.wait([slow], timeout=0) == ([], [slow])
    assert miniray.wait([slow], timeout=0.05) == ([], [slow])
    (tmp_path / "go").touch()
    assert miniray.wait([slow], timeout=30, fetch_local=False) == ([slow], [])


def test_a_failed_task_is_ready() -> None:
    ref = fail.remote()
    assert miniray.wait([ref], timeout=30) == ([ref], [])


def test_wait_refuses_nonsense() -> None:
    ref = miniray.put(1)
    with pytest.raises(TypeError):
        miniray.wait(ref)
    with pytest.raises(ValueError, match="unique"):
        miniray.wait([ref, ref])
    with pytest.raises(ValueError, match="num_returns"):
        miniray.wait([ref], num_returns=2)
    with pytest.raises(ValueError, match="0"):
        miniray.wait([ref], num_returns=0)
    with pytest.raises(ValueError, match="timeout"):
        miniray.wait([ref], timeout=-1)
    with pytest.raises(TypeError):
        miniray.wait([1])
    assert miniray.wait([]) == ([], [])


def test_waiting_for_one_after_another_sees_every_ref() -> None:
    @miniray.remote
    def number(n: int) -> int:
        return n

    left = [number.remote(n) for n in range(50)]
    seen = []
    while left:
        ready, left = miniray.wait(left)
        seen += miniray.get(ready)
    assert sorted(seen) == list(range(50))


def test_refs_compare_and_hash_by_what_they_refer_to() -> None:
    @miniray.remote
    def send_back(refs: list[Any]) -> Any:
        return refs[0]

    ref, other = miniray.put(1), miniray.put(1)
    same = miniray.get(send_back.remote([ref]))
    assert same == ref
    assert hash(same) == hash(ref)
    assert ref != other
    assert len({ref, same, other}) == 2
    assert ref.hex() in repr(ref)
    assert bytes.fromhex(ref.hex()) == ref.binary()
    assert not ref.is_nil()


def test_a_ref_can_be_awaited() -> None:
    @miniray.remote
    def double(n: int) -> int:
        return n * 2

    async def main() -> list[int]:
        first = await double.remote(1)
        return [first, *await asyncio.gather(*(double.remote(n) for n in (2, 3)))]

    assert asyncio.run(main()) == [2, 4, 6]


def test_awaiting_a_failed_task_raises_its_error() -> None:
    async def main() -> None:
        await fail.remote()

    with pytest.raises(KeyError):
        asyncio.run(main())


def test_awaiting_takes_part_in_asyncio_timeouts(tmp_path: Path) -> None:
    async def main() -> Any:
        ref = wait_and_return.remote(tmp_path / "go", 9)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ref, 0.05)
        (tmp_path / "go").touch()
        return await ref

    assert asyncio.run(main()) == 9


def test_a_ref_gives_a_future(tmp_path: Path) -> None:
    future = wait_and_return.remote(tmp_path / "go", "late").future()
    assert isinstance(future, concurrent.futures.Future)
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.result(timeout=30) == "late"
    with pytest.raises(KeyError):
        fail.remote().future().result(timeout=30)


def test_futures_of_refs_work_with_as_completed(tmp_path: Path) -> None:
    slow = wait_and_return.remote(tmp_path / "go", "slow").future()
    fast = miniray.put("fast").future()
    finished = concurrent.futures.as_completed([slow, fast], timeout=30)
    assert next(finished).result() == "fast"
    (tmp_path / "go").touch()
    assert next(finished).result() == "slow"


class Late:
    """Is there once a file exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        wait_for_file(self.path)


def test_a_future_of_a_value_that_takes_long_to_read_holds_up_nobody(tmp_path: Path) -> None:
    late = [miniray.put(Late(tmp_path / "go")).future() for _ in range(5)]
    assert miniray.put("quick").future().result(timeout=10) == "quick"
    assert not any(future.done() for future in late)
    (tmp_path / "go").touch()
    assert [future.result(timeout=30).path for future in late] == [tmp_path / "go"] * 5


def test_threads_may_get_at_the_same_time() -> None:
    @miniray.remote
    def square(n: int) -> int:
        return n * n

    def work(n: int) -> int:
        return miniray.get(square.remote(n))

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(40))) == [n * n for n in range(40)]


def test_a_value_that_holds_many_refs_comes_back_whole() -> None:
    refs = [miniray.put(n) for n in range(500)]
    found = miniray.get(miniray.put(refs))
    assert found == refs
    assert miniray.get(found[::100]) == [0, 100, 200, 300, 400]


def test_a_ref_inside_a_put_value_keeps_its_value_alive() -> None:
    outer = miniray.put([miniray.put(b"z" * MIB)])
    assert miniray.get(miniray.get(outer)[0]) == b"z" * MIB


def test_get_takes_the_same_pending_ref_many_times(tmp_path: Path) -> None:
    for count in (2, 9, 50):
        file = tmp_path / str(count)
        ref = wait_and_return.remote(file, 7)
        threading.Timer(0.05, file.touch).start()
        assert miniray.get([ref] * count, timeout=20) == [7] * count


def test_put_for_another_owner_says_what_to_do_instead() -> None:
    assert miniray.get(miniray.put(1, _owner=None)) == 1
    with pytest.raises(TypeError, match="method of the actor"):
        miniray.put(1, _owner="an actor")  # type: ignore[arg-type]
