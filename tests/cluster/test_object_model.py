"""Random programs beside a model: exactly the values that somebody still holds exist.

A driver, actors on two nodes and tasks put values, small and large, with refs inside;
pass, return, keep and drop them; fork, end by rule and are killed. After each step, what
every process owns, what daemons answer for and what lies in shared memory is compared with
the model (``object_model.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import is_alive, wait_until
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from object_helpers import inventory
from object_model import DAEMON, DRIVER, Model, difference
from object_programs import (
    LARGE,
    STEP,
    Actor,
    end_child,
    fork_and_drop,
    fork_and_stay,
    is_right,
    make,
    owned_ids,
    pass_on,
    put_and_end,
    put_in_task,
    read,
    stream,
    value_of,
)

import miniray
from miniray.cluster_utils import Cluster
from miniray.common.runtime import current_runtime
from miniray.exceptions import OwnerDiedError, RayActorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Place:
    """A cluster of two nodes with two actors on the one and one on the other."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        self.cluster.add_node(num_cpus=2, resources={"far": 100})
        miniray.init(address=self.cluster.address)
        self.cluster.wait_for_nodes()
        self.actors: list[Any] = [None, None, None]
        for number in range(3):
            self.replace(number)

    def replace(self, number: int) -> None:
        """A new actor."""
        resources = {"far": 1} if number == 2 else {}
        self.actors[number] = actor = Actor.options(resources=resources).remote()
        miniray.get(actor.pid.remote())

    def stop(self) -> None:
        miniray.shutdown()
        self.cluster.shutdown()

    def inventories(self) -> list[dict[str, Any]]:
        """What each daemon keeps."""
        return [inventory(), miniray.get(self.actors[2].inventory.remote())]


place: Place


@pytest.fixture(scope="module", autouse=True)
def cluster(session_root: Path) -> Iterator[None]:
    global place
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIRAY_WORKER_IDLE", "3600")  # workers of tasks stay owners
        place = Place()
        yield
        place.stop()


def settle(differences: Callable[[], list[str]]) -> None:
    """Wait until there are no differences; fail with those that stay."""
    found: list[str] = []

    def settled() -> bool:
        found[:] = differences()
        return not found

    try:
        wait_until(settled, timeout=30)
    except AssertionError:
        raise AssertionError("; ".join(found)) from None


picks = st.integers(0, 1 << 16)
few_picks = st.lists(picks, max_size=2)
larges = st.booleans()


def picked(items: list[Any], pick: int) -> Any:
    return items[pick % len(items)]


