"""However a cluster ends, nothing of it stays: no process, no file, no shared memory.

Drivers and nodes run as programs of their own, so that what they leave is all that
there is to find. Children that hide (no environment, a session of their own) are found
by the pids that they write down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_helpers import is_alive, processes_with, wait_until
from command_helpers import CommandLine

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

#: A cluster with an actor, a task that runs, and a large value of each; then what a test adds.
DRIVER = """
import os, signal, subprocess, sys, time
import miniray

@miniray.remote(num_cpus=0)
class Keeper:
    def keep(self, value):
        self.value = value
    def pid(self):
        return os.getpid()
    def fail(self):
        os._exit(1)

@miniray.remote(num_cpus=1)
def forever():
    time.sleep(1000)

@miniray.remote(num_cpus=0)
def large():
    return bytes(5_000_000)

miniray.init(address={address}, {cpus}log_to_driver=False)
keeper = Keeper.remote()
value = miniray.put(bytes(5_000_000))
miniray.get(keeper.keep.remote(value))
running = forever.remote()
result = large.remote()
miniray.wait([result], timeout=30)
print("ready", flush=True)
"""
EMBEDDED = DRIVER.format(address=repr("local"), cpus="num_cpus=2, ")
ATTACHED = DRIVER.format(address=repr("auto"), cpus="")
WAIT = "time.sleep(1000)"


@pytest.fixture
def command(tmp_path: Path) -> Iterator[CommandLine]:
    del tmp_path  # the path of a socket has at most 107 bytes
    root = Path(tempfile.mkdtemp(prefix="mr-hy-", dir="/tmp"))
    command = CommandLine(root, MINIRAY_HEAD_GRACE="1", MINIRAY_STOP_GRACE="1")
    before = shared_memory()
    yield command
    for pid in command.pids():  # of a test that failed
        with contextlib.suppress(ProcessLookupError):  # it ended with the one before
            os.kill(pid, signal.SIGKILL)
    command.leaves_nothing()
    shutil.rmtree(root)
    assert shared_memory() <= before


def shared_memory() -> set[str]:
    """Names in /dev/shm that could be ours."""
    return {
        path.name for path in Path("/dev/shm").glob("*") if path.name.startswith(("mr", "mini"))
    }


def start(command: CommandLine, source: str, **options: bool) -> subprocess.Popen[str]:
    """Start a driver and wait until it is at work."""
    driver = command.popen(sys.executable, "-c", source, **options)
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line == "ready\n", line + driver.communicate(timeout=10)[0]
    return driver


def process_of(command: CommandLine, role: str, *, embedded: bool = False) -> int:
    """The pid of a process of the one node that runs."""
    [record] = [r for r in command.records() if r["embedded"] is embedded]
    return int(record["processes"][role]["pid"])


# --- embedded clusters -----------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [
        "miniray.shutdown()",
        "",
        "sys.exit(3)",
        "raise RuntimeError('the script fails')",
        "os._exit(4)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "miniray.get(keeper.fail.remote())",
        "miniray.kill(keeper); miniray.shutdown()",
        "miniray.shutdown(); miniray.init(address='local', num_cpus=1)",
    ],
)
def test_nothing_is_left_when_the_driver_ends(command: CommandLine, end: str) -> None:
    driver = start(command, EMBEDDED + end)
    driver.communicate(timeout=30)
    # An embedded cluster does not wait for anything: it is gone with its driver, or just after.
    command.leaves_nothing(timeout=10)


def test_shutdown_returns_when_everything_has_ended(command: CommandLine) -> None:
    check = """
miniray.shutdown()
session = [p for p in os.environ if p == "MINIRAY_SESSION"]
root = os.environ["MINIRAY_TMPDIR"]
wanted = f"MINIRAY_TMPDIR={root}".encode()
left = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        environment = open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        continue
    if wanted in environment and int(pid) != os.getpid() and state != "Z":
        left.append(open(f"/proc/{pid}/cmdline").read())
memory = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
          if os.path.lexists(f"/proc/self/fd/{fd}")]
print([left, [m for m in memory if "memfd" in m or "mr-" in m],
       [name for name in os.listdir(root) if name.startswith("mr-")]])
"""
    driver = start(command, EMBEDDED + check)
    output, _ = driver.communicate(timeout=30)
    assert output == "[[], [], []]\n"


@pytest.mark.parametrize("role", ["boot", "head", "template"])
def test_an_embedded_cluster_ends_with_any_of_its_processes(
    command: CommandLine, role: str
) -> None:
    driver = start(command, EMBEDDED + WAIT)
    os.kill(process_of(command, role, embedded=True), signal.SIGKILL)
    wait_until(lambda: command.pids() == {driver.pid}, timeout=10)
    wait_until(lambda: not command.files(), timeout=10)
    assert driver.poll() is None  # the driver goes on, and hears of it when it asks
    driver.kill()
    driver.communicate(timeout=10)


def test_a_driver_whose_cluster_was_killed_hears_of_it(command: CommandLine) -> None:
    told = """
