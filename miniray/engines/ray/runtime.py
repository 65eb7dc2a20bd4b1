"""The seam ``Runtime`` on Ray: calls, values, what the head knows, and the process itself."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import ray
from ray import util
from ray.exceptions import ActorAlreadyExistsError as RayNameTaken
from ray.exceptions import GetTimeoutError as RayTimeout
from ray.exceptions import RayError, RaySystemError

from miniray.common import runtime as seam
from miniray.common.runtime import ActorClassInfo, ActorLocation, RuntimeContextData
from miniray.common.specs import MethodOptions
from miniray.engines.ray.errors import in_our_words, translated
from miniray.engines.ray.options import as_ray, called, group_of
from miniray.engines.ray.refs import RayActorRef, RayRef, unwrapped, wrapped
from miniray.engines.ray.worker import INFO, Code, is_cancelled
from miniray.exceptions import ActorAlreadyExistsError, GetTimeoutError
from miniray.values.closures import dumps_checked
from miniray.values.serialization import serialize, serialize_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.common.specs import ActorOptions, TaskOptions

#: Methods of Ray for those that every actor has.
_BUILT_IN = {"__miniray_ready__": "__ray_ready__", "__miniray_terminate__": "__ray_terminate__"}
#: Arguments of ``init()`` that Ray calls otherwise.
_THEIRS = {"memory": "_memory", "temp_dir": "_temp_dir"}

_second = ray.remote(num_cpus=0)(lambda _first, second: second)


class RayObjects(seam.RuntimeObjects):
    """The values of refs."""

    @functools.partial(in_our_words, pickled=lambda _self, value: serialize(value))
    def put(self, value: Any) -> RayRef:
        return RayRef(ray.put(value))

    def get(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        try:
            found: list[Any] = ray.get([ref.held for ref in refs], timeout=timeout)
            return found
        except RayTimeout:
            assert timeout is not None
            _, missing = self.wait(refs, len(set(refs)), 0, False)
            late = missing or refs
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
        # Ray Client gives a lost connection as the value.
        over_client = util.client.ray.is_connected()
        failed = (RayError, ConnectionError) if over_client else RayError

        def settle(value: Any, _kept: Any = ref) -> None:
            if not made.set_running_or_notify_cancel():
                return
            if isinstance(value, failed):
                made.set_exception(translated(value, ref.call))
            else:
                made.set_result(value)

        ref.held._on_completed(settle)  # Ray ends the process if the ref goes before that
        return made


#: For what makes a call, with arguments and options at its end.
_calling: functools.partial[Any] = functools.partial(
    in_our_words, pickled=lambda *given: serialize_arguments(*given[-3:-1])
)


class RayCalls(seam.RuntimeCalls):
    """Makes calls of Ray of what user code calls."""

    #: Whether this process has made actors that end with it: others may have their handles.
    made_actors = False

    def export(self, target: Callable[..., Any] | type, name: str) -> seam.Exported:
        code = Code(name, dumps_checked(target, name)[0])
        code.target = target
        return code

    @_calling
    def submit_task(self, function: Any, args: Any, kwargs: Any, options: TaskOptions) -> Any:
        held, named = unwrapped(args, kwargs)
        remote, call = function.task(options)
        return wrapped(remote(*held, **named), call)

    @_calling
    def create_actor(
        self, cls: Any, info: ActorClassInfo, args: Any, kwargs: Any, options: ActorOptions
    ) -> ActorLocation:
        held, named = unwrapped(args, kwargs)
        try:
            ref = RayActorRef(cls.actor(info, options)(*held, **named))
        except RayNameTaken:
            where = options.namespace or ray.get_runtime_context().namespace
            raise ActorAlreadyExistsError(options.name or "", where) from None
        self.made_actors |= options.lifetime != "detached"
        return ActorLocation(ref, info)

    @_calling
    def submit_actor_call(
        self,
        actor: Any,
        info: ActorClassInfo,
        method: str,
        args: Any,
        kwargs: Any,
        options: MethodOptions,
    ) -> Any:
        known, remote = actor.methods.get(method, (None, None))
        if known is not options:
            remote = _remote(actor.held, info, method, options)
            actor.methods[method] = options, remote
        return remote(*unwrapped(args, kwargs))

    def cancel(self, ref: Any, force: bool, recursive: bool) -> None:
        ray.cancel(ref.held, force=force, recursive=recursive)


def _remote(
    handle: Any, info: ActorClassInfo, method: str, options: MethodOptions
) -> Callable[..., Any]:
    """Return what calls a method of an actor with these options."""
    theirs = as_ray(options)
    if options.concurrency_group and util.client.ray.is_connected():
        declared = info.methods.get(method)
        if declared and declared.concurrency_group == options.concurrency_group:
            del theirs["concurrency_group"]  # Ray Client refuses it; the class says the same
    name = called(f"{info.name}.{method}", options)
    remote = getattr(handle, _BUILT_IN.get(method, method))._remote
    return lambda args, kwargs: wrapped(remote(args, kwargs, **theirs), name)


class RayHead(seam.RuntimeHead):
    """Named actors, placement groups and nodes."""

    def get_actor(self, name: str, namespace: str | None) -> ActorLocation:
        where = namespace or ray.get_runtime_context().namespace
        try:
            return _located(ray.get_actor(name, where))
        except ValueError:
            raise ValueError(f"There is no actor named {name!r} in namespace {where!r}.") from None

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        found = util.list_named_actors(all_namespaces)
        return found if all_namespaces else [{"name": name} for name in found]

    def kill_actor(self, actor: Any, no_restart: bool) -> None:
        ray.kill(actor.held, no_restart=no_restart)

    @in_our_words
    def create_placement_group(
        self,
        bundles: Sequence[Mapping[str, float]],
        strategy: str,
        name: str,
        lifetime: str | None,
        bundle_label_selector: Any,
    ) -> bytes:
        selectors = bundle_label_selector and list(bundle_label_selector)
        try:
            made = util.placement_group(
                list(bundles), strategy, name, lifetime, bundle_label_selector=selectors
            )
        except RaySystemError as error:
            if "already exists" in str(error):
                raise ValueError(f"The name {name!r} is taken by another group.") from None
            raise
        id: bytes = made.id.binary()
        return id

    def placement_group_ready(self, id: bytes, value: Any) -> RayRef:
        return RayRef(_second.remote(group_of(id).ready(), value))

    def remove_placement_group(self, id: bytes) -> None:
        util.remove_placement_group(group_of(id))

    def placement_group_table(self, id: bytes | None) -> dict[str, Any]:
        return dict(util.placement_group_table(id and group_of(id)))

    def find_placement_group(self, name: str, namespace: str | None) -> bytes | None:
        try:
            id: bytes = util.get_placement_group(name).id.binary()
        except ValueError:
            return None
        return id

    nodes: Any = staticmethod(ray.nodes)
    cluster_resources: Any = staticmethod(ray.cluster_resources)
    available_resources: Any = staticmethod(ray.available_resources)


def _info_of(handle: Any) -> ActorClassInfo:
    """Return what Ray's own handle, not one of Ray Client, knows of the actor's class."""
    info: ActorClassInfo | None = handle._ray_method_decorators.get(INFO)
    if info is not None:
        return info
    methods = {}  # of an actor that a program of Ray has made
    for name, given in handle._ray_method_num_returns.items():
        usual = "streaming" if handle._ray_method_is_generator.get(name) else 1
        methods[name] = MethodOptions(num_returns=usual if given is None else given)
    return ActorClassInfo(
        handle._ray_actor_creation_function_descriptor.class_name.split(".")[-1], "", methods
    )


_info_from_worker = ray.remote(num_cpus=0)(_info_of)


def _located(handle: Any) -> ActorLocation:
    """Return an actor for Ray's handle of it."""
    if util.client.ray.is_connected():  # as Ray Client finds methods
        return ActorLocation(RayActorRef(handle), ray.get(_info_from_worker.remote(handle)))
    return ActorLocation(RayActorRef(handle), _info_of(handle))


