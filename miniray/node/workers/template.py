"""The template process: forks workers in milliseconds, reaps them, and kills their orphans.

It has the worker's code imported, but no part of miniray running: no thread, no socket but the one
to its daemon. As the parent of all workers it can kill them without a race, and knows how each one
ended. It is a subreaper: children of user code fall to it when their worker ends, and are killed
("strays"). If the daemon dies, by SIGKILL too, the template ends every worker and removes the files
of the session.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import errno
import gc
import importlib
import marshal
import os
import random
import select
import signal
import socket
import sys
import threading
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from miniray.common.process_state import (
    children_of,
    may_hang_readers,
    python_command,
    set_title,
    variable_of,
)
from miniray.node.base import control_socket
from miniray.worker import stdio

if TYPE_CHECKING:
    from collections.abc import Callable

#: Workers and their children carry this variable, which identifies strays.
WORKER_VARIABLE = "MINIRAY_WORKER_ID"
_PR_SET_CHILD_SUBREAPER = 36
_WORKER_FDS = 3
#: Seconds until children that do not end, or whose worker is unknown, are examined again.
_LOOK_AGAIN = 0.2
#: Exit codes of commands that cannot be run, as shells have them.
_NOT_FOUND, _NOT_RUN = 127, 126
#: Strays of a worker that are named to the daemon, at most.
_MAX_NAMED = 16
#: Added to the nice value for imports beside other work, which then get two thirds of its share:
#: with far less they are not done on a busy machine when the next ranks start.
_NICER = 2
#: Variables for imports: what they keep away may start threads or use devices, which do not survive
#: a fork. Backends of vendors for PyTorch
#: (https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html), and the thread of
#: Arrow's jemalloc. Threads of OpenBLAS: each worker would start them anew, and they poll for 0.1 s
#: then. A worker gets its number later (``limit_threads``).
_FOR_IMPORTS = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
}


def set_subreaper() -> None:
    """Make orphaned descendants children of this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@dataclasses.dataclass(eq=False, repr=False)
