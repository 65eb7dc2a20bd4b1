"""A program of miniray on a Ray cluster: what no test of the public API shows by itself."""

from __future__ import annotations

import concurrent.futures
import os
import pickle
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from cluster_helpers import wait_until
from ports import free_ports

import miniray
from miniray.cli.main import main
from miniray.cluster_utils import Cluster
from miniray.engines.capabilities import REFUSED
from miniray.exceptions import (
    ActorDiedError,
    DeathCause,
    EngineError,
    TaskError,
    WorkerCrashedError,
)
from miniray.util import metrics, state, tpu

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.engine("ray"), pytest.mark.usefixtures("cluster")]
CLUSTER = {"num_cpus": 1, "num_gpus": 1}


class Untold(Exception):
    """Can't be pickled, and its constructor can't be called again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.stays_here = lambda: one


def test_an_exception_that_ray_cannot_send_arrives_with_its_class() -> None:
    @miniray.remote
    def fails() -> None:
        raise Untold(1, 2)

    with pytest.raises(TaskError, match="1 and 2") as caught:
        miniray.get(fails.remote())
    assert "Untold" in str(caught.value)


def test_an_error_has_the_name_that_its_call_was_given() -> None:
    @miniray.remote
    def share(of: int) -> float:
        return 1 / of

    @miniray.remote
    class Shares:
        def share(self, of: int) -> float:
            return 1 / of

    method = Shares.remote().share
    for usual, call in (("share", share), ("Shares.share", method)):
        for name, named in ((usual, call), ("a third", call.options(name="a third"))):
            with pytest.raises(ZeroDivisionError) as caught:
                miniray.get(named.remote(0))
            assert f"{name}() failed" in str(caught.value)


def test_each_result_of_a_call_that_ray_ends_names_it() -> None:
    @miniray.remote(num_returns=2, max_retries=0)
    def ends() -> tuple[int, int]:
        os._exit(1)

    for ref in ends.remote():
        with pytest.raises(WorkerCrashedError, match=r"^ends failed: "):
            miniray.get(ref, timeout=60)


def test_what_ray_client_does_not_tell_is_that_of_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.util.client import runtime_context

    told = runtime_context._ClientWorkerPropertyAPI(object()).build_runtime_context()
    monkeypatch.setattr(ray, "get_runtime_context", lambda: told)
    assert miniray.get_runtime_context().get_placement_group_id() is None


def test_threads_name_more_calls_than_are_remembered() -> None:
    from miniray.engines.ray import errors

    class Called:
        def __init__(self, number: int) -> None:
            self.number = number

        def task_id(self) -> Called:
            return self

        def binary(self) -> bytes:
            return self.number.to_bytes(8, "little")

    def name(of: range) -> None:
        for number in of:
            errors.name_call(Called(number), "call")

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(name, [range(at, at + 30_000) for at in range(0, 120_000, 30_000)]))


class Unreadable:
    """Can be pickled; reading it raises an error."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_a_value_that_cannot_be_read_raises_what_its_class_does() -> None:
    @miniray.remote
    def read(refs: list[Any]) -> None:
        miniray.get(refs)

    with pytest.raises(ValueError, match="no number"):
        miniray.get(miniray.put(Unreadable()))
    with pytest.raises(ValueError, match="no number"):
        miniray.get(read.remote([miniray.put(Unreadable())]))


def test_a_put_that_fails_in_a_task_is_its_own_error() -> None:
    @miniray.remote
    def puts() -> str:
        try:
            miniray.put([threading.Lock()])
        except TypeError as error:
            return str(error)
        return "none"

    told = miniray.get(puts.remote())
    assert "lock" in told
    assert "returned" not in told


def test_refs_pass_through_other_picklers() -> None:
    ref = miniray.put("kept")

    @miniray.remote
    def read(pickled: bytes) -> str:
        return miniray.get(pickle.loads(pickled))

    assert miniray.get(read.remote(pickle.dumps(ref))) == "kept"


