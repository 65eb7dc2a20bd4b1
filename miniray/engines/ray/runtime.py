"""The seam ``Runtime`` on Ray: calls, values, what the head knows, and the process itself."""

from __future__ import annotations

import concurrent.futures
import json
import operator
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray
from ray import _raylet, util
from ray.exceptions import GetTimeoutError as RayTimeout
from ray.exceptions import RayError

from miniray.common import runtime as seam
from miniray.common.runtime import ActorClassInfo, ActorLocation, RuntimeContextData
from miniray.common.specs import MethodOptions
from miniray.engines.capabilities import refuse
from miniray.engines.ray.code import Code, as_ray, group_of
from miniray.engines.ray.errors import CarriedTaskError, as_exception, is_cancelled, translated
from miniray.engines.ray.refs import RayRef, submit
from miniray.exceptions import GetTimeoutError
from miniray.objects.object_ref_generator import DynamicObjectRefGenerator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.common.specs import ActorOptions, TaskOptions

#: How Ray's context tells what it has neither under miniray's name nor with ``get_`` before it.
_FACTS: dict[str, Callable[[Any], Any]] = {
    "address": lambda now: now.gcs_address,
    "session_dir": lambda now: f"{now.get_temp_dir()}/{now.get_session_name()}",
    "function_name": lambda now: now.get_task_function_name(),
    "placement_group_id": lambda now: bytes.fromhex(now.get_placement_group_id() or "") or None,
    "capture_child_tasks": lambda now: now.should_capture_child_tasks_in_placement_group,
    "was_restarted": lambda now: bool(now.get_actor_id() and now.was_current_actor_reconstructed),
    "cancelled": lambda _now: is_cancelled(),
}
#: Facts that no driver has.
_OF_TASKS = {"task_id", "task_name", "function_name", "assigned_resources", "cancelled"}
_OF_TASKS |= {"actor_id", "actor_name", "was_restarted"}

_second = ray.remote(num_cpus=0)(lambda _first, second: second)


class RayContext:
    """Asks Ray's context for each fact of ``RuntimeContextData`` that is read."""

    def __getattr__(self, name: str) -> Any:
        now = ray.get_runtime_context()
        usual = getattr(type(now), f"get_{name}", operator.attrgetter(name))
        try:
            if name not in _OF_TASKS or now.worker.mode == ray.WORKER_MODE:
                return _FACTS.get(name, usual)(now)
        except AttributeError:
            if not util.client.ray.is_connected():  # it does not tell all of them
                raise
        return getattr(RuntimeContextData, name, {})


class RayRuntime(seam.Runtime, seam.RuntimeObjects, seam.RuntimeCalls, seam.RuntimeHead):
    """Ray, as the engine of a driver or of a process of its workers."""

    #: Whether this process has made actors that end with it: others may have their handles.
    _made_actors = False

    def __init__(self) -> None:
        self.session = object()
        self.objects = self.calls = self.head = self

    def __reduce__(self) -> Any:
        return _of_worker, ()

    # --- the values of refs --------------------------------------------------------
    def put(self, value: Any) -> Any:
        return submit(ray.put, (value,), {})

    def get(self, refs: Sequence[Any], timeout: float | None) -> Any:
        try:
            return ray.get([ref.held for ref in refs], timeout=timeout)
        except RayTimeout:
            assert timeout is not None
            late = self.wait(refs, len(set(refs)), 0, False)[1] or refs
            counts = len(late), len(refs)
            raise GetTimeoutError.of(late[0].hex(), late[0].call, *counts, timeout) from None
        except RayError as error:
            raise translated(error, refs[0].call if len(refs) == 1 else "") from None

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
            if not made.set_running_or_notify_cancel():
                return
            error = done.exception()
            if error is None:
                made.set_result(done.result())
            else:
                made.set_exception(translated(error, ref.call))

        ref.held.future().add_done_callback(settle)
        return made

    # --- calls ---------------------------------------------------------------------
    def export(self, target: Callable[..., Any] | type, name: str) -> seam.Exported:
        return Code(target, name)

    def submit_task(self, function: Any, args: Any, kwargs: Any, options: TaskOptions) -> Any:
        _check_streaming(options)
        remote, call = function.prepared(options)
        return submit(remote, args, kwargs, call)

    def create_actor(
        self, cls: Any, info: ActorClassInfo, args: Any, kwargs: Any, options: ActorOptions
    ) -> ActorLocation:
        remote, call = cls.prepared(options, info)
        ref = submit(remote, args, kwargs, call)
        self._made_actors |= options.lifetime != "detached"
        return ActorLocation(ref, info)

    def submit_actor_call(
        self,
        actor: Any,
        info: ActorClassInfo,
        method: str,
        args: Any,
        kwargs: Any,
        options: MethodOptions,
    ) -> Any:
        _check_streaming(options)
        theirs = getattr(actor.held, method.replace("__miniray_", "__ray_"))
        declared = info.methods.get(method)
        if options is not declared and (given := as_ray(options, declared)):
            theirs = theirs.options(**given)
        return submit(theirs.remote, args, kwargs, options.name or f"{info.name}.{method}")

    def cancel(self, ref: Any, force: bool, recursive: bool) -> None:
        ray.cancel(ref.held, force=force, recursive=recursive)

    # --- named actors, placement groups and nodes -----------------------------------
    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        return _located(ray.get_actor(name, namespace))

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        found = util.list_named_actors(all_namespaces)
        return found if all_namespaces else [{"name": name} for name in found]

    def kill_actor(self, actor: Any, no_restart: bool) -> None:
        ray.kill(actor.held, no_restart=no_restart)

    def create_placement_group(
        self, bundles: Any, strategy: str, name: str, lifetime: str | None, selectors: Any
    ) -> Any:
        if name and self.find_placement_group(name, None):
            raise ValueError(f"The name {name!r} is taken by another group.")
        named = {"bundle_label_selector": selectors}
        made = submit(util.placement_group, (bundles, strategy, name, lifetime), named)
        return made.held.id.binary()

    def placement_group_ready(self, id: bytes, value: Any) -> RayRef:
        return RayRef(_second.remote(group_of(id).ready(), value))

    def remove_placement_group(self, id: bytes) -> None:
        util.remove_placement_group(group_of(id))

    def placement_group_table(self, id: bytes | None) -> dict[str, Any]:
        return dict(util.placement_group_table(id and group_of(id)))

    def find_placement_group(self, name: str, namespace: str | None) -> Any:
        try:
            return util.get_placement_group(name).id.binary()
        except ValueError:
            return None

    nodes: Any = staticmethod(ray.nodes)
    cluster_resources: Any = staticmethod(ray.cluster_resources)
    available_resources: Any = staticmethod(ray.available_resources)

    # --- the process ---------------------------------------------------------------
    def context(self) -> Any:
        return RayContext()

    def current_actor(self) -> ActorLocation:
        return _located(ray.get_runtime_context().current_actor)

    def exit_actor(self) -> None:
        ray.actor.exit_actor()

    def owns_actors(self) -> bool:
        return self._made_actors

    def prepare_runtime_env(self, own: Mapping[str, Any] | None) -> str:
        return json.dumps(own or {})  # Ray uploads it with the call, and adds the job's

    def shutdown(self) -> None:
        ray.shutdown()


