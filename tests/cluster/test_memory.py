"""``miniray memory`` and ``list_objects``: what is in the store, whose it is, why it is held."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import is_alive, wait_for_file, wait_until
from running_cluster import running_cluster

import miniray
from miniray.util import state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.cluster_utils import Cluster
    from miniray.util.state import ObjectState

#: Patience with processes that answer: the machine may be busy.
LONG = 20.0
#: What only the driver's node has, and what only the other one has.
NEAR, FAR = {"near": 1}, {"far": 1}
DRIVER = f"driver (pid {os.getpid()})"


@pytest.fixture(scope="module", autouse=True)
def nodes(session_root: Path) -> Iterator[Cluster]:
    with running_cluster(
        {"num_cpus": 4, "resources": NEAR}, {"num_cpus": 2, "resources": FAR}
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def empty(nodes: Cluster) -> Iterator[None]:
    """Nothing of an earlier test is in the store."""
    wait_until(nothing_is_held, 10)
    yield
    gc.collect()


def nothing_is_held() -> bool:
    gc.collect()
    return not objects()


@miniray.remote(num_cpus=0, resources={"near": 0.1})
class Keeper:
    def __init__(self, first: Any = None) -> None:
        self.kept: list[Any] = [first]

    def pid(self) -> int:
        return os.getpid()

    def keep(self, refs: list[Any]) -> None:
        self.kept += refs

    def read(self, refs: list[Any]) -> None:
        self.kept.append(miniray.get(refs[0]))

    def drop(self) -> None:
        self.kept.clear()

    def put(self, size: int) -> list[Any]:
        return [miniray.put(zeros(size))]

    def put_and_keep(self, size: int) -> None:
        self.kept.append(miniray.put(zeros(size)))

    def make(self, size: int) -> Any:
        return zeros(size)

    def fork(self) -> None:
        """Have a child that lives until ``end_child``."""
        over, self.stay = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(self.stay)
            os.read(over, 1)
            os._exit(0)
        os.close(over)

    def end_child(self) -> None:
        os.close(self.stay)
        os.waitpid(self.child, 0)

    def hold_the_interpreter(self, fifo: str) -> None:
        """Wait for a byte without giving other threads a chance."""
        fd = os.open(fifo, os.O_RDWR)
        Path(f"{fifo}.busy").touch()
        ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)
        os.close(fd)


@miniray.remote
def waits_for(path: Path, *_values: Any) -> None:
    wait_for_file(path)


@miniray.remote(max_calls=1, resources={"near": 0.1})
def leaves(size: int) -> list[Any]:
    return [miniray.put(zeros(size))]


def zeros(size: int) -> Any:
    return np.zeros(size, dtype=np.uint8)


def objects(limit: int = 100) -> list[ObjectState]:
    """Those in shared memory."""
    return state.get_cluster_memory(timeout=LONG, limit=limit).objects


def the_object(size: int) -> ObjectState:
    """The one of about this size."""
    [found] = [found for found in objects() if 0 <= found.object_size - size < 4096]
    return found


def line_of(text: str) -> int:
    return Path(__file__).read_text().splitlines().index(text) + 1


def test_what_was_put_is_held_by_its_ref() -> None:
    ref = miniray.put(zeros(200_000))
    found = the_object(200_000)
    assert (found.object_id, found.state, found.reference_type) == (
        ref.hex(),
        "HELD",
        "LOCAL_REFERENCE",
    )
    line = line_of("    ref = miniray.put(zeros(200_000))")
    where = "test_what_was_put_is_held_by_its_ref"
    assert found.call_site == f"{__file__}:{line} in {where}"
    assert (found.type, found.pid, found.owner) == ("DRIVER", os.getpid(), DRIVER)
    assert found.node_id == miniray.get_runtime_context().get_node_id()
    assert found.task_status == "NIL"
    assert found.why == f"1 ref in {DRIVER}"
    assert found.allocated >= found.object_size
    assert state.get_objects(ref.hex()) == [found]
    del ref
    wait_until(nothing_is_held)


def test_an_argument_of_a_task_that_waits_is_held_by_the_task(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    first = waits_for.remote(go_on)
    second = waits_for.remote(go_on, miniray.put(zeros(200_000)), first)
    found = the_object(200_000)
    assert (found.reference_type, found.why) == (
        "USED_BY_PENDING_TASK",
        f"argument of waits_for in {DRIVER}",
    )
    go_on.touch()
    miniray.get([first, second])
    wait_until(nothing_is_held)


def test_large_arguments_are_listed_with_their_call(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    first = waits_for.remote(go_on)
    second = waits_for.remote(go_on, zeros(200_000), first)
    found = the_object(200_000)
    assert (found.object_id, found.call_site) == ("", "arguments of waits_for")
    assert (found.reference_type, found.task_status) == (
        "USED_BY_PENDING_TASK",
        "PENDING_ARGS_AVAIL",
    )
    go_on.touch()
    miniray.get([first, second])
    wait_until(nothing_is_held)


def test_arguments_of_a_constructor_are_held_as_it_may_run_again() -> None:
    keeper = Keeper.options(max_restarts=1).remote(miniray.put(zeros(200_000)))
    miniray.get(keeper.drop.remote())
    assert f"argument of Keeper.__init__ in {DRIVER}" in the_object(200_000).why


def test_arguments_of_a_detached_actor_are_held_for_it_also_when_its_driver_has_ended(
    nodes: Cluster,
) -> None:
    run(DETACHED.format(address=nodes.address))
    actor = miniray.get_actor("keeper", namespace="left")
    wait_until(lambda: "has ended" in the_object(300_000).owner)
    written, put = the_object(200_000), the_object(300_000)
    number = int(actor._actor_id.hex()[16:], 16)
    name = f"{actor._actor_id.hex()[:8]}-{number}"
    assert written.owner.endswith(", for a detached actor")
    assert f"argument of the detached actor {name} in the daemon of" in written.why
    assert "inside another object in the daemon of" in put.why
    miniray.kill(actor)
    wait_until(nothing_is_held)


#: A driver that leaves an actor with an array and a ref to another one.
DETACHED = """
import numpy, miniray
miniray.init(address="{address}", namespace="left")
class Keeper:
    def __init__(self, *values):
        pass
    def is_there(self):
        return True
