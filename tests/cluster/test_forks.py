"""Processes that user code forks: they are nothing to miniray, and the parent goes on."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import multiprocessing.util
import os
import random
import select
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cluster_helpers import square, wait_for_text, wait_until
from watched_output import watch

import miniray
from miniray.exceptions import NotInitializedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Forking a process that has threads is what these tests are about.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

CONTEXTS = ["fork", "spawn", "forkserver"]


def in_forked_child(function: Callable[[], object]) -> str:
    """Fork, call the function in the child, and return its result, or its error, as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(function())
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        assert select.select([file], [], [], 20)[0], "the child hangs"
        text = file.read().decode()
    os.waitpid(child, 0)
    return text


def open_sockets() -> int:
    """How many sockets, epolls and eventfds this process has open."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        count += target.startswith(("socket:", "anon_inode:[eventpoll", "anon_inode:[eventfd"))
    return count


@pytest.fixture(scope="module")
def folder_of_multiprocessing() -> None:
    """It is this process's own, which removes it when it ends, and not this module's."""
    multiprocessing.util.get_temp_dir()


@pytest.fixture(scope="module", autouse=True)
def servers_of_multiprocessing_end(
    folder_of_multiprocessing: None, session_root: Path
) -> Iterator[None]:
    """They are this process's own and would stay as long as it does."""
    from multiprocessing import forkserver, resource_tracker

    yield
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


@miniray.remote
def add_one(number: int) -> int:
    return number + 1


@miniray.remote(num_cpus=0)
class Forker:
    """Runs whatever it is given, in a worker."""

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(params=["driver", "worker"])
def run(request: pytest.FixtureRequest) -> Any:
    """Runs a function in this process, or in an actor; afterwards miniray must work there."""

    def check() -> int:
        return miniray.get(add_one.remote(1))

    if request.param == "driver":
        yield lambda function, *args: function(*args)
        assert check() == 2
    else:
        actor = Forker.remote()
        yield lambda function, *args: miniray.get(actor.run.remote(function, *args), timeout=40)
        assert miniray.get(actor.run.remote(check), timeout=20) == 2


def test_a_forked_child_gets_a_clear_error_from_the_api(run: Any) -> None:
    def use_the_api() -> str:
        ref = miniray.put(1)
        return "\n".join(
            in_forked_child(function)
            for function in (
                lambda: miniray.put(1),
                lambda: miniray.get(ref),
                lambda: add_one.remote(1),
                lambda: miniray.nodes(),
                lambda: miniray.get_runtime_context().get_node_id(),
            )
        )

    text = run(use_the_api)
    assert text.count("exceptions.NotInitializedError: ") == 5, text
    assert "was forked from process" in text
    assert "miniray.init()" in text


def test_a_forked_child_that_waits_for_a_generator_gets_a_clear_error() -> None:
    @miniray.remote
    def endless() -> Any:
        threading.Event().wait()
        yield 1

    generator = endless.remote()
    assert "NotInitializedError" in in_forked_child(lambda: next(generator))


def test_a_forked_child_is_not_initialized(run: Any) -> None:
    def ask() -> str:
        return in_forked_child(miniray.is_initialized)

    assert run(ask) == "False"


def count_sockets() -> tuple[int, str]:
    """Open sockets of this process, and of a child that it forks."""
    return open_sockets(), in_forked_child(open_sockets)


def test_a_forked_child_has_none_of_the_sockets_of_its_worker() -> None:
    actor = Forker.remote()
    parent, child = miniray.get(actor.run.remote(count_sockets), timeout=40)
    assert parent >= 3
    assert child == "0"


def test_a_forked_child_has_none_of_the_sockets_of_its_driver() -> None:
    # A process of its own: this one may have sockets of other tests.
    program = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
import miniray
from test_forks import add_one, count_sockets
miniray.init("local", num_cpus=1)
assert miniray.get(add_one.remote(1)) == 2
parent, child = count_sockets()
miniray.shutdown()
assert parent >= 3, parent
assert child == "0", child
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


def test_refs_that_a_child_drops_stay_with_the_parent(run: Any) -> None:
    def drop_in_child() -> Any:
        refs = [miniray.put(np.arange(100_000) + number) for number in range(3)]
        values = miniray.get(refs)

        def drop() -> int:
            refs.clear()
            values.clear()
            return len(refs)

        assert in_forked_child(drop) == "0"
        return [int(value[0]) for value in miniray.get(refs)]

    assert run(drop_in_child) == [0, 1, 2]


def test_a_child_reads_the_values_that_its_parent_has_mapped(run: Any) -> None:
    def read_in_child() -> str:
        value = miniray.get(miniray.put(np.arange(100_000)))
        return in_forked_child(lambda: int(value.sum()))

    assert run(read_in_child) == str(sum(range(100_000)))


