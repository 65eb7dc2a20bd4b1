"""What ``miniray.get_runtime_context()`` and ``miniray.init()`` return."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.names import short_name
from miniray.common.runtime import RuntimeContextData, current_runtime
from miniray.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from miniray.actor import ActorHandle


class RuntimeContext:
    """The job, node, worker, task and actor that the running code belongs to.

    Every method looks values up again, so that one context can be kept and used from any task.
    All ids are hex strings.
    """

    __slots__ = ()

    @property
    def _data(self) -> RuntimeContextData:
        return current_runtime().context()

    def get(self) -> dict[str, Any]:
        """Return the ids and the namespace, by name."""
        data = self._data
        context: dict[str, Any] = {
            "job_id": data.job_id,
            "node_id": data.node_id,
            "namespace": data.namespace,
        }
        if data.task_id is not None:
            context["task_id"] = data.task_id
        if data.actor_id is not None:
            context["actor_id"] = data.actor_id
        return context

    def get_job_id(self) -> str:
        """Return the id of the job: one driver and all that it starts."""
        return self._data.job_id

    def get_node_id(self) -> str:
        """Return the hex id of the node on which this code runs."""
        return self._data.node_id

    def get_worker_id(self) -> str:
        """Return the id of the worker's (or driver's) process in the cluster."""
        return self._data.worker_id

    def get_task_id(self) -> str | None:
        """Return the id of the task or call that runs; None in a driver."""
        return self._data.task_id

    def get_task_name(self) -> str | None:
        """Return the name of the running call, as ``f`` or ``Class.method``; None in a driver."""
        name = self._data.task_name
        return None if name is None else short_name(name)

    def get_task_function_name(self) -> str | None:
        """Return what runs, as ``module.f`` or ``module.Class.method``; None in a driver."""
        return self._data.task_function_name

    def is_canceled(self) -> bool:
        """Return whether the task or call that runs was cancelled, so that it can end by itself.

        Methods of plain and threaded actors are not interrupted by a cancel: they have to check
        here.

        Raises:
            RuntimeError: Nothing runs here that could be cancelled: this is a driver.
        """
        data = self._data
        if data.task_id is None and data.actor_id is None:
            raise RuntimeError("Only tasks and methods of actors can be cancelled, not a driver.")
        return data.cancelled

    def get_actor_id(self) -> str | None:
        """Return the hex id of the actor that runs this code; None outside of actors."""
        return self._data.actor_id

    def get_actor_name(self) -> str | None:
        """Return the name of the actor, empty if it has none; None outside of actors."""
        data = self._data
        return None if data.actor_id is None else data.actor_name or ""

    @property
    def namespace(self) -> str:
        """Where names of actors and placement groups are looked up."""
        return self._data.namespace

    @property
    def was_current_actor_reconstructed(self) -> bool:
        """Whether this actor was started again after it died."""
        data = self._data
        return data.actor_id is not None and bool(data.was_current_actor_reconstructed)

    @property
    def current_actor(self) -> ActorHandle[Any]:
        """A handle to this actor, to be given to others; it does not keep the actor alive.

        Raises:
            RuntimeError: This is not an actor.
        """
        from miniray.actor import ActorHandle

        runtime: Any = current_runtime()
        if runtime.context().actor_id is None:
            raise RuntimeError("current_actor is only there in the methods of an actor.")
        location = runtime.current_actor()
        return ActorHandle(location.ref, location.info)

    def get_placement_group_id(self) -> str | None:
        """Return the id of the placement group that the task or actor runs in, or None."""
        id = self._data.placement_group_id
        return None if id is None else id.hex()

    @property
    def should_capture_child_tasks_in_placement_group(self) -> bool:
        """Whether what this task or actor starts runs in its placement group too."""
        return self._data.should_capture_child_tasks_in_placement_group

    def get_assigned_resources(self) -> dict[str, float]:
        """Return what the task or actor holds, in units by resource name.

        Raises:
            RuntimeError: This is a driver, which holds no resources.
        """
        data = self._data
        if data.task_id is None and data.actor_id is None:
            raise RuntimeError("A driver has no assigned resources; tasks and actors have.")
        return dict(data.assigned_resources)

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return the ids of the devices that the task or actor holds, by resource name."""
        return {name: list(ids) for name, ids in self._data.accelerator_ids.items()}

    def get_resource_ids(self) -> dict[str, list[str]]:
        """Return the same as ``get_accelerator_ids``, by Ray's older name."""
        return self.get_accelerator_ids()

    def get_node_labels(self) -> dict[str, str]:
        """Return the labels of the node on which this code runs; empty if it is lost."""
        return dict(own_node().get("Labels", {}))

    @property
    def runtime_env(self) -> dict[str, Any]:
        """The runtime environment that the code runs in."""
        return dict(self._data.runtime_env)

    def get_runtime_env_string(self) -> str:
        """Return the runtime environment as JSON."""
        import json

        return json.dumps(self.runtime_env)

    @property
    def gcs_address(self) -> str:
        """Address of the head, which another driver passes to ``init``.

        A cluster that ``init`` has started has none that others could use.
        """
        return self._data.gcs_address

    def get_session_name(self) -> str:
        """Return the name of the cluster's session: the last part of its folder."""
        return Path(self._data.session_dir).name

    def get_temp_dir(self) -> str:
        """Return the folder that holds the session's folder."""
        return str(Path(self._data.session_dir).parent)

    # Ray's attributes for these.

    @property
    def job_id(self) -> str:
        """As ``get_job_id``."""
        return self.get_job_id()

    @property
    def node_id(self) -> str:
        """As ``get_node_id``."""
        return self.get_node_id()

    @property
    def task_id(self) -> str | None:
        """As ``get_task_id``."""
        return self.get_task_id()

    @property
    def actor_id(self) -> str | None:
        """As ``get_actor_id``."""
        return self.get_actor_id()

    @property
    def current_placement_group_id(self) -> str | None:
        """As ``get_placement_group_id``."""
        return self.get_placement_group_id()


