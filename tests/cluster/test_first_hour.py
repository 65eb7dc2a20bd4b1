"""What somebody meets in the first hour: first calls, `init`, small limits, Ctrl-C."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster_helpers import processes_with, wait_until
from watched_output import watch

import miniray
from miniray.system.machine import cpu_count, memory_limit
from miniray.util.multiprocessing import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def nothing_is_left(session_root: Path) -> Iterator[None]:
    """A test ends the cluster that it, or the first call in it, has started."""
    yield
    miniray.shutdown()
    wait_until(lambda: not processes_with("MINIRAY_TMPDIR", str(session_root)), timeout=10)


@miniray.remote
def add(a: int, b: int = 1) -> int:
    return a + b


@miniray.remote
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value


# --- the first call ---------------------------------------------------------------------------


def train() -> str:
    from miniray.train import RunConfig, ScalingConfig
    from miniray.train.data_parallel_trainer import DataParallelTrainer

    def loop() -> None:
        from miniray.train import report

        report({"loss": 0.5})

    storage = os.environ["MINIRAY_TMPDIR"]
    trainer = DataParallelTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="first", storage_path=storage),
    )
    return str(trainer.fit().metrics["loss"])


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(lambda: miniray.get(add.remote(1)), 2, id="task"),
        pytest.param(lambda: miniray.get(Counter.remote().add.remote()), 1, id="actor"),
        pytest.param(lambda: miniray.get(miniray.put([1])), [1], id="put"),
        pytest.param(lambda: miniray.get([]), [], id="get"),
        pytest.param(lambda: miniray.wait([]), ([], []), id="wait"),
        pytest.param(lambda: len(miniray.nodes()), 1, id="nodes"),
        pytest.param(lambda: "CPU" in miniray.cluster_resources(), True, id="resources"),
        pytest.param(lambda: miniray.util.list_named_actors(), [], id="names"),
        pytest.param(train, "0.5", id="train"),
    ],
)
def test_the_first_call_starts_a_cluster(call: Callable[[], Any], expected: Any) -> None:
    assert not miniray.is_initialized()
    assert call() == expected
    assert miniray.is_initialized()


def test_the_size_of_the_cluster_is_that_of_the_container() -> None:
    resources = miniray.cluster_resources()
    assert resources["CPU"] == cpu_count()
    assert 0 < resources["memory"] <= memory_limit()


# --- init -------------------------------------------------------------------------------------


def test_keywords_of_ray_that_do_no_harm_are_accepted_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="no effect") as caught:
        miniray.init(
            num_cpus=1,
            _redis_password="x",
            _metrics_export_port=8080,
            log_to_driver=True,
        )
    (warning,) = caught
    assert "_metrics_export_port, _redis_password" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("level", [logging.ERROR, "error"])
def test_init_sets_the_level_of_minirays_loggers(level: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        context = miniray.init(num_cpus=1, logging_level=level)
    own = logging.getLogger("miniray")
    try:
        assert own.level == logging.ERROR
        assert context.address_info["webui_url"] is None
    finally:
        own.setLevel(logging.NOTSET)


def test_a_wrong_logging_level_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="logging_level must be a number or one of CRITICAL"):
        miniray.init(num_cpus=1, logging_level="loud")


def test_switching_off_what_is_not_there_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        miniray.init(num_cpus=1, include_dashboard=False, local_mode=False)


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ({"num_cpu": 2}, "num_cpus"),
        ({"local_mode": True}, "local_mode"),
        ({"storage": "s3://bucket"}, "storage_path"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_other_keywords_are_refused_by_name(keyword: dict[str, Any], hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        miniray.init(**keyword)
    assert not miniray.is_initialized()


def test_the_memory_that_tasks_may_ask_for_can_be_given() -> None:
    miniray.init(num_cpus=1, _memory=500e6, object_store_memory=200e6)  # type: ignore[arg-type]
    assert miniray.cluster_resources()["memory"] == 500_000_000
    assert miniray.cluster_resources()["object_store_memory"] == 200_000_000


def test_a_working_directory_that_was_removed_is_named_and_another_one_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    with pytest.raises(FileNotFoundError, match="which workers use too, was removed"):
        miniray.init("local", num_cpus=1)
    assert not miniray.is_initialized()
    monkeypatch.chdir(tmp_path)
    with miniray.init("local", num_cpus=1):
        assert miniray.get(miniray.remote(os.getcwd).remote()) == str(tmp_path)


def test_temp_dir_says_where_the_session_is(tmp_path: Path) -> None:
    context = miniray.init(num_cpus=1, _temp_dir=str(tmp_path / "deep" / "folder"))
    session = Path(context.address_info["session_dir"])
    assert session.is_relative_to(tmp_path / "deep" / "folder")
    assert miniray.get(add.remote(1)) == 2
    assert list((session / "logs").iterdir())


@pytest.mark.parametrize("address", [None, "local"])
def test_a_pool_starts_a_cluster_of_its_own_size(address: str | None, tmp_path: Path) -> None:
    size = cpu_count() + 2

    def process_beside_others(_: int) -> int:
        (tmp_path / str(os.getpid())).touch()
        wait_until(lambda: len(list(tmp_path.iterdir())) == size)
        return os.getpid()

    with Pool(size, ray_address=address) as pool:
        assert len(set(pool.map(process_beside_others, range(size), chunksize=1))) == size
    assert miniray.cluster_resources()["CPU"] == size


# --- warnings ----------------------------------------------------------------------------------


def test_get_inside_of_an_asyncio_actor_works_and_warns_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = watch(monkeypatch, "stderr")
    miniray.init(num_cpus=2)

    @miniray.remote
    class Asker:
        async def ask(self, value: int) -> int:
            return miniray.get(add.remote(value))

    asker = Asker.remote()
    assert [miniray.get(asker.ask.remote(value)) for value in range(3)] == [1, 2, 3]
    stderr.wait_for("Use `await ref` instead")
    miniray.shutdown()  # everything that was printed has come
    assert stderr.getvalue().count("blocks the event loop") == 1


# --- Ctrl-C -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["get", "wait", "iterate", "head"])
def test_ctrl_c_while_the_driver_waits_leaves_the_cluster_usable(what: str, tmp_path: Path) -> None:
    miniray.init(num_cpus=2)

    @miniray.remote
    def slow(path: str) -> Any:
        Path(path).touch()
        threading.Event().wait()

    @miniray.remote
    def slow_items(path: str) -> Any:
        Path(path).touch()
        threading.Event().wait()
        yield 1

    counter = Counter.remote()
    assert miniray.get(counter.add.remote()) == 1
    begun = tmp_path / "begun"

    def wait() -> None:
        if what == "get":
            miniray.get(slow.remote(str(begun)))
        elif what == "wait":
            miniray.wait([slow.remote(str(begun))])
        elif what == "iterate":
            next(slow_items.remote(str(begun)))
        else:
            ref = slow.remote(str(begun))
            while True:
                miniray.nodes()
                miniray.wait([ref], timeout=0)

    def interrupt() -> None:
        wait_until(begun.exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as info:
        wait()
    thread.join()
    if what in ("get", "wait"):
        assert info.traceback[-1].name == what  # nothing of how it waited
    assert miniray.get(counter.add.remote(), timeout=20) == 2
    assert miniray.get(add.remote(1), timeout=20) == 2
    assert len(miniray.nodes()) == 1


# --- small limits -----------------------------------------------------------------------------


def as_somebody_else() -> None:
    """Count this process as another user's, and let the limit hold for root."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (21, 24):  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
        assert libc.prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
    os.setresuid(61234, 0, 0)  # only the real uid: files are opened as before