class Programs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.slots = iter(range(1 << 30))
        self.refs: dict[int, Any] = {}
        self.views: dict[int, Any] = {}
        #: Pids of workers that ran tasks, by the model's key.
        self.workers: dict[str, int] = {}
        self.names = [f"actor {number}" for number in range(3)]

    # --- helpers --------------------------------------------------------------------
    def mine(self) -> dict[int, int]:
        return self.model.holders[DRIVER].refs

    def chosen(self, process: str, chosen: list[int]) -> list[int]:
        """Some slots of its refs, to be put inside a value."""
        slots = list(self.model.holders[process].refs)
        return [picked(slots, pick) for pick in chosen] if slots else []

    def labels(self, process: str, slots: list[int]) -> list[int]:
        return [self.model.holders[process].refs[slot] for slot in slots]

    def hold(self, ref: Any, label: int) -> None:
        slot = next(self.slots)
        self.refs[slot] = ref
        self.mine()[slot] = label

    def with_refs(self) -> list[str]:
        return [name for name in self.names if self.model.holders[name].refs]

    def slot_of(self, name: str, item: int) -> int:
        return int(picked(list(self.model.holders[name].refs), item))

    def actor(self, name: str) -> Any:
        return place.actors[self.names.index(name)]

    # --- values come ------------------------------------------------------------------
    @rule(large=larges, inside=few_picks)
    def put(self, large: bool, inside: list[int]) -> None:
        slots = self.chosen(DRIVER, inside)
        value = value_of(len(self.model.items), large, [self.refs[slot] for slot in slots])
        ref = miniray.put(value)
        self.hold(ref, self.model.add(ref.binary(), large, DRIVER, self.labels(DRIVER, slots)))

    @rule(large=larges, inside=few_picks)
    def result_of_a_task(self, large: bool, inside: list[int]) -> None:
        slots = self.chosen(DRIVER, inside)
        ref = make.remote(len(self.model.items), large, [self.refs[slot] for slot in slots])
        self.hold(ref, self.model.add(ref.binary(), large, DRIVER, self.labels(DRIVER, slots)))
        miniray.wait([ref])

    @rule(large=larges, inside=few_picks, taken=st.integers(1, 3), far=st.booleans())
    def items_of_a_stream(self, large: bool, inside: list[int], taken: int, far: bool) -> None:
        """Some of four; the others were made, and go with the generator."""
        slots = self.chosen(DRIVER, inside)
        refs, labels = [self.refs[slot] for slot in slots], self.labels(DRIVER, slots)
        task = stream.options(resources={"far": 1} if far else {})
        items = task.remote(len(self.model.items), 4, large, refs)
        for _ in range(taken):
            ref = next(items)
            self.hold(ref, self.model.add(ref.binary(), large, DRIVER, labels))

    @rule(large=larges, inside=few_picks, ends=st.booleans(), far=st.booleans())
    def put_in_a_task(self, large: bool, inside: list[int], ends: bool, far: bool) -> None:
        slots = self.chosen(DRIVER, inside)
        task = (put_and_end if ends else put_in_task).options(resources={"far": 1} if far else {})
        label = len(self.model.items)
        pid, [ref] = miniray.get(task.remote(label, large, [self.refs[slot] for slot in slots]))
        owner = DAEMON if ends else f"worker {pid}"
        self.hold(ref, self.model.add(ref.binary(), large, owner, self.labels(DRIVER, slots)))
        if not ends:
            self.workers[owner] = pid
        elif self.workers.pop(f"worker {pid}", None):  # it had run another task before
            self.model.left(f"worker {pid}")

    @rule(which=picks, large=larges, inside=few_picks)
    def put_in_an_actor(self, which: int, large: bool, inside: list[int]) -> None:
        name = picked(self.names, which)
        slots, slot = self.chosen(name, inside), next(self.slots)
        label = len(self.model.items)
        id = miniray.get(self.actor(name).put.remote(slot, label, large, slots))
        self.model.add(id, large, name, self.labels(name, slots))
        self.model.holders[name].refs[slot] = label

    @rule(which=picks, large=larges, inside=few_picks, put=st.booleans())
    def result_of_an_actor(self, which: int, large: bool, inside: list[int], put: bool) -> None:
        name = picked(self.names, which)
        slots = self.chosen(name, inside)
        label = len(self.model.items)
        if put:
            [ref] = miniray.get(self.actor(name).put_for.remote(label, large, slots))
        else:
            ref = self.actor(name).make.remote(label, large, slots)
            miniray.wait([ref])
        owner = name if put else DRIVER
        self.hold(ref, self.model.add(ref.binary(), large, owner, self.labels(name, slots)))

    # --- refs and values are passed -----------------------------------------------------
    @precondition(lambda self: self.mine())
    @rule(which=picks, item=picks, wait=st.booleans(), drop=st.booleans())
    def give(self, which: int, item: int, wait: bool, drop: bool) -> None:
        name, slot, there = (
            picked(self.names, which),
            self.slot_of(DRIVER, item),
            next(self.slots),
        )
        call = self.actor(name).keep.remote(there, [self.refs[slot]])
        self.model.holders[name].refs[there] = self.mine()[slot]
        if drop:  # perhaps before the call is there
            del self.refs[slot], self.mine()[slot]
        if wait:
            miniray.get(call)

    @precondition(lambda self: self.mine())
    @rule(which=picks, item=picks, drop=st.booleans())
    def give_the_value(self, which: int, item: int, drop: bool) -> None:
        name, slot, there = picked(self.names, which), self.slot_of(DRIVER, item), next(self.slots)
        label = self.mine()[slot]
        call = self.actor(name).keep_value.remote(there, self.refs[slot])
        if drop:
            del self.refs[slot], self.mine()[slot]
        if self.model.items[label].lost:
            with contextlib.suppress(OwnerDiedError):  # it may be known here
                miniray.get(call)
            self.actor(name).drop.remote(there)
            return
        if not drop:
            self.model.holders[DRIVER].known.add(label)
        self.model.holders[name].views[there] = label
        miniray.get(call)

    @precondition(lambda self: self.with_refs())
    @rule(which=picks, item=picks)
    def take(self, which: int, item: int) -> None:
        name = picked(self.with_refs(), which)
        slot = self.slot_of(name, item)
        [ref] = miniray.get(self.actor(name).give.remote(slot))
        self.hold(ref, self.model.holders[name].refs[slot])

    @precondition(lambda self: self.with_refs())
    @rule(which=picks, item=picks, other=picks)
    def send(self, which: int, item: int, other: int) -> None:
        name = picked(self.with_refs(), which)
        to = picked([one for one in self.names if one != name], other)
        slot, there = self.slot_of(name, item), next(self.slots)
        miniray.get(self.actor(name).send.remote(slot, self.actor(to), there))
        self.model.holders[to].refs[there] = self.model.holders[name].refs[slot]

    @precondition(lambda self: self.mine())
    @rule(item=picks)
    def pass_through_a_task(self, item: int) -> None:
        slot = self.slot_of(DRIVER, item)
        call = pass_on.remote([self.refs.pop(slot)])
        [self.refs[slot]] = miniray.get(call)

    # --- values are read ------------------------------------------------------------------
    @precondition(lambda self: self.mine())
    @rule(item=picks, keep=st.booleans())
    def get(self, item: int, keep: bool) -> None:
        slot = self.slot_of(DRIVER, item)
        label = self.mine()[slot]
        self._check_read(DRIVER, label, read(self.refs[slot]))
        if keep and not self.model.items[label].lost:
            there = next(self.slots)
            self.views[there] = miniray.get(self.refs[slot])
            self.model.holders[DRIVER].views[there] = label

    @precondition(lambda self: self.with_refs())
    @rule(which=picks, item=picks, keep=st.booleans())
    def get_in_an_actor(self, which: int, item: int, keep: bool) -> None:
        name = picked(self.with_refs(), which)
        holder, slot = self.model.holders[name], self.slot_of(name, item)
        label = holder.refs[slot]
        self._check_read(name, label, miniray.get(self.actor(name).read.remote(slot)))
        if keep and not self.model.items[label].lost:
            there = next(self.slots)
            miniray.get(self.actor(name).view.remote(slot, there))
            holder.views[there] = label

    def _check_read(self, process: str, label: int, found: int | str) -> None:
        item, known = self.model.items[label], self.model.holders[process].known
        if not item.lost:
            assert found == label, (item, self.workers)
            known.add(label)
        elif label in known:  # it may have it in its memory, or mapped
            assert found == label or isinstance(found, str)
        else:
            assert isinstance(found, str), "the value of an owner that was killed can be read"

    # --- refs and values go ------------------------------------------------------------------
    # Preconditions look at refs only: which values are lost, and so have no views, depends on
    # which worker ran what, and differs when a program is repeated.
    @precondition(lambda self: self.mine())
    @rule(item=picks)
    def drop(self, item: int) -> None:
        slot = self.slot_of(DRIVER, item)
        del self.refs[slot], self.mine()[slot]

    @rule(item=picks)
    def drop_a_view(self, item: int) -> None:
        if self.views:
            slot = picked(list(self.views), item)
            del self.views[slot], self.model.holders[DRIVER].views[slot]

    @precondition(lambda self: self.with_refs())
    @rule(which=picks, item=picks)
    def drop_in_an_actor(self, which: int, item: int) -> None:
        name = picked(self.with_refs(), which)
        slot = self.slot_of(name, item)
        self.actor(name).drop.remote(slot)
        del self.model.holders[name].refs[slot]

    @rule(which=picks, item=picks)
    def drop_a_view_in_an_actor(self, which: int, item: int) -> None:
        name = picked(self.names, which)
        views = self.model.holders[name].views
        if views:
            slot = picked(list(views), item)
            self.actor(name).drop.remote(slot)
            del views[slot]

    # --- processes do what processes do ---------------------------------------------------------
    @rule()
    def fork(self) -> None:
        fork_and_drop(lambda: (self.refs.clear(), self.views.clear()))

    @rule(which=picks)
    def fork_in_an_actor(self, which: int) -> None:
        miniray.get(picked(place.actors, which).fork.remote())

    @rule()
    def fork_a_child_that_stays(self) -> None:
        self.model.forked(DRIVER, fork_and_stay())

    @rule(which=picks)
    def fork_a_child_that_stays_in_an_actor(self, which: int) -> None:
        name = picked(self.names, which)
        self.model.forked(name, miniray.get(self.actor(name).fork_and_stay.remote()))

    @rule(which=picks)
    def end_a_child(self, which: int) -> None:
        if self.model.children:
            self._end_child(picked(list(self.model.children), which))

    def _end_child(self, pid: int) -> None:
        parent = self.model.children.pop(pid)
        if parent == DRIVER:
            end_child(pid)
        else:
            miniray.get(self.actor(parent).end_child.remote(pid))

    @precondition(lambda self: self.with_refs())
    @rule(which=picks, item=picks)
    def pickle_in_an_actor(self, which: int, item: int) -> None:
        name = picked(self.with_refs(), which)
        slot = self.slot_of(name, item)
        miniray.get(self.actor(name).pickle.remote(slot))
        self.model.holders[name].pinned.add(self.model.holders[name].refs[slot])

    @rule(which=picks)
    def kill_an_actor(self, which: int) -> None:
        name = picked(self.names, which)
        actor = self.actor(name)
        pid = miniray.get(actor.pid.remote())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RayActorError):
            miniray.get(actor.pid.remote())
        self.model.killed(name)
        self._replace(name)

    @rule(which=picks)
    def end_an_actor(self, which: int) -> None:
        name = picked(self.names, which)
        pid = miniray.get(self.actor(name).pid.remote())
        place.actors[self.names.index(name)] = None
        wait_until(lambda: not is_alive(pid))
        self.model.left(name)
        self._replace(name)

    def _replace(self, name: str) -> None:
        number = self.names.index(name)
        place.replace(number)

    @rule(which=picks)
    def kill_a_worker(self, which: int) -> None:
        if not self.workers:
            return
        name = picked(list(self.workers), which)
        pid = self.workers.pop(name)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid))
        self.model.killed(name)

    # --- what must hold --------------------------------------------------------------------------
    def differences(self) -> list[str]:
        """Between the cluster and the model, at this moment."""
        model = self.model
        must, may = model.must_exist(), model.may_exist()
        inventories = place.inventories()
        current_runtime().refs.settle()  # type: ignore[attr-defined] # what this function called
        actual = {DRIVER: set(owned_ids())}
        calls = [actor.owned_ids.remote() for actor in place.actors]
        actual.update(zip(self.names, map(set, miniray.get(calls)), strict=True))
        found = []
        for name, ids in actual.items():
            found += difference(name, model.owned(must, name), ids, model.owned(may, name))
        adopted = {row["id"] for kept in inventories for row in kept["adopted"]}
        found += difference("adopted", model.owned(must, DAEMON), adopted, model.owned(may, DAEMON))
        return found + self._differences_in_memory(inventories, must, may)

    def _differences_in_memory(
        self, inventories: list[dict[str, Any]], must: set[int], may: set[int]
    ) -> list[str]:
        model = self.model
        originals, copies, freed = set(), set(), set()
        for node, kept in zip(self._nodes(), inventories, strict=True):
            for segment in kept["segments"]:
                label = (segment["size"] - LARGE) // STEP
                if segment["state"] == "FREED":
                    freed.add(label)
                elif segment["writer"] == node:
                    copies.add(label)
                else:
                    originals.add(label)
        large = model.large(may)
        looked_at = model.large(model.viewed() | model.held())
        return [
            *difference("segments", model.large(must), originals, large),
            *difference("copies", set(), copies, large),
            *difference("mapped", model.large(model.viewed()) - large, freed, looked_at),
        ]

    def _nodes(self) -> list[bytes]:
        far = place.cluster.worker_nodes[0].node_id
        own: bytes = current_runtime().facts.node_id  # type: ignore[attr-defined]
        return [own, bytes.fromhex(far)]

    @invariant()
    def exactly_what_is_held_exists(self) -> None:
        self._settle()
        assert all(map(is_right, self.views.values()))
        assert all(miniray.get([actor.views_are_right.remote() for actor in place.actors]))

    def _settle(self) -> None:
        settle(self.differences)

    def teardown(self) -> None:
        """Whatever a program did: everything held can be read, and then dropped."""
        try:
            self._read_everything()
            for pid in list(self.model.children):
                self._end_child(pid)
            self.refs.clear()
            self.views.clear()
            miniray.get([actor.clear.remote() for actor in place.actors])
            pinned = [name for name in self.names if self.model.holders[name].pinned]
            self.model.holders.clear()
            for name in pinned:  # only its end lets go of that
                self.end_an_actor(self.names.index(name))
            self._settle()
            settle(self._left_over)
        except BaseException:  # the next program begins with a cluster that works
            for pid, parent in self.model.children.items():
                if parent == DRIVER:
                    end_child(pid)
            self.refs.clear()
            self.views.clear()
            place.stop()
            place.start()
            raise

    def _read_everything(self) -> None:
        for slot, label in self.mine().items():
            self._check_read(DRIVER, label, read(self.refs[slot]))
        for name in self.names:
            for slot, label in self.model.holders[name].refs.items():
                self._check_read(name, label, miniray.get(self.actor(name).read.remote(slot)))

    def _left_over(self) -> list[str]:
        """What tables hold when no value is in use."""
        tables = {
            f"{name} of node {number}": size
            for number, kept in enumerate(place.inventories())
            for name, size in kept["tables"].items()
        }
        entries = miniray.get([actor.entries.remote() for actor in place.actors])
        tables.update(zip(self.names, entries, strict=True))
        current_runtime().refs.settle()  # type: ignore[attr-defined]
        tables["driver"] = len(current_runtime().table) - len(place.actors)  # type: ignore[attr-defined]
        return [f"{name}: {size} entries" for name, size in tables.items() if size]


def programs(examples: int, steps: int) -> Any:
    """A test of so many programs of at most so many steps."""
    case = type("Case", (Programs.TestCase,), {})
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        print_blob=True,
        # Not Phase.explain: it traces every line, and times out what waits.
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    return case


TestPrograms = pytest.mark.timeout(300)(programs(examples=5, steps=25))
TestManyPrograms = pytest.mark.slow(pytest.mark.timeout(3600)(programs(examples=400, steps=50)))