def test_an_actor_that_was_killed_says_so() -> None:
    @miniray.remote
    class Victim:
        def nothing(self) -> None: ...

    victim = Victim.remote()
    miniray.get(victim.nothing.remote())
    miniray.kill(victim)
    with pytest.raises(ActorDiedError) as caught:
        # Ray answers before the process has ended.
        wait_until(lambda: miniray.get(victim.nothing.remote()))
    assert caught.value.cause is DeathCause.KILLED


def test_an_actor_finds_itself_and_others_by_name() -> None:
    @miniray.remote
    class Named:
        def me(self) -> Any:
            return miniray.get_runtime_context().current_actor

        def twice(self, n: int) -> int:
            return 2 * n

    named = Named.options(name="engine-named").remote()
    assert miniray.get(named.me.remote()) == named
    found = miniray.get_actor("engine-named")
    assert miniray.get(found.twice.remote(2)) == 4
    with pytest.raises(TypeError, match="'n'"):  # it knows the signatures
        found.twice.remote()


def test_actors_that_give_no_cpus_hold_none() -> None:
    @miniray.remote
    class Held:
        def gpus(self) -> int:
            return len(miniray.get_gpu_ids())

    actors = [Held.remote(), Held.remote(), *(Held.options(num_gpus=0.5).remote() for _ in "ab")]
    assert miniray.get([actor.gpus.remote() for actor in actors], timeout=60) == [0, 0, 1, 1]


def test_a_dataset_is_read_to_its_end() -> None:
    pytest.importorskip("pyarrow")
    for _ in range(5):
        assert miniray.data.range(100).map(lambda row: row).materialize().count() == 100


def test_the_error_of_a_constructor_arrives_with_its_class() -> None:
    @miniray.remote
    class Unlucky:
        def __init__(self) -> None:
            raise KeyError("absent")

        def nothing(self) -> None: ...

    with pytest.raises(ActorDiedError) as caught:
        miniray.get(Unlucky.remote().nothing.remote())
    assert caught.value.cause is DeathCause.CREATION_FAILED
    assert isinstance(caught.value.creation_error, TaskError)
    assert isinstance(caught.value.creation_error.cause, KeyError)


def test_nothing_of_actors_stays_with_rays_head() -> None:
    from ray.experimental import internal_kv

    @miniray.remote
    class Kept:
        def __init__(self, fails: bool) -> None:
            if fails:
                raise KeyError("absent")

        def nothing(self) -> None: ...

    named = Kept.options(name="engine-kept").remote(False)
    miniray.get(named.nothing.remote())
    with pytest.raises(ActorDiedError):
        miniray.get(Kept.remote(True).nothing.remote())
    assert internal_kv._internal_kv_list("miniray") == []


def test_actors_of_a_program_of_ray_keep_what_their_methods_return() -> None:
    import ray

    @ray.remote
    class Foreign:
        @ray.method(num_returns=2)
        def pair(self) -> tuple[int, int]:
            return 1, 2

        def count(self) -> Any:
            yield 1
            yield 2

    foreign = Foreign.options(name="engine-foreign").remote()
    ray.get(foreign.__ray_ready__.remote())
    found = miniray.get_actor("engine-foreign")
    assert miniray.get(found.pair.remote()) == [1, 2]
    assert [miniray.get(ref) for ref in found.count.remote()] == [1, 2]


def test_refs_of_a_dynamic_generator_arrive_by_name_too() -> None:
    @miniray.remote(num_returns="dynamic")
    def count() -> Any:
        yield 1
        yield 2

    @miniray.remote
    def total(refs: Any) -> int:
        return sum(miniray.get(list(refs)))

    assert miniray.get(total.remote(refs=count.remote()), timeout=60) == 3


#: Drops a generator when its cluster is gone and there is another one.
OUTLIVES = """
import miniray

def begin():
    miniray.init("local", engine="ray", num_cpus=1)
    return miniray.remote(lambda: (yield 1)).remote()

first = begin()
miniray.get(next(first))
miniray.shutdown()
second = begin()
del first
print(miniray.get(next(second)))
"""


def test_a_generator_may_outlive_its_cluster() -> None:
    env = os.environ | {"RAY_TMPDIR": tempfile.gettempdir()}  # the module's own
    driver = [sys.executable, "-c", OUTLIVES]
    done = subprocess.run(driver, stdout=subprocess.PIPE, text=True, check=True, env=env)
    assert done.stdout.split() == ["1"]


