"""More data than the object store holds: on disk, back again, and errors when that is full too."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import takes_less_than, wait_until

import miniray
from miniray.exceptions import ObjectStoreFullError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MIB = 1024 * 1024
CAPACITY = 32 * MIB
VALUE = 4 * MIB


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[None]:
    """A store of eight values, of which the head hears often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_HEARTBEAT_INTERVAL", "0.05")
        miniray.init(num_cpus=4, object_store_memory=CAPACITY)
        yield
        miniray.shutdown()


def total(key: str) -> int:
    return sum(node[key] for node in miniray.nodes() if node["Alive"])


def spilled() -> int:
    """Bytes on disk, as of the last heartbeats."""
    return total("ObjectStoreSpilled")


def store_is_empty() -> bool:
    return total("ObjectStoreUsed") == 0 and spilled() == 0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Whatever a test does, memory and disk are empty after it."""
    yield
    wait_until(store_is_empty)


def value_of(number: int, size: int = VALUE) -> Any:
    return np.full(size // 8, number, dtype=np.int64)


def is_value_of(number: int, value: Any) -> bool:
    return bool((value == number).all()) and value.nbytes == VALUE


@miniray.remote
def make(number: int) -> Any:
    return value_of(number)


@miniray.remote
def successor(value: Any) -> Any:
    return value + 1


@miniray.remote(num_cpus=0)
class Holder:
    """Looks at values for as long as it is told to."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def hold(self, value: Any) -> None:
        self.held.append(value)

    def glance(self, value: Any) -> None:
        pass

    def is_intact(self, *numbers: int) -> bool:
        return all(is_value_of(*pair) for pair in zip(numbers, self.held, strict=True))

    def release(self) -> None:
        self.held.clear()


def held_values(count: int) -> list[Any]:
    """Views, so that their values cannot leave memory."""
    return [miniray.get(miniray.put(value_of(number))) for number in range(count)]


# --- more than fits ----------------------------------------------------------------------
def test_three_times_the_store_goes_through_put_and_get() -> None:
    refs = [miniray.put(value_of(number)) for number in range(24)]
    assert total("ObjectStoreUsed") <= CAPACITY
    for number in [*range(24), *reversed(range(24))]:
        assert is_value_of(number, miniray.get(refs[number]))
    assert spilled() >= 2 * CAPACITY


@pytest.mark.parametrize("made_by", ["put", "tasks"])
def test_three_times_the_store_goes_through_tasks(made_by: str) -> None:
    if made_by == "put":
        made = [miniray.put(value_of(number)) for number in range(24)]
    else:
        made = [make.remote(number) for number in range(24)]
    refs = [successor.remote(successor.remote(ref)) for ref in made]
    for number in range(24):
        assert is_value_of(number, miniray.get(made[number]))
        assert is_value_of(number + 2, miniray.get(refs[number]))


def test_tasks_with_several_arguments_do_not_starve_each_other() -> None:
    """Four at a time need six values each, where seven fit."""

    @miniray.remote
    def total_of(*values: Any) -> int:
        return sum(int(value[0]) for value in values)

    refs = [miniray.put(value_of(number)) for number in range(12)]
    picks = [[(start + step) % 12 for step in (0, 5, 7, 2, 9, 10)] for start in range(24)]
    sums = [total_of.remote(*(refs[pick] for pick in some)) for some in picks]
    assert miniray.get(sums, timeout=50) == [sum(some) for some in picks]


def test_one_get_may_be_of_more_than_the_store() -> None:
    refs = [miniray.put(value_of(number)) for number in range(24)]
    values = miniray.get(refs)
    assert all(is_value_of(number, value) for number, value in enumerate(values))
    assert total("ObjectStoreUsed") <= CAPACITY
    del refs
    assert all(is_value_of(number, value) for number, value in enumerate(values))


def test_a_task_may_have_arguments_of_more_than_the_store() -> None:
    @miniray.remote
    def total_of(*values: Any, **more: Any) -> int:
        return sum(int(value[-1]) for value in [*values, *more.values()])

    refs = [miniray.put(value_of(number)) for number in range(24)]
    refs += [make.remote(number) for number in range(24)]
    named = {f"value{number}": ref for number, ref in enumerate(refs[24:])}
    assert miniray.get(total_of.remote(*refs[:24], **named), timeout=50) == 2 * sum(range(24))