def _check_streaming(options: TaskOptions | MethodOptions) -> None:
    if options.num_returns == "streaming" and util.client.ray.is_connected():
        refuse("generators over ray://")


def _located(handle: Any) -> ActorLocation:
    """Return an actor for Ray's handle of it, which knows what its methods take and return."""
    made_by = getattr(handle, "_ray_actor_creation_function_descriptor", None)
    name = made_by.class_name if made_by else "actor"  # Ray Client does not know it
    methods = dict.fromkeys(dir(handle), MethodOptions())
    return ActorLocation(RayRef(handle), ActorClassInfo(name, "", methods))


def _of_worker() -> seam.Runtime | None:
    """Return the runtime of this process; make one that Ray has started ready for the engine."""
    if seam.runtime_or_none() is None:
        seam.set_runtime(RayRuntime())
        _raylet.RayTaskError = CarriedTaskError  # what Ray makes of an error of user code
        values = ray._private.worker.global_worker.get_serialization_context()
        values._deserialize_object = as_exception(values._deserialize_object)
        values.serialize = as_exception(values.serialize)
        util.register_serializer(
            ray.DynamicObjectRefGenerator,
            serializer=lambda made: [RayRef(ref) for ref in made._refs],
            deserializer=DynamicObjectRefGenerator,
        )
    return seam.runtime_or_none()


def connect_to_ray(options: Any) -> tuple[RayRuntime, dict[str, Any]]:
    """Attach this process to the cluster at the address, or start one of this machine.

    Never to one that Ray finds by itself, unless address is "auto": it may be another user's.

    Raises:
        ConnectionError: There is no cluster at the address.
    """
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    env = dict(options.runtime_env or {})
    given: dict[str, Any] = {}
    job: dict[str, Any] = {"metadata": dict(options.metadata)}
    if address == "local":
        given = {"include_dashboard": False, **options.node}
        given.pop("gpu_family", None)  # Ray finds it
        for name in {"memory", "temp_dir"} & given.keys():
            given[f"_{name}"] = given.pop(name)
        job["_py_driver_sys_path"] = sys.path[::-1]  # Ray puts one after the other in front
    else:  # its workers need no installation of miniray
        own = [str(Path(__file__).parents[2]), str(Path(cloudpickle.__file__).parent)]
        env["py_modules"] = [*env.get("py_modules", ()), *own]
    if not address.startswith("ray://"):  # Ray Client takes no more than what is below
        job["default_actor_lifetime"] = options.default_actor_lifetime
        given["log_to_driver"] = options.log_to_driver
        given["job_config"] = ray.job_config.JobConfig(**job)
    found = ray.init(address, namespace=options.namespace, runtime_env=env or None, **given)
    return RayRuntime(), {"address": address, **getattr(found, "address_info", {})}