class Template:
    """Serves one daemon until it is gone.

    Args:
        control: The socket to the daemon.
        preload: Modules that every worker has imported.
        clean_up: Called at the end if the daemon died instead of hanging up.
        beside: Whether to import them at a lower priority than that of other processes.
    """

    control: socket.socket
    preload: list[str]
    clean_up: Callable[[], None] | None
    _: dataclasses.KW_ONLY
    beside: bool = False

    def __post_init__(self) -> None:
        #: Living workers: pid → the id in their environment.
        self._workers: dict[int, str] = {}
        #: Templates with more modules, and other processes of the node's own, forked from this one:
        #: pid → the daemon's number for it.
        self._helpers: dict[int, int] = {}
        #: Workers that have ended, whose strays are not all gone yet: pid → wait status, and id.
        self._ended: dict[int, tuple[int, str]] = {}
        #: Strays: pid → the ended workers whose end is reported after theirs. One that a device
        #: driver holds in the kernel may stay for long.
        self._strays: dict[int, set[int]] = {}
        #: Workers whose process group got a signal to end: what they leave may
        #: still end by itself, until the daemon has them killed.
        self._asked: set[int] = set()
        #: Strays that may be a living worker's children, as their environment cannot be read now:
        #: they are not killed yet.
        self._unknown: set[int] = set()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> Callable[[], NoReturn]:
        """Serve; in a new worker, return the function that it has to run."""
        set_title("template")
        set_subreaper()
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the daemon decides when it ends
        gc.disable()  # it would take a tenth of the time of imports
        if self.beside:
            _import_beside(self.preload)
        else:
            _import(self.preload)
        _keep_finalizers_from_workers()
        gc.freeze()  # in workers too: a collection would copy the memory that they share
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        self._send(("ready", os.getpid()))
        while True:
            ready = poller.poll(1000 * _LOOK_AGAIN if self._unknown else None)
            if not ready:
                self._look_for_strays()
            for fd, _ in ready:
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                else:
                    worker = self._handle()
                    if worker is not None:
                        return worker

    # --- the daemon's requests -----------------------------------------------------------
    def _handle(self) -> Callable[[], NoReturn] | None:
        data, fds = control_socket.receive(self.control)
        if not data:
            self._end_everything()
        match marshal.loads(data):
            case ("fork", token):
                return self._fork(token, fds)
            case ("template", (preload, beside), number):
                return self._fork_helper(
                    lambda own: run_template(own, preload, None, beside=beside), number, fds
                )
            case ("helper", module, number):
                return self._fork_helper(lambda own: run_helper(own, module), number, fds)
            case ("kill", pid, number):
                self._asked.discard(pid)
                if pid in self._workers:
                    _kill(pid, number)
                self._look_for_strays()
            case ("ask", pid, number) if pid in self._workers:
                self._asked.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)
            case ("kill_helper", number):
                for pid, each in self._helpers.items():
                    if each == number:
                        _kill(pid, signal.SIGKILL)
            case ("end",):  # the daemon hangs up next, and goes on itself
                self.clean_up = None
        return None

    def _fork(self, token: int, fds: list[int]) -> Callable[[], NoReturn] | None:
        """Fork a worker. The descriptors are its stdout, its stderr, and its file."""
        pid = -1
        try:
            if len(fds) != _WORKER_FDS:  # the kernel drops what does not fit here
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            spec = stdio.read_spec(fds[-1])
            pid = os.fork()
        except OSError as error:
            self._send(("refused", token, f"{error.strerror}"))
        if pid == 0:
            return self._become_worker(spec, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            self._workers[pid] = spec["process_id"].hex()
            self._send(("forked", token, pid))
        return None

    def _fork_helper(
        self, run: Callable[[socket.socket], NoReturn], number: int, fds: list[int]
    ) -> Callable[[], NoReturn] | None:
        """Fork a template with more modules, or another process of the node's own."""
        pid = -1
        try:
            if fds:
                pid = os.fork()
        except OSError as error:
            print(f"a process of the node cannot be started: {error}", file=sys.stderr)  # noqa: T201
        if pid != 0:
            for fd in fds:
                os.close(fd)  # if none was started, this notifies the daemon
            if pid > 0:
                self._helpers[pid] = number
            return None
        self.control.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        own = socket.socket(fileno=fds[0])
        return lambda: run(own)

    def _become_worker(self, spec: dict[str, Any], fds: list[int]) -> Callable[[], NoReturn]:
        try:
            self._enter_worker(spec, fds)
        except BaseException:  # noqa: BLE001 - the template's code must not run in its child
            traceback.print_exc()
            os._exit(1)

        def run() -> NoReturn:
            from miniray.worker.main import run_worker

            run_worker(spec)

        return run

    def _enter_worker(self, spec: dict[str, Any], fds: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self.control.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        stdout, stderr, file = fds
        for target, source in enumerate((null, stdout, stderr)):
            os.dup2(source, target)
            os.close(source)
        os.environ.update(spec["environment"])
        if spec.get("command"):
            _run_command(spec["command"], spec["cwd"])
        gc.enable()
        _fresh_random_state()
        if spec["python"] is not None:
            # A new interpreter: variables that libraries read when they load take effect.
            os.set_inheritable(file, True)
            python = spec["python"]
            command = python_command("miniray.worker.main")
            os.execv(python, [python, "-c", command, str(file)])  # noqa: S606
        spec["file"] = file

    # --- ends ----------------------------------------------------------------------
    def _reap(self) -> None:
        left = False  # by a template or a stray: its children are strays now
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            was_stray = self._strays.pop(pid, None) is not None
            left = left or was_stray or self._helpers.pop(pid, None) is not None
            self._unknown.discard(pid)
            worker = self._workers.pop(pid, None)
            if worker is not None:
                self._ended[pid] = status, worker
        if left:
            self._kill_strays()
        self._look_for_strays()

    def _look_for_strays(self) -> None:
        """Kill strays, and report the workers that have none left."""
        if self._ended or self._unknown:
            self._kill_strays()
            self._report_ends()

    def _report_ends(self) -> None:
        """Report which ended workers have no strays left, and the strays of the others."""
        left: dict[int, list[int]] = {}
        for stray, workers in self._strays.items():
            for worker in workers:
                left.setdefault(worker, []).append(stray)
        for pid, (status, _) in list(self._ended.items()):
            if pid not in left:
                del self._ended[pid]
                self._asked.discard(pid)
                self._send(("exited", pid, status))
            elif pid not in self._asked:
                self._send(("lingers", pid, left[pid][:_MAX_NAMED]))

    def _kill_strays(self) -> None:
        """Kill children that are no living worker's."""
        living = set(self._workers.values())
        for pid in children_of(os.getpid()):
            if pid in self._workers or pid in self._helpers:
                continue
            if pid not in self._strays or pid in self._unknown:
                self._note(pid, living)
            of = self._strays.get(pid)
            if of is not None and pid not in self._unknown and not (of and of <= self._asked):
                _kill(pid, signal.SIGKILL)

    def _note(self, pid: int, living: set[str]) -> None:
        """Record which ended workers wait for a child: none if it is a living worker's."""
        session = _session_of(pid)
        known = session in self._workers or session in self._ended
        worker = "" if known else worker_of(pid)
        if worker is None and living:
            self._unknown.add(pid)
            self._strays.setdefault(pid, set(self._ended))
            return
        self._unknown.discard(pid)
        if session in self._workers or worker in living:
            self._strays.pop(pid, None)
        elif worker or session in self._ended or pid not in self._strays:
            self._strays[pid] = self._left_by(session, worker or "")

    def _left_by(self, session: int, worker: str) -> set[int]:
        """Return the ended worker that has left a child; all of them if that is unknown.

        None has left the workers of a template that was killed.
        """
        if session in self._ended:
            return {session}
        if worker:
            return {pid for pid, (_, id) in self._ended.items() if id == worker}
        return set(self._ended)

    def _end_everything(self) -> NoReturn:
        """End all processes that the daemon, which is gone, has started, and this one."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while True:
                # The kernel's list may miss children while others end: so the own one too, again.
                for pid in {*self._workers, *self._helpers, *children_of(os.getpid())}:
                    _kill(pid, signal.SIGKILL)
                ended = -1
                while ended:
                    ended, _ = os.waitpid(-1, os.WNOHANG)
                    self._workers.pop(ended, None)
                    self._helpers.pop(ended, None)
                signal.sigtimedwait({signal.SIGCHLD}, _LOOK_AGAIN)
        if self.clean_up is not None:
            self.clean_up()
        os._exit(0)

    def _send(self, message: tuple[Any, ...]) -> None:
        try:
            self.control.send(marshal.dumps(message))
        except (BrokenPipeError, ConnectionResetError):
            self._end_everything()


def _try_to_import(module: str) -> None:
    """Import a module; a worker that needs one that fails gets the error at its own import."""
    try:
        importlib.import_module(module)
    except Exception:  # noqa: BLE001 - of any module
        traceback.print_exc()


def _import(modules: list[str]) -> None:
    before = {name: os.environ.get(name) for name in _FOR_IMPORTS}
    os.environ.update(_FOR_IMPORTS)
    try:
        for module in modules:
            _try_to_import(module)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _import_beside(modules: list[str]) -> None:
    """Import modules at a lower priority.

    In a thread, which has its own priority: a process could not raise its priority again. It has
    ended before anything is forked.
    """

    def give_way() -> None:
        own = threading.get_native_id()
        nice = min(19, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
        os.setpriority(os.PRIO_PROCESS, own, nice)

    with concurrent.futures.ThreadPoolExecutor(1, initializer=give_way) as thread:
        thread.submit(_import, modules).result()


def _keep_finalizers_from_workers() -> None:
    """Keep workers from running, at exit, what imports registered with ``weakref.finalize``.

    It would undo what the template has made. PyTorch takes each of its operators back, for which
    the kernel copies most of the memory that a worker shares with others.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def _ignore_signal(_number: int, _frame: object) -> None:
    """Do nothing: the signal only wakes the loop."""


def _kill(pid: int, number: int) -> None:
    """Send a signal to a child; one that runs as another user may refuse it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def worker_of(pid: int) -> str | None:
    """Return the id of the worker that a process descends from; "" if the process hides it.

    None if it cannot be read now: the process waits in the kernel, and so might the reader of its
    environment, or it is between two programs.
    """
    if may_hang_readers(pid):
        return None
    try:
        return variable_of(pid, WORKER_VARIABLE) or ""
    except BlockingIOError:
        return None
    except OSError:
        return ""


def _session_of(pid: int) -> int:
    """Return the session of a process: its worker's pid unless user code left it; 0 if gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def _run_command(command: list[str], folder: str | None) -> NoReturn:
    """Become the command of a submitted job; print to its output why it cannot be run."""
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):  # Python and this one ignore it
        signal.signal(number, signal.SIG_DFL)
    try:
        if folder is not None:
            os.chdir(folder)
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        text = f"miniray: the command {command[0]!r} cannot be run: {error.strerror}\n"
        os.write(2, text.encode())
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN)


def _fresh_random_state() -> None:
    random.seed()
    numpy_random = sys.modules.get("numpy.random")  # numpy loads it on first use
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def run_helper(control: socket.socket, module: str) -> NoReturn:
    """Run ``serve(control)`` of a module in this process, and never return."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        gc.enable()
        importlib.import_module(module).serve(control)
    except BaseException:  # noqa: BLE001 - it ends the process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run_template(
    control: socket.socket,
    preload: list[str],
    clean_up: Callable[[], None] | None,
    *,
    beside: bool = False,
) -> NoReturn:
    """Serve in this process, and never return to the code of its parent."""
    try:
        worker = Template(control, preload, clean_up, beside=beside).serve()
        worker()
    except BaseException:  # noqa: BLE001 - it ends the process
        traceback.print_exc()
    os._exit(1)
