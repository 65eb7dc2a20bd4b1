"""The seam ``Runtime`` on Ray: calls, values, requests to the head, and the process itself.

Refs, handles of actors and generators are Ray's own, registered as subclasses of miniray's.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import operator
import os
import pickle
import sys
from typing import Any

import cloudpickle
import ray
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import PlacementGroup

from miniray.common import runtime as seam
from miniray.common import specs
from miniray.common.exception_transport import PACKAGE
from miniray.common.names import short_name
from miniray.common.object_ref import ObjectRef
from miniray.engines.capabilities import refuse
from miniray.engines.ray import errors
from miniray.exceptions import GetTimeoutError
from miniray.objects.object_ref_generator import DynamicObjectRefGenerator, ObjectRefGenerator
from miniray.values.closures import dumps_checked
from miniray.values.serialization import serialize_arguments


class RayGenerator(ray.ObjectRefGenerator):  # type: ignore[misc]
    """Ray's own, which ends its task when it goes, unless their cluster was left before."""

    call_ref = ray.ObjectRefGenerator.completed
    __reduce__ = ObjectRefGenerator.__reduce__

    def close(self) -> None:
        if not self.is_finished():
            ray.cancel(self)

    def __del__(self) -> None:
        if getattr(self.worker, "core_worker", None) is self.core_worker:  # else Ray would abort
            self.close()
            super().__del__()


def asks(function: Any) -> Any:
    """Return what calls a function of Ray, as a method of anything: its errors are miniray's."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ray.exceptions.RayError as error:
            raise errors.translated(error) from None
        except Exception:
            serialize_arguments(args, kwargs)  # names what can't be pickled
            raise

    return staticmethod(ask)


def submit(args: Any, kwargs: Any, num_returns: int | str, remote: Any, call: str) -> Any:
    """Make a call of Ray, whose errors have the name ``call``."""
    if num_returns == "streaming" and ray.util.client.ray.is_connected():
        refuse("generators over ray://")
    found = asks(remote)(*args, **kwargs)
    first = found[0] if isinstance(found, list) else found
    if type(first) is ray.ObjectRef:  # others are of the same task
        errors.name_call(first, call)
    elif type(found) is ray.ObjectRefGenerator:
        found.__class__ = RayGenerator
        found.core_worker = found.worker.core_worker
    return found


class Code(seam.Exported):
    """A user's function or class, and Ray's versions of it."""

    def __init__(self, target: Any, name: str) -> None:
        # Says what is large or can't be pickled. Classes are pickled once more, by Ray.
        super().__init__(b"", name, dumps_checked(target, name)[0])
        self._target = target
        #: Ray's function, or class, by how many calls a worker makes of it.
        self._made: dict[int, Any] = {}
        #: The options of the last call, the function for such calls, and its name in errors.
        self._prepared: tuple[Any, Any, str] = (None, None, "")

    def prepared(self, options: Any, info: Any = None) -> tuple[Any, str]:
        """Return what makes a task, or an actor with this info, and how errors name it."""
        prepared = self._prepared  # of one thread's call: others have other options
        if prepared[0] is not options:
            most = options.given.get("max_calls", int("GPU" in options.resources))
            if most not in self._made:
                self._made[most] = self._class(info, options) if info else self._task(most)
            given, where = as_ray(options)
            call = (options.name or short_name(self.name)) + where
            self._prepared = prepared = options, self._made[most].options(**given).remote, call
        return prepared[1:]

    def _task(self, max_calls: int) -> Any:
        """Return Ray's function for one that calls the user's in a worker that is ready for it."""
        blob = self.blob

        def task(*args: Any, **kwargs: Any) -> Any:
            made = _loaded(blob)(*args, **kwargs)
            # Ray sends values into generators, which those in `yield from` may not take.
            return (item for item in made) if inspect.isgenerator(made) else made

        task.__name__ = task.__qualname__ = short_name(self.name)
        task.__module__ = self._target.__module__
        # Pickled with it, unpickled as the worker's own.
        vars(task)["runtime"] = seam.runtime_or_none()
        made = ray.remote(max_calls=max_calls)(task)
        made._is_generator = inspect.isgeneratorfunction(inspect.unwrap(self._target))
        return made

    def _class(self, info: Any, options: Any) -> Any:
        """Return Ray's class for the user's; methods get what Ray's decorators would set."""
        for name, declared in info.methods.items():
            method = inspect.getattr_static(self._target, name)
            if theirs := {k: v for k, v in declared.given.items() if k != "name"}:
                ray.method(**theirs)(inspect.unwrap(getattr(method, "__func__", method)))
        space = {"__module__": info.module, "__miniray_runtime__": seam.runtime_or_none()}
        made = type(short_name(self.name), (self._target,), space)
        return ray.remote(concurrency_groups=dict(options.concurrency_groups))(made)