def run_limited(
    program: str, limits: dict[int, int], before: Callable[[], None] = lambda: None
) -> str:
    """Run a program under hard limits; returns what it printed."""

    def limit() -> None:
        for name, value in limits.items():
            resource.setrlimit(name, (value, value))
        before()

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


MANY_ACTORS = """
import miniray, sys
miniray.init(num_cpus=1)

@miniray.remote(num_cpus=0)
class Actor:
    def number(self, number):
        return number

number = int(NUMBER)
actors = [Actor.remote() for _ in range(number)]
refs = [actor.number.remote(n) for n, actor in enumerate(actors)]
good, errors = 0, set()
for n, ref in enumerate(refs):
    try:
        assert miniray.get(ref, timeout=40) == n
        good += 1
    except miniray.exceptions.MinirayError as error:
        errors.add(type(error).__name__ + ": " + " ".join(str(error).split()))
print("good:", good)
for error in errors:
    print("error:", error[:600])
for actor in actors:
    miniray.kill(actor)
del actors, actor, refs, ref
import time
deadline = time.monotonic() + 20
while True:  # what the killed ones held comes back
    try:
        print("again:", miniray.get(Actor.remote().number.remote(7), timeout=20))
        break
    except miniray.exceptions.MinirayError:
        assert time.monotonic() < deadline
"""


