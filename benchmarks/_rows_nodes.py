"""Rows over several nodes, all of them on this machine.

How many nodes and actors is said by the environment (``NODES``, ``ACTORS``), since
each row runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from _common import GIB, MIB, Engine, Figure, at_once, rate, row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Names of the environment variables that say how much to start.
NODES = "BENCHMARK_NODES"
ACTORS = "BENCHMARK_ACTORS"

NODE_CPUS = 4
#: Nodes that a value is sent to at once.
RECEIVERS = 8
#: How often 1 GiB moves while latencies are measured.
MOVES = 6


class Peer:
    """An actor that calls others."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.others: list[Any] = []

    def meet(self, others: list[Any]) -> None:
        self.others = others

    def ping(self) -> None:
        """Does nothing."""

    def take(self, value: Any) -> int:
        """Reads what it is given."""
        return len(value)

    def call_others(self, rounds: int) -> None:
        api = importlib.import_module(self.package)
        api.get([other.ping.remote() for _ in range(rounds) for other in self.others])


def start_nodes(engine: Engine) -> tuple[Any, int]:
    """Start the nodes; each has a resource of its own: ``node0``, ``node1``, ..."""
    count = int(os.environ[NODES])
    nodes = [{"num_cpus": NODE_CPUS, "resources": {f"node{n}": 1000}} for n in range(count)]
    return engine.start_nodes(nodes), count


def peers(engine: Engine, ray: Any, count: int) -> list[Any]:
    """An actor on every node."""
    remote = ray.remote(Peer)
    made = [remote.options(resources={f"node{n}": 1}).remote(engine.name) for n in range(count)]
    ray.get([peer.ping.remote() for peer in made])
    return made


@row("actors_over_nodes", Figure("actors created over all nodes", "/s"), limit=300)
def actors_over_nodes(engine: Engine) -> float:
    ray, _ = start_nodes(engine)
    remote = ray.remote(Peer).options(scheduling_strategy="SPREAD")
    count = int(os.environ[ACTORS])
    start = time.perf_counter()
    made = [remote.remote(engine.name) for _ in range(count)]
    ray.get([peer.ping.remote() for peer in made])
    return count / (time.perf_counter() - start)


@row(
    "calls_to_nodes",
    Figure("calls to every node in turn, one at a time", "/s"),
    Figure("calls to every node, 1,000 in flight", "/s"),
    limit=120,
)
def calls_to_nodes(engine: Engine) -> tuple[float, float]:
    ray, count = start_nodes(engine)
    made = peers(engine, ray, count)
    one = rate(lambda: [ray.get(peer.ping.remote()) for peer in made], count)
    each = 1000 // count
    calls = [at_once(ray, peer.ping.remote, each) for peer in made]
    return one, rate(lambda: [call() for call in calls], each * count)