@functools.cache
def _loaded(blob: bytes) -> Any:
    """Load a function in a worker, once. What that raises is the error of the call."""
    return errors.as_exception(pickle.loads)(blob)


#: How options begin that Ray has of the decorator, that it lacks, and that are in ``placement``.
_OTHERS = "max_calls", "concurrency_groups", "_preload", "placement_group"


def as_ray(options: Any) -> tuple[dict[str, Any], str]:
    """Return what the user gave, for Ray, and where it is to run, which Ray's errors don't say."""
    made = {key: value for key, value in options.given.items() if not key.startswith(_OTHERS)}
    others = [{"label_selector": each} for each in options.fallback_selectors]
    made |= {"label_selector": options.label_selector or None, "fallback_strategy": others or None}
    if "CPU" not in options.resources and options.resources.keys() - {"memory"}:
        made["num_cpus"] = 0  # which Ray takes only for the usual value if nothing is given
    place, where, strategy = options.placement, "", None
    if isinstance(place, specs.NodeAffinity):
        where = f" on node {place.node_id}"
        strategy = strategies.NodeAffinitySchedulingStrategy(place.node_id, place.soft)
    elif isinstance(place, specs.BundleAffinity):
        where = f" in placement group {place.placement_group_id.hex()}"
        group: Any = PlacementGroup(place.placement_group_id)
        given = group, place.bundle_index, place.capture_child_tasks
        strategy = strategies.PlacementGroupSchedulingStrategy(*given)
    elif place:
        strategy = "SPREAD" if isinstance(place, specs.Spread) else "DEFAULT"
    return made | {"scheduling_strategy": strategy}, where


# Ray's pickler sends the user's code, and miniray's its errors: a class is to be one to both.
for _name in ("_DYNAMIC_CLASS_TRACKER_BY_CLASS", "_DYNAMIC_CLASS_TRACKER_BY_ID"):
    _known: Any = getattr(ray.cloudpickle.cloudpickle, _name)
    _known.update(getattr(cloudpickle.cloudpickle, _name))
    setattr(cloudpickle.cloudpickle, _name, _known)

# Other picklers than Ray's would lose who owns a value, and let an actor end with its handle.
for _kind in (ray.ObjectRef, ray.actor.ActorHandle):
    copyreg.pickle(_kind, lambda held: (ray.cloudpickle.loads, (ray.cloudpickle.dumps(held),)))

ObjectRef.register(ray.ObjectRef)
ObjectRefGenerator.register(ray.ObjectRefGenerator)
DynamicObjectRefGenerator.register(ray.DynamicObjectRefGenerator)

#: Getters of facts that Ray's context has neither by the same name nor by ``get_`` and the name.
_FACTS: dict[str, Any] = {
    "session_dir": lambda now: f"{now.get_temp_dir()}/{now.get_session_name()}",
    "placement_group_id": lambda of: of.get_placement_group_id() and of.worker.placement_group_id,
    "cancelled": lambda now: now.worker.is_canceled,
}
_last = ray.remote(num_cpus=0)(lambda _first, last: last)


class RayContext:
    """Asks Ray's context for each fact of ``RuntimeContextData`` that is read."""

    def __getattr__(self, name: str) -> Any:
        now = ray.get_runtime_context()
        usual = getattr(type(now), f"get_{name}", operator.attrgetter(name))
        try:
            return _FACTS.get(name, usual)(now)
        except AttributeError:  # Ray Client does not have all of them
            return getattr(seam.RuntimeContextData, name, {})


