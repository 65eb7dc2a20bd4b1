"""The template process: what it forks, what it reaps, and what it ends."""

from __future__ import annotations

import asyncio
import errno
import marshal
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from open_files import open_files
from template_node import SLEEP, Node, alive, until, with_node, worker_spec

from miniray.node.base.control_socket import control_pair
from miniray.node.base.template_client import TemplateClient, TemplateGoneError
from miniray.node.workers import template as template_module
from miniray.node.workers.template import Template
from miniray.worker import stdio

if TYPE_CHECKING:
    from collections.abc import Iterator


@with_node
async def test_workers_are_forked_and_their_ends_are_told(node: Node) -> None:
    assert await node.run("print('hello')") == (0, "hello\n")
    assert await node.run("import os; os._exit(7)") == (7, "")
    assert (await node.run("import os, signal; os.kill(os.getpid(), 9)"))[0] == -9


@with_node
async def test_many_workers_at_once_are_told_apart(node: Node) -> None:
    runs = await asyncio.gather(*(node.run(f"print({n})") for n in range(30)))
    assert [output.strip() for _, output in runs] == [str(n) for n in range(30)]


@with_node
async def test_the_end_of_a_worker_is_told_after_its_start(node: Node) -> None:
    done = node.cleanup / "done"

    async def start() -> tuple[int, dict[int, int]]:
        pid, _ = await node.fork(f"open({str(done)!r}, 'w').close()")
        return pid, dict(node.exits)

    starting = asyncio.ensure_future(start())
    await asyncio.sleep(0)
    template = psutil.Process(node.process.pid)
    while not done.exists() or template.children() or template.status() != "sleeping":
        """Nothing is read meanwhile."""
    pid, ended = await starting
    assert ended == {}
    await until(lambda: pid in node.exits)


@with_node
async def test_a_worker_gets_a_session_its_variables_and_a_closed_stdin(node: Node) -> None:
    code = (
        "import os, sys;"
        "print(os.getsid(0) == os.getpid(), os.environ['MINE'], repr(sys.stdin.read()))"
    )
    assert await node.run(code, environment={"MINE": "yes"}) == (0, "True yes ''\n")


@with_node
async def test_a_worker_inherits_no_descriptor_of_the_template(node: Node) -> None:
    code = "import os; os.close(spec['file'])"  # its own, which no stand-in of a worker closes
    code += "; print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:-1])"
    _, output = await node.run(code)
    assert output == "[0, 1, 2]\n"


@with_node
async def test_workers_begin_with_different_random_states(node: Node) -> None:
    runs = [await node.run("import random; print(random.random())") for _ in range(2)]
    assert runs[0] != runs[1]


@with_node
async def test_a_spec_of_any_size_reaches_its_worker(node: Node) -> None:
    """Such as the arguments of an actor's constructor: far more than a message holds."""
    code = "print(len(spec['blob']))"
    assert await node.run(code, blob=b"x" * 5_000_000) == (0, "5000000\n")


@with_node
async def test_a_worker_may_be_a_new_interpreter(node: Node) -> None:
    script = node.cleanup / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "from miniray.worker import stdio\n"
        "spec = stdio.read_spec(int(sys.argv[3]))\n"
        "print(spec['code'], len(spec['blob']), os.environ['MINE'])\n"
    )
    script.chmod(0o700)
    outcome = await node.run(
        "fresh", python=str(script), blob=b"x" * 300_000, environment={"MINE": "yes"}
    )
    assert outcome == (0, "fresh 300000 yes\n")


@with_node
async def test_a_worker_that_cannot_start_harms_nobody_else(node: Node) -> None:
    code, _ = await node.run("", python="/nonexistent/python")
    assert code == 1
    assert await node.run("print('fine')") == (0, "fine\n")
    assert node.cleanup.exists()


@with_node
async def test_a_worker_can_be_killed(node: Node) -> None:
    pid, read = await node.fork(SLEEP)
    assert await node.line(read) == "sleeping"
    node.client.kill(pid, signal.SIGTERM)
    await until(lambda: pid in node.exits)
    assert node.exits[pid] == -signal.SIGTERM
    node.client.kill(pid)  # gone already: nobody is hit


@with_node
async def test_children_that_a_worker_leaves_are_gone_when_its_end_is_told(node: Node) -> None:
    code = (
        "import subprocess, sys;"
        "s = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        "a = subprocess.Popen(s); b = subprocess.Popen(s, start_new_session=True);"
        "print(a.pid, b.pid)"
    )
    code, output = await node.run(code)  # type: ignore[assignment]
    assert not any(alive(int(pid)) for pid in output.split())