@functools.cache
def _was_restarted() -> bool:
    """Return whether the actor of this process is not its first one: asks Ray's head."""
    with warnings.catch_warnings():  # Ray deprecates what it calls there itself
        warnings.simplefilter("ignore")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class RayRuntime(seam.Runtime):
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
        here = {
            "job_id": now.get_job_id(),
            "node_id": now.get_node_id(),
            "namespace": now.namespace,
        }
        if util.client.ray.is_connected():  # Ray Client tells no more
            return RuntimeContextData(**here, worker_id="", address="", session_dir="")
        group, actor_id = now.get_placement_group_id(), now.get_actor_id()
        running: dict[str, Any] = {}
        if now.worker.mode == ray.WORKER_MODE:
            running = {
                "task_id": now.get_task_id(),
                "task_name": now.get_task_name(),
                "actor_id": actor_id,
                "actor_name": now.get_actor_name(),
                "function_name": now.get_task_function_name(),
                "was_restarted": actor_id is not None and _was_restarted(),
                "cancelled": is_cancelled(),
                "assigned_resources": now.get_assigned_resources(),
            }
        return RuntimeContextData(
            **here,
            **running,
            worker_id=now.get_worker_id(),
            address=now.gcs_address,
            session_dir=f"{now.get_temp_dir()}/{now.get_session_name()}",
            placement_group_id=group and bytes.fromhex(group),
            capture_child_tasks=now.should_capture_child_tasks_in_placement_group,
            accelerator_ids=now.get_accelerator_ids(),
            runtime_env=dict(now.runtime_env),
        )

    def current_actor(self) -> ActorLocation:
        return _located(ray.get_runtime_context().current_actor)

    def exit_actor(self) -> None:
        ray.actor.exit_actor()

    def owns_actors(self) -> bool:
        return self.calls.made_actors

    def prepare_runtime_env(self, own: Mapping[str, Any] | None) -> str:
        merged = self._runtime_env | dict(own or {})
        return json.dumps(merged, sort_keys=True) if merged else ""

    def shutdown(self) -> None:
        ray.shutdown()