made = miniray.remote(num_cpus=0, resources={{"near": 0.1}}, max_restarts=1)(Keeper)
first, second = (numpy.zeros(size, numpy.uint8) for size in (200_000, 300_000))
actor = made.options(name="keeper", lifetime="detached").remote(first, [miniray.put(second)])
assert miniray.get(actor.is_there.remote())
"""


def test_what_another_object_contains_is_held_by_it() -> None:
    outer = miniray.put([miniray.put(zeros(200_000))])
    found = the_object(200_000)
    number = int(outer.hex()[16:], 16)
    assert found.reference_type == "CAPTURED_IN_OBJECT"
    assert found.why == f"inside {outer.hex()[:8]}-{number} in {DRIVER}"
    assert found.holders[0].names == [outer.hex()]


@pytest.mark.parametrize("where", [{"near": 0.1}, FAR], ids=["here", "on another node"])
def test_a_borrower_is_named_with_what_it_has(where: dict[str, float]) -> None:
    keeper = Keeper.options(resources=where).remote()
    pid = miniray.get(keeper.pid.remote())
    miniray.get(keeper.keep.remote([miniray.put(zeros(200_000))]))
    wait_until(lambda: "driver" not in the_object(200_000).why)
    found = the_object(200_000)
    assert (found.reference_type, found.why) == ("LOCAL_REFERENCE", f"1 ref in Keeper (pid {pid})")
    assert (found.pid, found.owner) == (os.getpid(), DRIVER)
    miniray.get(keeper.drop.remote())
    wait_until(nothing_is_held)


def test_what_is_freed_and_still_mapped_is_told_with_who_maps_it() -> None:
    keeper = Keeper.remote()
    pid = miniray.get(keeper.pid.remote())
    ref = miniray.put(zeros(200_000))
    miniray.get(keeper.read.remote([ref]))
    del ref
    wait_until(lambda: the_object(200_000).state == "FREED")
    found = the_object(200_000)
    assert (found.reference_type, found.object_id) == ("PINNED_IN_MEMORY", "")
    assert found.why == f"freed, but still mapped by Keeper (pid {pid})"
    assert found.call_site.startswith(f"{__file__}:")
    [node, _] = state.get_cluster_memory(timeout=LONG).nodes
    assert (node.freed, node.freed_by) == (
        found.allocated,
        {f"Keeper (pid {pid})": found.allocated},
    )
    miniray.get(keeper.drop.remote())
    wait_until(nothing_is_held)
    assert state.get_cluster_memory(timeout=LONG).nodes[0].freed == 0


def test_what_only_a_child_of_user_code_has_mapped_is_not_counted() -> None:
    keeper = Keeper.remote()
    ref = miniray.put(zeros(200_000))
    miniray.get(keeper.read.remote([ref]))
    miniray.get(keeper.fork.remote())
    miniray.get(keeper.drop.remote())
    del ref
    wait_until(nothing_is_held)
    miniray.get(keeper.end_child.remote())


#: A driver that leaves with a view, and looks at it when it is told to.
LEAVES = """
import sys, numpy as np, miniray
miniray.init(address=sys.argv[1])
ref = miniray.put(np.full(200_000, 7, np.uint8))
view = miniray.get(ref)
del ref
miniray.shutdown()
print("left", flush=True)
sys.stdin.readline()
print(set(view.tolist()), flush=True)
"""


def test_what_a_driver_that_has_left_looks_at_is_not_counted_nor_written_again(
    nodes: Cluster,
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", LEAVES, nodes.address]
    with subprocess.Popen(command, text=True, **pipes) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        assert driver.stdout.readline() == "left\n"
        wait_until(nothing_is_held)
        refs = [miniray.put(np.full(200_000, 9, np.uint8)) for _ in range(4)]
        print(file=driver.stdin, flush=True)
        assert driver.stdout.readline() == "{7}\n"
        del refs


def test_a_ref_that_was_pickled_keeps_its_object_and_that_is_said() -> None:
    program = (
        "import json, pickle\nimport numpy as np\nimport miniray\n"
        "from miniray.util.state import list_objects\n"
        "miniray.init('local', num_cpus=1)\n"
        "ref = miniray.put(np.zeros(200_000, np.uint8))\n"
        "pickle.dumps(ref)\n"
        "before = list_objects()[0].why\n"
        "del ref\n"
        "print(json.dumps([before, list_objects()[0].why]))\n"
    )
    before, after = json.loads(run(program))
    assert before.startswith("1 ref in driver")
    assert after.startswith("pickled by driver")
    assert after.endswith("which keeps it to its end")


def test_what_a_killed_process_owned_is_told_as_long_as_somebody_maps_it() -> None:
    owner, reader = Keeper.remote(), Keeper.remote()
    owner_pid, reader_pid = miniray.get([owner.pid.remote(), reader.pid.remote()])
    refs = miniray.get(owner.put.remote(200_000))
    assert the_object(200_000).owner == f"Keeper (pid {owner_pid})"
    miniray.get(reader.read.remote(refs))
    os.kill(owner_pid, signal.SIGKILL)
    wait_until(lambda: the_object(200_000).pid == 0)
    found = the_object(200_000)
    assert (found.state, found.type) == ("FREED", "")
    assert found.owner.endswith("which has ended or did not answer")
    assert f"mapped by Keeper (pid {reader_pid})" in found.why
    miniray.get(reader.drop.remote())
    del refs
    wait_until(nothing_is_held)


def test_what_a_process_left_when_it_ended_by_rule_is_held_by_the_daemon() -> None:
    refs = miniray.get(leaves.remote(200_000))
    wait_until(lambda: the_object(200_000).owner.startswith("the daemon of node "))
    found = the_object(200_000)
    assert found.object_id == refs[0].hex()
    assert found.why == f"1 ref in {DRIVER}"
    del refs
    wait_until(nothing_is_held)


def test_a_process_that_is_too_busy_to_answer_is_named(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    keeper = Keeper.remote()
    pid = miniray.get(keeper.pid.remote())
    miniray.get(keeper.put_and_keep.remote(200_000))
    assert the_object(200_000).why == f"1 ref in Keeper (pid {pid})"
    done = keeper.hold_the_interpreter.remote(str(fifo))
    wait_for_file(tmp_path / "fifo.busy")
    try:
        began = time.monotonic()
        memory = state.get_cluster_memory(timeout=0.5)
        assert time.monotonic() - began < LONG
        [found] = [found for found in memory.objects if found.pid == pid]
        assert (found.reference_type, found.object_size // 1000) == ("UNKNOWN_STATUS", 200)
        assert found.why == f"its owner, Keeper (pid {pid}), did not answer in time"
        assert found.call_site.endswith("Keeper.put_and_keep")
        assert f"Keeper (pid {pid})" in memory.nodes[0].no_answer
    finally:
        fifo.write_bytes(b".")
    miniray.get(done)
    assert the_object(200_000).why == f"1 ref in Keeper (pid {pid})"


def test_a_node_that_does_not_answer_is_named(nodes: Cluster) -> None:
    silent = nodes.add_node(num_cpus=1)
    pid = daemon_of(silent.node_id)
    os.kill(pid, signal.SIGSTOP)
    try:
        memory = state.get_cluster_memory(timeout=0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    reasons = {node.node_id: node.state_message for node in memory.nodes}
    assert reasons[silent.node_id] == "it did not answer in time"
    wait_until(lambda: not any(node.state_message for node in nodes_told()))
    nodes.remove_node(silent)
    wait_until(lambda: len(nodes_told()) == 2)


def nodes_told() -> list[Any]:
    return state.get_cluster_memory(timeout=LONG).nodes


def daemon_of(node_id: str) -> int:
    """The daemon's pid: it is the one that tells of itself."""
    from miniray.common.runtime import current_runtime

    for node, report, _ in current_runtime().head.ask_nodes("memory", (1, False), LONG):
        if node.hex() == node_id:
            [daemon] = [row for row in report["processes"] if row["type"] == "NODE"]
            return daemon["pid"]
    raise AssertionError(node_id)


