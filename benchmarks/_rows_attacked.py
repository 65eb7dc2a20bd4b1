"""Rows about what a user notices of others: strangers at the ports, and careless users.

Whether to do a tenth of everything is said by the environment (``SHORT``), since each row runs in a
process of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _strangers
import psutil
from _common import MIB, Engine, Figure, row
from _processes import TAG, tagged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT = "BENCHMARK_SHORT"
NODES = 2
SECONDS = 25
#: What a user may wait for anything because of strangers, in seconds.
LONGEST = 1.0
#: Memory that a driver which reads nothing may cost its node, in MiB.
GROWTH = 64.0
TASKS = 100_000
PENDING = 10_000
LINES_PER_SECOND = 18_000

_WHAT = ("call", "request to the head", "actor created and called")


def _tenth(amount: int) -> int:
    return amount // 10 if os.environ.get(SHORT) else amount


def _figures(condition: str, longest: float | None = LONGEST) -> tuple[Figure, ...]:
    """Median and longest of what a user does, and how often a node was given up."""
    goal = None if longest is None else 1000 * longest
    found = []
    for what in _WHAT:
        found.append(Figure(f"{condition}: {what}, median", "ms"))
        found.append(Figure(f"{condition}: {what}, longest", "ms", target=goal))
    return (*found, Figure(f"{condition}: nodes given up", "", target=0))


class Answering:
    """An actor that answers."""

    def answer(self) -> None:
        """Does nothing."""


class User:
    """Who is to notice nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        cpus = {"num_cpus": 4, "resources": {"slot": 1}}
        self._ray = engine.start_nodes([cpus] * NODES)
        self._state = engine.module("util.state")
        self._remote = self._ray.remote(Answering).options(num_cpus=0)
        self._actor = self._remote.remote()
        self._do()

    @property
    def address(self) -> str:
        """Of the head."""
        return str(self._engine.cluster.address)

    @property
    def daemon(self) -> psutil.Process:
        """The daemon of the head's node."""
        return psutil.Process(self._engine.cluster.head_node.pids["node"])

    def measure(self, goes_on: Callable[[], bool]) -> list[float]:
        """Do things while something goes on; returns what ``_figures`` names."""
        took: list[list[float]] = [[] for _ in _WHAT]
        while goes_on():
            for times, seconds in zip(took, self._do(), strict=True):
                times.append(1000 * seconds)
        found = [figure for times in took for figure in (statistics.median(times), max(times))]
        return [*found, self._given_up()]

    def _do(self) -> list[float]:
        steps: list[Callable[[], object]] = [
            lambda: self._ray.get(self._actor.answer.remote()),
            self._state.list_nodes,
            self._create,
        ]
        took = []
        for step in steps:
            start = time.perf_counter()
            step()
            took.append(time.perf_counter() - start)
        return took

    def _create(self) -> None:
        actor = self._remote.options(scheduling_strategy="SPREAD").remote()
        self._ray.get(actor.answer.remote())
        self._ray.kill(actor)

    def _given_up(self) -> int:
        log = Path(self._engine.cluster.head_node.session_dir) / "logs" / "head.log"
        return log.read_text().count("it was silent")

    def move_a_value(self) -> None:
        """Have the nodes' movers started."""
        read = self._ray.remote(len).options(scheduling_strategy="SPREAD", num_cpus=1)
        value = self._ray.put(bytes(8 * MIB))
        self._ray.get([read.remote(value) for _ in range(4 * NODES)])