def test_a_window_of_results_may_be_larger_than_the_store() -> None:
    window: list[Any] = []
    for number in range(48):
        window.append(miniray.get(make.remote(number)))
        del window[:-12]
    assert all(is_value_of(number, value) for number, value in enumerate(window, 36))
    assert is_value_of(7, miniray.get(miniray.put(value_of(7))))


def test_what_is_read_on_disk_can_be_written_to_as_its_readers_copy() -> None:
    views = held_values(8)
    refs = [miniray.put(bytearray(b"x" * VALUE)) for _ in range(2)]
    mine = [miniray.get(ref) for ref in refs]
    mine[1][:3] = b"abc"
    assert mine[1][:4] == b"abcx"
    assert miniray.get(refs[1])[:4] == b"xxxx"
    assert all(is_value_of(number, view) for number, view in enumerate(views))


def test_reading_and_writing_go_on_at_the_same_time() -> None:
    refs = [miniray.put(value_of(number)) for number in range(16)]
    wrong: list[int] = []

    def read(order: Any) -> None:
        for number in order:
            if not is_value_of(number, miniray.get(refs[number])):
                wrong.append(number)

    threads = [
        threading.Thread(target=read, args=(order,)) for order in (range(16), range(15, -1, -1))
    ]
    for thread in threads:
        thread.start()
    more = [miniray.put(value_of(number)) for number in range(16, 32)]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert all(is_value_of(number, miniray.get(ref)) for number, ref in enumerate(more, 16))


def test_a_value_that_was_read_often_leaves_memory_as_well() -> None:
    ref = miniray.put(value_of(1))
    for _ in range(5):
        assert is_value_of(1, miniray.get(ref))
    others = [miniray.put(value_of(number)) for number in range(12)]
    assert is_value_of(1, miniray.get(ref))
    del others


def test_nested_and_returned_refs_reach_values_on_disk() -> None:
    @miniray.remote
    def pack(count: int) -> Any:
        return {number: miniray.put(value_of(number)) for number in range(count)}

    @miniray.remote
    def total_of(refs: dict[int, Any]) -> int:
        return sum(int(miniray.get(ref)[0]) for ref in refs.values())

    packed = pack.remote(16)
    assert miniray.get(total_of.remote(packed)) == sum(range(16))
    assert is_value_of(3, miniray.get(miniray.get(packed)[3]))


# --- freed -------------------------------------------------------------------------------
def test_the_disk_comes_back_when_refs_go() -> None:
    refs = [miniray.put(value_of(number)) for number in range(24)]
    wait_until(lambda: spilled() >= CAPACITY)
    del refs[:20]
    wait_until(lambda: spilled() <= 4 * VALUE)
    assert [is_value_of(number, miniray.get(ref)) for number, ref in enumerate(refs, 20)] == [
        True
    ] * 4


def test_what_a_killed_actor_owned_leaves_the_disk() -> None:
    @miniray.remote(num_cpus=0)
    class Owner:
        def fill(self) -> int:
            self.refs = [miniray.put(value_of(number)) for number in range(24)]
            return os.getpid()

    owner = Owner.remote()
    os.kill(miniray.get(owner.fill.remote()), 9)
    wait_until(store_is_empty)