class RayRuntime(seam.Runtime, seam.RuntimeObjects, seam.RuntimeCalls, seam.RuntimeHead):
    """Ray, as the engine of a driver or of a process of its workers."""

    def __init__(self) -> None:
        self.session = self.objects = self.calls = self.head = self

    def __reduce__(self) -> Any:
        return _of_worker, ()

    put = asks(ray.put)
    wait = asks(ray.wait)
    future = asks(operator.methodcaller("future"))
    export: Any = Code
    cancel = asks(ray.cancel)
    get_actor = asks(lambda *of: _located(ray.get_actor(*of)))
    kill_actor = asks(ray.kill)
    list_named_actors = asks(ray.util.list_named_actors)
    placement_group_ready = asks(lambda g, value: _last.remote(PlacementGroup(g).ready(), value))
    remove_placement_group = asks(lambda g: ray.util.remove_placement_group(PlacementGroup(g)))
    placement_group_table = asks(lambda g: ray.util.placement_group_table(g and PlacementGroup(g)))
    nodes = asks(ray.nodes)
    cluster_resources = asks(ray.cluster_resources)
    available_resources = asks(ray.available_resources)
    context: Any = RayContext
    current_actor = asks(lambda: _located(ray.get_runtime_context().current_actor))
    exit_actor = staticmethod(ray.actor.exit_actor)
    shutdown = staticmethod(ray.shutdown)

    def get(self, refs: Any, timeout: Any) -> Any:
        try:
            return ray.get(list(refs), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            once = list(dict.fromkeys(refs))
            late = ray.wait(once, num_returns=len(once), timeout=0, fetch_local=False)[1] or once
            named = late[0].hex(), errors.call_of(late[0])
            raise GetTimeoutError.of(*named, len(late), len(refs), timeout) from None
        except ray.exceptions.RayError as error:  # over Ray Client
            raise errors.translated(error) from None

    def submit_task(self, function: Any, args: Any, kwargs: Any, options: Any) -> Any:
        return submit(args, kwargs, options.num_returns, *function.prepared(options))

    def create_actor(self, cls: Any, info: Any, args: Any, kwargs: Any, options: Any) -> Any:
        return seam.ActorLocation(submit(args, kwargs, 1, *cls.prepared(options, info)), info)

    def submit_actor_call(self, method: Any, args: Any, kwargs: Any) -> Any:
        info, options = method.info, method.options
        theirs = getattr(method.actor, method.name.replace("__miniray_", "__ray_"))
        if options is not info.methods.get(method.name) and options.given:
            theirs = theirs.options(**options.given)
        call = options.name or f"{info.name}.{method.name}"
        return submit(args, kwargs, options.num_returns, theirs.remote, call)

    def create_placement_group(self, *args: Any, name: str, **options: Any) -> Any:
        if name and self.find_placement_group(name, None):
            raise ValueError(f"The name {name!r} is taken by another group.")
        return asks(ray.util.placement_group)(*args, name=name, **options).id

    def find_placement_group(self, name: str, namespace: str | None) -> Any:
        try:
            return ray.util.get_placement_group(name).id
        except ValueError:
            return None


def _located(handle: Any) -> seam.ActorLocation:
    """Return an actor for Ray's handle of it, with the signatures of its methods."""
    made_by = getattr(handle, "_ray_actor_creation_function_descriptor", None)
    name = getattr(made_by, "class_name", "actor")  # Ray Client does not have it
    methods = dict.fromkeys(dir(handle), specs.MethodOptions())
    return seam.ActorLocation(handle, seam.ActorClassInfo(name, "", methods))


def _of_worker() -> seam.Runtime | None:
    """Return the runtime of this process; make one that Ray has started ready for the engine."""
    if seam.runtime_or_none() is None:
        seam.set_runtime(RayRuntime())
        ray._raylet.RayTaskError = errors.CarriedTaskError  # what Ray makes of an error
        errors.translate_values(in_worker=True)
    return seam.runtime_or_none()


def connect_to_ray(options: Any) -> tuple[RayRuntime, dict[str, Any]]:
    """Attach this process to the cluster at the address, or start one of this machine.

    Never to one that Ray finds by itself, unless address is "auto": it may be another user's.
    Raises ConnectionError if there is none at the address.
    """
    address = options.address or os.environ.get("RAY_ADDRESS") or "local"
    env = dict(options.runtime_env or {})
    given: dict[str, Any] = {}
    job: dict[str, Any] = {"default_actor_lifetime": options.default_actor_lifetime}
    if address == "local":
        names = {"memory": "_memory", "temp_dir": "_temp_dir"}
        node = {key: of for key, of in options.node.items() if key != "gpu_family"}  # Ray finds it
        given = {"include_dashboard": False} | {names.get(key, key): of for key, of in node.items()}
        job["_py_driver_sys_path"] = sys.path[::-1]  # Ray puts one after the other in front
    else:  # its workers need no installation of miniray
        env["py_modules"] = [*env.get("py_modules", ()), PACKAGE, *cloudpickle.__path__]
    if not address.startswith("ray://"):  # Ray Client takes only what is below
        given["log_to_driver"] = options.log_to_driver
        given["job_config"] = ray.job_config.JobConfig(metadata=dict(options.metadata), **job)
    found = ray.init(address, namespace=options.namespace, runtime_env=env or None, **given)
    errors.translate_values(in_worker=False)
    return RayRuntime(), {"address": address, **getattr(found, "address_info", {})}
