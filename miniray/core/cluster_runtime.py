"""The runtime of a process that is attached to a cluster: driver or worker.

Puts the parts of ``core/`` together behind ``core/runtime.py`` and hands each
message that arrives to the part it is for. What it owns itself is small: exported
functions, the clients of actors, and the wait for values.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import logging
import pickle
import threading
import weakref
from typing import TYPE_CHECKING, Any

from miniray.config import config
from miniray.core import context, waiting
from miniray.core import protocol as p
from miniray.core.actor_client import ActorClient
from miniray.core.actor_directory import ActorDirectory
from miniray.core.borrowing import Borrowing, error_value
from miniray.core.calls import Call, CallTable
from miniray.core.ids import ObjectIds
from miniray.core.objects import Entry, ObjectTable, Value
from miniray.core.peers import Peer, PeerTable
from miniray.core.recovery import Recovery, is_shared
from miniray.core.runtime import (
    ActorClassInfo,
    ActorLocation,
    ActorOptions,
    Exported,
    MethodOptions,
    Runtime,
    RuntimeContextData,
    TaskOptions,
)
from miniray.core.serialization import deserialize, dumps_code, serialize
from miniray.core.shared_memory import SharedMemory
from miniray.core.streams import StreamState
from miniray.core.task_client import TaskClient
from miniray.core.task_shape import shape_of, task_spec
from miniray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    NotInitializedError,
    ObjectLostError,
    TaskError,
)
from miniray.object_ref import ObjectRef, hooks
from miniray.object_ref_generator import ObjectRefGenerator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.core.io_loop import IOLoop
    from miniray.core.node_link import NodeLink

logger = logging.getLogger(__name__)


#: Seconds after which dropped refs are looked at again, while some go.
_DRAIN_AGAIN = 0.02


class ClusterRuntime(Runtime):
    """The cluster engine behind the public API."""

    def __init__(
        self,
        *,
        loop: IOLoop,
        link: NodeLink,
        process_id: bytes,
        node_id: bytes,
        socket_folder: str,
        key: bytes,
        facts: context.ProcessFacts,
        on_shutdown: Callable[[], None],
    ) -> None:
        self.session = object()
        self.loop = loop
        self.link = link
        self.process_id = process_id
        self.node_id = node_id
        self.facts = facts
        self._on_shutdown = on_shutdown
        self.ids = ObjectIds(process_id)
        self.table = ObjectTable(process_id, node_id, self)
        self.shared_memory = SharedMemory(link, node_id)
        self.borrowing = Borrowing(self.table)
        self.calls = CallTable(self.table, self.borrowing, self.shared_memory)
        self.peers = PeerTable(
            socket_folder,
            node_id,
            process_id,
            loop,
            key,
            link,
            auth_timeout=config().auth_timeout,
            on_message=self._on_message,
            on_lost=self._on_peer_lost,
        )
        self.borrowing.attach(self.peers)
        self.tasks = TaskClient(self.calls, self.peers, link, loop)
        self.recovery = Recovery(
            self.table, self.borrowing, self.calls, self.calls.lineage, self.tasks
        )
        self.calls.recover = self.recovery.lost
        self.borrowing.recover = self.recovery.again
        self.actors = ActorDirectory(self)
        self._exported: set[bytes] = set()
        self._code_of: weakref.WeakKeyDictionary[Any, Exported] = weakref.WeakKeyDictionary()
        self._futures: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._quiet = False
        #: Pushes from the daemon or the head, by topic.
        self.on_topic: dict[str, Callable[..., None]] = {
            "lease_granted": self.tasks.on_granted,
            "lease_failed": self.tasks.on_failed,
            "lease_revoked": self.tasks.on_revoked,
            "process_died": self.peers.process_died,
            "actor": self.actors.on_state,
            "head_back": self._on_head_back,
        }
        #: Messages of peers, by kind; a worker adds those that ask it to run something.
        self.on_kind: dict[int, Callable[[Peer, tuple[Any, ...]], None]] = {
            p.PEER_REPLY: self._on_reply,
            p.PEER_STREAM: self._on_stream_item,
            p.PEER_RECALLED: lambda peer, message: self.tasks.on_recalled(peer, message[1]),
            p.PEER_WANT: self.borrowing.on_want,
            p.PEER_VALUE: self.borrowing.on_value,
            p.PEER_LOST: self.borrowing.on_lost,
            p.PEER_BORROW: self.borrowing.on_borrow,
            p.PEER_UNBORROW: self.borrowing.on_unborrow,
            p.PEER_ACK: self.borrowing.on_ack,
        }
        #: Called for each peer that is gone, after the parts above know it.
        self.on_peer_gone: Callable[[Peer], None] | None = None
        #: Merges an environment with the job's and uploads what it names; see bootstrap.
        self.prepare_runtime_env: Callable[[Mapping[str, Any] | None], str] = _no_runtime_env
        #: In a worker: runs around a wait that blocks the task (gives the CPU back).
        self.block: Callable[[Callable[[float | None], bool], float | None], bool] = _plain_wait
        self._install_hooks()

    def _install_hooks(self) -> None:
        hooks.dropped = collections.deque()
        hooks.woken = False
        hooks.wake = self._wake_for_drops
        hooks.serialized = self._on_serialized
        hooks.deserialized = self._on_deserialized

    # --- refs that come and go ---------------------------------------------------------
    def _wake_for_drops(self) -> None:
        self.loop.call_soon(self._drain_in_loop)

    def _drain_in_loop(self) -> None:
        """The loop's drain: stays on call while refs keep going, so that few drops wake it."""
        if hooks.dropped:
            self.drain()
        elif self._quiet:
            self._quiet = False
            hooks.woken = False
            if not hooks.dropped:  # else one went away before the flag was down
                return
            hooks.woken = True
        else:
            self._quiet = True
        self.loop.call_later(_DRAIN_AGAIN, self._drain_in_loop)

    def drain(self) -> None:
        """Count the refs that were dropped since the last time."""
        self._quiet = False
        dropped = hooks.dropped
        batch = []
        try:
            while True:
                batch.append(dropped.popleft())
        except IndexError:
            pass
        if batch:
            self.table.drop(batch)
            self.shared_memory.report_unmapped()

    def _on_serialized(self, ref: ObjectRef[Any]) -> None:
        from miniray.core.serialization import collector

        if collector.refs is not None:
            collector.refs.append(ref)
        else:
            # Pickled by the user, outside of the runtime: nobody can know when that
            # copy goes, so the object stays for the life of this process (as in Ray).
            self.table.pin(ref.binary())

    def _on_deserialized(self, id: bytes, owner_node: bytes) -> ObjectRef[Any]:
        if not owner_node:
            return ObjectRef(id, b"")
        if self.table.entry(id) is None:
            # Not from a value or a call that holds it: from a closure, or the user's bytes.
            return self.borrowing.hold(((id, owner_node),))[0]
        return self.table.adopt(id, owner_node)[0]

    # --- core.objects.Outside ------------------------------------------------------------
    def free_shared(self, value: Any) -> None:
        """The owner frees a value."""
        if value[0] == p.VALUE_SHARED:
            self.shared_memory.free(value)

    def unborrow(self, id: bytes, owner_node: bytes) -> None:
        """The last ref of a borrowed object went away."""
        self.borrowing.unborrow(id, owner_node)

    def origin_unused(self, id: bytes) -> None:
        """An object whose making is remembered went away."""
        self.calls.lineage.forget(id)

    def actor_unreferenced(self, id: bytes) -> None:
        """The last handle of an actor of this process went away."""
        self.actors.unreferenced(id)

    # --- values ------------------------------------------------------------------
    def put(self, value: Any) -> ObjectRef[Any]:
        if hooks.dropped:
            self.drain()
        serialized = serialize(value)
        if serialized.size > config().inline_limit:
            stored = self.shared_memory.write(serialized, self.process_id, self.node_id)
        else:
            contained = tuple((r.binary(), r._owner_node) for r in serialized.refs)
            stored = (serialized.form, serialized.payload(), contained)
        return self.table.create_with_value(self.ids.new(), stored, list(serialized.refs) or None)

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        if hooks.dropped:
            self.drain()
        deadline = waiting.deadline_of(timeout)
        entries = [self._entry(ref) for ref in refs]
        pending = [entry for entry in entries if entry.value is None]
        if pending and not self._wait_values(pending, len(pending), timeout):
            missing = [entry for entry in pending if entry.value is None]
            raise GetTimeoutError(
                f"{len(missing)} of {len(entries)} values were not there within {timeout} s; "
                f"the first is {missing[0].id.hex() if missing else pending[0].id.hex()}."
            )
        return [self._load(entry, deadline) for entry in entries]

    def _load(self, entry: Entry, deadline: float | None) -> Any:
        """The value of an entry; one that was lost is made again if that is possible."""
        while True:
            value = entry.value
            if value is not None:
                try:
                    return self.load(entry, value)
                except ObjectLostError as error:
                    self._recover(entry, value, error)
            if not self._wait_values([entry], 1, waiting.time_left(deadline)):
                raise GetTimeoutError(
                    f"The value of {entry.id.hex()} was lost, and not made again in time."
                )

    def _recover(self, entry: Entry, value: Value, error: ObjectLostError) -> None:
        """See to it that a value that could not be loaded is replaced; raises if none can be."""
        if not is_shared(value):
            raise error
        reason = self.recovery.lost(entry, value)
        if reason is not None:
            raise ObjectLostError(entry.id.hex(), f"{error.reason}; {reason}") from None

    def _entry(self, ref: ObjectRef[Any]) -> Entry:
        entry = self.table.entry(ref.binary())
        if entry is None:
            raise ObjectLostError(ref.hex(), "this process is not attached to its cluster any more")
        return entry

    def _wait_values(self, pending: Sequence[Entry], needed: int, timeout: float | None) -> bool:
        self.loop.flush_posted()
        self.borrowing.want(pending)
        return waiting.wait_for(self.table, pending, needed, timeout, self.block)

    def load(self, entry: Entry, value: Value) -> Any:
        """The Python value of an entry; raises what failed."""
        form = value[0]
        if form == p.VALUE_PICKLE:
            return pickle.loads(value[1])
        if form == p.VALUE_SHARED:
            mapping = entry.mapping
            if mapping is None:
                mapping = entry.mapping = self.shared_memory.map(value[1])
            return deserialize(mapping.form, mapping.view)
        if form == p.VALUE_ERROR:
            error = pickle.loads(value[1])
            raise error.as_instanceof_cause() if isinstance(error, TaskError) else error
        return deserialize(form, value[1])

    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        if hooks.dropped:
            self.drain()
        try:
            found = self._split(refs, num_returns)
        except AttributeError:
            if not any(isinstance(ref, ObjectRefGenerator) for ref in refs):
                raise
            return self._wait_streams(refs, num_returns, timeout, fetch_local)
        if found is None:
            pending = [e for e in map(self._entry, refs) if e.value is None]
            needed = num_returns - (len(refs) - len(pending))
            if needed > 0:
                self._wait_values(pending, needed, timeout)
            found = self._split(refs, num_returns, at_most=True)
            assert found is not None
        return found

    def _wait_streams(
        self,
        refs: Sequence[Any],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool,
    ) -> tuple[list[Any], list[Any]]:
        """``wait`` with generators among the refs: they are ready when they have an item."""
        given = {
            (ref.next_ready() if isinstance(ref, ObjectRefGenerator) else ref): ref for ref in refs
        }
        ready, rest = self.wait(list(given), num_returns, timeout, fetch_local)
        return [given[ref] for ref in ready], [given[ref] for ref in rest]

    def _split(
        self, refs: Sequence[ObjectRef[Any]], wanted: int, *, at_most: bool = False
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]] | None:
        """The first ``wanted`` ready refs and the rest; None if there are fewer.

        Stops looking when it has enough, so that a loop that takes one at a time
        does not look at all of them each time.
        """
        ready: list[ObjectRef[Any]] = []
        rest: list[ObjectRef[Any]] = []
        find = self.table.entry
        for index, ref in enumerate(refs):
            entry = find(ref._id) or self._entry(ref)
            if entry.value is None:
                rest.append(ref)
                continue
            ready.append(ref)
            if len(ready) == wanted:
                rest.extend(refs[index + 1 :])
                return ready, rest
        return (ready, rest) if at_most else None

    def future(self, ref: ObjectRef[Any]) -> concurrent.futures.Future[Any]:
        result: concurrent.futures.Future[Any] = concurrent.futures.Future()
        entry = self._entry(ref)

        def load() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                value = self._load(self._entry(ref), None)  # the closure keeps the ref alive
            except BaseException as error:  # noqa: BLE001 - it is the future's result
                result.set_exception(error)
            else:
                result.set_result(value)

        def ready(_entry: Entry) -> None:
            self._future_pool().submit(load)

        if self.table.when_ready(entry, ready):
            load()
        else:
            self.borrowing.want([entry])
        return result

    def _future_pool(self) -> concurrent.futures.ThreadPoolExecutor:
        """Threads in which values of futures are unpickled: that is user code."""
        with self._lock:
            if self._futures is None:
                self._futures = concurrent.futures.ThreadPoolExecutor(
                    2, thread_name_prefix="miniray-future"
                )
            return self._futures

    async def value_of(self, ref: ObjectRef[Any]) -> Any:
        import asyncio

        loop = asyncio.get_running_loop()
        entry = self._entry(ref)
        while True:
            if entry.value is None:
                await self._there(entry)
            value = entry.value
            if value is None:  # it was lost meanwhile, and is made again
                continue
            try:
                if is_shared(value) and value[1][0] != self.node_id:
                    # Moving it here takes a while; the event loop goes on meanwhile.
                    return await loop.run_in_executor(None, self.load, entry, value)
                return self.load(entry, value)
            except ObjectLostError as error:
                self._recover(entry, value, error)

    async def _there(self, entry: Entry) -> None:
        """Wait until an entry has a value."""
        import asyncio

        self.loop.flush_posted()
        loop = asyncio.get_running_loop()
        there: asyncio.Future[None] = loop.create_future()

        def ready(_entry: Entry) -> None:
            loop.call_soon_threadsafe(_resolve, there)

        if not self.table.when_ready(entry, ready):
            self.borrowing.want([entry])
            try:
                await there
            finally:
                self.table.drop_waiter(entry, ready)

    # --- functions and classes -----------------------------------------------------------
    def export(self, target: Callable[..., Any] | type, name: str) -> Exported:
        blob, refs = dumps_code(target)
        for ref in refs:
            self.table.pin(ref.binary())  # the code lives as long as the job
        key = hashlib.sha256(blob).digest()[:16]
        if len(blob) > config().large_closure_warning:
            from miniray.core.closures import warn_large

            warn_large(target, name, len(blob))
        return Exported(key, name, blob)

    def publish(self, code: Exported) -> None:
        """Make code available to every worker; once per runtime and key."""
        if code.key not in self._exported:
            self._exported.add(code.key)
            self.link.node_notice("put_code", code.key, code.blob)

    # --- calls -------------------------------------------------------------------
    def submit_task(
        self,
        function: Exported,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: TaskOptions,
    ) -> Any:
        if hooks.dropped:
            self.drain()
        if function.key not in self._exported:
            self.publish(function)
        group = self.tasks.group(
            shape_of(options, function), lambda: task_spec(options, function, self)
        )
        return self._submit(
            args,
            kwargs,
            options.num_returns,
            options.generator_backpressure,
            function.key,
            options.name or function.name,
            self.tasks,
            options.max_retries,
            options.retry_exceptions,
            group,
        )

    def submit_actor_call(
        self,
        actor: ObjectRef[Any],
        info: ActorClassInfo,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: MethodOptions,
    ) -> Any:
        if hooks.dropped:
            self.drain()
        client = self.actors.client(actor, info)
        retries = options.max_task_retries
        return self._submit(
            args,
            kwargs,
            options.num_returns,
            options.generator_backpressure,
            method,
            options.name or f"{info.name}.{method}",
            client,
            info.max_task_retries if retries is None else retries,
            options.retry_exceptions,
            options.concurrency_group,
            actor,
        )

    def _submit(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_returns: int | str,
        backpressure: int,
        target: Any,
        name: str,
        channel: TaskClient | ActorClient,
        retries: int,
        retry_exceptions: bool | tuple[type[BaseException], ...],
        options: Any,
        actor: ObjectRef[Any] | None = None,
    ) -> Any:
        arguments, refs, pins = self.calls.arguments(args, kwargs)
        if actor is not None:
            pins = [actor, *pins] if pins else [actor]
        number = self.calls.next_number()
        stream = None
        if num_returns == 1:
            ids: tuple[bytes, ...] = (self.ids.new(),)
        elif isinstance(num_returns, int):
            ids = tuple([self.ids.new() for _ in range(num_returns)])
        else:
            ids = ()
            stream = self._stream(number, backpressure)
        results = [self.table.create(id) for id in ids]
        call = Call(
            number,
            target,
            name,
            ids,
            arguments,
            refs,
            pins,
            channel,
            retries,
            retry_exceptions,
            stream,
            options,
        )
        running = context.execution.get()
        if running is not None:
            if running.children is None:
                running.children = []
            running.children.append(ids[0] if ids else call.stream.id)  # type: ignore[union-attr]
        channel.submit(call)
        if stream is not None:
            return ObjectRefGenerator(stream, self._block_on)
        if len(results) == 1 and num_returns == 1:
            return results[0]
        return results if results else None

    def _block_on(self, gate: threading.Lock) -> None:
        """Wait for a lock that somebody will open, as a wait of the running task."""

        def wait(timeout: float | None) -> bool:
            return gate.acquire(timeout=-1 if timeout is None else timeout)

        self.loop.flush_posted()
        self.block(wait, None)

    def _stream(self, number: int, backpressure: int) -> StreamState:
        def consumed(count: int) -> None:
            if backpressure >= 0:
                call = self.calls.open.get(number)
                if call is not None and call.peer is not None:
                    call.peer.send((p.PEER_STREAM_ACK, number, count))

        def abandoned() -> None:
            # May run in a garbage collection anywhere: only the loop may take locks for it.
            self.loop.call_soon(stop)

        def stop() -> None:
            call = self.calls.open.get(number)
            if call is not None:
                call.cancelled = True
                if call.peer is not None:
                    call.peer.send((p.PEER_STREAM_ACK, number, -1))
                else:
                    call.channel.cancel(call, False, False)

        return StreamState(
            self.ids.new(), self.table, self.ids.new, consumed, abandoned, backpressure
        )

    def _on_reply(self, peer: Peer, message: tuple[Any, ...]) -> None:
        call = self.calls.open.get(message[1])
        if call is not None and call.channel is self.tasks and message[2] != p.STATUS_LOST:
            self.tasks.observe(call, message[5])
        self.calls.on_reply(peer, message)

    def _on_stream_item(self, peer: Peer, message: tuple[Any, ...]) -> None:
        _, number, index, value = message
        call = self.calls.open.get(number)
        refs = self.borrowing.hold(value[2]) if value[2] else None
        if call is None or call.stream is None or not call.stream.item(index, value, refs):
            self.calls.free_value(value)
        if refs:
            self.borrowing.defer(lambda: peer.send((p.PEER_RELEASE, [number])))

    def runtime_env_for(self, own: Mapping[str, Any] | None) -> str:
        """The job's environment with what a task or actor adds, as canonical JSON."""
        if not own and not self.facts.runtime_env:
            return ""
        return self.prepare_runtime_env(own)

    def create_actor(
        self,
        cls: Exported,
        info: ActorClassInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: ActorOptions,
    ) -> ActorLocation:
        self.publish(cls)
        return self.actors.create(cls, info, args, kwargs, options)

    def kill_actor(self, actor: ObjectRef[Any], no_restart: bool) -> None:
        self.link.head_request("kill_actor", actor.binary(), no_restart)

    def cancel(self, ref: ObjectRef[Any], force: bool, recursive: bool) -> None:
        call = self.calls.find(ref.binary())
        if call is None:
            if not self.table.is_owned(ref.binary()):
                raise ValueError(
                    f"{ref!r} was made by another process; only the process that made a call can "
                    f"cancel it."
                )
            return  # finished already
        if force and isinstance(call.channel, ActorClient):
            raise ValueError(
                "force=True would end the actor and cannot be used to cancel one of its calls; "
                "use miniray.kill() to end the actor."
            )
        call.cancelled = True
        call.channel.cancel(call, force, recursive)

    def cancel_by_id(self, id: bytes, force: bool) -> None:
        """Cancel what a cancelled task had started."""
        call = self.calls.find(id)
        if call is not None:
            call.cancelled = True
            call.channel.cancel(call, force, True)

    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        return self.actors.find(name, namespace)

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.link.head_request(
            "list_named_actors", None if all_namespaces else self.facts.namespace
        )
        return found

    # --- placement groups ----------------------------------------------------------
    def create_placement_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Sequence[Mapping[str, str]] | None,
    ) -> bytes:
        id = self.ids.new()
        self.link.head_notice(
            "create_placement_group",
            id,
            [dict(bundle) for bundle in bundles],
            strategy,
            name,
            self.facts.namespace,
            lifetime == "detached",
            [dict(selector) for selector in bundle_label_selector]
            if bundle_label_selector is not None
            else None,
        )
        return id

    def placement_group_ready(self, id: bytes) -> ObjectRef[Any]:
        """A ref that this process owns and that the head's answer makes ready."""
        ref = self.table.create(self.ids.new())
        object_id = ref.binary()

        def answer(error: Any, result: Any, _fd: int) -> None:
            from miniray.core.node_link import rebuild_error

            if error is None:
                serialized = serialize(True)
                value: Value = (serialized.form, serialized.payload(), ())
            else:
                value = error_value(rebuild_error(error))
            self.table.set_value(object_id, value)

        self.link.head_request_async("await_placement_group", (id,), answer)
        return ref

    def remove_placement_group(self, id: bytes) -> None:
        self.link.head_request("remove_placement_group", id)

    def placement_group_table(self, id: bytes | None) -> dict[str, Any]:
        found: dict[str, Any] = self.link.head_request("placement_group_table", id)
        return found

    def find_placement_group(self, name: str, namespace: str | None) -> bytes | None:
        found: bytes | None = self.link.head_request(
            "find_placement_group", name, namespace or self.facts.namespace
        )
        return found

    # --- the cluster ---------------------------------------------------------------
    def nodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.link.head_request("nodes")
        return found

    def cluster_resources(self) -> dict[str, float]:
        found: dict[str, float] = self.link.head_request("cluster_resources")
        return found

    def available_resources(self) -> dict[str, float]:
        found: dict[str, float] = self.link.head_request("available_resources")
        return found

    def head_call(self, method: str, *args: Any) -> Any:
        return self.link.head_request(method, *args)

    def context(self) -> RuntimeContextData:
        from miniray.accelerators import DEVICE_RESOURCES

        facts = self.facts
        running = context.execution.get()
        return RuntimeContextData(
            job_id=facts.job_id.hex(),
            node_id=self.node_id.hex(),
            worker_id=self.process_id.hex(),
            namespace=facts.namespace,
            address=facts.address,
            session_dir=facts.session_dir,
            task_id=running.task_id.hex() if running is not None else None,
            task_name=running.name if running is not None else None,
            actor_id=facts.actor_id.hex() if facts.actor_id is not None else None,
            actor_name=facts.actor_name,
            function_name=running.function_name if running is not None else None,
            placement_group_id=facts.placement_group_id,
            capture_child_tasks=facts.capture_child_tasks,
            was_restarted=facts.was_restarted,
            attempt=running.attempt if running is not None else 0,
            accelerator_ids={
                **{resource: [] for resource in DEVICE_RESOURCES},
                **facts.accelerator_ids,
            },
            assigned_resources=facts.assigned_resources,
            runtime_env=facts.runtime_env,
        )

    def current_actor(self) -> ActorLocation:
        own = self.facts.own_actor
        if own is None:
            raise RuntimeError("This code does not run in an actor.")
        return self.actors.location(*own)

    def exit_actor(self) -> None:
        from miniray.worker.exits import ActorExit

        if self.facts.actor_id is None:
            raise RuntimeError("exit_actor() can only be called in a method of an actor.")
        raise ActorExit

    # --- messages ------------------------------------------------------------------
    def _on_message(self, peer: Peer, message: tuple[Any, ...]) -> None:
        handler = self.on_kind.get(message[0])
        if handler is None:
            logger.error(
                "a peer sent message kind %r, which this process does not know", message[0]
            )
        else:
            handler(peer, message)

    def on_push(self, topic: str, body: tuple[Any, ...]) -> None:
        """A push from the daemon or the head."""
        handler = self.on_topic.get(topic)
        if handler is not None:
            handler(*body)
        else:
            logger.error("a push about %r, which this process does not know", topic)

    def _on_head_back(self) -> None:
        """The head, or its successor, knows of this process again, but not what it wants."""
        self.tasks.on_head_back()
        self.actors.on_head_back()

    def _on_peer_lost(self, peer: Peer) -> None:
        self.tasks.on_peer_lost(peer)
        self.actors.on_peer_lost(peer)
        self.borrowing.peer_lost(peer)
        self.table.borrower_died(peer.process_id)
        if self.on_peer_gone is not None:
            self.on_peer_gone(peer)

    def on_link_lost(self) -> None:
        """The node's daemon is gone: nothing that was waited for will come."""
        if self._closed:
            return
        error = error_value(NodeDiedError(self.node_id.hex(), "its daemon ended"))
        for call in list(self.calls.open.values()):
            self.calls.fail_value(call, error)
        for entry in self.table.snapshot():
            if entry.value is None:
                self.table.set_value(entry.id, error)

    def shutdown(self) -> None:
        """Leave the cluster."""
        if self._closed:
            return
        self._closed = True
        hooks.wake = hooks.serialized = hooks.deserialized = None
        error = error_value(RuntimeError("miniray.shutdown() was called."))
        for call in list(self.calls.open.values()):
            if call.stream is not None:
                call.stream.end(error)
        for entry in self.table.snapshot():
            if entry.value is None and entry.waiters:
                self.table.set_value(entry.id, error)
        if self._futures is not None:
            self._futures.shutdown(wait=False, cancel_futures=True)
        self._on_shutdown()

    def close_sockets(self) -> None:
        """Close the peers; the daemon's link is closed by who made it."""
        self.peers.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, tell nobody."""
        self._closed = True
        hooks.wake = hooks.serialized = hooks.deserialized = None
        self.block = _refuse_wait
        self.peers.abandon()
        self.link.abandon()
        self.loop.abandon()


def _refuse_wait(_wait: Callable[[float | None], bool], _timeout: float | None) -> bool:
    raise NotInitializedError(
        "This process was forked from the one that waits here for a value. What the parent "
        "started can be waited for in the parent only."
    )


def _plain_wait(wait: Callable[[float | None], bool], timeout: float | None) -> bool:
    return wait(timeout)


def _no_runtime_env(own: Mapping[str, Any] | None) -> str:
    raise RuntimeError(f"runtime_env {own!r} cannot be used in this process")


def _resolve(future: Any) -> None:
    if not future.done():
        future.set_result(None)
