"""What tasks and actors request, from the options of users to the worker that runs them.

Options become ``TaskOptions``, ``ActorOptions`` and ``MethodOptions`` (``options.py``). The head's
part of them is a ``LeaseSpec`` or an ``ActorSpec``; what it grants is a ``GrantedLease``, which the
daemon keeps and passes to the worker. Each field is declared here, and nowhere else on that way.

Between processes they are tuples, which only ``to_wire`` and ``from_wire`` make and take apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence  # noqa: TC003 - checked when a spec arrives
from typing import Any, NamedTuple, TypeVar

from miniray.common.amounts import Needs, from_units
from miniray.common.names import short_name


# --- placement -------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class NodeAffinity:
    """Run on the node with this id (hex); elsewhere if ``soft`` and it is gone or too small."""

    node_id: str
    soft: bool = False


@dataclasses.dataclass(frozen=True)
class BundleAffinity:
    """Draw on a bundle of a placement group; ``bundle_index`` -1 means any bundle."""

    placement_group_id: bytes
    bundle_index: int = -1
    #: None: as the caller's own placement group has it.
    capture_child_tasks: bool | None = False


@dataclasses.dataclass(frozen=True)
class Spread:
    """Place on the least used nodes."""


@dataclasses.dataclass(frozen=True)
class Anywhere:
    """The default policy, and in no placement group, even if the caller's group captures."""


#: None is the default policy (pack to half, then spread), in the caller's group if that captures.
Placement = NodeAffinity | BundleAffinity | Spread | Anywhere | None
_PLACEMENTS: dict[str, Any] = {
    each.__name__: each for each in (NodeAffinity, BundleAffinity, Spread)
}


# --- the wire --------------------------------------------------------------------------
def field_names(cls: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in their order."""
    return tuple(cls.__dataclass_fields__)


_T = TypeVar("_T", bound="Spec")


class Spec:  # noqa: PLW1641 - no spec is a key
    """A dataclass that travels as the tuple of its fields' values."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.to_wire() == other.to_wire()

    def to_wire(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in field_names(type(self))])

    @classmethod
    def from_wire(cls: type[_T], data: Sequence[Any]) -> _T:
        """Undo ``to_wire``; ``messages/plain.py`` checks the types of the fields.

        Raises:
            ValueError, TypeError, KeyError: The data is of no spec of this class.
        """
        return cls(**dict(zip(field_names(cls), data, strict=True)))