def test_1024_descriptors_are_enough_for_200_actors() -> None:
    text = run_limited(MANY_ACTORS.replace("NUMBER", "200"), {resource.RLIMIT_NOFILE: 1024})
    assert text.splitlines() == ["good: 200", "again: 7"]


def test_without_descriptors_actors_fail_with_the_reason_and_nothing_hangs() -> None:
    text = run_limited(MANY_ACTORS.replace("NUMBER", "80"), {resource.RLIMIT_NOFILE: 160})
    lines = text.splitlines()
    good = int(lines[0].removeprefix("good: "))
    assert 10 <= good < 80
    errors = [line for line in lines if line.startswith("error:")]
    assert all("Too many open files" in error and "ulimit -n" in error for error in errors), text
    assert "again: 7" in lines


def test_without_processes_actors_fail_with_the_reason_and_nothing_hangs() -> None:
    if os.geteuid() != 0:
        pytest.skip("the limit counts all processes of a user: this needs one that has none")
    text = run_limited(
        MANY_ACTORS.replace("NUMBER", "60"),
        {resource.RLIMIT_NPROC: 80},
        as_somebody_else,
    )
    lines = text.splitlines()
    good = int(lines[0].removeprefix("good: "))
    assert 5 <= good < 60
    assert any("cannot start a process: Resource temporarily unavailable" in e for e in lines), text
    assert "again: 7" in lines


FEW_IN_THE_DRIVER = """
import miniray, resource
miniray.init(num_cpus=1)

@miniray.remote(num_cpus=0)
class Actor:
    def number(self, number):
        return number

resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))  # the node keeps what it has
actors = [Actor.remote() for _ in range(50)]
for _ in range(2):
    got = miniray.get([actor.number.remote(n) for n, actor in enumerate(actors)], timeout=40)
    assert got == list(range(50)), got
for actor in actors:
    miniray.kill(actor)
print("done")
"""


def test_a_driver_without_descriptors_calls_through_its_node() -> None:
    assert run_limited(FEW_IN_THE_DRIVER, {}) == "done\n"


MANY_VALUES = """
import miniray, numpy as np
miniray.init(num_cpus=1)
refs = [miniray.put(np.full(25_000, number)) for number in range(400)]
assert all((miniray.get(ref) == number).all() for number, ref in enumerate(refs))
views = [miniray.get(ref) for ref in refs]
assert all((view == number).all() for number, view in enumerate(views))
views.clear()
refs.clear()
try:
    for number in range(400):
        views.append(miniray.get(miniray.put(np.full(25_000, number))))
except OSError as error:
    print(error)
assert 50 < len(views) < 400
assert all((view == number).all() for number, view in enumerate(views))
views.clear()
assert (miniray.get(miniray.put(np.full(25_000, 7))) == 7).all()
print("again:", miniray.get(miniray.remote(lambda: 7).remote(), timeout=20))
"""


def test_values_for_which_there_are_no_descriptors_go_to_disk_and_are_read_there() -> None:
    lines = run_limited(MANY_VALUES, {resource.RLIMIT_NOFILE: 160}).splitlines()
    assert "open files" in lines[0]
    assert "ulimit -n" in lines[0]
    assert lines[1] == "again: 7"


# --- names of machines ------------------------------------------------------------------------


def test_a_host_name_that_is_127_0_1_1_breaks_nothing(tmp_path: Path, session_root: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "real = socket.getaddrinfo\n"
        "def getaddrinfo(host, *args, **kwargs):\n"
        "    own = host in (socket.gethostname(), socket.gethostname().encode())\n"
        "    return real('127.0.1.1' if own else host, *args, **kwargs)\n"
        "socket.getaddrinfo = getaddrinfo\n"
        "socket.gethostbyname = lambda name: '127.0.1.1'\n"
        "socket.getfqdn = lambda name='': 'localhost'\n"
    )
    program = """
import miniray, socket
assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
miniray.init(INIT)
print(miniray.get(miniray.remote(lambda: 5).remote()))
assert miniray.nodes()[0]["NodeManagerAddress"] != "127.0.1.1"
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
            env=env,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = "from miniray.cli.main import main; main()"
    assert run("-c", program.replace("INIT", "'local', num_cpus=1")) == "5\n"
    run("-c", command, "start", "--head", "--num-cpus", "1", "--port", "0")
    try:
        assert run("-c", program.replace("INIT", "'auto'")) == "5\n"
    finally:
        run("-c", command, "stop")