def get_runtime_context() -> RuntimeContext:
    """Return the context of the running code."""
    current_runtime()
    return RuntimeContext()


def own_node() -> dict[str, Any]:
    """Return the entry of ``miniray.nodes()`` for this process's node; empty if it is lost."""
    runtime = current_runtime()
    own = runtime.context().node_id
    return next((node for node in runtime.head.nodes() if node["NodeID"] == own), {})


class InitContext(Mapping[str, Any]):
    """The connection that ``init()`` made; used in ``with``, it shuts down at the end.

    It is a mapping too, that of ``address_info``, as in Ray.

    Attributes:
        address_info: ``address`` (what another driver passes to ``init``), ``node_id``,
            ``session_dir`` and more, by name.
        python_version: Version of Python, as text.
        miniray_version: Version of miniray, as text.
        dashboard_url: ``HOST:PORT`` of the page, which ``miniray dashboard`` opens; None if this
            node has none.
    """

    def __init__(self, address_info: Mapping[str, Any], shutdown: Callable[[], None]) -> None:
        self._shutdown = shutdown
        self.address_info = dict(address_info)
        self.python_version = ".".join(map(str, sys.version_info[:3]))
        self.miniray_version = VERSION
        self.dashboard_url: str | None = self.address_info.get("webui_url")

    def __getitem__(self, key: str) -> Any:
        return self.address_info[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.address_info)

    def __len__(self) -> int:
        return len(self.address_info)

    def disconnect(self) -> None:
        """Call ``miniray.shutdown()``."""
        self._shutdown()

    def __enter__(self) -> InitContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def __repr__(self) -> str:
        folder = self.address_info.get("session_dir")
        logs = f", logs='{folder}/logs'" if folder else ""
        return f"InitContext(address={self.address_info.get('address')!r}{logs})"
