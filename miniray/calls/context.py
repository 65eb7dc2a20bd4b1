"""Who the running code is: the task or actor call that this thread or coroutine executes."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

from miniray.common.names import module_of, short_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.calls.call import Call


class Execution:
    """One running task or method call."""

    __slots__ = (
        "answered",
        "cancelled",
        "children",
        "doomed",
        "exits",
        "function",
        "method",
        "name",
        "task_id",
    )

    def __init__(self, task_id: bytes, name: str, method: str) -> None:
        #: Id of the first result, or of the call where that has none of its own.
        self.task_id = task_id
        self.name = name
        #: ``Class.method`` of an actor's call.
        self.method = method
        #: What a task runs, once it is loaded.
        self.function: Callable[..., Any] | None = None
        self.cancelled = False
        #: It has called ``exit_actor``: the actor ends with it, whatever it makes of the exception.
        self.exits = False
        #: Its result is on its way; what it has started may run on.
        self.answered = False
        #: Calls that this one has made and that have not ended, by number: for a recursive cancel.
        self.children: dict[int, Call] = {}
        #: Those of them that it had made before it heard of its cancel.
        self.doomed: dict[int, Call] | None = None

    def interrupted(self) -> None:
        """It hears of its cancel now: what it calls from here on is its clean-up, and goes on."""
        if self.doomed is None:
            self.doomed, self.children = self.children, {}

    def function_name(self, actor_class: type | None) -> str:
        """Module and name of the function or method that runs, as in Ray."""
        code = self.function or actor_class
        name = short_name(getattr(self.function, "__qualname__", self.method))
        return name if code is None else f"{module_of(code)}.{name}"


class ProcessFacts:
    """What a process is for the cluster; set once when it attaches, then by its lease."""

    def __init__(self) -> None:
        self.job_id = b""
        self.namespace = ""
        #: Of actors made here that do not say theirs.
        self.default_actor_lifetime = "non_detached"
        self.address = ""
        self.session_dir = ""
        self.actor_id: bytes | None = None
        self.actor_name: str | None = None
        #: Once it is loaded.
        self.actor_class: type | None = None
        #: ``repr`` of the actor, where its class defines one.
        self.actor_repr: str | None = None
        self.was_restarted = False
        #: In an actor's worker: what handles know of its class, pickled.
        self.actor_info: bytes | None = None
        self.placement_group_id: bytes | None = None
        self.capture_child_tasks = False
        self.runtime_env: Mapping[str, Any] = {}
        self.assigned_resources: Mapping[str, float] = {}
        self.accelerator_ids: Mapping[str, list[str]] = {}


execution: contextvars.ContextVar[Execution | None] = contextvars.ContextVar(
    "miniray_execution", default=None
)
