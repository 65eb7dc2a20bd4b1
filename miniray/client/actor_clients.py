"""The actors that this process created or calls: creation, lookup, and states from the head."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.calls.actor_client import ActorClient
from miniray.calls.call import Call, Channel, serialize_call
from miniray.calls.task_groups import effective_placement
from miniray.common.config import config
from miniray.common.object_ref import ObjectRef
from miniray.common.runtime import ActorLocation
from miniray.common.specs import ActorSpec
from miniray.common.state_types import ALIVE, DEAD
from miniray.exceptions import (
    ActorAlreadyExistsError,
    ActorUnschedulableError,
    DeathCause,
    MinirayError,
    RuntimeEnvSetupError,
)
from miniray.messages.value import NOTHING, Death, error_value, is_shared, refs_in, size_of
from miniray.wire.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.calls.call import RefArgument
    from miniray.calls.calls import CallTable
    from miniray.calls.context import ProcessFacts
    from miniray.client.job_uploads import JobUploads
    from miniray.common.runtime import ActorClassInfo, Exported
    from miniray.common.specs import ActorOptions
    from miniray.objects.borrowing import Borrowing
    from miniray.objects.objects import ObjectTable
    from miniray.values.serialization import Serialized
    from miniray.wire.node_link import NodeLink
    from miniray.wire.peers import Peer, PeerTable


#: Deaths of actors whose earlier calls may have finished: their replies are awaited. Others end
#: running calls, and may be reported before their process is gone.
_FINISHED = frozenset({DeathCause.EXIT_ACTOR, DeathCause.EXITED, DeathCause.OUT_OF_SCOPE})


class _Creation(NamedTuple):
    """Options of a call that makes an actor."""

    detached: bool
    #: Whether the constructor may run again.
    may_restart: bool


@dataclasses.dataclass(eq=False, repr=False)
class ActorClients(Channel):
    """Clients of actors by id. Thread-safe; the channel of calls that create actors."""

    facts: ProcessFacts
    link: NodeLink
    peers: PeerTable
    table: ObjectTable
    borrowing: Borrowing
    calls: CallTable
    uploads: JobUploads
    _clients: dict[bytes, ActorClient] = dataclasses.field(default_factory=dict, init=False)
    #: Clients by the process that their actor lives in: it has the process to itself.
    _at: dict[bytes, ActorClient] = dataclasses.field(default_factory=dict, init=False)
    _lock: Any = dataclasses.field(
        default_factory=threading.RLock, init=False
    )  # a collection in here may drop a ref
    #: What constructors hold that have not run, or may run again.
    _creation: dict[bytes, Call] = dataclasses.field(default_factory=dict, init=False)

    # --- making ------------------------------------------------------------------
    def create(
        self,
        cls: Exported,
        info: ActorClassInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: ActorOptions,
    ) -> ActorLocation:
        """Register an actor with the head; its constructor's arguments follow when ready."""
        spec = self._spec(cls, info, options)
        serialized, refs, pins = serialize_call(args, kwargs)
        # From here on a signal handler must not raise: the actor would live with no owner.
        interrupts = Interrupts.begin()
        try:
            return self._create(info, spec, serialized, refs, pins, options.get_if_exists)
        finally:
            if interrupts is not None:
                interrupts.end()

    def _create(
        self,
        info: ActorClassInfo,
        spec: ActorSpec,
        serialized: Serialized,
        refs: list[RefArgument],
        pins: list[ObjectRef[Any]] | None,
        get_if_exists: bool,
    ) -> ActorLocation:
        id = self.table.new_id()
        arguments = self.calls.store(serialized)
        try:
            found = self._register(id, spec, get_if_exists)
        except ActorAlreadyExistsError:
            self.calls.free_value(arguments)
            raise
        except BaseException:
            self.calls.free_value(arguments)
            # The wait may have been given up: the actor would have no owner.
            self.link.head_notice("kill_actor", id, True)
            raise
        if found is not None:
            self.calls.free_value(arguments)
            return self._location(*found)
        ref = ObjectRef(id, b"") if spec.detached else self.table.create_actor(id)
        self._client(id, info)
        call = Call(
            number=self.calls.next_number(),
            target=id,
            name=f"{info.name}.__init__",
            channel=self,
            arguments=arguments,
            refs=refs,
            pins=pins,
            options=_Creation(spec.detached, spec.max_restarts != 0),
        )
        self._creation[id] = call
        self.calls.submit(call)
        return ActorLocation(ref, info)

    def _spec(self, cls: Exported, info: ActorClassInfo, options: ActorOptions) -> ActorSpec:
        facts = self.facts
        groups = {name: method.concurrency_group for name, method in info.methods.items()}
        return ActorSpec.of(
            options,
            class_key=cls.key,
            class_name=info.name,
            info=pickle.dumps(info, 5),
            method_groups={name: group for name, group in groups.items() if group},
            is_async=info.is_async,
            namespace=options.namespace or facts.namespace,
            detached=(options.lifetime or facts.default_actor_lifetime) == "detached",
            owner_node=facts.node_id,
            placement=effective_placement(options.placement, facts.capturing_group),
            runtime_env=self.uploads.environment(options.runtime_env),
        )

    def _register(self, id: bytes, spec: ActorSpec, get_if_exists: bool) -> Any:
        """Register an actor with the head; return where the one is that has its name already."""
        if spec.name is not None:
            # Only a name can be taken: everything else is a notice without an answer.
            return self.link.head_request("create_actor", id, spec.to_wire(), get_if_exists)
        self.link.head_notice("create_actor", id, spec.to_wire(), False)
        return None

    def ready(self, call: Call) -> None:
        """Start the actor: its constructor's arguments have values."""
        resolved, error = self.calls.resolved_refs(call)
        largest = config().largest_actor_arguments
        if error is None and (size := _size(resolved)) > largest:
            error = error_value(
                ValueError(
                    f"The values of the refs among the arguments of {call.name} take {size} bytes "
                    f"together. They go through the head, and may take {largest}. Pass the refs "
                    f"inside a list or dict, and get the values in the constructor."
                )
            )
        elif error is not None and (size := size_of(error)) > largest:
            error = error_value(
                ValueError(
                    f"An argument of {call.name} has failed, with an error of {size} bytes. It "
                    f"goes through the head, and may take {largest}."
                )
            )
        if error is not None:
            resolved = []
        arguments = call.arguments
        if call.options.detached and error is None:
            self._leave_arguments(call, resolved)
        self.link.head_notice("start_actor", call.target, arguments, resolved, error)
        self.calls.sent(call)  # it stays only as the holder of its arguments

    def _leave_arguments(self, call: Call, resolved: list[RefArgument]) -> None:
        """Leave the daemon the arguments of a detached actor that may start after this process."""
        values = [call.arguments, *(value for *_, value in resolved if value is not None)]
        inside = {(id, node) for _, id, node, _ in resolved}
        inside.update(ref for value in values for ref in refs_in(value))
        counted = tuple((id, node) for id, node in inside if node)
        large = is_shared(call.arguments)
        if not counted and not large:
            return
        node_id = self.facts.node_id
        self.borrowing.report_for(self.peers.get(node_id, node_id), counted)
        kept = call.arguments if large else NOTHING
        self.link.node_notice("keep_arguments", call.target, kept, counted)
        call.arguments = NOTHING  # it is not this process's to free any more

    def creations(self) -> list[Call]:
        """Return the calls that make actors and will run, or may run again."""
        return list(self._creation.values())

    # --- finding -----------------------------------------------------------------
    def find(self, name: str, namespace: str | None) -> ActorLocation:
        """Find a named actor; ValueError if there is none.

        Its handle is not counted, as in Ray: finding an actor does not keep it alive.
        """
        where = namespace or self.facts.namespace
        id, _node, _detached, info = self.link.head_request("get_actor", name, where)
        return ActorLocation(ObjectRef(id, b""), pickle.loads(info))

    def _location(self, id: bytes, owner_node: bytes, detached: bool, info: bytes) -> ActorLocation:
        if detached:
            return ActorLocation(ObjectRef(id, b""), pickle.loads(info))
        [ref] = self.borrowing.hold(((id, owner_node),))
        return ActorLocation(ref, pickle.loads(info))

    def knows(self, id: bytes) -> bool:
        """Return whether this process made the actor of an id, or has called it."""
        return id in self._clients

    def owns_any(self) -> bool:
        """Return whether an actor lives that ends with this process."""
        clients = list(self._clients.items())
        return any(self.table.is_actor(id) and client.state != DEAD for id, client in clients)

    def client(self, actor: ObjectRef[Any], info: ActorClassInfo) -> ActorClient:
        """Return the client of an actor; subscribe to its state on first use."""
        client = self._clients.get(actor.binary())
        return client if client is not None else self._client(actor.binary(), info, subscribe=True)

    def _client(self, id: bytes, info: ActorClassInfo, *, subscribe: bool = False) -> ActorClient:
        with self._lock:
            client = self._clients.get(id)
            if client is None:
                client = self._clients[id] = ActorClient(
                    id, info.name, self.calls, self.peers, info.max_pending_calls
                )
                if subscribe:
                    self.link.head_notice("subscribe_actor", id)
        return client

    # --- what happens to them --------------------------------------------------------
    def on_state(
        self,
        id: bytes,
        state: str,
        node_id: bytes,
        process_id: bytes,
        epoch: int,
        death: tuple[Any, ...] | None,
    ) -> None:
        """Take the head's word on where an actor is, or why it is dead or restarts."""
        creation = self._creation.get(id)
        if creation and (state == DEAD or (state == ALIVE and not creation.options.may_restart)):
            self._drop_creation(id)
        client = self._clients.get(id)
        if client is None:
            return
        before = client.process_id
        known = None if death is None else Death(*death)
        cause = None if known is None else _cause(id, known)
        dead = known if state == DEAD else None
        at_once = dead is not None and DeathCause[dead.cause] not in _FINISHED
        client.on_state(state, node_id, process_id, epoch, cause, at_once=at_once)
        if not client.settling:
            self._at.pop(before, None)
        if client.process_id:
            self._at[client.process_id] = client
        if state == DEAD and self.table.entry(id) is None:
            self._clients.pop(id, None)  # later handles by name subscribe again

    def on_head_back(self) -> None:
        """Subscribe to all actors again, with a head that has forgotten it."""
        for id in list(self._clients):
            self.link.head_notice("subscribe_actor", id)

    def on_peer_lost(self, peer: Peer) -> None:
        client = self._at.get(peer.process_id)
        if client is not None:
            client.on_peer_lost(peer)
            if not peer.unreachable or client.process_id != peer.process_id:
                self._at.pop(peer.process_id, None)

    def unreferenced(self, id: bytes) -> None:
        """End an actor that this process created, after its last handle is gone.

        Its client stays until it has ended: handles that were found by name may have calls in
        flight.
        """
        self.link.head_notice("actor_out_of_scope", id)
        self._drop_creation(id)
        self.released(id)

    def released(self, id: bytes) -> None:
        """Forget a dead actor without a counted handle in this process."""
        client = self._clients.get(id)
        if client is not None and client.state == DEAD:
            self._clients.pop(id, None)

    def _drop_creation(self, id: bytes) -> None:
        call = self._creation.pop(id, None)
        if call is not None:
            self.calls.sent(call)
            self.calls.release(call)


def _size(resolved: list[RefArgument]) -> int:
    """Return the bytes of the values of refs that travel with a call."""
    return sum(size_of(value) for *_, value in resolved if not is_shared(value))


def _cause(id: bytes, known: Death) -> Callable[[], MinirayError]:
    """Return what makes the error of a dead actor, a fresh one for each call."""

    def make() -> MinirayError:
        creation_error = pickle.loads(known.creation) if known.creation is not None else None
        if isinstance(creation_error, (ActorUnschedulableError, RuntimeEnvSetupError)):
            return creation_error  # as in Ray: it never lived
        return known.error(id, creation_error)

    return make