#: Prints where a worker has miniray from, what a generator yields, what a method of an actor that
#: was found by its name returns, and what ends a future whose driver leaves Ray Client.
DRIVER = """
import os
import threading

import miniray

@miniray.remote
def place():
    return miniray.__file__

@miniray.remote
def count():
    yield 1

miniray.init(engine="ray")
print(miniray.get(place.remote()))
try:
    print(*map(miniray.get, count.remote()))
except miniray.exceptions.EngineError as error:
    print(error)

@miniray.remote(concurrency_groups={"other": 1})
class Named:
    @miniray.method(num_returns=2)
    def pair(self):
        return 1, 2

    @miniray.method(concurrency_group="other")
    def thread(self):
        return threading.get_ident()

    def usual_thread(self):
        return threading.get_ident()

named = Named.options(name="named").remote()
found = miniray.get_actor("named")
print(*miniray.get(found.pair.remote()))
try:
    found.pair.remote(1)
except TypeError:
    print("takes none")
threads = miniray.get([named.thread.remote(), named.usual_thread.remote()])
print("other thread" if threads[0] != threads[1] else threads)

if os.environ["RAY_ADDRESS"].startswith("ray://"):
    future = miniray.remote(num_cpus=0)(lambda: threading.Event().wait(60)).remote().future()
    miniray.shutdown()
    print(type(future.exception(30)).__name__)
"""


def test_workers_without_miniray_get_it_from_the_driver(tmp_path: Path) -> None:
    """The cluster's Python has Ray, but no miniray: what .pth files of its packages add is lost."""
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    libraries = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")})
    packages = [path for path in sys.path if path.endswith("-packages")]
    (Path(libraries) / "ray.pth").write_text("\n".join(packages))
    python = tmp_path / "venv/bin/python"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["RAY_TMPDIR"] = tempfile.gettempdir()  # the module's own
    in_it = {"env": env, "cwd": tmp_path}
    assert subprocess.run([python, "-c", "import miniray"], check=False, **in_it).returncode
    port, client_port = free_ports(2)
    start = [python, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    start += [f"--ray-client-server-port={client_port}", "--dashboard-agent-listen-port=0"]
    start += ["--include-dashboard=false", "--num-cpus=1", "--node-ip-address=127.0.0.1"]
    head = subprocess.Popen(start, stdout=subprocess.DEVNULL, **in_it)
    try:
        wait_until(lambda: _answers(port), timeout=60)
        driver = [sys.executable, "-c", DRIVER]
        told = []
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{client_port}"):
            env["RAY_ADDRESS"] = address
            done = subprocess.run(driver, stdout=subprocess.PIPE, text=True, check=True, **in_it)
            told.append(done.stdout.splitlines())
    finally:
        head.terminate()
        head.wait(60)
    assert all("py_modules_files" in lines[0] for lines in told)
    assert all(lines[2:5] == ["1 2", "takes none", "other thread"] for lines in told)
    assert told[0][1] == "1"
    assert REFUSED["generators over ray://"] in told[1][1]
    assert told[1][5] == "ConnectionError"


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


#: A use of each capability that the engine lacks.
USES: dict[str, Callable[[], object]] = {
    "util.state": lambda: state.list_actors(),
    "util.memory": lambda: state.get_cluster_memory(),
    "util.metrics": lambda: metrics.Counter("refused").inc(),
    "timeline": lambda: miniray.timeline(),
    "util.tpu": lambda: tpu.get_num_tpu_slices("2x2", "v4"),
    "commands": lambda: main(["status"], standalone_mode=False),
    "cluster_utils": lambda: Cluster(initialize_head=True),
}


@pytest.mark.parametrize("capability", sorted(REFUSED.keys() - {"generators over ray://"}))
def test_what_the_page_lists_is_refused_at_the_call(capability: str) -> None:
    with pytest.raises((EngineError, click.ClickException)) as refused:
        USES[capability]()
    assert REFUSED[capability] in str(refused.value)


def test_no_list_of_nodes_is_taken_for_one_of_tpus() -> None:
    with pytest.raises(EngineError, match="`ray list actors`"):
        state.list_nodes()
