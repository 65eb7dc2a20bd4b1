"""The seam ``Runtime`` on Ray: values, what the head knows, and the process itself."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import warnings
from typing import TYPE_CHECKING, Any

import ray
from ray import util

from miniray.common.runtime import (
    ActorLocation,
    Runtime,
    RuntimeContextData,
    RuntimeHead,
    RuntimeObjects,
)
from miniray.engines.capabilities import refuse
from miniray.engines.ray.calls import RayCalls, find_actor
from miniray.engines.ray.errors import translated
from miniray.engines.ray.options import group_of
from miniray.engines.ray.refs import RayRef, loaded
from miniray.engines.ray.worker import HostedActor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class RayObjects(RuntimeObjects):
    """The values of refs."""

    def put(self, value: Any) -> RayRef:
        try:
            return RayRef(ray.put(value))
        except ray.exceptions.RayError as error:
            raise translated(error) from None

    def get(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        try:
            return [*map(loaded, ray.get([ref.held for ref in refs], timeout=timeout))]
        except ray.exceptions.RayError as error:
            raise translated(error) from None

    def wait(
        self, refs: Sequence[Any], num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[list[Any], list[Any]]:
        by_held = {ref.held: ref for ref in refs}
        ready, rest = ray.wait(
            list(by_held), num_returns=num_returns, timeout=timeout, fetch_local=fetch_local
        )
        return [by_held[held] for held in ready], [by_held[held] for held in rest]

    def future(self, ref: Any) -> concurrent.futures.Future[Any]:
        made: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def settle(done: concurrent.futures.Future[Any]) -> None:
            error = done.exception()
            if not made.set_running_or_notify_cancel():
                return
            if error is None:
                made.set_result(loaded(done.result()))
            else:
                made.set_exception(translated(error))

        ref.held.future().add_done_callback(settle)
        return made

    def when_done(self, ref: Any, callback: Callable[[], None]) -> None:
        ref.held._on_completed(lambda _value: callback())

    async def value_of(self, ref: Any) -> Any:
        try:
            return loaded(await ref.held)
        except ray.exceptions.RayError as error:
            raise translated(error) from None


class RayHead(RuntimeHead):
    """Named actors, placement groups and nodes."""

    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        return find_actor(name, namespace)

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        found = util.list_named_actors(all_namespaces)
        return found if all_namespaces else [{"name": name} for name in found]

    def kill_actor(self, actor: Any, no_restart: bool) -> None:
        ray.kill(actor.held, no_restart=no_restart)

    def create_placement_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Sequence[Mapping[str, str]] | None,
    ) -> bytes:
        selectors = None if bundle_label_selector is None else list(bundle_label_selector)
        try:
            made = util.placement_group(
                list(bundles), strategy, name, lifetime, bundle_label_selector=selectors
            )
        except ray.exceptions.RaySystemError as error:
            if "already exists" in str(error):
                raise ValueError(f"The name {name!r} is taken by another group.") from None
            raise translated(error) from None
        id: bytes = made.id.binary()
        return id

    def placement_group_ready(self, id: bytes, value: Any) -> RayRef:
        return RayRef(_second.remote(group_of(id).ready(), value))

    def remove_placement_group(self, id: bytes) -> None:
        util.remove_placement_group(group_of(id))

    def placement_group_table(self, id: bytes | None) -> dict[str, Any]:
        return dict(util.placement_group_table(None if id is None else group_of(id)))

    def find_placement_group(self, name: str, namespace: str | None) -> bytes | None:
        try:
            id: bytes = util.get_placement_group(name).id.binary()
        except ValueError:
            return None
        return id

    def nodes(self) -> list[dict[str, Any]]:
        return list(ray.nodes())

    def cluster_resources(self) -> dict[str, float]:
        return dict(ray.cluster_resources())

    def available_resources(self) -> dict[str, float]:
        return dict(ray.available_resources())

    def head_call(self, method: str, *args: Any) -> Any:
        if method != "kv_keys":
            refuse("util.state" if method == "state" and args != ("node_states",) else "util.tpu")
        return []  # of train runs: `tell` has kept none

    def tell(self, method: str, *args: Any) -> None:
        """Ray's head takes no such messages."""

    def tell_node(self, method: str, *args: Any) -> None:
        refuse("util.metrics")

    def memory_report(self, limit: int, detail: bool, seconds: float) -> Any:
        refuse("util.memory")

    def ask_nodes(self, what: str, arguments: Any, seconds: float, nodes: Any = None) -> Any:
        refuse("timeline" if what == "timeline" else "util.state")

    async def flush_output(self) -> None:
        """Do nothing: Ray's workers write to their files themselves."""


_second = ray.remote(num_cpus=0)(lambda _first, second: second)


@functools.cache
def _was_restarted() -> bool:
    """Return whether the actor of this process is not its first one: asks Ray's head."""
    with warnings.catch_warnings():  # Ray deprecates what it calls there itself
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class RayRuntime(Runtime):
    """Ray, as the engine of a driver or of a process of its workers."""

    objects: RayObjects
    calls: RayCalls
    head: RayHead

    def __init__(self, runtime_env: Mapping[str, Any] | None = None) -> None:
        self.session = object()
        self.objects, self.calls, self.head = RayObjects(), RayCalls(), RayHead()
        self._runtime_env = dict(runtime_env or {})

    def context(self) -> RuntimeContextData:
        now = ray.get_runtime_context()
        if util.client.ray.is_connected():  # Ray Client tells no more
            return RuntimeContextData(
                now.get_job_id(), now.get_node_id(), "", now.namespace, "", ""
            )
        group = now.get_placement_group_id()
        inside = ray.get_runtime_context().worker.mode == ray.WORKER_MODE
        return RuntimeContextData(
            job_id=now.get_job_id(),
            node_id=now.get_node_id(),
            worker_id=now.get_worker_id(),
            namespace=now.namespace,
            address=now.gcs_address,
            session_dir=f"{now.get_temp_dir()}/{now.get_session_name()}",
            task_id=now.get_task_id() if inside else None,
            task_name=now.get_task_name() if inside else None,
            actor_id=now.get_actor_id(),
            actor_name=now.get_actor_name() if inside else None,
            function_name=now.get_task_function_name() if inside else None,
            placement_group_id=None if group is None else bytes.fromhex(group),
            capture_child_tasks=now.should_capture_child_tasks_in_placement_group,
            was_restarted=now.get_actor_id() is not None and _was_restarted(),
            # Ray does not tell asyncio actors, whose coroutines are cancelled as such.
            cancelled=inside and not HostedActor.is_async() and now.is_canceled(),
            accelerator_ids=now.get_accelerator_ids(),
            assigned_resources=now.get_assigned_resources() if inside else {},
            runtime_env=dict(now.runtime_env),
        )

    def current_actor(self) -> ActorLocation:
        return ActorLocation(RayRef(ray.get_runtime_context().current_actor), HostedActor.info)

    def exit_actor(self) -> None:
        ray.actor.exit_actor()

    def answer(self, question: str, handler: Callable[..., Any] | None) -> None:
        """Ray asks no process."""

    def owns_actors(self) -> bool:
        return bool(self.calls.owned)

    def prepare_runtime_env(self, own: Mapping[str, Any] | None) -> str:
        merged = self._runtime_env | dict(own or {})
        return json.dumps(merged, sort_keys=True) if merged else ""

    def shutdown(self) -> None:
        ray.shutdown()
