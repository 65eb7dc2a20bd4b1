"""Requests of the API to head and daemon: named actors, placement groups, listings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from miniray.calls.actor_client import ActorClient
from miniray.calls.task_groups import TaskGroup
from miniray.common.names import short_name
from miniray.common.object_ref import short_id
from miniray.common.runtime import RuntimeHead
from miniray.exceptions import MinirayError
from miniray.messages.value import error_value, rebuild_error
from miniray.values.serialization import serialize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.calls.call import Call
    from miniray.calls.calls import CallTable
    from miniray.calls.context import ProcessFacts
    from miniray.client.actor_clients import ActorClients
    from miniray.common.object_ref import ObjectRef
    from miniray.common.runtime import ActorLocation
    from miniray.objects.objects import ObjectTable
    from miniray.wire.node_link import NodeLink

#: Seconds that the head may take to say why; a shorter timeout is not made longer by it.
WHY_TIMEOUT = 0.5
#: Placement groups that a process requests before it waits for the head.
_GROUPS_IN_FLIGHT = 256
#: Calls of a chain, each the argument of the next, that are looked through.
_DEEP = 10


@dataclasses.dataclass(eq=False, repr=False)
class ClusterRequests(RuntimeHead):
    """Requests to the head."""

    facts: ProcessFacts
    link: NodeLink
    table: ObjectTable
    calls: CallTable
    actors: ActorClients
    #: Placement groups without a name that are removed when this process ends, at the latest.
    _own_groups: set[bytes] = dataclasses.field(default_factory=set, init=False)
    #: Placement groups by the refs that become ready with them.
    _awaited_groups: dict[bytes, bytes] = dataclasses.field(default_factory=dict, init=False)

    # --- actors ------------------------------------------------------------------
    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        return self.actors.find(name, namespace)

    def list_named_actors(self, all_namespaces: bool) -> list[Any]:
        namespace = None if all_namespaces else self.facts.namespace
        found: list[Any] = self.link.head_request("list_named_actors", namespace)
        return found if all_namespaces else [actor["name"] for actor in found]

    # --- placement groups ----------------------------------------------------------
    def create_placement_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        *,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Sequence[Mapping[str, str]] | None,
    ) -> bytes:
        id = self.table.new_id()
        # A name may be taken; and a program that makes groups faster than the head looks at them
        # waits for it now and then, so that others are not behind all of them.
        ask = name or len(self._own_groups) % _GROUPS_IN_FLIGHT == _GROUPS_IN_FLIGHT - 1
        tell = self.link.head_request if ask else self.link.head_notice
        try:
            if lifetime != "detached" and not name:
                self._own_groups.add(id)
            tell(
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
        except BaseException:  # refused, or a signal's handler raised: nothing uses the group
            self._own_groups.discard(id)
            self.link.head_notice("remove_placement_group", id)
            raise
        return id

    def placement_group_ready(self, id: bytes, value: Any) -> ObjectRef[Any]:
        ref = self.table.create(self.table.new_id())
        object_id = ref.binary()
        serialized = serialize(value)

        def answer(error: Any, _result: Any, _fd: int) -> None:
            found = serialized.value() if error is None else error_value(rebuild_error(error))
            self._awaited_groups.pop(object_id, None)
            self.table.set_value(object_id, found)

        self._awaited_groups[object_id] = id
        self.link.head_request_async("await_placement_group", (id,), answer)
        return ref

    def remove_placement_group(self, id: bytes) -> None:
        if id in self._own_groups:
            # It ends with this process's node too, so that no answer is needed to be sure of it;
            # and no process waits for its name.
            self._own_groups.discard(id)
            self.link.head_notice("remove_placement_group", id)
        else:
            self.link.head_request("remove_placement_group", id)

    def find_placement_group(self, name: str, namespace: str | None) -> bytes | None:
        found: bytes | None = self.link.head_request(
            "find_placement_group", name, namespace or self.facts.namespace
        )
        return found

    # --- the cluster ---------------------------------------------------------------
    def head_call(self, method: str, *args: Any) -> Any:
        return self.link.head_request(method, *args)

    def tell(self, method: str, *args: Any) -> None:
        self.link.head_notice(method, *args)

    def ask_nodes(
        self, what: str, arguments: tuple[Any, ...], seconds: float, nodes: Any = None
    ) -> list[tuple[bytes, Any, str]]:
        return self.link.ask_nodes(what, arguments, seconds, nodes)

    async def flush_output(self) -> None:
        await self.link.node_request_later("flush_output", (), lambda _: None)

    # --- what is waited for ----------------------------------------------------------
    def why_missing(self, id: bytes, timeout: float | None) -> tuple[str, str]:
        """Describe the call of a value that was not ready within a timeout, and what it waits for.

        Returns:
            The name of its call; and a sentence on the demand without resources. Empty if unknown.
        """
        call = self.calls.find(id)
        name = "" if call is None else call.name
        if timeout is None or timeout < WHY_TIMEOUT:
            return name, ""
        return name, self._why_waits(id, call)

    def _why_waits(self, id: bytes, call: Call | None) -> str:
        for _ in range(_DEEP):  # what makes an argument has to run first
            before = call and self._maker_of_argument(call)
            if before is None:
                break
            call = before
        what: Any = None
        if call is None:
            kind, what = "placement_group", self._awaited_groups.get(id)
            name = f"The placement group {short_id(what.hex())}" if what is not None else ""
        elif call.peer is None and isinstance(call.options, TaskGroup):
            kind, what, name = "task", call.options.id, call.name
        elif call.peer is None and isinstance(call.channel, ActorClient):
            kind, what, name = "actor", call.channel.actor_id, call.channel.name
        if what is None:
            return ""  # it runs, or another process has its state
        try:
            reason = self.link.head_request("why_waits", kind, what, timeout=WHY_TIMEOUT)
        except (TimeoutError, MinirayError):
            return ""  # the head is busy, or gone
        return f" {short_name(name)} waits: {reason}." if reason else ""

    def _maker_of_argument(self, call: Call) -> Call | None:
        """Return an open call that makes an argument of another one."""
        made = (self.calls.find(id) for _, id, _, value in call.refs if value is None)
        return next((found for found in made if found is not None), None)