# --- tasks and actors ------------------------------------------------------------------
@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class _Demand(Spec):
    """Requests common to tasks and actors, in their options and specs."""

    placement: Placement = None
    #: Amount per resource name, in units: ``{"CPU": 1, "GPU": 0.5, "memory": bytes}``.
    resources: Mapping[str, float]
    label_selector: Mapping[str, str] | None = None
    #: Conditions that will do where no node that meets those has capacity, the best first.
    fallback_selectors: Sequence[Mapping[str, str]] = ()

    def to_wire(self) -> tuple[Any, ...]:
        placement, *others = Spec.to_wire(self)
        if placement is not None:
            placement = (type(placement).__name__, *dataclasses.astuple(placement))
        return placement, *others

    @classmethod
    def from_wire(cls: type[_T], data: Sequence[Any]) -> _T:
        placement, *others = data
        if placement is not None:
            kind, *values = placement
            placement = _PLACEMENTS[kind](*values)
        return cls(**dict(zip(field_names(cls), (placement, *others), strict=True)))

    @classmethod
    def of(cls: type[_T], options: TaskOptions | ActorOptions, **others: Any) -> _T:
        """Make the spec of these options; ``others`` are fields that the options lack."""
        names = set(field_names(type(options))) & set(field_names(cls)) - set(others)
        return cls(**{name: getattr(options, name) for name in names}, **others)

    @property
    def group(self) -> BundleAffinity | None:
        """The placement group that they draw on, if any."""
        return self.placement if isinstance(self.placement, BundleAffinity) else None


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class TaskOptions(_Demand):
    """Checked options of a task."""

    name: str = ""
    num_returns: int | str = 1  # a number, "streaming" or "dynamic"
    max_retries: int = 3  # -1: without end
    retry_exceptions: bool | tuple[type[BaseException], ...] = False
    #: 0: no limit; None when the user gave none: tasks that take devices have 1 then.
    max_calls: int | None = None
    runtime_env: Mapping[str, Any] | None = None
    #: For generators: how many yielded values may wait unread; -1 is no limit.
    generator_backpressure: int = -1
    #: Modules that its process has imported when it starts: forked from where they are loaded.
    preload: Sequence[str] = ()
    #: The checked options by their own names, for an engine that takes them as they are.
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class LeaseSpec(_Demand):
    """What the head needs to lease workers to the tasks of one shape."""

    #: A task that is of this shape, for messages and logs.
    name: str
    #: As in ``TaskOptions``.
    max_calls: int | None = None
    #: As in ``TaskOptions``.
    preload: Sequence[str] = ()
    #: JSON, with the uploads for it; empty: none.
    runtime_env: str = ""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class _Actor(_Demand):
    """The options of an actor that its spec has as they are."""

    #: What must be free to place it (1 CPU more than it holds, when num_cpus was not given).
    placement_resources: Mapping[str, float]
    name: str | None = None
    max_restarts: int = 0  # -1: without end
    max_concurrency: int | None = None  # None: 1, or 1000 for an asyncio actor
    concurrency_groups: Mapping[str, int] = dataclasses.field(default_factory=dict)
    #: As in ``TaskOptions``.
    preload: Sequence[str] = ()
    #: More of them, which processes have that start when they are loaded; no process waits for it.
    preload_later: Sequence[str] = ()


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class ActorOptions(_Actor):
    """Checked options of an actor."""

    namespace: str | None = None
    get_if_exists: bool = False
    lifetime: str | None = None  # "detached", "non_detached" (counted), or None: the job's default
    max_task_retries: int = 0  # -1: without end
    max_pending_calls: int = -1
    runtime_env: Mapping[str, Any] | None = None
    #: As in ``TaskOptions``.
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class ActorSpec(_Actor):
    """An actor, as head, daemon and worker need it."""

    class_key: bytes
    class_name: str
    #: Pickled ``ActorClassInfo``.
    info: bytes
    #: The concurrency groups of the methods that have one: the worker has these before user code,
    #: which ``info`` may need.
    method_groups: Mapping[str, str]
    is_async: bool
    #: That its name is in.
    namespace: str
    detached: bool
    owner_node: bytes
    #: JSON, with the uploads for it; empty: none.
    runtime_env: str = ""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class CommandSpec(_Demand):
    """The command of a submitted job, as head and daemon need it."""

    #: The id of the submission.
    name: str
    #: The program and its arguments.
    command: Sequence[str]
    #: How often it runs again after an exit code that is not 0, and as often after lost nodes.
    max_retries: int = 0
    #: Seconds that it may run; 0: no limit.
    max_time: float = 0.0
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: JSON, with the uploads for it; empty: none.
    runtime_env: str = ""
    #: Names of its ``env_vars`` whose values are never shown.
    secrets: Sequence[str] = ()


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class MethodOptions:
    """Options of one method of an actor, from ``@method`` and ``.options``."""

    num_returns: int | str = 1
    concurrency_group: str | None = None
    max_task_retries: int | None = None  # None: the actor's
    retry_exceptions: bool | tuple[type[BaseException], ...] = False
    generator_backpressure: int = -1
    name: str = ""
    #: As in ``TaskOptions``.
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __reduce__(self) -> tuple[type[MethodOptions], tuple[Any, ...]]:
        # Without the names of the fields: each handle has those of all methods.
        return MethodOptions, tuple([getattr(self, name) for name in field_names(MethodOptions)])


