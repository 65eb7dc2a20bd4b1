"""Values in the object store of one node: no copies, no changes, and nothing left behind."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from object_helpers import inventory, process_tables

import miniray
from miniray.common.runtime import current_runtime
from miniray.exceptions import (
    ObjectLostError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024 * 1024
CAPACITY = 192 * MIB
#: PyTorch is loaded by the template, once for all workers with this option.
WITH_TORCH = {"_preload": ["torch"]}


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[None]:
    """A small store, of which the head hears often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_HEARTBEAT_INTERVAL", "0.05")
        miniray.init(num_cpus=4, object_store_memory=CAPACITY)
        yield
        miniray.shutdown()


def used_bytes() -> int:
    """Bytes in the object stores of all nodes, as of their last heartbeats."""
    return sum(node["ObjectStoreUsed"] for node in miniray.nodes() if node["Alive"])


def store_is_empty() -> bool:
    return used_bytes() == 0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, the store is empty after it."""
    yield
    wait_until(store_is_empty)


def where(array: Any) -> tuple[str, int]:
    """The file that an array is mapped from, and its place in there."""
    address = array.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode = line.split(maxsplit=5)[:5]
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return f"{device}:{inode}", int(offset, 16) + address - begin
    raise AssertionError("the array is nowhere")


@miniray.remote(num_cpus=0)
class Keeper:
    def __init__(self) -> None:
        self.kept: Any = None

    def where(self, array: Any) -> tuple[str, int]:
        return where(array)

    def where_is_tensor(self, tensor: Any) -> tuple[str, int]:
        return where(tensor.numpy())

    def keep(self, value: Any) -> None:
        self.kept = value

    def kept_sum(self) -> int:
        value = miniray.get(self.kept[0]) if isinstance(self.kept, list) else self.kept
        return int(value.sum())

    def tables(self) -> dict[str, int]:
        return process_tables()

    def has_kept(self) -> bool:
        return self.kept is not None

    def wait_for(self, path: Path) -> None:
        wait_for_file(path)

    def change(self, array: Any) -> None:
        array[0] = 9

    def unlock(self, array: Any) -> None:
        array.setflags(write=True)

    def make(self, size: int) -> Any:
        return np.ones(size, dtype=np.uint8)

    def put_for_me(self, size: int) -> list[Any]:
        return [miniray.put(np.ones(size, dtype=np.uint8))]

    def die_while_writing(self, size: int, writes_before: int) -> None:
        """The first write goes into new memory, later ones into memory that is mapped here."""
        from miniray.objects import shared_memory

        for _ in range(writes_before):
            miniray.put(np.ones(size, dtype=np.uint8))

        def write_half(fd: int, pieces: Any) -> None:
            piece = pieces[-1]
            os.pwrite(fd, piece[: len(piece) // 2], 0)
            os.kill(os.getpid(), signal.SIGKILL)

        def copy_half(block: Any, pieces: Any) -> None:
            piece = pieces[-1]
            shared_memory.copy_into(block, 0, piece[: len(piece) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        shared_memory.write_all = write_half
        shared_memory._copy = copy_half
        miniray.put(np.ones(size, dtype=np.uint8))

    def die_while_mapping(self, refs: list[Any], mapped: bool) -> None:
        """After the daemon has counted it as a reader, before or after it has the memory."""
        from miniray.objects import shared_memory

        map_memory = shared_memory.map_memory

        def die(*args: Any, **kwargs: Any) -> None:
            if mapped:
                map_memory(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        shared_memory.map_memory = die
        miniray.get(refs)

    def pid(self) -> int:
        return os.getpid()

    def entries(self) -> int:
        return len(current_runtime().table)  # type: ignore[attr-defined]


# --- how values are read ---------------------------------------------------------------
def test_two_actors_and_the_driver_read_the_same_memory() -> None:
    ref = miniray.put(np.arange(MIB, dtype=np.uint8))
    actors = [Keeper.remote() for _ in range(2)]
    places = miniray.get([actor.where.remote(ref) for actor in actors])
    assert places[0] == places[1] == where(miniray.get(ref))


def test_an_array_cannot_be_changed_in_place_by_any_reader() -> None:
    ref = miniray.put(np.zeros(MIB, dtype=np.uint8))
    actor = Keeper.remote()
    for attempt in (actor.change, actor.unlock):
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
            miniray.get(attempt.remote(ref))
    mine = miniray.get(ref)
    with pytest.raises(ValueError, match="WRITEABLE"):
        mine.setflags(write=True)
    assert not mine.any()


def test_the_writer_may_go_on_with_its_own_array() -> None:
    array = np.zeros(MIB, dtype=np.uint8)
    ref = miniray.put(array)
    array[:] = 1
    assert not miniray.get(ref).any()


def test_a_structure_keeps_its_shape_and_shares_its_arrays() -> None:
    shared = np.arange(MIB, dtype=np.int64)
    value = {"a": [shared, shared[::2].copy()], "b": (b"x" * MIB, "y" * MIB), "c": {1, 2}}
    ref = miniray.put(value)
    back = miniray.get(ref)
    assert back["b"] == value["b"]
    assert back["c"] == {1, 2}
    np.testing.assert_array_equal(back["a"][0], shared)
    np.testing.assert_array_equal(back["a"][1], shared[::2])
    assert not back["a"][0].flags.writeable


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_either_order_and_of_slices_come_back_equal(order: Any) -> None:
    array = np.asarray(np.arange(512 * 1024, dtype=np.float64).reshape(512, 1024), order=order)
    np.testing.assert_array_equal(miniray.get(miniray.put(array)), array)
    np.testing.assert_array_equal(miniray.get(miniray.put(array[::3, 1::2])), array[::3, 1::2])


def test_ten_megabytes_of_bytes_come_back_equal() -> None:
    value = os.urandom(10_000_000)

    @miniray.remote
    def swap(data: bytes) -> bytes:
        return data[::-1]

    assert miniray.get(miniray.put(value)) == value
    assert miniray.get(swap.remote(value)) == value[::-1]
    assert miniray.get(miniray.put(bytearray(value))) == value


def test_torch_tensors_come_back_equal() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(MIB, dtype=torch.float32)

    @miniray.remote(**WITH_TORCH)
    def double(given: Any) -> Any:
        return given * 2

    assert torch.equal(miniray.get(double.remote(miniray.put(tensor))), tensor * 2)


def test_an_operation_in_place_changes_a_tensor_for_its_reader_only() -> None:
    torch = pytest.importorskip("torch")
    ref = miniray.put(torch.zeros(MIB))

    @miniray.remote(**WITH_TORCH)
    class Holder:
        def __init__(self, refs: list[Any]) -> None:
            self.tensor = miniray.get(refs[0])

        def add(self, amount: float) -> float:
            self.tensor += amount
            return float(self.tensor[-1])

    one, other = Holder.remote([ref]), Holder.remote([ref])
    assert miniray.get([one.add.remote(1), one.add.remote(1), other.add.remote(5)]) == [1, 2, 5]
    assert not miniray.get(ref).any()
    for _ in range(4):  # nor for the next reader of the same process
        assert miniray.get(ref).add_(1)[0] == 1


def test_readers_of_a_tensor_share_its_memory_until_they_write() -> None:
    torch = pytest.importorskip("torch")
    ref = miniray.put(torch.zeros(MIB))
    tensor, again = miniray.get(ref), miniray.get(ref)
    assert where(tensor.numpy()) == where(again.numpy())
    assert tensor.data_ptr() != again.data_ptr()
    actor = Keeper.options(**WITH_TORCH).remote()
    array = miniray.get(miniray.put(np.ones(MIB)))
    assert where(array)[0] != where(tensor.numpy())[0]
    assert miniray.get(actor.where_is_tensor.remote(ref)) == where(tensor.numpy())
    tensor.add_(1)
    assert not again.any()


# --- when memory is given back ---------------------------------------------------------
def test_memory_comes_back_when_the_last_ref_goes() -> None:
    ref = miniray.put(np.ones(4 * MIB, dtype=np.uint8))
    wait_until(lambda: used_bytes() >= 4 * MIB)
    other = ref
    del ref
    assert miniray.get(other)[0] == 1
    del other
    wait_until(store_is_empty)


def test_a_view_keeps_its_bytes_after_its_ref_is_gone() -> None:
    expected = np.arange(4 * MIB, dtype=np.uint8)
    ref = miniray.put(expected)
    view = miniray.get(ref)
    part = view[MIB : MIB + 100]
    del ref, view
    for fill in range(30):
        miniray.put(np.full(4 * MIB, fill, dtype=np.uint8))
    np.testing.assert_array_equal(part, expected[MIB : MIB + 100])
    wait_until(lambda: used_bytes() >= 4 * MIB)  # as of its next heartbeat


def test_a_view_in_an_actor_keeps_its_bytes_when_the_driver_drops_its_ref() -> None:
    actor = Keeper.remote()
    ref = miniray.put(np.ones(4 * MIB, dtype=np.uint8))
    miniray.get(actor.keep.remote(ref))
    del ref
    for _ in range(10):
        miniray.put(np.full(4 * MIB, 7, dtype=np.uint8))
    assert miniray.get(actor.kept_sum.remote()) == 4 * MIB
    miniray.get(actor.keep.remote(None))


def test_a_ref_in_an_actors_state_keeps_the_value() -> None:
    actor = Keeper.remote()
    ref = miniray.put(np.ones(MIB, dtype=np.uint8))
    miniray.get(actor.keep.remote([ref]))
    del ref
    assert miniray.get(actor.kept_sum.remote()) == MIB
    wait_until(lambda: used_bytes() >= MIB)
    miniray.get(actor.keep.remote(None))
    wait_until(store_is_empty)


def test_a_ref_passes_through_three_processes() -> None:
    first, second, third = (Keeper.remote() for _ in range(3))

    @miniray.remote(num_cpus=0)
    def hand(refs: list[Any], chain: list[Any]) -> None:
        if len(chain) > 1:
            miniray.get(hand.remote(refs, chain[1:]))
        miniray.get(chain[0].keep.remote(refs))

    ref = miniray.put(np.ones(MIB, dtype=np.uint8))
    miniray.get(hand.remote([ref], [first, second, third]))
    del ref
    for actor in (first, second, third):
        assert miniray.get(actor.kept_sum.remote()) == MIB
        miniray.get(actor.keep.remote(None))


def test_refs_inside_values_inside_values_keep_everything() -> None:
    value: Any = np.ones(MIB, dtype=np.uint8)
    for _ in range(5):
        value = [miniray.put(value)]
    actor = Keeper.remote()
    miniray.get(actor.keep.remote(value))
    for _ in range(5):
        value = miniray.get(value[0])
    assert value.sum() == MIB
    miniray.get(actor.keep.remote(None))


def test_a_value_of_a_dead_actor_is_freed() -> None:
    actor = Keeper.remote()
    refs = miniray.get(actor.put_for_me.remote(4 * MIB))
    pid = miniray.get(actor.pid.remote())
    wait_until(lambda: used_bytes() >= 4 * MIB)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayActorError):
        miniray.get(actor.pid.remote())
    wait_until(store_is_empty)
    told = rf"a worker of Keeper \(pid {pid}\) on node \w+, which was ended by signal 9"
    with pytest.raises(OwnerDiedError, match=told):
        miniray.get(refs)


def test_a_ref_of_a_killed_owner_can_be_passed_on() -> None:
    actor, other = Keeper.remote(), Keeper.remote()
    refs = miniray.get(actor.put_for_me.remote(10))
    os.kill(miniray.get(actor.pid.remote()), signal.SIGKILL)
    with pytest.raises(RayActorError):
        miniray.get(actor.pid.remote())
    miniray.get(other.keep.remote(refs))
    with pytest.raises(OwnerDiedError):
        miniray.get(other.kept_sum.remote())
    miniray.get(other.keep.remote(None))
    miniray.get(other.keep.remote([refs]))  # it is not read: nobody asks for its value
    wait_until(lambda: miniray.get(other.tables.remote())["registrations"] == 0)
    assert miniray.get(other.tables.remote())["owners asked again"] == 0


def test_what_an_actor_has_mapped_is_given_back_when_it_is_killed() -> None:
    actor = Keeper.remote()
    ref = miniray.put(np.ones(4 * MIB, dtype=np.uint8))
    miniray.get(actor.keep.remote(ref))
    miniray.kill(actor)
    del ref
    wait_until(store_is_empty)


@pytest.mark.parametrize("writes_before", [0, 3], ids=["new memory", "warm memory"])
def test_a_writer_killed_half_way_leaves_nothing(writes_before: int) -> None:
    with pytest.raises(RayActorError):
        miniray.get(Keeper.remote().die_while_writing.remote(4 * MIB, writes_before))
    wait_until(lambda: not inventory()["segments"])
    values = [miniray.put(np.full(4 * MIB, fill, dtype=np.uint8)) for fill in range(8)]
    assert [int(miniray.get(ref).max()) for ref in values] == list(range(8))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_reader_killed_while_it_maps_leaves_nothing(mapped: bool) -> None:
    ref = miniray.put(np.full(4 * MIB, 5, dtype=np.uint8))
    with pytest.raises(RayActorError):
        miniray.get(Keeper.remote().die_while_mapping.remote([ref], mapped))
    wait_until(lambda: not any(one["mappers"] for one in inventory()["segments"]))
    assert (miniray.get(ref) == 5).all()
    del ref
    wait_until(lambda: not inventory()["segments"])


def test_large_arguments_are_freed_after_their_calls() -> None:
    actor = Keeper.remote()
    array = np.ones(4 * MIB, dtype=np.uint8)
    miniray.get([actor.where.remote(array) for _ in range(10)])
    wait_until(store_is_empty)


def test_results_nobody_reads_are_freed() -> None:
    actor = Keeper.remote()
    for _ in range(10):
        actor.make.remote(4 * MIB)
    miniray.get(actor.pid.remote())
    wait_until(store_is_empty)


def test_a_loop_that_feeds_a_result_back_keeps_only_the_last() -> None:
    @miniray.remote
    def step(array: Any) -> Any:
        return array + 1

    state = miniray.put(np.zeros(4 * MIB, dtype=np.uint8))
    for _ in range(100):  # more than twice what the store has
        state = step.remote(state)
        miniray.wait([state])
    assert miniray.get(state)[0] == 100


# --- refs from workers that end by rule --------------------------------------------------
@pytest.mark.parametrize("size", [10, 4 * MIB], ids=["small", "big"])
def test_refs_from_a_worker_that_ended_by_rule_stay_good(size: int) -> None:
    @miniray.remote(max_calls=1)
    def make() -> Any:
        inner = miniray.put(np.ones(size, dtype=np.uint8))
        return os.getpid(), [inner, miniray.put([inner, "nested"])]

    pid, refs = miniray.get(make.remote())
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert miniray.get(refs[0]).sum() == size
    nested, name = miniray.get(refs[1])
    assert name == "nested"
    assert miniray.get(nested).sum() == size
    actor = Keeper.remote()
    miniray.get(actor.keep.remote([refs[0]]))
    del refs, nested
    assert miniray.get(actor.kept_sum.remote()) == size
    miniray.get(actor.keep.remote(None))


@pytest.fixture
def slow_end(tmp_path: Path) -> Any:
    """A task whose worker, when it has left its values to its daemon, does not end before it may.

    Returns the ref that it returns, and the file that lets it end.
    """
    begun, may_end = tmp_path / "begun", tmp_path / "may end"

    def end_slowly() -> None:
        begun.touch()
        wait_for_file(may_end)

    @miniray.remote(max_calls=1)
    def make(size: int) -> Any:
        atexit.register(end_slowly)
        return os.getpid(), [miniray.put(np.ones(size, dtype=np.uint8))]

    def run(size: int) -> Any:
        pid, refs = miniray.get(make.remote(size))
        wait_for_file(begun)
        return pid, refs

    yield run, may_end
    may_end.touch()


@pytest.mark.parametrize("size", [10, MIB], ids=["small", "big"])
def test_a_ref_dropped_while_its_owner_ends_by_rule_is_freed(slow_end: Any, size: int) -> None:
    run, may_end = slow_end
    pid, refs = run(size)
    del refs
    wait_until(lambda: not inventory()["adopted"])
    may_end.touch()
    wait_until(lambda: not is_alive(pid))


@pytest.mark.parametrize("size", [10, MIB], ids=["small", "big"])
def test_a_ref_passed_on_while_its_owner_ends_by_rule_stays_good(slow_end: Any, size: int) -> None:
    run, may_end = slow_end
    pid, refs = run(size)
    actor = Keeper.remote()
    miniray.get(actor.keep.remote(refs))
    del refs
    may_end.touch()
    wait_until(lambda: not is_alive(pid))
    miniray.get(actor.pid.remote())
    assert miniray.get(actor.kept_sum.remote()) == size
    miniray.get(actor.keep.remote(None))
    wait_until(lambda: not inventory()["adopted"])


def test_what_one_ended_worker_put_into_the_value_of_another_is_freed_with_it() -> None:
    @miniray.remote(max_calls=1)
    def make(refs: list[Any]) -> Any:
        return os.getpid(), [miniray.put([*refs, np.ones(MIB, dtype=np.uint8)])]

    refs: list[Any] = []
    for _ in range(3):
        pid, refs = miniray.get(make.remote(refs))
        wait_until(lambda pid=pid: not is_alive(pid))
    wait_until(lambda: len(inventory()["adopted"]) == 3)
    del refs
    wait_until(lambda: not inventory()["adopted"])


def test_a_result_to_come_in_a_value_of_a_worker_that_ends_stays_good(tmp_path: Path) -> None:
    go = tmp_path / "go"

    @miniray.remote(num_cpus=0)
    def slow() -> str:
        wait_for_file(go)
        return "there"

    @miniray.remote(max_calls=1)
    def make() -> Any:
        return [miniray.put([slow.remote()])]

    [outer] = miniray.get(make.remote())
    [inner] = miniray.get(outer)
    del outer
    go.touch()
    assert miniray.get(inner, timeout=20) == "there"


@pytest.mark.parametrize("size", [10, MIB], ids=["small", "big"])
def test_arguments_of_a_worker_that_ends_reach_a_busy_actor(tmp_path: Path, size: int) -> None:
    go = tmp_path / "go"

    actor = Keeper.remote()

    @miniray.remote(max_calls=1, num_cpus=0)
    def call(actor: Any, refs: bool) -> None:
        value = np.ones(size, dtype=np.uint8)
        actor.keep.remote([miniray.put(value)] if refs else value)

    for refs in (True, False):
        waiting = actor.wait_for.remote(go)
        miniray.get(call.remote(actor, refs))
        go.touch()
        miniray.get(waiting)
        go.unlink()
        wait_until(lambda: miniray.get(actor.has_kept.remote()))
        assert miniray.get(actor.kept_sum.remote()) == size
        miniray.get(actor.keep.remote(None))


# --- many --------------------------------------------------------------------------------
def test_values_pass_through_a_small_store_for_ever() -> None:
    for fill in range(15):
        assert miniray.get(miniray.put(np.full(40 * MIB, fill, dtype=np.uint8)))[0] == fill


def test_ten_thousand_refs_can_be_got_at_once() -> None:
    @miniray.remote
    def number(n: int) -> int:
        return n

    assert miniray.get([miniray.put(n) for n in range(10_000)]) == list(range(10_000))
    assert miniray.get([number.remote(n) for n in range(10_000)]) == list(range(10_000))


def test_a_value_may_hold_ten_thousand_refs() -> None:
    @miniray.remote
    def total(refs: list[Any]) -> tuple[int, list[Any]]:
        return sum(miniray.get(refs)), refs

    refs = [miniray.put(n) for n in range(10_000)]
    held = miniray.put(refs)
    found, back = miniray.get(total.remote(held))
    assert found == sum(range(10_000))
    assert back == refs
    del refs
    assert miniray.get(miniray.get(held)) == list(range(10_000))


# --- what cannot be unpickled ---------------------------------------------------------------
def explode() -> Any:
    raise RuntimeError("cannot be unpickled")


class Bomb:
    def __init__(self, payload: bytes = b"") -> None:
        self.payload = payload

    def __reduce__(self) -> Any:
        return explode, ()


@pytest.mark.parametrize("size", [10, MIB], ids=["small", "big"])
def test_a_value_that_cannot_be_unpickled_raises_where_it_is_read(size: int) -> None:
    @miniray.remote
    class Maker:
        def make(self) -> Any:
            return [Bomb(), np.ones(size, dtype=np.uint8)]

        def take(self, value: Any) -> str:
            return type(value).__name__

        def pid(self) -> int:
            return os.getpid()

    maker = Maker.remote()
    pid = miniray.get(maker.pid.remote())
    ref = maker.make.remote()
    with pytest.raises(RuntimeError, match="cannot be unpickled"):
        miniray.get(ref)
    with pytest.raises(RayTaskError, match="cannot be unpickled"):
        miniray.get(maker.take.remote(ref))
    with pytest.raises(RayTaskError, match="cannot be unpickled"):
        miniray.get(maker.take.remote([Bomb(), np.ones(size, dtype=np.uint8)]))
    assert miniray.get(maker.pid.remote()) == pid


class OwnError(BaseException):
    """One that no ``except Exception`` takes."""


class Raises:
    """Its unpickling raises an instance of a class."""

    def __init__(self, kind: type[BaseException], size: int) -> None:
        self.content = kind, np.ones(size, dtype=np.uint8)

    def __reduce__(self) -> Any:
        return raise_one, self.content


def raise_one(kind: type[BaseException], _payload: Any) -> Any:
    raise kind("while it was unpickled")


@pytest.mark.parametrize("size", [10, MIB], ids=["small", "big"])
@pytest.mark.parametrize("kind", [OwnError, StopIteration, KeyboardInterrupt, GeneratorExit])
def test_an_asyncio_actor_lives_on_whatever_unpickling_an_argument_raises(
    kind: type[BaseException], size: int
) -> None:
    @miniray.remote
    class Reader:
        async def take(self, value: Any) -> str:
            return type(value).__name__

        async def pid(self) -> int:
            return os.getpid()

    reader = Reader.remote()
    pid = miniray.get(reader.pid.remote())
    ref = miniray.put(Raises(kind, size))
    taken = [reader.take.remote(ref), reader.take.remote(Raises(kind, size))]
    for result in taken:
        with pytest.raises(RayTaskError, match="while it was unpickled"):
            miniray.get(result, timeout=30)
    assert miniray.get(reader.pid.remote(), timeout=30) == pid


class ReadsAnother:
    """Its unpickling needs another value, which is lost as long as a file is not there."""

    def __init__(self, there: Path) -> None:
        self.content = there, np.ones(MIB, dtype=np.uint8)

    def __reduce__(self) -> Any:
        return read_another, self.content


def read_another(there: Path, payload: Any) -> int:
    if not there.exists():
        raise ObjectLostError("ab" * 16, "it is another one")
    return len(payload)


def test_a_value_whose_unpickling_finds_another_one_lost_is_not_lost_itself(tmp_path: Path) -> None:
    runs, there = tmp_path / "runs", tmp_path / "there"

    @miniray.remote
    def make() -> Any:
        with runs.open("a") as file:
            file.write("x")
        return ReadsAnother(there)

    @miniray.remote
    def take(value: int) -> int:
        return value

    async def await_it() -> None:
        with pytest.raises(ObjectLostError, match="it is another one"):
            await ref

    ref = make.remote()
    with pytest.raises(ObjectLostError, match="it is another one"):
        miniray.get(ref)
    asyncio.run(await_it())
    with pytest.raises(ObjectLostError, match="it is another one"):
        miniray.get(take.remote(ref))
    there.touch()
    assert miniray.get(ref) == miniray.get(take.remote(ref)) == MIB
    assert runs.read_text() == "x"


def test_a_result_that_cannot_be_pickled_is_its_calls_error_and_its_worker_lives_on() -> None:
    import threading

    @miniray.remote
    class Maker:
        def make(self) -> Any:
            return [np.ones(MIB), threading.Lock()]

        def pid(self) -> int:
            return os.getpid()

    @miniray.remote(max_retries=0)
    def make() -> Any:
        return [np.ones(MIB), threading.Lock()]

    maker = Maker.remote()
    pid = miniray.get(maker.pid.remote())
    for ref in (make.remote(), maker.make.remote()):
        with pytest.raises(TypeError, match="lock"):
            miniray.get(ref)
    assert miniray.get(maker.pid.remote()) == pid


def test_no_process_remembers_objects_that_are_gone() -> None:
    actor = Keeper.remote()
    before = miniray.get(actor.entries.remote())
    for _ in range(20):
        refs = miniray.get(actor.put_for_me.remote(MIB))
        miniray.get(actor.keep.remote(refs))
        miniray.get(actor.keep.remote([miniray.put([refs, np.ones(MIB, dtype=np.uint8)])]))
    miniray.get(actor.keep.remote(None))
    del refs
    wait_until(lambda: miniray.get(actor.entries.remote()) == before)


@pytest.mark.parametrize("owner_dies", [False, True], ids=["task failed", "owner died"])
def test_a_get_that_fails_holds_nothing_when_its_error_is_gone(owner_dies: bool) -> None:
    @miniray.remote
    def fail() -> None:
        raise ValueError

    def fail_to_get() -> None:
        if owner_dies:
            actor = Keeper.remote()
            [ref] = miniray.get(actor.put_for_me.remote(MIB))
            os.kill(miniray.get(actor.pid.remote()), signal.SIGKILL)
        else:
            ref = fail.remote()
        try:
            miniray.get([ref])
        except (ValueError, OwnerDiedError):
            return
        raise AssertionError

    def entries() -> int:
        return len(current_runtime().table)  # type: ignore[attr-defined]

    miniray.get(miniray.put(1))
    gc.collect()
    current_runtime().refs.settle()  # type: ignore[attr-defined]
    before = entries()
    gc.disable()
    try:
        fail_to_get()
        wait_until(lambda: entries() <= before)  # less, if something of an earlier test has gone
    finally:
        gc.enable()