def test_a_process_that_dies_while_it_is_asked_is_not_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    keeper = Keeper.options(max_restarts=0).remote()
    pid = miniray.get(keeper.pid.remote())
    done = keeper.hold_the_interpreter.remote(str(fifo))
    wait_for_file(tmp_path / "fifo.busy")
    program = (
        "import sys, miniray\nfrom miniray.util.state import get_cluster_memory\n"
        "print('asks', flush=True)\n"
        "memory = get_cluster_memory(timeout=600)\n"
        "print(memory.nodes[0].no_answer)"
    )
    asking = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    assert asking.stdout.readline() == "asks\n"
    os.kill(pid, signal.SIGKILL)
    rest, _ = asking.communicate(timeout=45)
    assert rest == "[]\n"
    with pytest.raises(miniray.exceptions.ActorDiedError):
        miniray.get(done)


def test_copies_on_other_nodes_are_listed_where_they_are(nodes: Cluster) -> None:
    here, far = (node.node_id for node in nodes.list_all_nodes())
    keeper = Keeper.options(resources=FAR).remote()
    pid = miniray.get(keeper.pid.remote())
    ref = miniray.put(zeros(200_000))
    miniray.get(keeper.read.remote([ref]))
    found = {record.node_id: record for record in objects()}
    assert (found[here].is_copy, found[far].is_copy) == (False, True)
    assert {record.object_id for record in found.values()} == {ref.hex()}
    assert f"mapped by Keeper (pid {pid})" in found[far].why
    assert f"mapped by Keeper (pid {pid})" not in found[here].why
    del ref
    wait_until(lambda: [(o.node_id, o.state) for o in objects()] == [(far, "FREED")])
    miniray.get(keeper.drop.remote())
    wait_until(nothing_is_held)