@with_node
async def test_orphans_of_a_living_worker_outlive_the_end_of_another(node: Node) -> None:
    """One that was only forked carries no variables of its worker: its session tells."""
    living = (
        "import os, time, subprocess, sys\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        time.sleep(600)\n"
        "    os.write(write, str(child).encode())\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.read(read, 100).decode(), p.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    pid, read = await node.fork(living)
    orphans = [int(part) for part in (await node.line(read)).split()]
    await node.run("print('short')")
    assert all(alive(orphan) for orphan in orphans)
    node.client.kill(pid)
    await until(lambda: pid in node.exits)
    assert not any(alive(orphan) for orphan in orphans)


#: Waits in the kernel: the parent of a vfork does until its child has ended.
STUCK = "import ctypes, os, time; print(os.getpid(), flush=True)\n"
STUCK += "ctypes.CDLL(None).vfork() or time.sleep(600)"
#: A worker that leaves such a process, in a session of its own, to the template.
WITH_STUCK = f"""
import subprocess, sys, time
start = ["sh", "-c", 'setsid "$0" -c "$1" &', sys.executable, {STUCK!r}]
child = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
"""


def waits_in_the_kernel(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"


@with_node
async def test_an_orphan_that_waits_in_the_kernel_is_ended_once_it_does_no_longer(
    node: Node,
) -> None:
    """Until then nobody can tell safely whose it is, so workers that live are left alone."""
    pid, read = await node.fork(f"{WITH_STUCK}time.sleep(600)")
    stuck = int(await node.line(read))
    await until(lambda: waits_in_the_kernel(stuck))
    await node.fork(SLEEP)  # another one lives on
    node.client.kill(pid)
    await until(lambda: node.lingering.get(pid) == [stuck])
    assert alive(stuck)
    [child] = psutil.Process(stuck).children()
    child.kill()
    await until(lambda: pid in node.exits)
    assert not alive(stuck)


@with_node
async def test_nothing_is_left_when_the_daemon_is_gone(node: Node) -> None:
    code = (
        "import subprocess, sys, time, signal;"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "s = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        "print(subprocess.Popen(s, start_new_session=True).pid, flush=True); time.sleep(600)"
    )
    workers = [await node.fork(code) for _ in range(3)]
    children = [int(await node.line(read)) for _, read in workers]
    (node.cleanup / "p-socket").touch()
    node.client.control.shutdown(2)  # as the kernel does for a daemon under SIGKILL
    await until(lambda: node.process.poll() is not None)
    assert not any(alive(pid) for pid in [*children, *(pid for pid, _ in workers)])
    assert not node.cleanup.exists()
    assert node.gone == 1


@with_node
async def test_a_killed_template_is_noticed_and_open_requests_fail(node: Node) -> None:
    os.kill(node.process.pid, signal.SIGSTOP)
    start = asyncio.ensure_future(node.fork("print('never')"))
    await asyncio.sleep(0)
    os.kill(node.process.pid, signal.SIGKILL)
    with pytest.raises(TemplateGoneError):
        await asyncio.wait_for(start, 10)
    assert node.gone == 1
    with pytest.raises(TemplateGoneError):
        await node.fork("print('never')")
    with pytest.raises(TemplateGoneError):
        node.client.fork_template([])
    node.client.kill(1)  # nobody there: nothing happens


@with_node
async def test_a_request_to_a_killed_template_fails_as_such_before_its_end_is_noticed(
    node: Node,
) -> None:
    os.kill(node.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, node.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(TemplateGoneError):
        await asyncio.wait_for(node.fork("print('never')"), 10)
    assert node.gone == 1


@with_node
async def test_a_template_without_descriptors_refuses_and_goes_on(node: Node) -> None:
    await node.run("print('warm')")
    pid = node.process.pid
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    two_more = next(n for n in range(1000) if n - len([fd for fd in used if fd < n]) == 2)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (two_more, before[1]))
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        await node.fork("print('never')")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert await node.run("print('again')") == (0, "again\n")


@with_node
async def test_closing_fails_what_waits_and_closes_its_descriptors(node: Node) -> None:
    before = open_files()
    control = os.fstat(node.client.control.fileno()).st_ino
    node.client.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    os.kill(node.process.pid, signal.SIGSTOP)
    try:
        starts = [asyncio.ensure_future(node.fork("")) for _ in range(100)]
        await asyncio.sleep(0)
        assert node.client._socket._queue  # more than the socket takes
        node.client.close()
        node.client.close()
        results = await asyncio.gather(*starts, return_exceptions=True)
    finally:
        os.kill(node.process.pid, signal.SIGCONT)
    assert all(isinstance(result, TemplateGoneError) for result in results)
    opened = open_files() - before
    assert set(opened.values()) == {1}  # the read ends of the pipes, which are this test's
    assert len(opened) == 100
    assert f"socket:[{control}]" not in open_files()
    assert node.gone == 0


@with_node
async def test_a_process_of_the_nodes_own_can_be_ended_though_it_is_stopped(node: Node) -> None:
    helper = node.client.fork_helper("miniray.node.transfer.mover")
    with helper.control as control:
        control.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(control, marshal.dumps(("there?",)))
        assert marshal.loads(await loop.sock_recv(control, 1000)) == ("there",)
        [mover] = psutil.Process(node.process.pid).children()
        mover.suspend()
        helper.kill()
        assert await asyncio.wait_for(loop.sock_recv(control, 1000), 10) == b""
    helper.kill()  # it is gone


@with_node
async def test_a_template_can_have_another_with_more_modules(node: Node) -> None:
    exits: dict[int, int] = {}
    gone: list[int] = []
    control = node.client.fork_template(["colorsys"])
    other = TemplateClient(
        control, 0, exits.__setitem__, lambda: gone.append(1), node.lingering.__setitem__
    )
    read, write = os.pipe2(os.O_CLOEXEC)
    node.outputs.append(read)
    code = "import sys; print('colorsys' in sys.modules)"
    pid = await other.fork(stdio.make(worker_spec(code)), write, os.open(os.devnull, os.O_WRONLY))
    await until(lambda: pid in exits)
    assert os.read(read, 100) == b"True\n"
    assert other.pid not in (0, node.process.pid)
    _, first = await node.run("import sys; print('colorsys' in sys.modules)")
    assert first == "False\n"  # the first one stays as it was
    other.close()
    await until(lambda: not alive(other.pid))


@pytest.mark.parametrize("before", [None, "1"])
def test_modules_are_loaded_without_the_backends_of_vendors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    variable = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    (tmp_path / "like_torch.py").write_text(f"import os; loads = os.environ.get({variable!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "like_torch", raising=False)
    if before is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, before)
    template_module._import(["like_torch"])
    assert sys.modules["like_torch"].loads == "0"
    assert os.environ.get(variable) == before  # what workers load themselves is up to the user


@with_node
async def test_workers_of_a_template_that_was_killed_are_ended(node: Node) -> None:
    gone: list[int] = []
    exits: dict[int, int] = {}
    control = node.client.fork_template([])
    other = TemplateClient(
        control, 0, exits.__setitem__, lambda: gone.append(1), node.lingering.__setitem__
    )
    read, write = os.pipe2(os.O_CLOEXEC)
    node.outputs.append(read)
    pid = await other.fork(stdio.make(worker_spec(SLEEP)), write, os.open(os.devnull, os.O_WRONLY))
    assert await node.line(read) == "sleeping"
    os.kill(other.pid, signal.SIGKILL)
    await until(lambda: gone)
    await until(lambda: not alive(pid))
    assert await node.run("print('fine')") == (0, "fine\n")


@with_node
async def test_a_template_whose_modules_cannot_be_imported_does_without_them(node: Node) -> None:
    control = node.client.fork_template(["there_is_no_such_module"])
    larger = TemplateClient(
        control, 0, lambda _pid, _status: None, lambda: None, lambda _pid, _left: None
    )
    await until(lambda: larger.ready)
    larger.close()
    assert await node.run("print('fine')") == (0, "fine\n")


# --- children that cannot be killed ------------------------------------------------------
class Kernel:
    """Stands in for the kernel: children of the template, and what it reaps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ours, theirs = control_pair()
        self.template = Template(theirs, [], None)
        self._ends = (ours, theirs)
        #: pid: (session, id of the worker in its environment; None: it can't be read now)
        self.children: dict[int, tuple[int, str | None]] = {}
        self.dead: list[int] = []
        self.told: list[int] = []
        #: What was told of ended workers that have left something: those pids.
        self.left: dict[int, list[int]] = {}
        #: Pids that may not be killed.
        self.forbidden: set[int] = set()
        self.killed: list[int] = []
        monkeypatch.setattr(template_module, "children_of", lambda _pid: list(self.children))
        monkeypatch.setattr(template_module, "_session_of", lambda pid: self.children[pid][0])
        monkeypatch.setattr(template_module, "worker_of", lambda pid: self.children[pid][1])
        monkeypatch.setattr(
            os, "waitpid", lambda *_: (self.dead.pop(0), 0) if self.dead else (0, 0)
        )
        monkeypatch.setattr(os, "kill", self._kill)
        monkeypatch.setattr(self.template, "_send", self._hear)

    def _kill(self, pid: int, _number: int) -> None:
        if pid in self.forbidden:
            raise PermissionError
        self.killed.append(pid)

    def _hear(self, message: tuple[Any, ...]) -> None:
        if message[0] == "exited":
            self.told.append(message[1])
        else:
            self.left[message[1]] = message[2]

    def worker(self, pid: int, id: str) -> None:
        self.template._workers[pid] = id
        self.children[pid] = (pid, id)

    def reap(self, *pids: int) -> list[int]:
        """These processes are gone; the workers whose end is told now."""
        for pid in pids:
            del self.children[pid]
        self.dead += pids
        self.template._reap()
        told, self.told[:] = list(self.told), []
        return told

    def close(self) -> None:
        for end in self._ends:
            end.close()
        os.close(self.template._wake_read)
        os.close(self.template._wake_write)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel(monkeypatch)
    yield kernel
    monkeypatch.undo()
    kernel.close()


@pytest.mark.parametrize(
    "child", [(1, ""), (99, "one")], ids=["by its session", "by its environment"]
)
def test_a_child_that_does_not_end_delays_only_its_own_workers_end(
    kernel: Kernel, child: tuple[int, str]
) -> None:
    for pid, id in ((1, "one"), (2, "two"), (3, "three")):
        kernel.worker(pid, id)
    kernel.children[7] = child
    assert kernel.reap(1, 2) == [2]
    assert kernel.reap(3) == [3]
    assert set(kernel.killed) == {7}
    assert kernel.reap(7) == [1]


def test_a_child_of_unknown_origin_delays_those_that_had_ended_and_nobody_later(
    kernel: Kernel,
) -> None:
    for pid, id in ((1, "one"), (2, "two"), (3, "three")):
        kernel.worker(pid, id)
    kernel.children[7] = (99, "")
    assert kernel.reap(1, 2) == []
    assert kernel.reap(3) == [3]
    assert kernel.reap(7) == [1, 2]


def test_what_a_worker_has_left_is_told_and_told_again_when_it_changes(kernel: Kernel) -> None:
    kernel.worker(1, "one")
    kernel.children |= {7: (1, ""), 8: (1, "")}
    assert kernel.reap(1) == []
    assert kernel.left == {1: [7, 8]}
    kernel.children[9] = (1, "")  # of the one that goes
    assert kernel.reap(7) == []
    assert kernel.left == {1: [8, 9]}
    assert kernel.reap(8, 9) == [1]


def test_a_child_that_may_not_be_killed_is_waited_for(kernel: Kernel) -> None:
    kernel.worker(1, "one")
    kernel.children[7] = (99, "one")
    kernel.forbidden.add(7)
    assert kernel.reap(1) == []
    assert kernel.left == {1: [7]}
    assert kernel.reap(7) == [1]


def test_what_a_template_that_ends_has_started_is_killed_and_what_that_has(kernel: Kernel) -> None:
    kernel.template._helpers[4] = 1
    kernel.children[4] = (4, "")
    kernel.children |= {5: (5, "five"), 7: (77, "")}  # they fall to this one when it ends
    kernel.reap(4)
    assert set(kernel.killed) == {5, 7}
    kernel.children[8] = (88, "")
    kernel.reap(5)
    assert 8 in kernel.killed


def test_what_a_worker_that_is_asked_to_end_may_keep_spares_no_workers_of_a_killed_template(
    kernel: Kernel,
) -> None:
    kernel.worker(1, "one")
    kernel.template._asked.add(1)
    kernel.children[7] = (1, "one")
    assert kernel.reap(1) == []
    kernel.template._helpers[4] = 1
    kernel.children[4] = (4, "")
    kernel.children[5] = (5, "five")
    kernel.reap(4)
    assert set(kernel.killed) == {5}
    assert kernel.reap(5) == []
    assert kernel.reap(7) == [1]


def test_children_of_living_workers_are_left_alone(kernel: Kernel) -> None:
    for pid, id in ((1, "one"), (2, "two")):
        kernel.worker(pid, id)
    kernel.children |= {7: (2, ""), 8: (99, "two")}
    assert kernel.reap(1) == [1]
    assert kernel.killed == []


def test_a_child_that_may_hang_its_reader_is_left_alone_until_it_can_be_told_whose_it_is(
    kernel: Kernel,
) -> None:
    for pid, id in ((1, "one"), (2, "two"), (3, "three")):
        kernel.worker(pid, id)
    kernel.children |= {7: (99, None), 8: (98, None)}
    assert kernel.reap(1) == []
    assert kernel.reap(2) == [2]  # who ends later does not wait for them
    assert kernel.killed == []
    kernel.children |= {7: (99, "three"), 8: (98, "one")}
    kernel.template._look_for_strays()
    assert kernel.killed == [8]
    assert kernel.left[1] == [8]
    assert kernel.reap(8) == [1]


def test_without_living_workers_it_is_nobody_elses(kernel: Kernel) -> None:
    kernel.worker(1, "one")
    kernel.children[7] = (99, None)
    assert kernel.reap(1) == []
    assert kernel.killed == [7]
    assert kernel.reap(7) == [1]
