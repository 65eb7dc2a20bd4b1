"""A worker process from its first line to its exit.

It attaches to its daemon, receives its purpose (tasks of a lease, or one actor),
runs that in the main thread, and makes a planned exit: it flushes output, runs atexit
functions, and hands over what it owns.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import inspect
import logging
import marshal
import os
import pickle
import signal
import sys
import traceback
import types
from typing import TYPE_CHECKING, Any, NoReturn

from miniray.calls import context
from miniray.client.attach import Attachment, Introduction
from miniray.client.cluster_runtime import ProcessHooks
from miniray.client.handover import await_others, hand_over
from miniray.common import process_state
from miniray.common.config import config
from miniray.common.names import short_name
from miniray.common.process_state import SHOW_STACKS, children_of
from miniray.common.runtime import set_runtime
from miniray.common.specs import ActorSpec, GrantedLease
from miniray.exceptions import TaskError
from miniray.messages.value import ActorExit
from miniray.objects.ignored_signals import finish
from miniray.wire.interrupts import leave_in_place
from miniray.wire.io_loop import Gate
from miniray.worker import stdio
from miniray.worker.actor_modes import executor_of
from miniray.worker.executor import CANCEL_SIGNAL, Executor
from miniray.worker.work import SHUTDOWN, carried, load_for_constructor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miniray.common.object_ref import ObjectRef
    from miniray.objects.waiting import Wait

#: For prctl(2), from linux/prctl.h.
_PR_SET_PTRACER = 0x59616D61
_prctl = ctypes.CDLL(None).prctl  # looked up once, in the template

logger = logging.getLogger(__name__)


class WorkerProcess:
    """One worker process: its purpose and its parts."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.lease = GrantedLease.from_wire(spec["lease"])
        self.executor: Executor
        self._exit_code = 0
        self._ending = False
        self._in_child = False
        self._left_something = False
        self._attachment = Attachment(
            spec["node_socket"],
            spec["key"],
            Introduction(spec["process_id"], "worker", self.lease.job_id),
            timeout=config().worker_start_timeout,
            on_shutdown=lambda _attachment: None,
            on_lost=_daemon_lost,
            process=ProcessHooks(
                self._block,
                self._end_actor,
                self._executing,
                self._works,
                self._in_forked_child,
                self._next_arguments,
            ),
        )
        self.runtime = self._attachment.runtime
        self.runtime.on_topic["lease"] = self._on_lease
        self.runtime.on_topic["exit"] = self._on_exit
        self.runtime.on_topic["idle"] = lambda: process_state.set_title("idle worker")
        self._apply()
        set_runtime(self.runtime)
        sys.breakpointhook = self._on_breakpoint

    def _block(self, wait: Wait, timeout: float | None) -> bool:
        return self.executor.block(wait, timeout)

    def _end_actor(self) -> None:
        self.executor.leave(ActorExit())

    def _executing(self) -> Iterator[tuple[str, Iterable[ObjectRef[Any]]]]:
        return self.executor.holds()

    def _works(self) -> Iterator[tuple[bytes, str, float | None]]:
        return self.executor.works()

    def _next_arguments(self) -> tuple[Any, ...] | None:
        return self.executor.next_arguments()

    def _on_breakpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Handle ``breakpoint()`` in user code: wait for a terminal, as there is none here."""
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **kwargs)  # the user has another debugger
        from miniray.worker.debugger import debug

        debug(sys._getframe(1), os.path.dirname(self.spec["node_socket"]), self.spec["key"])
        return None

    def _in_forked_child(self) -> None:
        """End the child where it would answer its parent's callers: user code forked it."""
        self._in_child = True
        self.executor.replies.in_forked_child(end_child)

    def _apply(self) -> None:
        process_state.set_title(short_name(self.lease.name))
        facts = self._attachment.facts
        facts.begin_lease(self.lease)
        process_state.limit_threads(facts.assigned_resources.get("CPU", 0))

    def _on_lease(self, granted: tuple[Any, ...]) -> None:
        """Run tasks of another lease: this worker was idle."""
        self.lease = GrantedLease.from_wire(granted)
        try:
            self._apply()
        finally:  # its tasks wait for the lease
            self.executor.begin_lease(self.lease.number, self.lease.max_calls)

    def _on_exit(self) -> None:
        """Exit as planned: the daemon no longer needs this process."""
        self._ending = True
        self.executor.stop()

    def end(self, why: BaseException | None) -> None:
        """End this process, as user code or a limit demands."""
        if self._in_child:
            end_child(why)
        if self._ending:
            return
        self._ending = True
        if isinstance(why, SystemExit):
            self._exit_code = exit_code(why)
        self.runtime.link.node_notice(
            "exiting", "exit_actor" if isinstance(why, ActorExit) else "planned"
        )
        self.executor.stop()

    # --- tasks -------------------------------------------------------------------
    def run_tasks(self) -> None:
        """Run the tasks of a lease, and of the next ones."""
        self.executor = executor = Executor(self.runtime, self.end, None)
        executor.begin_lease(self.lease.number, self.lease.max_calls)
        self._listen()
        executor.run()

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        try:
            finish(unraisable)
            if not self.executor.interruption.was_ignored(unraisable.exc_value):
                sys.__unraisablehook__(unraisable)
        finally:
            # No signal is handled between here and the end.
            self.executor.interruption.in_hook = False

    def _listen(self) -> None:
        on_signal = self.executor.interruption.on_signal
        leave_in_place(CANCEL_SIGNAL, on_signal)
        signal.signal(CANCEL_SIGNAL, on_signal)
        sys.unraisablehook = self._on_unraisable
        self._attachment.open()
        self.runtime.link.node_notice("ready")

    # --- an actor ------------------------------------------------------------------
    def run_actor(self, actor: ActorSpec) -> None:
        stdio.set_name(actor.class_name)
        self.executor = executor_of(actor, self.runtime, self.end)
        self._listen()
        self.executor.serve(lambda: self._create(actor))

    async def _create(self, actor: ActorSpec) -> bool:
        """Run the constructor and report the outcome; wait only for one that is a coroutine."""
        name = f"{actor.class_name}.__init__"
        execution = context.Execution(self.lease.actor_id or b"", name, method=name)
        token = context.execution.set(execution)
        try:
            instance = await self._construct(actor)
            execution.answered = True
            if execution.exits:  # and the constructor has caught that
                raise ActorExit
        except (ActorExit, SystemExit) as error:
            self.end(error)
            return False
        except BaseException as error:  # noqa: BLE001 - it reaches the first call
            self._report_failure(name, error)
            return False
        finally:
            context.execution.reset(token)
        self._name_output(actor, instance)
        self.executor.begin(instance)
        self.runtime.borrowing.defer(lambda: self.runtime.link.node_notice("actor_ready"))
        return True

    async def _construct(self, actor: ActorSpec) -> Any:
        """Make the actor's instance; refs among its arguments are held meanwhile."""
        cls = self.executor.load_code(actor.class_key)
        self._attachment.facts.actor_class = cls
        arguments, refs = marshal.loads(self.lease.arguments)
        args, kwargs, _held = load_for_constructor(self.runtime, arguments, refs)
        if not inspect.iscoroutinefunction(cls.__init__):
            return cls(*args, **kwargs)
        instance = cls.__new__(cls, *args, **kwargs)
        await instance.__init__(*args, **kwargs)
        return instance

    def _report_failure(self, name: str, error: BaseException) -> None:
        """Report to the head and the log why there is no instance, and end."""
        id = (self.lease.actor_id or b"").hex()
        try:
            error = carried(error)
            failure = TaskError.from_exception(error, name, pid=os.getpid(), actor_id=id)
            text, pickled = str(failure), pickle.dumps(failure, 5)
        except BaseException as problem:  # noqa: BLE001 - the error's class is user code
            failure = TaskError.untold(name, error, problem)
            text, pickled = str(failure), pickle.dumps(failure, 5)
        # For a user who calls no method, and so never gets the error.
        sys.stderr.write(f"{text}\n")
        self._exit_code = 1
        self._ending = True
        self.runtime.link.node_notice("actor_failed", pickled)

    def _name_output(self, actor: ActorSpec, instance: Any) -> None:
        """Print under the ``__repr__`` of an actor's class, if it has its own, as in Ray."""
        if "__repr__" in _own_names(type(instance)):
            try:
                name = repr(instance)
            except Exception:
                logger.exception("__repr__ of actor %s failed", actor.class_name)
            else:
                stdio.set_name(name)
                self._attachment.facts.actor_repr = name

    # --- the end -------------------------------------------------------------------
    def finish(self) -> int:
        """Make a planned exit; return the exit code."""
        link = self.runtime.link
        self._shut_down()
        self.runtime.tell_counts()
        link.node_notice("finishing")
        self.executor.instance = None
        stdio.flush_all()
        self.executor.wait_counted()
        sent = Gate(self.runtime.loop)
        self.runtime.borrowing.defer(sent.arrived)  # after the replies that were deferred
        await_others(self.runtime, sent)
        self._left_something = hand_over(self.runtime)
        link.node_notice("leaving")
        return self._exit_code

    def _shut_down(self) -> None:
        """Let an actor clean up, if its class says how; as exit functions, it has a deadline."""
        instance = self.executor.instance
        for name in SHUTDOWN:
            if name in _own_names(type(instance)):
                self.runtime.link.node_notice("leaving")
                self.runtime.link.flush()
                try:
                    getattr(instance, name)()
                except BaseException:
                    logger.exception("%s.%s failed", type(instance).__name__, name)
                return

    def close(self) -> None:
        """Write the queued messages, and read the answers to what was handed over."""
        # Wait for the other ends: they may take any time to read.
        self.runtime.link.node_notice("finishing")
        for peer in self.runtime.peers.all():
            peer.flush()
        if self._left_something:
            self.runtime.peers.hang_up()
        # The rest is the kernel's work, which a driver that hangs may delay.
        self.runtime.link.node_notice("leaving")
        self.runtime.link.flush()


