"""The interface between the public API and an engine that runs it.

``miniray.get``, ``.remote()`` and the other public names call only what is
declared here. The cluster (``client/cluster_runtime.py``) is the first
implementation; another engine can be a second one without a change to the API
modules. The only code here is requests that return the head's answer unchanged.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from miniray.common import first_use
from miniray.common.names import user_stacklevel
from miniray.common.object_ref import hooks

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Mapping, Sequence

    from miniray.common.object_ref import ObjectRef
    from miniray.common.specs import ActorOptions, MethodOptions, TaskOptions


@dataclasses.dataclass(eq=False, repr=False)
class ActorClassInfo:
    """The part of an actor's class that handles need, pickled with the handle."""

    name: str  # class name, for messages
    module: str
    methods: Mapping[str, MethodOptions]
    is_async: bool = False
    max_task_retries: int = 0
    max_pending_calls: int = -1


class ActorLocation(NamedTuple):
    """How to make a handle of an actor.

    The engine finds the actor by ``ref``, or by the ref's ``_actor_id``.
    """

    ref: ObjectRef[Any]
    info: ActorClassInfo


class BoundMethod(NamedTuple):
    """A method of an actor, to be called with these options."""

    actor: ObjectRef[Any]
    info: ActorClassInfo
    name: str
    options: MethodOptions


@dataclasses.dataclass(eq=False, repr=False)
class RuntimeContextData:
    """Who and where the calling code is, by Ray's names; ids are hex strings."""

    job_id: str
    node_id: str
    worker_id: str
    namespace: str
    gcs_address: str  # what another driver passes to init()
    session_dir: str
    task_id: str | None = None
    task_name: str | None = None
    actor_id: str | None = None
    actor_name: str | None = None
    #: Class name and method (``Counter.add``) or the function's qualified name.
    task_function_name: str | None = None
    placement_group_id: bytes | None = None
    should_capture_child_tasks_in_placement_group: bool = False
    was_current_actor_reconstructed: bool = False
    cancelled: bool = False
    #: Device ids per accelerator resource: ``{"GPU": ["0", "1"], "TPU": [], ...}``.
    accelerator_ids: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    assigned_resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Exported:
    """A function or class as it was registered with a runtime."""

    __slots__ = ("blob", "key", "name")

    def __init__(self, key: bytes, name: str, blob: bytes) -> None:
        self.key = key  # 16 bytes of the SHA-256 of blob
        self.name = name  # qualified name, for messages
        self.blob = blob  # cloudpickle of the function or class