try:
    miniray.get(running)
except miniray.exceptions.RayError as error:
    print(type(error).__name__, flush=True)
miniray.shutdown()
"""
    driver = start(command, EMBEDDED + told)
    os.kill(process_of(command, "boot", embedded=True), signal.SIGKILL)
    output, _ = driver.communicate(timeout=20)
    assert driver.returncode == 0, output
    assert "Error" in output
    command.leaves_nothing()


@pytest.mark.parametrize("handled", [False, True])
def test_ctrl_c_ends_a_script_and_its_cluster(command: CommandLine, handled: bool) -> None:
    """The terminal sends SIGINT to the whole foreground process group."""
    wait = "miniray.get(running)"
    if handled:
        wait = """
try:
    print("waiting", flush=True)
    miniray.get(running)
except KeyboardInterrupt:
    print(miniray.get(keeper.pid.remote()) > 0, flush=True)  # the cluster goes on
"""
    driver = start(command, EMBEDDED + wait, start_new_session=True)
    if handled:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "waiting\n"
    os.killpg(driver.pid, signal.SIGINT)
    output, _ = driver.communicate(timeout=30)
    if handled:
        assert output == "True\n"
        assert driver.returncode == 0
    else:
        assert "KeyboardInterrupt" in output
        assert driver.returncode != 0
    command.leaves_nothing(timeout=10)


# --- started clusters ------------------------------------------------------------------


@pytest.mark.parametrize("role", ["boot", "template"])
def test_a_started_node_ends_when_its_daemon_or_template_is_killed(
    command: CommandLine, tmp_path: Path, role: str
) -> None:
    path = tmp_path / "pids"
    command.start_head("--num-cpus", "2")
    source = f"""{CHILDREN}
@miniray.remote(num_cpus=0)
def work():
    breed({str(path)!r})
    time.sleep(1000)
work.remote()
{WAIT}
"""
    driver = start(command, ATTACHED + source)
    pids = children(path)
    os.kill(process_of(command, role), signal.SIGKILL)
    try:
        wait_until(lambda: command.pids() == {driver.pid}, timeout=10)
        wait_until(lambda: not any(map(is_alive, pids)), timeout=20)
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)
        driver.kill()
        driver.communicate(timeout=10)
    command.leaves_nothing()


def test_all_nodes_end_when_the_one_with_the_head_is_killed(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "2")
    command.join(head, "--num-cpus", "1")
    driver = start(command, ATTACHED + WAIT)
    driver.kill()
    driver.communicate(timeout=10)
    for process in command.records()[0]["processes"].values():
        os.kill(process["pid"], signal.SIGKILL)
    # The other node waits for a head, for as long as it is told to, and ends.
    wait_until(lambda: not command.pids(), timeout=15)
    command.run("status")  # finds, and removes, the record of the node that was killed
    command.leaves_nothing()


def test_a_killed_head_is_followed_by_another_one(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "2", MINIRAY_HEAD_GRACE="30")
    command.join(head, "--num-cpus", "1", MINIRAY_HEAD_GRACE="30")
    more = """
import glob, json
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
nodes = sorted(n["NodeID"] for n in miniray.nodes())
@miniray.remote(num_cpus=0)
class Counter:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return self.count
@miniray.remote(num_cpus=1)
def slow(number):
    time.sleep(0.02)
    return number
counters = [Counter.options(name=f"counter {i}", scheduling_strategy=On(node, soft=False)).remote()
            for i, node in enumerate(nodes)]
print(miniray.get([counter.add.remote() for counter in counters]), flush=True)
miniray.cancel(running, force=True)
numbers = [slow.remote(number) for number in range(100)]
miniray.wait(numbers, num_returns=5)
records = [json.load(open(path)) for path in
           glob.glob(os.environ["MINIRAY_TMPDIR"] + "/miniray-*/clusters/*.json")]
[pid] = [record["processes"]["head"]["pid"] for record in records if record["is_head"]]
os.kill(pid, signal.SIGKILL)
print(miniray.get([counter.add.remote() for counter in counters]), flush=True)
print(len(miniray.nodes()) in (1, 2), sum(miniray.get(numbers)), flush=True)
print(miniray.get(miniray.get_actor("counter 1").add.remote()), flush=True)
print(miniray.get(Counter.remote().add.remote()), flush=True)
while miniray.available_resources().get("CPU") != 3 or len(miniray.nodes()) != 2:
    time.sleep(0.05)