def _own_names(cls: type) -> set[str]:
    """Return the names that a class or its bases define, without `object`'s."""
    return {name for base in cls.__mro__ if base is not object for name in vars(base)}


def exit_code(why: SystemExit) -> int:
    """Return the requested exit code; write what is no number to stderr, as Python does.

    That text, as of ``sys.exit("no such file")``, is often all that says why.
    """
    if why.code is None:
        return 0
    if isinstance(why.code, int):
        return why.code
    print(why.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return 1


def end_child(why: BaseException | None) -> NoReturn:
    """End a forked child as an interpreter would, but for exit functions, which are its parent's.

    Args:
        why: What came out of the function in which it was forked; None: it returned.
    """
    code = 0
    if isinstance(why, SystemExit):
        code = exit_code(why)
    elif why is not None and not isinstance(why, ActorExit):
        traceback.print_exception(why)
        code = 1
    stdio.flush_all()
    os._exit(code & 0xFF)


def kill_descendants() -> None:
    """Kill all processes below this one. Opens /proc only: safe in any thread."""
    pending = [os.getpid()]
    found: list[int] = []
    while pending:
        for child in children_of(pending.pop()):
            found.append(child)
            pending.append(child)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _daemon_lost() -> None:
    """End this process and what it started, as the daemon is gone."""
    kill_descendants()
    os._exit(1)


def run_worker(spec: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        _prepare_process(spec)
        worker = WorkerProcess(spec)
        actor = worker.lease.actor
        if actor is not None:
            worker.run_actor(actor)
        else:
            worker.run_tasks()
        code = worker.finish()
        atexit._run_exitfuncs()
        worker.close()
    except BaseException:
        logger.exception("the worker failed")
        code = 1
    stdio.flush_all()
    stdio.flush_c()
    os._exit(code)


def main() -> NoReturn:
    """Be the worker that the descriptor in the first argument describes, in a new interpreter."""
    fd = int(sys.argv[1])
    run_worker(stdio.read_spec(fd) | {"file": fd})


def _prepare_process(spec: dict[str, Any]) -> None:
    """Give user code what it expects of a fresh process."""
    leave_in_place(signal.SIGINT, _ignore_interrupt)
    signal.signal(signal.SIGINT, _ignore_interrupt)
    stdio.install(spec["file"])
    _be_seen(spec["daemon"], spec["file"])
    faulthandler.enable(2, all_threads=False)  # where the code was if a signal like SIGSEGV ends it
    _show_own_warnings()
    sys.argv = [""]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if spec["cwd"]:
        try:
            os.chdir(spec["cwd"])
        except OSError as error:
            logger.warning("cannot enter the working directory %s: %s", spec["cwd"], error)
    for path in reversed(spec["sys_path"]):
        if path in sys.path:
            sys.path.remove(path)
        sys.path.insert(0, path)
        sys.path_importer_cache.pop(path, None)  # what is there now is found


def _be_seen(daemon: int, file: int) -> None:
    """Let the daemon read this process's stacks, also when it does not answer.

    Args:
        daemon: Its pid.
        file: Of this worker, into which the stacks are written; stays open.
    """
    # Where the kernel has Yama, only ancestors may read a process; the daemon and the py-spy that
    # it starts are none. Elsewhere this is an error without effect.
    _prctl(_PR_SET_PTRACER, daemon, 0, 0, 0)
    os.set_inheritable(file, False)
    faulthandler.register(SHOW_STACKS, file=file, all_threads=True, chain=False)


def _show_own_warnings() -> None:
    """Give miniray's loggers a handler: how others are shown is the user code's choice."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    own = logging.getLogger("miniray")
    own.addHandler(handler)
    own.propagate = False


def _ignore_interrupt(_number: int, _frame: object) -> None:
    """Leave Ctrl-C to the driver; a handler (not SIG_IGN), so that children get the default."""