@pytest.mark.parametrize("reads", [1, 3])
def test_a_child_reads_on_what_its_parent_has_let_go_of(run: Any, reads: int) -> None:
    """Read once, or so often that the parent keeps it mapped: nobody writes there again."""

    def read_later() -> list[int]:
        size = 8_000_000
        wait, go = os.pipe()
        ref = miniray.put(np.full(size, 7, dtype=np.uint8))
        for _ in range(reads):
            value = miniray.get(ref)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(wait, 1)
            os.write(write, str(int(value.sum())).encode())
            os._exit(0)
        del value, ref
        for fill in range(4):
            miniray.get(miniray.put(np.full(size, fill, dtype=np.uint8)))
        os.write(go, b"!")
        found = int(os.read(read, 100))
        os.waitpid(child, 0)
        for fd in (wait, go, read, write):
            os.close(fd)
        return [found, 7 * size]

    found, expected = run(read_later)
    assert found == expected


def test_a_forked_child_may_attach_as_a_driver_of_its_own(session_root: Path) -> None:
    def attach() -> int:
        miniray.init(address="local", num_cpus=1)
        try:
            return miniray.get(add_one.remote(40))
        finally:
            miniray.shutdown()

    assert in_forked_child(attach) == "41"


def test_a_child_that_exits_in_the_middle_of_a_task_answers_nobody(tmp_path: Path) -> None:
    @miniray.remote
    def fork_and_exit(code: object) -> tuple[int, int]:
        child = os.fork()
        if child == 0:
            sys.exit(code)
        return os.getpid(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    for code, expected in ((0, 0), (7, 7), (None, 0), ("no", 1)):
        assert miniray.get(fork_and_exit.remote(code), timeout=20)[1] == expected


def test_a_child_that_returns_from_the_task_ends_and_answers_nobody() -> None:
    @miniray.remote
    def fork_and_return() -> int:
        child = os.fork()
        if child == 0:
            return 1
        return 10 + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert miniray.get([fork_and_return.remote() for _ in range(3)], timeout=20) == [10] * 3


def test_a_child_that_fails_in_a_task_ends_with_code_1_and_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = watch(monkeypatch, "stderr")

    @miniray.remote
    def fork_and_fail() -> int:
        child = os.fork()
        if child == 0:
            raise ValueError("only in the child")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert miniray.get(fork_and_fail.remote(), timeout=20) == 1
    stderr.wait_for("only in the child")


def test_children_of_threaded_and_asyncio_actors_answer_nobody() -> None:
    def fork_and_return() -> int:
        child = os.fork()
        if child == 0:
            return 1
        return 10 + os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    @miniray.remote(max_concurrency=2)
    class Threaded:
        def fork(self) -> int:
            return fork_and_return()

    @miniray.remote
    class Asyncio:
        async def fork(self) -> int:
            return fork_and_return()

    assert miniray.get(Threaded.remote().fork.remote(), timeout=20) == 10
    assert miniray.get(Asyncio.remote().fork.remote(), timeout=20) == 10


def test_a_child_that_exits_leaves_the_drivers_cluster_alone(session_root: Path) -> None:
    program = """
import os, sys, miniray
miniray.init(address="local", num_cpus=1)
f = miniray.remote(lambda: 5)
assert miniray.get(f.remote()) == 5
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print("parent got", miniray.get(f.remote()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "parent got 5" in done.stdout


@pytest.mark.parametrize("method", CONTEXTS)
def test_multiprocessing_works(run: Any, method: str) -> None:
    def use_a_pool(function: Callable[[int], int]) -> list[int]:
        with multiprocessing.get_context(method).Pool(2) as pool:
            return pool.map(function, range(5))

    assert run(use_a_pool, square) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("method", CONTEXTS)
def test_a_process_pool_executor_works(run: Any, method: str) -> None:
    def use_an_executor(function: Callable[[int], int]) -> list[int]:
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as executor:
            return list(executor.map(function, range(5)))

    assert run(use_an_executor, square) == [0, 1, 4, 9, 16]


def test_subprocesses_work(run: Any) -> None:
    def start() -> str:
        command = [sys.executable, "-c", "print(6 * 7)"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert run(start) == "42"


def test_a_subprocess_inherits_no_descriptor_of_miniray(run: Any) -> None:
    def count() -> str:
        command = [sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, close_fds=False
        ).stdout.strip()

    def preexec() -> str:
        return subprocess.run(
            ["echo", "done"], capture_output=True, text=True, check=True, preexec_fn=os.getpid
        ).stdout.strip()

    assert int(run(count)) <= 8  # 0, 1, 2, the folder itself, and what the test runner left
    assert run(preexec) == "done"


def test_a_data_loader_with_workers_works(run: Any) -> None:
    def load() -> list[float]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2)
        return [float(batch.sum()) for (batch,) in loader]

    assert run(load) == [6.0, 22.0]


def test_a_worker_is_no_daemonic_process() -> None:
    @miniray.remote
    def daemonic() -> bool:
        return multiprocessing.current_process().daemon

    assert miniray.get(daemonic.remote()) is False


def test_workers_have_random_states_of_their_own() -> None:
    def draw() -> tuple[float, float, float]:
        import numpy

        generator = numpy.random.default_rng()
        return random.random(), float(numpy.random.random()), float(generator.random())

    actors = [Forker.remote() for _ in range(3)]
    drawn = miniray.get([actor.run.remote(draw) for actor in actors])
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == 3, "two workers draw the same numbers"


def test_workers_that_begin_with_torch_have_random_states_of_their_own() -> None:
    def draw() -> float:
        import torch

        return float(torch.rand(1, dtype=torch.float64))

    actors = [Forker.options(_preload=["torch"]).remote() for _ in range(2)]
    first, second = miniray.get([actor.run.remote(draw) for actor in actors], timeout=50)
    assert first != second


def test_an_actor_begins_with_what_is_loaded_beside_others_once_it_is() -> None:
    def begins_with() -> set[str]:
        return {"colorsys", "pyclbr"} & sys.modules.keys()

    def of_new_actor() -> set[str]:
        actor = Forker.options(_preload=["colorsys"], _preload_later=["pyclbr"]).remote()
        return miniray.get(actor.run.remote(begins_with), timeout=50)

    assert "colorsys" in of_new_actor()
    wait_until(lambda: of_new_actor() == {"colorsys", "pyclbr"})


def test_a_task_begins_with_what_was_loaded_for_it() -> None:
    @miniray.remote(_preload=["wave"])
    def begins_with() -> bool:
        return "wave" in sys.modules

    assert miniray.get(begins_with.remote(), timeout=50)
    assert not miniray.get(begins_with.options(_preload=[]).remote(), timeout=50)
    actor = Forker.options(_preload=["wave", "sched"]).remote()  # for more than is asked below
    miniray.get(actor.pid.remote(), timeout=50)
    assert miniray.get(begins_with.options(_preload=["sched"]).remote(), timeout=50)


def test_modules_that_cannot_be_loaded_before_are_errors_of_those_who_use_them() -> None:
    @miniray.remote(_preload=["no_such_module"], max_retries=0)
    def use(name: str) -> Any:
        return __import__(name).__name__

    assert miniray.get(use.remote("wave"), timeout=50) == "wave"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        miniray.get(use.remote("no_such_module"), timeout=50)


def test_atexit_functions_run_when_a_worker_ends_by_rule(tmp_path: Path) -> None:
    def leave(path: str) -> None:
        import atexit

        atexit.register(lambda: Path(path).write_text("ended"))
        miniray.actor.exit_actor()

    actor = Forker.remote()
    path = tmp_path / "end"
    actor.run.remote(leave, str(path))
    wait_until(path.exists)


def test_a_worker_that_ends_finalizes_its_own_objects_and_not_those_of_imports(
    tmp_path: Path,
) -> None:
    # Modules of the node itself are loaded before a fork: so this one is on its path.
    (tmp_path / "finalized.py").write_text(
        "import os, sys, weakref\n"
        "weakref.finalize(sys.modules[__name__], os.mkdir, os.environ['FOLDER'] + '/of_import')\n"
    )
    program = """
import os, time, miniray
miniray.init("local", num_cpus=1)

@miniray.remote(_preload=["finalized"])
class Worker:
    def begin(self):
        import finalized, weakref
        weakref.finalize(finalized, os.mkdir, os.environ["FOLDER"] + "/of_worker")
        return os.getpid()

worker = Worker.remote()
pid = miniray.get(worker.begin.remote())
worker.__ray_terminate__.remote()
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.01)
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "FOLDER": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], timeout=50, check=True, env=env)
    assert (tmp_path / "of_worker").exists()
    assert not (tmp_path / "of_import").exists()


