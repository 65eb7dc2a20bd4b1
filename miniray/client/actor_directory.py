"""The actors that this process created or calls: creation, lookup, and what the head says."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.calls.actor_client import ALIVE, DEAD, ActorClient
from miniray.calls.call import NOTHING, Call
from miniray.calls.task_shape import capturing_group, effective_placement
from miniray.common.config import config
from miniray.common.names import call_site, describe
from miniray.common.object_ref import ObjectRef
from miniray.common.runtime import ActorClassInfo, ActorLocation, Exported
from miniray.common.specs import ActorSpec
from miniray.exceptions import (
    ActorUnschedulableError,
    DeathCause,
    MinirayError,
    RuntimeEnvSetupError,
)
from miniray.messages import protocol as p
from miniray.messages.errors import Death
from miniray.objects.borrowing import error_value
from miniray.wire.interrupts import Interrupts

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.calls.call import RefArgument
    from miniray.client.cluster_runtime import ClusterRuntime
    from miniray.common.specs import ActorOptions
    from miniray.values.serialization import Serialized
    from miniray.wire.peers import Peer


#: Deaths of actors whose earlier calls may have finished: their replies are awaited. Others end
#: what runs, and may be told before their process is gone.
_FINISHED = frozenset({DeathCause.EXIT_ACTOR, DeathCause.EXITED, DeathCause.OUT_OF_SCOPE})


class _Creation(NamedTuple):
    """What is to be known of a call that makes an actor."""

    detached: bool
    #: Whether the constructor may run again.
    may_restart: bool
    #: The actor's name, and where in user code a detached one was made, for reports.
    name: str
    made: str


class ActorDirectory:
    """Clients of actors by id. Thread-safe; the channel of calls that create actors."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        self._clients: dict[bytes, ActorClient] = {}
        #: Clients by the process that their actor lives in: it has the process to itself.
        self._at: dict[bytes, ActorClient] = {}
        self._lock = threading.RLock()  # a collection in here may drop a ref
        #: What constructors hold that have not run, or may run again.
        self._creation: dict[bytes, Call] = {}

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
        runtime = self._runtime
        spec = self._spec(cls, info, options)
        serialized, refs, pins = runtime.calls.serialize(args, kwargs)
        # Cut off from here on, an actor would be there of which nobody knows.
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
        runtime = self._runtime
        id = runtime.ids.new()
        arguments = runtime.calls.store(serialized)
        try:
            found = self._register(id, spec, get_if_exists)
        except BaseException:
            runtime.calls.free_value(arguments)
            # If the wait was given up, nobody will know of it; else there is no such actor.
            runtime.link.head_notice("kill_actor", id, True)
            raise
        if found is not None:
            runtime.calls.free_value(arguments)
            return self._location(*found)
        ref = ObjectRef(id, b"") if spec.detached else runtime.table.create_actor(id)
        self._client(id, info)
        call = Call(
            number=runtime.calls.next_number(),
            target=id,
            name=f"{info.name}.__init__",
            channel=self,
            arguments=arguments,
            refs=refs,
            pins=pins,
            options=_Creation(
                spec.detached,
                spec.max_restarts != 0,
                spec.name or "",
                describe(call_site()) if spec.detached else "",
            ),
        )
        self._creation[id] = call
        self.submit(call)
        return ActorLocation(ref, info)

    def _spec(self, cls: Exported, info: ActorClassInfo, options: ActorOptions) -> ActorSpec:
        """What the head has to know of a new actor."""
        runtime = self._runtime
        facts = runtime.facts
        return ActorSpec.of(
            options,
            class_key=cls.key,
            class_name=info.name,
            info=pickle.dumps(info, 5),
            is_async=info.is_async,
            namespace=options.namespace or facts.namespace,
            detached=(options.lifetime or facts.default_actor_lifetime) == "detached",
            owner_node=runtime.node_id,
            placement=effective_placement(options.placement, capturing_group(facts)),
            runtime_env=runtime.runtime_env_for(options.runtime_env),
        )

    def _register(self, id: bytes, spec: ActorSpec, get_if_exists: bool) -> Any:
        """Tell the head of an actor; returns where the one is that has its name already."""
        link = self._runtime.link
        if spec.name is not None:
            # Only a name can be taken: everything else is told without waiting for an answer.
            return link.head_request("create_actor", id, spec.to_wire(), get_if_exists)
        link.head_notice("create_actor", id, spec.to_wire(), False)
        return None

    def submit(self, call: Call) -> None:
        """Place the actor once its constructor's arguments have values."""
        if self._runtime.calls.open_call(call):
            self.dependencies_ready(call)

    def dependencies_ready(self, call: Call) -> None:
        """The constructor's arguments have values: the actor can be placed."""
        resolved, error = self._runtime.calls.resolved_refs(call)
        largest = config().largest_actor_arguments
        if error is None and (size := _size(resolved)) > largest:
            error = error_value(
                ValueError(
                    f"The values of the refs among the arguments of {call.name} take {size} bytes "
                    f"together. They go through the head, and may take {largest}. Pass the refs "
                    f"inside a list or dict, and get the values in the constructor."
                )
            )
        elif error is not None and len(error[1]) > largest:
            error = error_value(
                ValueError(
                    f"An argument of {call.name} has failed, with an error of {len(error[1])} "
                    f"bytes. It goes through the head, and may take {largest}."
                )
            )
        if error is not None:
            resolved = []
        arguments = call.arguments
        if call.options.detached and error is None:
            self._leave_arguments(call, resolved)
        self._runtime.link.head_notice("start_actor", call.target, arguments, resolved, error)
        # Not a call that anybody replies to: it stays only as the holder of its arguments.
        self._runtime.calls.sent(call)

    def _leave_arguments(self, call: Call, resolved: list[RefArgument]) -> None:
        """A detached actor may start when this process is gone: the daemon keeps what it needs."""
        runtime = self._runtime
        values = [call.arguments, *(value for *_, value in resolved if value is not None)]
        inside = {(id, node) for _, id, node, _ in resolved}
        inside.update(ref for value in values for ref in value[2])
        counted = tuple((id, node) for id, node in inside if node)
        is_shared = call.arguments[0] == p.VALUE_SHARED
        if not counted and not is_shared:
            return
        daemon = runtime.peers.get(runtime.node_id, runtime.node_id)
        runtime.borrowing.report_for(daemon, counted)
        kept = call.arguments if is_shared else NOTHING
        creation = call.options
        about = (call.name, creation.name, creation.made, creation.may_restart)
        runtime.link.node_notice("keep_arguments", call.target, kept, counted, about)
        call.arguments = NOTHING  # it is not this process's to free any more

    def finished(self, call: Call) -> None:
        """Creations are not answered as calls are."""

    def retry(self, call: Call) -> None:
        """Creations are repeated by the head."""

    def withdraw(self, call: Call) -> None:
        """Creations are not sent to a process."""

    def cancel(self, call: Call, force: bool, recursive: bool) -> bool:
        """Creations cannot be cancelled: an actor is killed."""
        return False

    def creations(self) -> list[Call]:
        """The calls that make actors: what they hold is kept, as they are to run, or may again."""
        return list(self._creation.values())

    # --- finding -----------------------------------------------------------------
    def find(self, name: str, namespace: str | None) -> ActorLocation:
        """A named actor; ValueError if there is none.

        Its handle is not counted, as in Ray: finding an actor does not keep it alive.
        """
        where = namespace or self._runtime.facts.namespace
        id, _node, _detached, info = self._runtime.link.head_request("get_actor", name, where)
        return ActorLocation(ObjectRef(id, b""), pickle.loads(info))

    def _location(self, id: bytes, owner_node: bytes, detached: bool, info: bytes) -> ActorLocation:
        """A handle's parts from what the head tells of an actor."""
        if detached:
            ref: ObjectRef[Any] = ObjectRef(id, b"")
        else:
            ref = self._runtime.borrowing.hold(((id, owner_node),))[0]
        return ActorLocation(ref, pickle.loads(info))

    def knows(self, id: bytes) -> bool:
        """Whether an id is that of an actor which this process made or has called."""
        return id in self._clients

    def client(self, actor: ObjectRef[Any], info: ActorClassInfo) -> ActorClient:
        """The client of an actor; subscribes to its state on first use."""
        client = self._clients.get(actor.binary())
        return client if client is not None else self._client(actor.binary(), info, subscribe=True)

    def _client(self, id: bytes, info: ActorClassInfo, *, subscribe: bool = False) -> ActorClient:
        with self._lock:
            client = self._clients.get(id)
            if client is None:
                client = self._clients[id] = ActorClient(
                    id,
                    info.name,
                    self._runtime.calls,
                    self._runtime.peers,
                    max_pending_calls=info.max_pending_calls,
                )
                if subscribe:
                    self._runtime.link.head_notice("subscribe_actor", id)
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
        """The head says where an actor is, or why it is dead."""
        if state == DEAD or (state == ALIVE and not self._may_restart(id)):
            self._drop_creation(id)
        client = self._clients.get(id)
        if client is not None:
            before = client.process_id
            cause = _cause(id, death) if death is not None else None
            at_once = death is not None and DeathCause[death[0]] not in _FINISHED
            client.on_state(state, node_id, process_id, epoch, cause, at_once=at_once)
            if not client.settling:
                self._at.pop(before, None)
            if client.process_id:
                self._at[client.process_id] = client
            if state == DEAD and self._runtime.table.entry(id) is None:
                self._clients.pop(id, None)  # who finds it by name later asks anew

    def on_head_back(self) -> None:
        """The head forgot who wants to hear of which actor."""
        for id in list(self._clients):
            self._runtime.link.head_notice("subscribe_actor", id)

    def on_peer_lost(self, peer: Peer) -> None:
        """A process is gone."""
        client = self._at.get(peer.process_id)
        if client is not None:
            client.on_peer_lost(peer)
            if not peer.unreachable or client.process_id != peer.process_id:
                self._at.pop(peer.process_id, None)

    def unreferenced(self, id: bytes) -> None:
        """The last handle of an actor of this process went away: it ends.

        Its client stays until it has: handles that were found by name may have calls in flight.
        """
        self._runtime.link.head_notice("actor_out_of_scope", id)
        self._drop_creation(id)
        self.released(id)

    def released(self, id: bytes) -> None:
        """No counted handle of an actor is left in this process."""
        client = self._clients.get(id)
        if client is not None and client.state == DEAD:
            self._clients.pop(id, None)

    def _may_restart(self, id: bytes) -> bool:
        call = self._creation.get(id)
        return call is not None and call.options.may_restart

    def _drop_creation(self, id: bytes) -> None:
        call = self._creation.pop(id, None)
        if call is not None:
            self._runtime.calls.close(call)


def _size(resolved: list[RefArgument]) -> int:
    """Bytes of the values of refs that travel with a call."""
    values = [value for _, _, _, value in resolved if value is not None]
    return sum(len(value[1]) for value in values if value[0] != p.VALUE_SHARED)


def _cause(id: bytes, death: tuple[Any, ...]) -> Callable[[], MinirayError]:
    """Makes the error of a dead actor; a fresh one for each call."""
    known = Death(*death)

    def make() -> MinirayError:
        creation_error = pickle.loads(known.creation) if known.creation is not None else None
        if isinstance(creation_error, (ActorUnschedulableError, RuntimeEnvSetupError)):
            return creation_error  # as in Ray: it never lived
        return known.error(id, creation_error)

    return make