def connect_to_ray(options: Any) -> tuple[RayRuntime, dict[str, Any]]:
    """Attach this process to the cluster at the address, or start one of this machine.

    Never to one that Ray finds by itself, unless address is "auto": it may be another user's.

    Raises:
        ConnectionError: There is no cluster at the address.
    """
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    env = dict(options.runtime_env or {})
    given: dict[str, Any] = {}
    if address == "local":
        node = {"include_dashboard": False, **options.node}
        node.pop("gpu_family", None)  # Ray finds it
        given = {_THEIRS.get(name, name): value for name, value in node.items()}
    else:  # its workers need no installation of miniray
        own = [str(Path(__file__).parents[2]), str(Path(cloudpickle.__file__).parent)]
        env["py_modules"] = [*env.get("py_modules", ()), *own]
    if not address.startswith("ray://"):  # Ray Client takes no more than what is below
        given["log_to_driver"] = options.log_to_driver
        given["job_config"] = ray.job_config.JobConfig(
            metadata=dict(options.metadata), default_actor_lifetime=options.default_actor_lifetime
        )
    ray.init(address, namespace=options.namespace, runtime_env=env or None, **given)
    runtime = RayRuntime(options.runtime_env)
    now = runtime.context()
    names = ("node_id", "session_dir", "namespace", "job_id")
    about = {name: getattr(now, name) for name in names}
    return runtime, {**about, "address": now.address or address, "webui_url": None}