"""
    driver = start(command, ATTACHED + more)
    output, _ = driver.communicate(timeout=50)
    assert driver.returncode == 0, output
    assert output.splitlines() == ["[1, 1]", "[2, 2]", "True 4950", "3", "1"]
    assert f"at {head.address}: 2 nodes," in command.run("status").stdout
    assert command.run("stop").returncode == 0
    assert not command.pids()


def test_no_work_is_lost_or_left_when_heads_are_killed_under_load(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "2", MINIRAY_HEAD_GRACE="30")
    command.join(head, "--num-cpus", "2", MINIRAY_HEAD_GRACE="30")
    source = """
import glob, json, os, signal, threading, time
import miniray
from miniray.util.placement_group import placement_group, remove_placement_group
miniray.init(address="auto", log_to_driver=False)

@miniray.remote(num_cpus=0)
class Counter:
    def __init__(self): self.count = 0
    def add(self): self.count += 1; return self.count
@miniray.remote
def short(number):
    time.sleep(0.01)
    return number
@miniray.remote
def nested(count):
    return sum(miniray.get([short.remote(number) for number in range(count)]))

def head():
    records = [json.load(open(path)) for path in
               glob.glob(os.environ["MINIRAY_TMPDIR"] + "/miniray-*/clusters/*.json")]
    return next((r["processes"]["head"]["pid"] for r in records if r["is_head"]), None)

def kill_heads():
    for _ in range(2):
        pid, begun = head(), turn
        while turn < begun + 1:  # there is work before, and between the two
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        while head() in (pid, None):
            time.sleep(0.05)
killer = threading.Thread(target=kill_heads, daemon=True)
turn = 0
killer.start()
while killer.is_alive():
    counter = Counter.options(name=f"counter {turn}").remote()
    group = placement_group([{"CPU": 1}])
    refs = [short.remote(number) for number in range(40)] + [nested.remote(3), nested.remote(3)]
    assert sum(miniray.get(refs, timeout=30)) == 786
    assert miniray.get([counter.add.remote() for _ in range(5)], timeout=30) == [1, 2, 3, 4, 5]
    assert group.wait(30)
    assert miniray.get(miniray.get_actor(f"counter {turn}").add.remote(), timeout=30) == 6
    remove_placement_group(group)
    del counter
    turn += 1
while miniray.available_resources().get("CPU") != 4 or len(miniray.nodes()) != 2:
    time.sleep(0.05)
print(json.dumps(turn))
"""
    assert command.python(source) > 0
    wait_until(lambda: "No actors." in command.run("status").stdout)
    assert command.run("stop").returncode == 0
    assert not command.pids()


def test_a_driver_that_is_killed_takes_what_it_started_with_it(command: CommandLine) -> None:
    command.start_head("--num-cpus", "2")
    nodes = command.pids()
    held = []
    for _ in range(3):
        driver = start(command, ATTACHED + WAIT)
        assert command.pids() > nodes
        driver.kill()
        driver.communicate(timeout=10)
        wait_until(lambda: command.pids() == nodes, timeout=15)
        wait_until(lambda: "No actors." in command.run("status").stdout)
        held.append(segments(process_of(command, "boot")))
    assert max(held) == held[0]  # those of before are used again
    assert command.run("stop").returncode == 0
    command.leaves_nothing()


def segments(pid: int) -> int:
    """How many large values' memory a node daemon holds, with what it keeps warm for others."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(entry.readlink()))
    return sum(link.startswith("/memfd:miniray") for link in links)


# --- children of user code -----------------------------------------------------------------

#: Starts every kind of child that user code may leave, and returns their pids.
CHILDREN = """
def breed(path):
    import multiprocessing, signal, subprocess
    forked, spawned = (multiprocessing.get_context(name) for name in ("fork", "spawn"))
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.Popen(["sleep", "1000"], **quiet)
    subprocess.Popen(["sleep", "1000"], start_new_session=True, **quiet)
    subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True, **quiet)
    stubborn = "import time; from signal import *; signal(SIGTERM, SIG_IGN); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", stubborn], **quiet)
    forked.Process(target=time.sleep, args=(1000,), daemon=True).start()
    spawned.Process(target=time.sleep, args=(1000,)).start()
    me, pids = os.getpid(), []
    if os.fork() == 0:  # a daemon as the book has it: twice forked, with nothing of its parent's
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.execve("/bin/sleep", ["sleep", f"1000.{me}"], {})  # its parent is told by this alone
    os.wait()
    while len(pids) < 7:
        time.sleep(0.05)
        pids = [pid for pid in descendants() if pid != me]
    with open(path, "w") as file:
        file.write(" ".join(map(str, [me, *pids])))
    return os.getpid()

def descendants():
    parents = {}
    names = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            head, _, rest = open(f"/proc/{pid}/stat").read().rpartition(")")
            command = open(f"/proc/{pid}/cmdline").read()
        except OSError:
            continue
        parents[int(pid)] = int(rest.split()[1])
        names[int(pid)] = command
    template = parents[os.getpid()]
    found = []
    for pid in parents:
        up = pid
        while up > 1 and up != os.getpid():
            up = parents.get(up, 0)
        orphan = parents[pid] == template and names[pid].endswith(f"1000.{os.getpid()}\\0")
        if up == os.getpid() or orphan:
            found.append(pid)
    return found
"""