# --- what the head grants --------------------------------------------------------------
class Allocation(NamedTuple):
    """What one lease or one bundle holds: exactly this is given back."""

    node_id: str
    #: Scalar amounts in fixed point.
    scalars: Needs = ()
    #: Per device resource, the devices and the share held of each.
    devices: tuple[tuple[str, Needs], ...] = ()
    #: (placement group id, bundle index) that it draws on, if any.
    bundle: tuple[bytes, int] | None = None

    def device_ids(self, resource: str) -> list[str]:
        """Return the ids of the held devices of a resource, in the node's order."""
        return [id for name, shares in self.devices if name == resource for id, _ in shares]

    @property
    def cpu(self) -> int:
        """Fixed-point CPU held."""
        return next((units for name, units in self.scalars if name == "CPU"), 0)

    def emptied(self) -> Allocation:
        """Return what is left of it when its amounts are given back."""
        return self._replace(scalars=(), devices=())

    def names(self) -> set[str]:
        return {name for name, _ in self.scalars} | {name for name, _ in self.devices}

    def resources(self) -> dict[str, float]:
        """Return the amounts held per resource name, in units."""
        held = {name: from_units(units) for name, units in self.scalars}
        for name, shares in self.devices:
            held[name] = from_units(sum(units for _, units in shares))
        return held


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class JobSpec(Spec):
    """A job, as its workers need it."""

    namespace: str = ""
    #: Node of its driver, which shows what workers print.
    driver_node: bytes = b""
    #: Where the driver runs: on that machine, workers look for code where the driver does.
    machine: str = ""
    sys_path: Sequence[str] = ()
    cwd: str = ""
    default_actor_lifetime: str = "non_detached"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False, repr=False)
class GrantedLease(Spec):
    """A lease that the head grants on a node, as the worker receives it."""

    number: int
    #: Of the head that has granted it.
    epoch: int
    #: The client whose tasks run on it, or that has made the actor; empty: that of a command.
    owner: bytes
    job_id: bytes
    job: JobSpec
    spec: LeaseSpec | ActorSpec | CommandSpec
    allocation: Allocation
    #: After how many tasks its worker ends; 0: no limit.
    max_calls: int = 0
    #: None: it is for tasks, or for a command.
    actor_id: bytes | None = None
    #: Marshalled (arguments value, refs) of the actor's constructor.
    arguments: bytes = b""
    #: How often the actor was restarted.
    restarts: int = 0

    def to_wire(self) -> tuple[Any, ...]:
        """Return plain data, nested specs included."""
        fields = {name: getattr(self, name) for name in field_names(GrantedLease)}
        fields["job"] = self.job.to_wire()
        fields["spec"] = (type(self.spec).__name__, self.spec.to_wire())
        fields["allocation"] = tuple(self.allocation)
        return tuple(fields.values())

    @classmethod
    def from_wire(cls: type[_G], data: Sequence[Any]) -> _G:
        """Undo ``to_wire``, for messages of the head."""
        fields = dict(zip(field_names(GrantedLease), data, strict=True))
        kind, spec = fields["spec"]
        fields["job"] = JobSpec.from_wire(fields["job"])
        fields["spec"] = _LEASED[kind].from_wire(spec)
        fields["allocation"] = Allocation(*fields["allocation"])
        return cls(**fields)

    @property
    def actor(self) -> ActorSpec | None:
        """The actor that it is for; None: it is for tasks."""
        return self.spec if isinstance(self.spec, ActorSpec) else None

    @property
    def command(self) -> CommandSpec | None:
        """The command of a submitted job that it is for, if it is for one."""
        return self.spec if isinstance(self.spec, CommandSpec) else None

    @property
    def name(self) -> str:
        """Class of its actor, a task of its shape, or the id of its submitted job."""
        spec = self.spec
        return short_name(spec.class_name if isinstance(spec, ActorSpec) else spec.name)

    @property
    def devices(self) -> dict[str, list[str]]:
        held = self.allocation.devices
        return {name: [id for id, _ in shares] for name, shares in held}


_G = TypeVar("_G", bound=GrantedLease)
#: What a lease may be for, by the name under which it travels.
_LEASED: dict[str, type[LeaseSpec | ActorSpec | CommandSpec]] = {
    each.__name__: each for each in (LeaseSpec, ActorSpec, CommandSpec)
}