def test_nothing_of_the_disk_has_a_name(session_root: Path) -> None:
    refs = [miniray.put(value_of(number)) for number in range(24)]
    files = [path for path in session_root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < VALUE
    del refs


# --- what is looked at -------------------------------------------------------------------
def test_a_view_keeps_its_bytes_whatever_is_put_afterwards() -> None:
    view = miniray.get(miniray.put(value_of(7)))
    holder = Holder.remote()
    miniray.get(holder.hold.remote(value_of(8)))
    for number in range(30):
        assert is_value_of(number, miniray.get(miniray.put(value_of(number))))
    refs = [miniray.put(value_of(number)) for number in range(16)]
    assert is_value_of(7, view)
    assert miniray.get(holder.is_intact.remote(8))
    del refs
    miniray.get(holder.release.remote())


def test_a_put_does_not_wait_for_what_others_look_at() -> None:
    holder = Holder.remote()
    miniray.get([holder.hold.remote(value_of(number)) for number in range(6)])
    views = held_values(1)
    refs = [miniray.put(value_of(number, 2 * VALUE)) for number in range(3)]
    assert miniray.get(holder.is_intact.remote(*range(6)))  # nothing is disturbed
    miniray.get(holder.release.remote())
    assert [miniray.get(ref)[-1] for ref in refs] == [0, 1, 2]
    del views


def test_a_get_does_not_wait_for_what_others_look_at() -> None:
    async def read(ref: Any) -> int:
        return int((await ref)[-1])

    def read_beside() -> float:
        holder = Holder.remote()
        miniray.get([holder.hold.remote(value_of(number)) for number in range(7)])
        ref = miniray.put(value_of(1, 2 * VALUE))
        begin = time.monotonic()
        assert miniray.get(ref)[-1] == 1
        assert asyncio.run(read(ref)) == 1
        took = time.monotonic() - begin
        assert miniray.get(holder.is_intact.remote(*range(7)))
        miniray.get(holder.release.remote())
        return took

    takes_less_than(2, read_beside)


def test_nobody_waits_for_who_looks_at_values_that_it_has_read_twice() -> None:
    """What is read again stays mapped, and is asked for; here it is looked at as well."""

    def put_beside() -> float:
        holder = Holder.remote()
        refs = [miniray.put(value_of(number)) for number in range(7)]
        miniray.get([holder.hold.remote(ref) for ref in refs])
        miniray.get([holder.glance.remote(ref) for ref in refs])
        begin = time.monotonic()
        more = miniray.put(value_of(7, 2 * VALUE))
        assert miniray.get(more)[-1] == 7
        took = time.monotonic() - begin
        assert miniray.get(holder.is_intact.remote(*range(7)))
        miniray.get(holder.release.remote())
        return took

    takes_less_than(2, put_beside)  # the limit for one who does not answer


def test_a_reader_on_disk_that_is_killed_leaves_the_others_what_they_look_at() -> None:
    views = held_values(7)
    refs = [miniray.put(value_of(number)) for number in range(8, 12)]
    holders = [Holder.remote(), Holder.remote()]
    miniray.get([holder.hold.remote(ref) for holder in holders for ref in refs])
    miniray.kill(holders[0])
    assert miniray.get(holders[1].is_intact.remote(*range(8, 12)))
    del refs
    assert miniray.get(holders[1].is_intact.remote(*range(8, 12)))
    assert all(is_value_of(number, view) for number, view in enumerate(views))


def test_results_and_arguments_find_room_on_disk_when_memory_is_looked_at() -> None:
    @miniray.remote(num_cpus=0)
    class Maker:
        def make(self, size: int) -> Any:
            return value_of(1, size)

        def first(self, refs: list[Any]) -> bool:
            return miniray.wait(refs)[0] == refs

    maker = Maker.remote()
    views = held_values(7)
    result = maker.make.remote(2 * VALUE)
    assert miniray.get(maker.first.remote([result]))
    argument = maker.first.remote([miniray.put(value_of(2, 2 * VALUE))])
    assert miniray.get(argument)
    views.clear()
    assert miniray.get(result)[0] == 1


def test_a_value_larger_than_the_store_fails_at_once() -> None:
    kept = [miniray.put(value_of(number)) for number in range(6)]
    before = spilled()

    def put() -> float:
        begin = time.monotonic()
        with pytest.raises(ObjectStoreFullError, match=f"larger than .* {CAPACITY} bytes"):
            miniray.put(np.zeros(2 * CAPACITY, dtype=np.uint8))
        return time.monotonic() - begin

    takes_less_than(2, put)
    assert spilled() == before
    del kept


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_value_larger_than_the_store_is_refused_before_it_is_copied(kind: type) -> None:
    value = kind(4 * CAPACITY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ObjectStoreFullError, match=f"larger than .* {CAPACITY} bytes"):
        miniray.put(value)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < CAPACITY


@pytest.mark.filterwarnings("ignore:Argument 2 of this call:UserWarning")
def test_a_result_or_an_argument_larger_than_the_store_is_its_calls_error() -> None:
    @miniray.remote
    def zeros(size: int, *_others: Any) -> Any:
        return np.zeros(size, dtype=np.uint8)

    told = f"needs .* {CAPACITY} bytes|larger than .* {CAPACITY} bytes"
    with pytest.raises(ObjectStoreFullError, match=told):
        miniray.get(zeros.remote(2 * CAPACITY))
    with pytest.raises(ObjectStoreFullError, match=told):
        zeros.remote(1, np.zeros(2 * CAPACITY, dtype=np.uint8))
    assert miniray.get(zeros.remote(VALUE)).nbytes == VALUE


# --- other nodes -------------------------------------------------------------------------
def test_values_on_disk_move_to_other_nodes_and_copies_give_way(session_root: Path) -> None:
    program = """
    import numpy as np
    import miniray
    from miniray.cluster_utils import Cluster

    cluster = Cluster(head_node_args={"num_cpus": 1, "object_store_memory": 64 << 20})
    cluster.add_node(num_cpus=1, resources={"far": 1}, object_store_memory=64 << 20)
    miniray.init(cluster.address)

    @miniray.remote(num_cpus=0, resources={"far": 0.1})
    class Far:
        def check(self, refs):
            return [bool((miniray.get(ref) == number).all()) for number, ref in enumerate(refs)]

        def make(self, count):
            self.made = [miniray.put(np.full(1 << 20, number)) for number in range(count)]
            return self.made

    far = Far.remote()
    near = [miniray.put(np.full(1 << 20, number)) for number in range(20)]
    assert miniray.get(far.check.remote(near)) == [True] * 20
    assert miniray.get(far.check.remote(near)) == [True] * 20
    there = miniray.get(far.make.remote(20))
    assert [bool((miniray.get(ref) == n).all()) for n, ref in enumerate(there)] == [True] * 20
    print({n["NodeID"]: n["ObjectStoreSpilled"] for n in miniray.nodes()})
    miniray.shutdown()
    cluster.shutdown()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=100)


# --- a disk that is full or broken -------------------------------------------------------
REFUSED = """
import os
import numpy as np
import miniray
from miniray.exceptions import ObjectStoreFullError

miniray.init(num_cpus=1, object_store_memory=64 << 20)
if "REPLACED" in os.environ:
    os.rmdir(os.environ["REPLACED"])
    open(os.environ["REPLACED"], "x").close()
kept = []
view = miniray.get(miniray.put(np.full(1 << 20, -1)))
try:
    for number in range(100):
        kept.append(miniray.put(np.full(1 << 20, number)))
except ObjectStoreFullError as error:
    print(error)
    assert error.node_id == miniray.get_runtime_context().get_node_id()
else:
    raise SystemExit("nothing was refused")
assert all((miniray.get(ref) == number).all() for number, ref in enumerate(kept))
assert (view == -1).all()
print(len(kept), "values are whole")
kept.clear()
assert miniray.get(miniray.put(np.full(1 << 20, 1)))[0] == 1
miniray.shutdown()
"""


def refused(wrapper: Sequence[str] = (), **variables: str) -> str:
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", REFUSED],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    """The disk is a file system of 20 MiB, mounted for this test's processes only."""
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "-Urm"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("mount namespaces are not available to this user")
    script = f"mount -t tmpfs -o size=20m tmpfs '{tmp_path}' && exec \"$@\""
    text = refused([*alone, "sh", "-c", script, "sh"], MINIRAY_SPILL_FOLDER=str(tmp_path))
    assert f"Nothing could be moved to {tmp_path}: No space left on device" in text
    held = (
        r"It holds \d+ MiB by driver \(pid \d+\); freed but still mapped: 8 MiB by driver "
        r"\(pid \d+\); on disk: 16 MiB by driver \(pid \d+\)\."
    )
    assert re.search(held, text), text
    taken = r"Of the 20 MiB of that disk, values of this node take 16 MiB, other files take 0 B"
    assert re.search(taken, text), text
    assert re.search(r"the object store of node [0-9a-f]{16}, which has \d+ of", text), text
    count = re.search(r"(\d+) values are whole", text)
    assert count is not None
    assert 8 <= int(count[1]) <= 9


def test_a_folder_that_cannot_be_used_any_more_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path / "folder")
    text = refused(MINIRAY_SPILL_FOLDER=folder, REPLACED=folder)
    assert f"Nothing could be moved to {folder}: File exists" in text


def test_the_folder_can_be_chosen(tmp_path: Path, session_root: Path) -> None:
    program = """
    import os, numpy as np, miniray
    miniray.init(num_cpus=1, object_store_memory=16 << 20)
    kept = [miniray.put(np.full(1 << 20, number)) for number in range(6)]
    assert (miniray.get(kept[0]) == 0).all()
    miniray.shutdown()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "MINIRAY_SPILL_FOLDER": str(tmp_path / "fast disk")},
        check=True,
        timeout=100,
    )
    assert (tmp_path / "fast disk").is_dir()
    assert list((tmp_path / "fast disk").iterdir()) == []
