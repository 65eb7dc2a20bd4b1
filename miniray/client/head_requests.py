"""What head and daemon are asked for the API: named actors, placement groups, listings."""

from __future__ import annotations

import pickle
import sys
from typing import TYPE_CHECKING, Any

from miniray.calls import context
from miniray.client.runtime_parts import RuntimeParts
from miniray.common.object_ref import ObjectRef
from miniray.common.runtime import ActorLocation, RuntimeContextData
from miniray.objects.borrowing import error_value
from miniray.values.serialization import serialize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.common.state_types import NodeMemory
    from miniray.objects.objects import Value


#: Placement groups that a process asks for before it waits for the head.
_GROUPS_IN_FLIGHT = 256


class HeadRequests(RuntimeParts):
    """Requests to the head, and the runtime context."""

    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        return self.actors.find(name, namespace)

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        found: list[dict[str, str]] = self.link.head_request(
            "list_named_actors", None if all_namespaces else self.facts.namespace
        )
        return found

    def kill_actor(self, actor: ObjectRef[Any], no_restart: bool) -> None:
        self.link.head_request("kill_actor", actor.binary(), no_restart)

    def create_placement_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Sequence[Mapping[str, str]] | None,
    ) -> bytes:
        id = self.ids.new()
        # A name may be taken; and a program that makes groups faster than the head looks at them
        # waits for it now and then, so that others are not behind all of them.
        ask = name or len(self.own_groups) % _GROUPS_IN_FLIGHT == _GROUPS_IN_FLIGHT - 1
        tell = self.link.head_request if ask else self.link.head_notice
        try:
            if lifetime != "detached" and not name:
                self.own_groups.add(id)
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
        except BaseException:  # refused, or a signal's handler raised: nobody knows of the group
            self.own_groups.discard(id)
            self.link.head_notice("remove_placement_group", id)
            raise
        return id

    def placement_group_ready(self, id: bytes, value: Any) -> ObjectRef[Any]:
        """A ref that this process owns and that the head's answer makes ready."""
        ref = self.table.create(self.ids.new())
        object_id = ref.binary()
        serialized = serialize(value)

        def answer(error: Any, result: Any, _fd: int) -> None:
            from miniray.wire.node_link import rebuild_error

            if error is None:
                found: Value = (serialized.form, serialized.payload(), ())
            else:
                found = error_value(rebuild_error(error))
            self.awaited_groups.pop(object_id, None)
            self.table.set_value(object_id, found)

        self.awaited_groups[object_id] = id
        self.link.head_request_async("await_placement_group", (id,), answer)
        return ref

    def remove_placement_group(self, id: bytes) -> None:
        if id in self.own_groups:
            # It ends with this process's node too, so that no answer is needed to be sure of it;
            # and nobody waits for its name.
            self.own_groups.discard(id)
            self.link.head_notice("remove_placement_group", id)
        else:
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

    def memory_report(self, limit: int, detail: bool, seconds: float) -> list[NodeMemory]:
        return self.link.memory_report(limit, detail, seconds)

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
            function_name=running.function_name(facts.actor_class) if running is not None else None,
            placement_group_id=facts.placement_group_id,
            capture_child_tasks=facts.capture_child_tasks,
            was_restarted=facts.was_restarted,
            cancelled=running is not None and running.cancelled,
            accelerator_ids={
                **{resource: [] for resource in DEVICE_RESOURCES},
                **facts.accelerator_ids,
            },
            assigned_resources=facts.assigned_resources,
            runtime_env=facts.runtime_env,
        )

    def current_actor(self) -> ActorLocation:
        id, info = self.facts.actor_id, self.facts.actor_info
        if id is None or info is None:
            raise RuntimeError("This code does not run in an actor.")
        # Not counted, as in Ray: an actor that keeps its own handle would never end.
        return ActorLocation(ObjectRef(id, b""), pickle.loads(info))

    def exit_actor(self) -> None:
        from miniray.messages.errors import ActorExit

        if self.facts.actor_id is None:
            raise RuntimeError("exit_actor() can only be called in a method of an actor.")
        running = context.execution.get()
        if running is not None:
            running.exits = True  # before it is asked whether anybody will see that
        if running is None or running.answered:
            self.end_actor()
        if running is None:
            sys.exit()  # a thread of the user's: nobody prints its end
        raise ActorExit
