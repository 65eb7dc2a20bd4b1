"""What Ray is given: the user's own functions and classes, and checked options by Ray's names."""

from __future__ import annotations

import functools
import inspect
import pickle
from typing import TYPE_CHECKING, Any

import ray
from ray._raylet import PlacementGroupID
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import PlacementGroup

from miniray.common.names import short_name
from miniray.common.runtime import ActorClassInfo, Exported, runtime_or_none
from miniray.common.specs import Anywhere, BundleAffinity, MethodOptions, NodeAffinity, Spread
from miniray.engines.ray.errors import as_exception
from miniray.values.closures import dumps_checked

if TYPE_CHECKING:
    from miniray.common.specs import ActorOptions, Placement, TaskOptions


class Code(Exported):
    """A function or class of the user's, and what Ray has made of it."""

    def __init__(self, target: Any, name: str) -> None:
        # Says what is large or can't be pickled. Classes are pickled once more, by Ray.
        super().__init__(b"", name, dumps_checked(target, name)[0])
        self.target = target
        #: Ray's function, or class, by how many calls a worker makes of it.
        self._made: dict[int, Any] = {}
        #: The options of the last call, what makes such a call, and how errors name it.
        self._prepared: tuple[Any, Any, str] = (None, None, "")

    def prepared(self, options: Any, info: ActorClassInfo | None = None) -> tuple[Any, str]:
        """Return what makes a task, or an actor with this info, and how errors name it."""
        prepared = self._prepared
        if prepared[0] is not options:
            most = getattr(options, "max_calls", 0)
            if most is None:  # as in Ray, if the decorator says so
                most = int("GPU" in options.resources)
            if most not in self._made:
                self._made[most] = self._class(info, options) if info else self._task(most)
            remote = self._made[most].options(**as_ray(options)).remote
            self._prepared = prepared = options, remote, _called(self.name, options)
        return prepared[1:]

    def _task(self, max_calls: int) -> Any:
        """Return Ray's function for one that calls the user's in a worker that is ready for it."""
        blob = self.blob

        def task(*args: Any, **kwargs: Any) -> Any:
            return _loaded(blob)(*args, **kwargs)

        def generator(*args: Any, **kwargs: Any) -> Any:
            for item in _loaded(blob)(*args, **kwargs):  # noqa: UP028
                yield item  # not `yield from`: Ray sends values into generators

        if inspect.isgeneratorfunction(inspect.unwrap(self.target)):
            task = generator
        task.__name__ = task.__qualname__ = short_name(self.name)
        task.__module__ = self.target.__module__
        vars(task)["runtime"] = runtime_or_none()  # pickled with it, unpickled as the worker's own
        return ray.remote(max_calls=max_calls)(task)

    def _class(self, info: ActorClassInfo, options: ActorOptions) -> Any:
        """Return Ray's class for a subclass whose workers are ready for the user's.

        Its methods have what Ray's decorators would have given them.
        """
        cls = self.target
        for name, declared in info.methods.items():
            method = inspect.getattr_static(cls, name)
            method = inspect.unwrap(getattr(method, "__func__", method))  # as Ray does
            usual = "streaming" if inspect.isgeneratorfunction(method) else 1
            theirs = as_ray(declared, MethodOptions(name=declared.name, num_returns=usual))
            if theirs:
                ray.method(**theirs)(method)
        space = {"__module__": cls.__module__, "__miniray_runtime__": runtime_or_none()}
        if hasattr(cls, "__miniray_shutdown__"):
            space["__ray_shutdown__"] = cls.__miniray_shutdown__
        groups = dict(options.concurrency_groups)
        return ray.remote(concurrency_groups=groups)(type(short_name(self.name), (cls,), space))


@functools.cache
def _loaded(blob: bytes) -> Any:
    """Load a function in a worker, once. What that raises is the error of the call."""
    return as_exception(pickle.loads)(blob)


def _called(name: str, options: TaskOptions | ActorOptions) -> str:
    """Return how errors name a call, and where it was to run, which Ray's do not tell."""
    name, placement = options.name or short_name(name), options.placement
    if isinstance(placement, NodeAffinity):
        return f"{name} on node {placement.node_id}"
    if isinstance(placement, BundleAffinity):
        return f"{name} in placement group {placement.placement_group_id.hex()}"
    return name


def group_of(id: bytes) -> PlacementGroup:
    """Return Ray's handle of a placement group."""
    return PlacementGroup(PlacementGroupID(id))


def _strategy(placement: Placement) -> Any:
    if isinstance(placement, NodeAffinity):
        return strategies.NodeAffinitySchedulingStrategy(placement.node_id, placement.soft)
    if isinstance(placement, BundleAffinity):
        return strategies.PlacementGroupSchedulingStrategy(
            group_of(placement.placement_group_id),
            placement.bundle_index,
            placement.capture_child_tasks,
        )
    return {Spread: "SPREAD", Anywhere: "DEFAULT"}[type(placement)]


#: Fields that Ray gets elsewhere, or has nothing for.
_OTHERS = {"resources", "max_calls", "concurrency_groups"}
_OTHERS |= {"placement_resources", "preload", "preload_later"}


def as_ray(
    options: TaskOptions | ActorOptions | MethodOptions, declared: MethodOptions | None = None
) -> dict[str, Any]:
    """Return options for Ray, without those that are as declared, or have their usual value."""
    made: dict[str, Any] = {}
    for name, field in type(options).__dataclass_fields__.items():
        value = getattr(options, name)
        usual = getattr(declared, name) if declared else field.default
        if name in _OTHERS or (value == usual and (declared or name != "num_returns")):
            continue
        if name == "placement":
            made["scheduling_strategy"] = _strategy(value)
        elif name == "fallback_selectors":
            made["fallback_strategy"] = [{"label_selector": each} for each in value]
        elif name == "generator_backpressure":
            made["_generator_backpressure_num_objects"] = value
        else:
            made[name] = value
    if hasattr(options, "resources"):
        others = dict(options.resources)
        if others.keys() - {"memory"} or "CPU" not in getattr(options, "placement_resources", ()):
            made["num_cpus"] = others.pop("CPU", 0)
        # Else not given: Ray places an actor that gives nothing as miniray does.
        made |= {"num_gpus": others.pop("GPU", None), "memory": others.pop("memory", None)}
        made["resources"] = others or None
    return made
