"""Tasks and method calls on their way out, and what comes back: replies, streams, cancels."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.calls.actor_client import ActorClient
from miniray.calls.call import Call
from miniray.calls.task_shape import shape_of
from miniray.client.ref_tracking import RefTracking
from miniray.common.config import config
from miniray.common.ids import owner_of
from miniray.common.object_ref import ObjectRef, hooks
from miniray.common.runtime import ActorClassInfo, ActorLocation, Exported
from miniray.messages import protocol as p
from miniray.messages.code_pieces import split
from miniray.objects.object_ref_generator import DynamicObjectRefGenerator, ObjectRefGenerator
from miniray.objects.streams import StreamState
from miniray.values.serialization import dumps_code, serialize
from miniray.wire.gates import Gate
from miniray.wire.interrupts import Interrupts, uncut

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.specs import ActorOptions, MethodOptions, TaskOptions
    from miniray.objects.objects import Entry
    from miniray.wire.peers import Peer

logger = logging.getLogger(__name__)


class Submission(RefTracking):
    """Sends calls through their channels."""

    #: Keys of the code that was made available to workers.
    _exported: set[bytes]

    def export(self, target: Callable[..., Any] | type, name: str) -> Exported:
        blob, refs = dumps_code(target)
        for ref in refs:
            self.table.pin(ref.binary())  # the code lives as long as the job
        key = hashlib.sha256(blob).digest()[:16]
        if len(blob) > config().large_closure_warning:
            from miniray.values.closures import check_large

            check_large(target, name, len(blob), config().largest_closure)
        return Exported(key, name, blob)

    def publish(self, code: Exported) -> None:
        """Make code available to every worker; once per runtime and key."""
        if code.key not in self._exported:
            for name, part in split(code.key, code.blob):
                if len(part) <= config().inline_limit:
                    self.link.node_notice("put_code", name, part)
                else:  # waits, so that what other threads send passes between two pieces
                    self.link.head_request("put_code", self.facts.job_id, name, part)
            self._exported.add(code.key)  # only now may another thread rely on it

    # --- calls -------------------------------------------------------------------
    def submit_task(
        self,
        function: Exported,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: TaskOptions,
    ) -> Any:
        if function.key not in self._exported:
            self.publish(function)
        shape = shape_of(options, function, self.facts)
        group = self.tasks.group(
            shape.key,
            lambda: dataclasses.replace(
                shape.spec, runtime_env=self.runtime_env_for(options.runtime_env)
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
        self,
        actor: ObjectRef[Any],
        info: ActorClassInfo,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: MethodOptions,
    ) -> Any:
        client = self.actors.client(actor, info)
        if not actor._owner_node:
            # Found by its name. Where it is known by a counted handle too, it lives until the call
            # has ended, as with any call through that.
            actor = self.table.counted(actor.binary()) or actor
        retries = options.max_task_retries
        how = None
        if options.name or options.concurrency_group:
            how = (options.concurrency_group, options.name or None)
        call = Call(
            method,
            options.name or f"{info.name}.{method}",
            client,
            info.max_task_retries if retries is None else retries,
            options.retry_exceptions,
            how,
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
        serialized, call.refs, pins = self.calls.serialize(args, kwargs)
        if actor is not None:
            pins = [actor, *pins] if pins else [actor]
        call.pins = pins
        submitted = False
        # Cut off from here on, a call would be under way of which nobody knows.
        interrupts = Interrupts.begin()
        try:
            try:
                if hooks.dropped:
                    self.drain()
                number = call.number = self.calls.next_number()
                call.return_ids, call.stream, result = self._new_results(number, options)
                call.arguments = self.calls.store(serialized)
                running = context.execution.get()
                if running is None:
                    call.channel.submit(call)
                else:
                    self._submit_child(running, call)
                submitted = True
                # After it is known as open: it is failed either here or with all that are.
                if self.link.lost and number in self.calls.open:
                    self.calls.fail(call, self.link.end())
            finally:
                if interrupts is not None:
                    interrupts.end()
        except BaseException:
            # A signal that waited ends the caller: nobody will ask for the result. What a running
            # call has started goes with that, or stays, as its cancel says.
            if submitted and call.siblings is None:
                self._cancel_call(call)
            raise
        return result

    def _new_results(
        self, number: int, options: TaskOptions | MethodOptions
    ) -> tuple[tuple[bytes, ...], StreamState | None, Any]:
        """Ids of a call's results, or its stream; and what ``.remote()`` returns."""
        num_returns = options.num_returns
        if num_returns == 1:
            id = self.ids.new()
            return (id,), None, self.table.create(id)
        if isinstance(num_returns, int):
            ids = tuple([self.ids.new() for _ in range(num_returns)])
            return ids, None, [self.table.create(id) for id in ids] or None
        if num_returns == "dynamic":
            stream = self._stream(number, -1)
            return (), stream, self._all_of(stream)
        stream = self._stream(number, options.generator_backpressure)
        return (), stream, ObjectRefGenerator(stream, self._block_on)

    def _all_of(self, stream: StreamState) -> ObjectRef[Any]:
        """A ref of all items of a generator, which is there when that has ended."""
        completed = self.table.entry(stream.completed_ref().binary())
        assert completed is not None

        def ended(completed: Entry) -> None:
            value = completed.value
            assert value is not None
            if value[0] == p.VALUE_ERROR:
                self.table.set_value(stream.id, value)
                return
            refs = stream.take_all()
            serialized = serialize(DynamicObjectRefGenerator(refs))
            contained = tuple((ref.binary(), ref._owner_node) for ref in refs)
            stored = (serialized.form, serialized.payload(), contained)
            self.table.set_value(stream.id, stored, refs)

        self.table.when_ready(completed, ended)  # the call is not sent yet
        return self.table.create(stream.id)

    @uncut
    def _cancel_call(self, call: Call, *, force: bool = False, recursive: bool = True) -> None:
        call.cancelled = True
        call.channel.cancel(call, force, recursive)

    @staticmethod
    def _submit_child(running: context.Execution, call: Call) -> None:
        """Submit a call that a running one makes."""
        call.siblings = running.children
        call.siblings[call.number] = call
        try:
            call.channel.submit(call)
        except BaseException:
            call.siblings.pop(call.number, None)
            raise

    @uncut  # the wait itself may be
    def _block_on(self, when: Callable[[Callable[[], None]], bool]) -> None:
        """Wait, as the running task, until ``when`` calls back; not at all if it says True."""
        gate = Gate(self.loop)
        if not when(gate.arrived):
            self.loop.flush_posted()
            self.block(gate.wait, None)

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
        if call is not None and message[2] != p.STATUS_LOST:
            if call.refs:
                self.calls.note_copies(call, peer.node_id)
            if call.channel is self.tasks:
                self.tasks.observe(call, message[5])
        self.calls.on_reply(peer, message)

    def _on_stream_item(self, peer: Peer, message: tuple[Any, ...]) -> None:
        _, number, index, value, pin = message
        call = self.calls.open.get(number)
        refs = self.borrowing.hold(value[2]) if value[2] else None
        stream = None if call is None else call.stream
        if call is None or stream is None or not stream.item(index, value, refs, call.name):
            self.calls.free_value(value)
        elif call.repeatable and value[0] == p.VALUE_SHARED and index < len(stream.ids):
            self.calls.remember_item(call, stream, value)
        if refs:
            self.borrowing.defer(lambda: peer.send((p.PEER_RELEASE, [pin])))

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

    def cancel(self, ref: ObjectRef[Any], force: bool, recursive: bool) -> None:
        id = ref.binary()
        if not self.table.is_owned(id):  # whoever made the call knows where it runs
            maker = self.peers.get(ref._owner_node, owner_of(id))
            maker.send((p.PEER_CANCEL_MAKER, id, force, recursive))
            return
        call = self.calls.find(id)
        if call is None:
            return  # finished already
        if force and isinstance(call.channel, ActorClient):
            raise ValueError(
                "force=True would end the actor and cannot be used to cancel one of its calls; "
                "use miniray.kill() to end the actor."
            )
        self._cancel_call(call, force=force, recursive=recursive)

    def _on_cancel_asked(self, peer: Peer, message: tuple[Any, ...]) -> None:
        """PEER_CANCEL_MAKER: a process that was given a ref of a call wants that cancelled."""
        _, id, force, recursive = message
        try:
            self.cancel(ObjectRef(id, b""), force, recursive)
        except ValueError as error:
            logger.warning("process %s asked for a cancel: %s", peer.process_id.hex(), error)

    @staticmethod
    def cancel_children(running: context.Execution) -> None:
        """Cancel what a cancelled task had started, but for what it did to clean up."""
        calls = running.children if running.doomed is None else running.doomed
        for call in list(calls.values()):
            call.cancelled = True
            call.channel.cancel(call, False, True)
