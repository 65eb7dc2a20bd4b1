"""Tasks and method calls on their way out: made for user code's calls, with the refs it gets."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.calls.call import Call, serialize_call
from miniray.calls.task_groups import shape_of
from miniray.common.object_ref import hooks
from miniray.common.runtime import (
    ActorClassInfo,
    ActorLocation,
    BoundMethod,
    Exported,
    RuntimeCalls,
)
from miniray.messages import protocol as p
from miniray.messages.value import is_error
from miniray.objects.object_ref_generator import (
    DynamicObjectRefGenerator,
    ObjectRefGenerator,
    StreamState,
)
from miniray.values.serialization import serialize
from miniray.wire.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.calls.calls import CallTable
    from miniray.calls.context import ProcessFacts
    from miniray.calls.task_client import TaskClient
    from miniray.client.actor_clients import ActorClients
    from miniray.client.job_uploads import JobUploads
    from miniray.client.ref_tracking import RefTracking
    from miniray.common.object_ref import ObjectRef
    from miniray.common.specs import ActorOptions, MethodOptions, TaskOptions
    from miniray.objects.objects import Entry, ObjectTable
    from miniray.objects.waiting import Waits
    from miniray.wire.io_loop import IOLoop


@dataclasses.dataclass(eq=False, repr=False)
class Submission(RuntimeCalls):
    """Makes the calls of user code; the call table sends them."""

    facts: ProcessFacts
    refs: RefTracking
    calls: CallTable
    tasks: TaskClient
    actors: ActorClients
    uploads: JobUploads
    returns: Returns

    def export(self, target: Callable[..., Any] | type, name: str) -> Exported:
        return self.uploads.export(target, name)

    def submit_task(
        self,
        function: Exported,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: TaskOptions,
    ) -> Any:
        if function.key not in self.uploads.published:
            self.uploads.publish(function)
        shape = shape_of(options, function, self.facts)
        group = self.tasks.group(
            shape.key,
            lambda: dataclasses.replace(
                shape.spec, runtime_env=self.uploads.environment(options.runtime_env)
            ),
        )
        call = Call(  # names of arguments would cost as much again
            function.key,
            options.name or function.name,
            self.tasks,
            options.max_retries,
            options.retry_exceptions,
            group,
            options.max_retries != 0,
        )
        return self._submit(call, args, kwargs, options)

    def submit_actor_call(
        self, method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        actor, info, name, options = method
        client = self.actors.client(actor, info)
        if not actor._owner_node:
            # Found by its name. Where it is known by a counted handle too, it lives until the call
            # has ended, as with any call through that.
            actor = self.refs.table.counted(actor.binary()) or actor
        retries = options.max_task_retries
        retries = info.max_task_retries if retries is None else retries
        how = None
        if options.name or options.concurrency_group:
            how = (options.concurrency_group, options.name or None)
        call = Call(
            name,
            options.name or f"{info.name}.{name}",
            client,
            retries,
            options.retry_exceptions,
            how,
            retries != 0,
        )
        return self._submit(call, args, kwargs, options, actor)

    def _submit(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: TaskOptions | MethodOptions,
        actor: ObjectRef[Any] | None = None,
    ) -> Any:
        """Give a call its arguments, its number and its results, and send it."""
        calls = self.calls
        serialized, call.refs, pins = serialize_call(args, kwargs)
        if actor is not None:
            pins = [actor, *pins] if pins else [actor]
        call.pins = pins
        submitted = False
        # From here until the call is registered a signal handler must not raise: the call would
        # run with no owner.
        interrupts = Interrupts.begin()
        try:
            try:
                if hooks.dropped:
                    self.refs.drain()
                call.number = calls.next_number()
                call.return_ids, call.stream, result = self.returns.of(call.number, options)
                call.arguments = calls.store(serialized)
                running = context.execution.get()
                if running is not None:
                    call.join(running.children)
                calls.submit(call)
                submitted = True
            finally:
                if interrupts is not None:
                    interrupts.end()
        except BaseException:
            # A signal that waited ends the caller: the result will not be requested. What a running
            # call has started goes with that, or stays, as its cancel says.
            if submitted and call.siblings is None:
                calls.cancel_call(call)
            raise
        return result

    def create_actor(
        self,
        cls: Exported,
        info: ActorClassInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: ActorOptions,
    ) -> ActorLocation:
        self.uploads.publish(cls)
        return self.actors.create(cls, info, args, kwargs, options)

    def cancel(self, ref: ObjectRef[Any], *, force: bool, recursive: bool) -> None:
        self.calls.cancel(ref, force, recursive)


@dataclasses.dataclass(eq=False, repr=False)
class Returns:
    """What calls return at once: refs that get their values later, or a generator of refs."""

    _table: ObjectTable
    _calls: CallTable
    _loop: IOLoop
    _waits: Waits

    def of(
        self, number: int, options: TaskOptions | MethodOptions
    ) -> tuple[tuple[bytes, ...], StreamState | None, Any]:
        """Make a call's result ids, or its stream; and the return value of ``.remote()``."""
        num_returns = options.num_returns
        table = self._table
        if num_returns == 1:
            id = table.new_id()
            return (id,), None, table.create(id)
        if isinstance(num_returns, int):
            ids = tuple([table.new_id() for _ in range(num_returns)])
            return ids, None, [table.create(id) for id in ids] or None
        if num_returns == "dynamic":
            stream = self._stream(number, -1)
            return (), stream, self._all_of(stream)
        stream = self._stream(number, options.generator_backpressure)
        return (), stream, ObjectRefGenerator(stream, self._waits.for_callback)

    def _all_of(self, stream: StreamState) -> ObjectRef[Any]:
        """Make a ref of all items of a generator, ready when that has ended."""
        completed = self._table.entry(stream.completed_ref().binary())
        assert completed is not None

        def ended(completed: Entry) -> None:
            value = completed.value
            assert value is not None
            if is_error(value):
                self._table.set_value(stream.id, value)
                return
            refs = stream.take_all()
            stored = serialize(DynamicObjectRefGenerator(refs)).value()
            self._table.set_value(stream.id, stored, refs)

        self._table.when_ready(completed, ended)  # the call is not sent yet
        return self._table.create(stream.id)

    def _stream(self, number: int, backpressure: int) -> StreamState:
        def consumed(count: int) -> None:
            if backpressure >= 0:
                call = self._calls.open.get(number)
                if call is not None and call.peer is not None:
                    call.peer.send((p.PEER_STREAM_ACK, number, count))

        def abandoned() -> None:
            # May run in a garbage collection anywhere: only the loop may take locks for it.
            self._loop.call_soon(stop)

        def stop() -> None:
            call = self._calls.open.get(number)
            if call is not None:
                call.cancelled = True
                if call.peer is not None:
                    call.peer.send((p.PEER_STREAM_ACK, number, -1))
                else:
                    call.channel.cancel(call, False, False)

        return StreamState(self._table.new_id(), self._table, consumed, abandoned, backpressure)