def test_a_worker_collects_its_own_garbage_and_does_not_look_at_what_was_imported() -> None:
    def collect() -> tuple[bool, int]:
        import gc
        import weakref

        class Node:
            own: Node

        node = Node()
        node.own, seen = node, weakref.ref(node)
        del node
        gc.collect()
        return gc.isenabled() and seen() is None, gc.get_freeze_count()

    collected, frozen = miniray.get(Forker.remote().run.remote(collect))
    assert collected
    assert frozen > 10_000


def test_a_childs_exit_functions_are_its_own(tmp_path: Path) -> None:
    def fork(path: str) -> int:
        import atexit

        def note() -> None:
            with Path(path).open("a") as file:
                file.write(f"{os.getpid()}\n")

        atexit.register(note)
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        return child

    actor = Forker.remote()
    path = tmp_path / "ends"
    miniray.get(actor.run.remote(fork, str(path)))
    worker = miniray.get(actor.pid.remote())
    actor.__ray_terminate__.remote()
    assert wait_for_text(path).split() == [str(worker)]


def test_the_error_of_a_forked_child_can_be_caught_by_its_class() -> None:
    def catch() -> str:
        try:
            miniray.nodes()
        except NotInitializedError:
            return "caught"
        return "nothing"

    assert in_forked_child(catch) == "caught"
