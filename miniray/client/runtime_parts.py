"""What the pieces of the cluster runtime share: the parts that one process is made of.

``ClusterRuntime`` makes them; ``ref_tracking``, ``object_access``, ``submission`` and
``head_requests`` each hold one side of the public API's work over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.common.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from miniray.calls import context
    from miniray.calls.calls import CallTable
    from miniray.calls.recovery import Recovery
    from miniray.calls.task_client import TaskClient
    from miniray.client.actor_directory import ActorDirectory
    from miniray.common.ids import ObjectIds
    from miniray.objects.borrowing import Borrowing
    from miniray.objects.objects import ObjectTable
    from miniray.objects.shared_memory import SharedMemory
    from miniray.objects.unseen_errors import UnseenErrors
    from miniray.wire.io_loop import IOLoop
    from miniray.wire.node_link import NodeLink
    from miniray.wire.peers import PeerTable


class RuntimeParts(Runtime):
    """The parts, by name."""

    loop: IOLoop
    link: NodeLink
    #: Ids of this process and of its node, 8 bytes each.
    process_id: bytes
    node_id: bytes
    facts: context.ProcessFacts
    ids: ObjectIds
    table: ObjectTable
    shared_memory: SharedMemory
    borrowing: Borrowing
    calls: CallTable
    peers: PeerTable
    tasks: TaskClient
    recovery: Recovery
    actors: ActorDirectory
    unseen_errors: UnseenErrors
    #: Placement groups without a name that are removed when this process ends, at the latest.
    own_groups: set[bytes]
    #: By refs that become ready with them.
    awaited_groups: dict[bytes, bytes]
    #: Merges an environment with the job's and uploads what it names.
    prepare_runtime_env: Callable[[Mapping[str, Any] | None], str]
    #: Runs around a wait that blocks the task (in a worker it gives the CPU back).
    block: Callable[[Callable[[float | None], bool], float | None], bool]
    #: In an actor's worker: ends the actor, and what it runs fails.
    end_actor: Callable[[], None]

    def runtime_env_for(self, own: Mapping[str, Any] | None) -> str:
        """The job's environment with what a task or actor adds, as canonical JSON."""
        if not own and not self.facts.runtime_env:
            return ""
        return self.prepare_runtime_env(own)