@row("all_to_all", Figure("calls of every node's actor to every other's", "/s"), limit=120)
def all_to_all(engine: Engine) -> float:
    ray, count = start_nodes(engine)
    # Callers and called are two sets: a plain actor that waits for another can't answer.
    callers, called = peers(engine, ray, count), peers(engine, ray, count)
    for number, caller in enumerate(callers):
        ray.get(caller.meet.remote([*called[:number], *called[number + 1 :]]))
    rounds = max(1, 1000 // count)
    operations = rounds * count * (count - 1)
    return rate(lambda: ray.get([c.call_others.remote(rounds) for c in callers]), operations)


@row(
    "broadcast",
    Figure("100 MiB to 8 nodes, in times of a transfer to one", "x", 4),
    Figure("100 MiB to 8 nodes", "s"),
    limit=180,
)
def broadcast(engine: Engine) -> tuple[float, float]:
    import numpy as np

    nodes: list[dict[str, Any]] = [{"num_cpus": NODE_CPUS}]
    nodes += [{"num_cpus": 1, "resources": {f"node{n}": 1000}} for n in range(RECEIVERS)]
    ray = engine.start_nodes(nodes)
    made = peers(engine, ray, RECEIVERS)
    value = np.ones(100 * MIB, dtype=np.uint8)  # read where it arrives, without another copy

    def seconds(receivers: list[Any]) -> float:
        ref = ray.put(value)
        start = time.perf_counter()
        ray.get([peer.take.remote(ref) for peer in receivers])
        return time.perf_counter() - start

    seconds(made)  # memory is warm from here on
    rounds = 5
    single = [seconds([made[n % RECEIVERS]]) for n in range(RECEIVERS)]
    all_at_once = [seconds(made) for _ in range(rounds)]
    one, all_of_them = statistics.median(single), statistics.median(all_at_once)
    return all_of_them / one, all_of_them


class Reader:
    """An actor that has values moved to its node."""

    def take(self, value: Any) -> int:
        return len(value)


class Asker:
    """An actor that asks the head, as its node's heartbeats tell it something."""

    def __init__(self, package: str) -> None:
        self.package = package

    def ask(self, count: int) -> list[float]:
        """Seconds that each of so many requests took."""
        api = importlib.import_module(self.package)
        return [timed(api.available_resources) for _ in range(count)]


def timed(work: Callable[[], Any]) -> float:
    """Seconds that it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def p99(seconds: list[float]) -> float:
    """The 99th percentile in milliseconds."""
    return sorted(seconds)[int(len(seconds) * 0.99)] * 1000


def while_it_moves(ray: Any, reader: Any, sample: Callable[[], list[float]]) -> list[float]:
    """Samples taken while 1 GiB moves to the reader's node, again and again."""
    import numpy as np

    value = np.ones(GIB, dtype=np.uint8)
    found: list[float] = []
    for _ in range(MOVES):
        ref = ray.put(value)
        moving = reader.take.remote(ref)
        while not ray.wait([moving], timeout=0)[0]:
            found += sample()
        assert ray.get(moving) == GIB
        del ref, moving
    return found


#: Keeps a processor busy for as long as nobody else wants it.
IDLER = """
import os, pathlib
os.setsid()
try:
    pathlib.Path("/proc/self/autogroup").write_text("19")
except OSError:
    pass
os.nice(19)
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def busy_processors() -> Iterator[None]:
    """Let loops that give way to everything else keep all processors busy."""
    with contextlib.ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            loop = subprocess.Popen([sys.executable, "-c", IDLER], stdout=subprocess.PIPE)
            stack.enter_context(loop)
            stack.callback(loop.kill)
            assert loop.stdout is not None
            loop.stdout.readline()
        yield


@row(
    "latency_while_moving",
    Figure("call to a node, p99, quiet", "ms"),
    Figure("call to a node, p99, while 1 GiB moves there", "ms"),
    Figure("    times the quiet one", "x", 2),
    Figure("    times that while loops of the lowest priority run", "x"),
    Figure("head request of a node, p99, quiet", "ms"),
    Figure("head request of a node, p99, while 1 GiB moves there", "ms"),
    Figure("    times the quiet one", "x", 2),
    Figure("    times that while loops of the lowest priority run", "x"),
    limit=300,
)
def latency_while_moving(engine: Engine) -> list[float]:
    room = {"num_cpus": NODE_CPUS, "object_store_memory": 5 * GIB // 2}
    ray = engine.start_nodes([room, {**room, "resources": {"there": 3}}])
    there = {"resources": {"there": 1}, "num_cpus": 0}
    peer = ray.remote(Peer).options(**there).remote(engine.name)
    reader = ray.remote(Reader).options(**there).remote()
    asker = ray.remote(Asker).options(**there).remote(engine.name)
    ray.get([peer.ping.remote(), reader.take.remote([]), asker.ask.remote(10)])

    def call() -> list[float]:
        return [timed(lambda: ray.get(peer.ping.remote())) for _ in range(50)]

    def ask() -> list[float]:
        return ray.get(asker.ask.remote(50))

    figures = []
    for sample in (call, ask):
        quiet = p99([seconds for _ in range(60) for seconds in sample()])
        moving = p99(while_it_moves(ray, reader, sample))
        with busy_processors():
            busy = p99([seconds for _ in range(60) for seconds in sample()])
        figures += [quiet, moving, moving / quiet, moving / busy]
    return figures