class RuntimeObjects(abc.ABC):
    """The values of refs: made, waited for, read."""

    @abc.abstractmethod
    def put(self, value: Any) -> ObjectRef[Any]:
        """Store a value and return its ref. This process owns it."""

    @abc.abstractmethod
    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        """Wait for the values; raise the first error, or GetTimeoutError."""

    @abc.abstractmethod
    def wait(
        self,
        refs: list[ObjectRef[Any]],
        *,
        num_returns: int,
        timeout: float | None,
        fetch_local: bool,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        """Split refs into (ready, not ready), each in the order given."""

    @abc.abstractmethod
    def future(self, ref: ObjectRef[Any]) -> concurrent.futures.Future[Any]:
        """Return a future that gets the value or the error of a ref."""

    def when_done(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        """Call back once a ref has its value or error.

        That may be in the thread that handles messages: the callback must not wait, nor run user
        code.
        """
        self.future(ref).add_done_callback(lambda _: callback())

    async def value_of(self, ref: ObjectRef[Any]) -> Any:
        """Return the value or raise the error of a ref."""
        import asyncio

        return await asyncio.wrap_future(self.future(ref))


class RuntimeCalls(abc.ABC):
    """Tasks and methods of actors."""

    @abc.abstractmethod
    def export(self, target: Callable[..., Any] | type, name: str) -> Exported:
        """Pickle a function or class once; a warning names what drags in much data."""

    @abc.abstractmethod
    def submit_task(
        self,
        function: Exported,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: TaskOptions,
    ) -> Any:
        """Start a task: a ref, a list of refs (num_returns > 1), None (0), or a generator."""

    @abc.abstractmethod
    def create_actor(
        self,
        cls: Exported,
        info: ActorClassInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: ActorOptions,
    ) -> ActorLocation:
        """Start an actor and return at once; its errors reach the first call.

        Raises:
            ActorAlreadyExistsError: the name is taken and get_if_exists is not set.
        """

    @abc.abstractmethod
    def submit_actor_call(
        self, method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method: returns as ``submit_task`` does."""

    @abc.abstractmethod
    def cancel(self, ref: ObjectRef[Any], *, force: bool, recursive: bool) -> None:
        """Cancel the task or call that makes this ref."""


class RuntimeHead(abc.ABC):
    """Requests to the head: named actors, placement groups, nodes, listings."""

    @abc.abstractmethod
    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        """Look up a named actor; ValueError if there is none."""

    @abc.abstractmethod
    def list_named_actors(self, all_namespaces: bool) -> list[Any]:
        """Return the names of the living named actors; of all, dicts with their namespaces."""

    def kill_actor(self, actor: ObjectRef[Any], *, no_restart: bool) -> None:
        """End an actor's process at once."""
        self.head_call("kill_actor", actor.binary(), no_restart)

    # --- placement groups ----------------------------------------------------------
    @abc.abstractmethod
    def create_placement_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        *,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Sequence[Mapping[str, str]] | None,
    ) -> bytes:
        """Ask for a placement group; returns its id at once.

        Raises:
            ValueError: The name is taken.
        """

    @abc.abstractmethod
    def placement_group_ready(self, id: bytes, value: Any) -> ObjectRef[Any]:
        """Return a ref to the value, that becomes ready when the group is placed."""

    @abc.abstractmethod
    def remove_placement_group(self, id: bytes) -> None:
        """Release a group; what runs in it ends."""

    def placement_group_table(self, id: bytes | None) -> dict[str, Any]:
        """Return a group's table (bundle_cache, strategy, state), or those of all by hex id."""
        found: dict[str, Any] = self.head_call("placement_group_table", id)
        return found

    @abc.abstractmethod
    def find_placement_group(self, name: str, namespace: str | None) -> bytes | None:
        """Return the id of the named group, or None."""

    # --- the cluster ---------------------------------------------------------------
    def nodes(self) -> list[dict[str, Any]]:
        """Return Ray's list of nodes: NodeID, Alive, NodeManagerAddress, Resources, ..."""
        found: list[dict[str, Any]] = self.head_call("nodes")
        return found

    def cluster_resources(self) -> dict[str, float]:
        """Return the totals over the living nodes."""
        found: dict[str, float] = self.head_call("cluster_resources")
        return found

    def available_resources(self) -> dict[str, float]:
        """Return what is free over the living nodes."""
        found: dict[str, float] = self.head_call("available_resources")
        return found

    # --- only for miniray's own head and nodes: other engines leave it as it is here -------
    def head_call(self, method: str, *args: Any) -> Any:
        """Ask the head (key-values, jobs, and more); plain data both ways."""
        _only_of_miniray()

    def tell(self, method: str, *args: Any) -> None:  # noqa: B027 - others have no head
        """Send the head a request whose answer does not matter; returns at once."""

    def listing(self, what: str) -> list[dict[str, Any]]:
        """Return one of the head's listings: "actors", "node_states", ..."""
        found: list[dict[str, Any]] = self.head_call("state", what)
        return found

    def ask_nodes(
        self, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
    ) -> list[tuple[bytes, Any, str]]:
        """Query nodes and their processes; returns of each its id, the answer, and why none."""
        _only_of_miniray()

    async def flush_output(self) -> None:  # noqa: B027
        """Make nodes write the output of the job's processes to files."""


def _only_of_miniray() -> NoReturn:
    from miniray.exceptions import EngineError

    raise EngineError("This asks miniray's own head and nodes, which other engines do not have.")


class Runtime(abc.ABC):
    """Everything that the public API needs from an engine. Thread-safe."""

    #: Changes with each init, so that cached exports of an older runtime are not reused.
    session: object
    objects: RuntimeObjects
    calls: RuntimeCalls
    head: RuntimeHead

    @abc.abstractmethod
    def context(self) -> RuntimeContextData:
        """Return who and where the caller is."""

    @abc.abstractmethod
    def current_actor(self) -> ActorLocation:
        """Return the actor that the calling code belongs to; RuntimeError outside of actors."""

    @abc.abstractmethod
    def exit_actor(self) -> None:
        """End the current actor after this call (raises inside the method)."""

    def next_arguments(self) -> tuple[Any, ...] | None:
        """Load the positional arguments of the call of this actor that waits next.

        That call gets the same objects. It is for a thread of the call that runs, and has to
        return before that one ends. None: no call waits, or its values are not on this node.
        """
        return None

    def owns_actors(self) -> bool:
        """Return whether actors may live that end with this process."""
        return True

    def prepare_runtime_env(self, own: Mapping[str, Any] | None) -> str:
        """Return an environment as JSON, without references to this machine.

        As it is, for an engine that looks after that at each call.
        """
        return json.dumps(own or {})

    def answer(  # noqa: B027 - an engine without requests to processes needs no answers
        self, question: str, handler: Callable[..., Any] | None
    ) -> None:
        """Let a function answer requests to this process, as ``Answers``; None: no more."""

    def tell_counts(self) -> None:  # noqa: B027 - an engine without metrics has nothing to send
        """Send the node the counts of this process, which may end before the next request."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Leave the cluster; an embedded one ends."""


_current: Runtime | None = None
#: Why this process may not get a runtime by merely using the API; "" if it may.
_refusal = ""


def set_runtime(runtime: Runtime | None) -> None:
    """Make this the runtime of the process; None: it has none."""
    global _current, _refusal
    _current = runtime
    _refusal = ""


def refuse_runtime(why: str) -> None:
    """Let uses of the API fail with this reason until ``init()`` is called."""
    global _current, _refusal
    _current = None
    _refusal = why


def runtime_or_none() -> Runtime | None:
    """Return the runtime of this process, if it has one."""
    return _current


def runtime_of(what: str) -> Runtime:
    """Return the runtime that a ref or a handle of this process belongs to.

    Raises:
        NotInitializedError: There is no runtime, and a new one would have no such object.
    """
    if _current is None and not _refusal:
        from miniray.exceptions import NotInitializedError

        raise NotInitializedError(
            f"This {what} belongs to a cluster that this process has left with "
            "miniray.shutdown(). Get values before shutdown(), or create them and the actors again."
        )
    return current_runtime()


def current_runtime() -> Runtime:
    """Return the runtime of this process; starts an embedded cluster if init() was not called.

    Raises:
        NotInitializedError: This is a forked child, which has to call init() itself.
    """
    if _current is not None:
        return _current
    if _refusal:
        from miniray.exceptions import NotInitializedError

        raise NotInitializedError(_refusal)
    first_use.attach()
    runtime = runtime_or_none()
    assert runtime is not None
    _tell_own_cluster(runtime)
    return runtime


def _tell_own_cluster(runtime: Runtime) -> None:
    """Warn in a child of multiprocessing, which may be meant to use its parent's cluster."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    child = multiprocessing is not None and multiprocessing.parent_process() is not None
    own = runtime.context().gcs_address.startswith("unix:") and not os.environ.get(
        "MINIRAY_ADDRESS"
    )
    if child and own:
        warnings.warn(
            "This process was started by multiprocessing and has started a cluster of its own: "
            "that of its parent belongs to the parent alone. Use tasks and actors in place of "
            "processes; or start a cluster with `miniray start --head`, and both attach to it.",
            stacklevel=user_stacklevel(),
        )


hooks.runtime = runtime_of