def _until(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end


@row("quiet", *_figures("quiet"))
def quiet(engine: Engine) -> list[float]:
    return User(engine).measure(_until(_tenth(SECONDS)))


# --- strangers -------------------------------------------------------------------------------


def _attacked(user: User, kind: str, where: str) -> list[float]:
    seconds = _tenth(SECONDS)
    program = [sys.executable, _strangers.__file__, kind, where, str(seconds), str(_tenth(2000))]
    stranger = subprocess.Popen(program, stdout=subprocess.DEVNULL)
    found = user.measure(lambda: stranger.poll() is None)
    if stranger.returncode:
        raise RuntimeError(f"the strangers ended with code {stranger.returncode}")
    return found


def _at_the_head(kind: str, what: str) -> None:
    def measure(engine: Engine) -> list[float]:
        user = User(engine)
        return _attacked(user, kind, user.address)

    row(kind, *_figures(what), limit=120)(measure)


_at_the_head("pings", "PING frames")
_at_the_head("headers", "HEADERS frames")
_at_the_head("hellos", "handshakes given up")
_at_the_head("garbage", "bytes that are no TLS")
_at_the_head("idle", "2,000 idle connections")
_at_the_head("hung", "2,000 handshakes that stop")
_at_the_head("tls", "2,000 of TLS, then nothing")


@row("mover", *_figures("2,000 idle ones at the movers"), limit=120)
def mover(engine: Engine) -> list[float]:
    user = User(engine)
    before = _listening()
    user.move_a_value()
    ports = _listening() - before
    if not ports:
        raise RuntimeError("no mover listens")
    return _attacked(user, "idle", f"127.0.0.1:{ports.pop()}")


def _listening() -> set[int]:
    """Ports of the cluster's processes."""
    found = set()
    for pid in tagged(os.environ[TAG]):
        with contextlib.suppress(psutil.Error):
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add(each.laddr.port)
    return found


# --- careless users --------------------------------------------------------------------------

_OTHER = """
import sys, time
import {package} as ray
ray.init(address="{address}", log_to_driver={logs})
print("attached", flush=True)
"""
_MANY_TASKS = """
@ray.remote
def task(): pass
ray.get([task.remote() for _ in range({tasks})])
"""
_MANY_ACTORS = """
@ray.remote(resources={{"slot": 1}})
class Actor:
    def answer(self): pass
actors = [Actor.remote() for _ in range({pending})]
ray.wait([actor.answer.remote() for actor in actors[:2]], num_returns=2)
time.sleep({seconds})
"""
_MANY_LINES = """
@ray.remote
def talk(lines, seconds):
    end = time.monotonic() + seconds
    begin, printed = time.monotonic(), 0
    while time.monotonic() < end:
        while printed < (time.monotonic() - begin) * lines:
            print("a line of the usual length, as programs print them", printed)
            printed += 1
        time.sleep(0.01)
ray.get([talk.remote({lines} / 2, {seconds}) for _ in range(2)])
"""


@contextlib.contextmanager
def _other(engine: Engine, address: str, program: str, *, logs: bool) -> Iterator[Any]:
    """Another driver of the cluster that does something."""
    text = (_OTHER + program).format(
        package=engine.name,
        address=address,
        logs=logs,
        tasks=_tenth(TASKS),
        pending=_tenth(PENDING),
        lines=LINES_PER_SECOND,
        seconds=_tenth(SECONDS),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != b"attached":
            raise RuntimeError("the other driver did not attach")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _careless(engine: Engine, program: str) -> list[float]:
    user = User(engine)
    with _other(engine, user.address, program, logs=False) as other:
        return user.measure(lambda: other.poll() is None)


@row("tasks", *_figures("100,000 tasks of another driver", longest=None), limit=240)
def tasks(engine: Engine) -> list[float]:
    return _careless(engine, _MANY_TASKS)


@row("pending", *_figures("10,000 pending actors of another driver", longest=None), limit=240)
def pending(engine: Engine) -> list[float]:
    return _careless(engine, _MANY_ACTORS)


@row("lines", *_figures("18,000 lines/s of another driver", longest=None), limit=240)
def lines(engine: Engine) -> list[float]:
    user = User(engine)
    with _other(engine, user.address, _MANY_LINES, logs=True) as other:
        reader = subprocess.Popen(["cat"], stdin=other.stdout, stdout=subprocess.DEVNULL)
        found = user.measure(lambda: other.poll() is None)
        reader.kill()
        reader.wait()
    return found


@row(
    "stopped",
    Figure("daemon's memory before a driver that prints is stopped", "MiB"),
    Figure("the most in 30 s after that", "MiB"),
    Figure("growth", "MiB", target=GROWTH),
    limit=120,
)
def stopped(engine: Engine) -> list[float]:
    user = User(engine)
    endless = _MANY_LINES.replace("time.sleep(0.01)", "pass").replace("{lines} / 2", "1e9")
    endless = endless.replace("{seconds}", "1000")
    with _other(engine, user.address, endless, logs=True) as other:
        for _ in range(100):  # it prints what its tasks do
            other.stdout.readline()
        os.kill(other.pid, signal.SIGSTOP)
        before = most = user.daemon.memory_info().rss / MIB
        goes_on = _until(_tenth(30))
        while goes_on():
            most = max(most, user.daemon.memory_info().rss / MIB)
            time.sleep(0.1)
    return [before, most, most - before]