def test_every_byte_of_every_node_is_listed(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    near, far = Keeper.remote(), Keeper.options(resources=FAR).remote()
    kept = [miniray.put(zeros(150_000 + 7 * number)) for number in range(20)]
    kept += [keeper.make.remote(300_000) for keeper in (near, far)]
    miniray.get([near.read.remote(kept[:1]), far.read.remote(kept[1:2])])
    freed = kept.pop(0)
    del freed
    call = waits_for.remote(go_on, zeros(400_000))
    wait_until(lambda: any(found.state == "FREED" for found in objects()))
    memory = state.get_cluster_memory(timeout=LONG)
    for node in memory.nodes:
        here = [found for found in memory.objects if found.node_id == node.node_id]
        assert sum(found.allocated for found in here) == node.used
        assert len(here) == node.num_segments
    assert all(found.why for found in memory.objects)
    assert "UNKNOWN_STATUS" not in {found.reference_type for found in memory.objects}
    go_on.touch()
    miniray.get(call)


def test_the_largest_are_told_with_their_reasons_also_among_equals() -> None:
    refs = [miniray.put(zeros(200_000)) for _ in range(30)]
    refs.append(miniray.put(zeros(300_000)))
    found = objects(limit=7)
    assert len(found) == 7
    assert found[0].object_id == refs[-1].hex()
    assert {each.why for each in found} == {f"1 ref in {DRIVER}"}


def test_results_are_told_with_what_made_them() -> None:
    keeper = Keeper.remote()
    ref = keeper.make.remote(200_000)
    miniray.get(ref)
    found = the_object(200_000)
    assert (found.call_site, found.task_status, found.owner) == ("Keeper.make", "FINISHED", DRIVER)
    summary = state.summarize_objects(timeout=LONG)["cluster"]
    assert summary["total_objects"] == 1
    [made] = summary["summary"].values()
    assert list(summary["summary"]) == ["Keeper.make"]
    assert (made["total_objects"], made["ref_type_counts"]) == (1, {"LOCAL_REFERENCE": 1})


def test_small_values_and_those_to_come_are_counted_and_listed(tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    small = miniray.put("small")
    pending = waits_for.remote(go_on)
    keeper = Keeper.remote()
    miniray.get(keeper.pid.remote())
    found = {each.object_id: each for each in state.list_objects(timeout=LONG)}
    assert (found[small.hex()].state, found[small.hex()].allocated) == ("HELD", 0)
    assert (found[pending.hex()].state, found[pending.hex()].call_site) == ("PENDING", "waits_for")
    assert "ACTOR_HANDLE" in {each.reference_type for each in found.values()}
    assert found == {each.object_id: each for each in state.list_objects(timeout=LONG, detail=True)}
    assert objects() == []
    assert state.get_cluster_memory(timeout=LONG).nodes[0].num_inline >= 1
    go_on.touch()
    miniray.get(pending)


def test_where_small_values_were_put_is_recorded_if_that_is_wanted() -> None:
    program = (
        "import json, miniray\nfrom miniray.util.state import list_objects\n"
        "miniray.init('local', num_cpus=1)\n"
        "ref = miniray.put('small')\n"
        "print(json.dumps([found.call_site for found in list_objects()]))"
    )
    assert json.loads(run(program)) == [""]
    recorded = json.loads(run(program, MINIRAY_RECORD_CALL_SITES="1"))
    assert recorded == ["<string>:4 in <module>"]


def test_filters_choose_objects() -> None:
    refs = [miniray.put(zeros(size)) for size in (200_000, 300_000)]
    outer = miniray.put([refs.pop()])
    shared = ("allocated", "!=", 0)
    assert (
        len(state.list_objects(filters=[shared, ("reference_type", "=", "local_reference")])) == 1
    )
    assert (
        len(state.list_objects(filters=[shared, ("reference_type", "!=", "LOCAL_REFERENCE")])) == 1
    )
    assert state.list_objects(filters=[("pid", "=", 1)]) == []
    with pytest.raises(ValueError, match="no field 'colour'"):
        state.list_objects(filters=[("colour", "=", "red")])
    with pytest.raises(ValueError, match="limit"):
        state.list_objects(limit=0)
    del outer


def test_the_command_shows_nodes_objects_and_sums(nodes: Cluster) -> None:
    refs = [miniray.put(zeros(200_000)) for _ in range(3)]
    shown = command()
    assert f"Object store of the cluster at {nodes.address}: " in shown
    assert shown.count(DRIVER) == 6  # as the owner of each, and as its holder
    assert "LOCAL_REFERENCE" in shown
    assert f"{__file__}:" in shown
    assert "2 more" in command("--limit", "1")
    grouped = command("--group-by", "owner", "--units", "B")
    assert any(line.split()[:4] == [*DRIVER.split(), "3"] for line in grouped.splitlines())
    told = json.loads(command("--json"))
    assert {found["object_id"] for found in told["objects"]} == {ref.hex() for ref in refs}
    assert len(told["nodes"]) == 2


def command(*arguments: str) -> str:
    call = "from miniray.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", call, "memory", "--timeout", str(LONG), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=45,
    ).stdout


def run(program: str, **variables: str) -> str:
    """What a driver of its own prints."""
    return subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=45,
        env={**os.environ, **variables},
    ).stdout


