"""The task or method call that this thread or coroutine executes, and what its process is."""

from __future__ import annotations

import contextvars
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from miniray.common.names import module_of, short_name
from miniray.common.runtime import RuntimeContextData

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.calls.call import Call
    from miniray.common.specs import GrantedLease


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Execution:
    """One running task or method call."""

    #: Id of the first result, or of the call where that has none of its own.
    task_id: bytes
    name: str
    #: ``Class.method`` of an actor's call.
    method: str
    #: What a task runs, once it is loaded.
    function: Callable[..., Any] | None = None
    cancelled: bool = False
    #: It has called ``exit_actor``: the actor ends with it, whatever it makes of the exception.
    exits: bool = False
    #: Its result is on its way; what it has started may run on.
    answered: bool = False
    #: Open calls that this one has made, by number: for a recursive cancel.
    children: dict[int, Call] = dataclasses.field(default_factory=dict)
    #: Calls that it had made before it was notified of its cancel.
    doomed: dict[int, Call] | None = None

    def interrupted(self) -> None:
        """Record that its cancel was delivered: later calls of it clean up, and run."""
        if self.doomed is None:
            self.doomed, self.children = self.children, {}

    def cancel_children(self) -> None:
        """Cancel what it had started, but for its clean-up."""
        for call in list((self.children if self.doomed is None else self.doomed).values()):
            call.cancelled = True
            call.channel.cancel(call, False, True)

    def function_name(self, actor_class: type | None) -> str:
        """Return module and name of the function or method that runs, as in Ray."""
        code = self.function or actor_class
        name = short_name(getattr(self.function, "__qualname__", self.method))
        return name if code is None else f"{module_of(code)}.{name}"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class ProcessFacts:
    """A process's role in the cluster; set once when it attaches, then by its lease."""

    process_id: bytes
    node_id: bytes
    job_id: bytes
    #: What another driver passes to ``init()``.
    address: str = ""
    session_dir: str = ""
    namespace: str = ""
    #: Of actors made here that do not say theirs.
    default_actor_lifetime: str = "non_detached"
    actor_id: bytes | None = None
    actor_name: str | None = None
    #: Once it is loaded.
    actor_class: type | None = None
    #: ``repr`` of the actor, where its class defines one.
    actor_repr: str | None = None
    was_restarted: bool = False
    #: In an actor's worker: the facts of its class that handles carry, pickled.
    actor_info: bytes | None = None
    placement_group_id: bytes | None = None
    capture_child_tasks: bool = False
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    assigned_resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    accelerator_ids: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)

    def begin_lease(self, lease: GrantedLease) -> None:
        """Record what a lease says about its worker, and about the actor that it is for."""
        group = lease.spec.group
        self.job_id = lease.job_id
        self.namespace = lease.job.namespace
        self.default_actor_lifetime = lease.job.default_actor_lifetime
        self.assigned_resources = lease.allocation.resources()
        self.accelerator_ids = lease.devices
        self.placement_group_id = group.placement_group_id if group is not None else None
        self.capture_child_tasks = group is not None and bool(group.capture_child_tasks)
        self.runtime_env = json.loads(lease.spec.runtime_env or "{}")
        actor = lease.actor
        if actor is not None:
            self.actor_id = lease.actor_id
            self.actor_name = actor.name
            self.actor_info = actor.info
            self.was_restarted = lease.restarts > 0

    @property
    def capturing_group(self) -> bytes | None:
        """The placement group that the children of the running code belong to."""
        return self.placement_group_id if self.capture_child_tasks else None

    def runtime_context(self) -> RuntimeContextData:
        from miniray.accelerators.registry import DEVICE_RESOURCES

        running = execution.get()
        return RuntimeContextData(
            job_id=self.job_id.hex(),
            node_id=self.node_id.hex(),
            worker_id=self.process_id.hex(),
            namespace=self.namespace,
            gcs_address=self.address,
            session_dir=self.session_dir,
            task_id=running.task_id.hex() if running is not None else None,
            task_name=running.name if running is not None else None,
            actor_id=self.actor_id.hex() if self.actor_id is not None else None,
            actor_name=self.actor_name,
            task_function_name=running.function_name(self.actor_class)
            if running is not None
            else None,
            placement_group_id=self.placement_group_id,
            should_capture_child_tasks_in_placement_group=self.capture_child_tasks,
            was_current_actor_reconstructed=self.was_restarted,
            cancelled=running is not None and running.cancelled,
            accelerator_ids={
                **{resource: [] for resource in DEVICE_RESOURCES},
                **self.accelerator_ids,
            },
            assigned_resources=self.assigned_resources,
            runtime_env=self.runtime_env,
        )


execution: contextvars.ContextVar[Execution | None] = contextvars.ContextVar(
    "miniray_execution", default=None
)