def children(path: Path) -> list[int]:
    """The pids that user code wrote down: its own and those of its children."""
    wait_until(lambda: path.exists() and path.read_text())
    pids = [int(pid) for pid in path.read_text().split()]
    assert len(pids) >= 8
    return pids


#: What ends an actor while its cluster goes on, and what ends both.
ENDS_OF_ACTORS = {
    "the actor is killed": "miniray.kill(breeder)",
    "the actor's last handle goes": "del breeder",
    "the actor's process is killed": "os.kill(pid, signal.SIGKILL)",
    "the actor exits": "breeder.leave.remote()",
}
ENDS_OF_CLUSTERS = {
    "the cluster is shut down": "miniray.shutdown()",
    "the driver is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "Ctrl-C ends the driver": "os.kill(os.getpid(), signal.SIGINT)",
}
BREEDER = f"""{CHILDREN}
@miniray.remote(num_cpus=0)
class Breeder:
    def breed(self, path):
        return breed(path)
    def leave(self):
        miniray.actor.exit_actor()
"""


def breeds(path: Path, end: str) -> str:
    """Code that makes an actor and its children, and then ends it."""
    return f"""
breeder = Breeder.remote()
pid = miniray.get(breeder.breed.remote({str(path)!r}))
{end}
"""


def all_end(command: CommandLine, driver: subprocess.Popen[str], pids: list[int]) -> None:
    """Wait until the children have ended; whatever happens, nothing goes on after this."""
    try:
        wait_until(lambda: not any(map(is_alive, pids)), timeout=20)
    finally:
        left = [pid for pid in pids if is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        driver.kill()
        driver.communicate(timeout=10)
    assert not left
    command.leaves_nothing()


def test_the_children_of_an_actor_end_with_it(command: CommandLine, tmp_path: Path) -> None:
    paths = {end: tmp_path / str(number) for number, end in enumerate(ENDS_OF_ACTORS)}
    source = "".join(breeds(paths[end], code) for end, code in ENDS_OF_ACTORS.items())
    driver = start(command, EMBEDDED + BREEDER + source + WAIT)
    pids = {end: children(path) for end, path in paths.items()}
    left = {end: pids[end] for end in ENDS_OF_ACTORS}

    def all_ended() -> bool:
        for end, family in pids.items():
            left[end] = [pid for pid in family if is_alive(pid)]
        return not any(left.values())

    try:
        wait_until(all_ended, timeout=20, told=lambda: str(left))
    finally:
        all_end(command, driver, [pid for family in pids.values() for pid in family])


@pytest.mark.parametrize("end", ENDS_OF_CLUSTERS)
def test_the_children_of_an_actor_end_with_its_cluster(
    command: CommandLine, tmp_path: Path, end: str
) -> None:
    path = tmp_path / "pids"
    source = EMBEDDED + BREEDER + breeds(path, ENDS_OF_CLUSTERS[end]) + WAIT
    driver = start(command, source)
    pids = children(path)
    all_end(command, driver, pids)


def test_the_children_of_an_actor_end_with_stop(command: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "pids"
    command.start_head("--num-cpus", "2")
    driver = start(command, ATTACHED + BREEDER + breeds(path, WAIT))
    pids = children(path)
    assert command.run("stop").returncode == 0
    left = [pid for pid in pids if is_alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    driver.kill()
    driver.communicate(timeout=10)
    assert not left
    command.leaves_nothing()


@pytest.mark.parametrize("role", ["boot", "template", "head"])
def test_the_children_of_a_task_end_with_the_node(
    command: CommandLine, tmp_path: Path, role: str
) -> None:
    path = tmp_path / "pids"
    source = f"""{CHILDREN}
@miniray.remote
def work():
    breed({str(path)!r})
    time.sleep(1000)
work.remote()
time.sleep(1000)
"""
    driver = start(command, EMBEDDED + source)
    pids = children(path)
    os.kill(process_of(command, role, embedded=True), signal.SIGKILL)
    all_end(command, driver, pids)


def test_processes_carry_the_name_of_their_session(command: CommandLine) -> None:
    driver = start(command, EMBEDDED + WAIT)
    [record] = command.records()
    tag = ("MINIRAY_SESSION", record["session"]["id"])
    wait_until(lambda: command.pids() - {driver.pid} == processes_with(*tag))
    driver.kill()
    driver.communicate(timeout=10)
    wait_until(lambda: not processes_with(*tag))