# --- what is only looked at ------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:Argument")
def test_refs_and_handles_beside_large_arguments_are_held_by_nobody_after_the_call() -> None:
    """The arguments are pickled once more, to tell which one is large."""

    @miniray.remote(num_cpus=0)
    def look(*_: Any) -> None:
        """Does nothing with it."""

    weights = np.ones(12 << 20, dtype=np.uint8)
    keeper = Keeper.remote()
    pid = miniray.get(keeper.pid.remote())
    miniray.get(look.remote(weights, [miniray.put(np.zeros(200_000))], keeper))
    del keeper
    wait_until(nothing_is_held, LONG, told=lambda: str(objects()))
    wait_until(lambda: not is_alive(pid), LONG)


def test_refs_and_handles_beside_what_cannot_be_pickled_are_held_by_nobody() -> None:
    @miniray.remote(num_cpus=0)
    def give(*_: Any) -> Any:
        return [miniray.put(np.zeros(200_000)), threading.Lock()]

    keeper = Keeper.remote()
    pid = miniray.get(keeper.pid.remote())
    with pytest.raises(TypeError, match="lock"):
        miniray.put([miniray.put(np.zeros(200_000)), threading.Lock()])
    with pytest.raises(TypeError, match="lock"):
        give.remote(keeper, threading.Lock())
    with pytest.raises(TypeError, match="lock"):
        miniray.get(give.remote())
    del keeper
    wait_until(nothing_is_held, LONG, told=lambda: str(objects()))
    wait_until(lambda: not is_alive(pid), LONG)
