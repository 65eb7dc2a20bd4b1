"""TPU slices as placement groups: one slice is reserved as one, several for multi-slice.

Which slices there are is read in ``tpu_nodes.py``; placing bundles is the head's work.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

from miniray.accelerators import slice_shape
from miniray.accelerators.tpu_topology import CHIP_COUNTS, SliceShape
from miniray.core import option_checks as check
from miniray.core.runtime import current_runtime
from miniray.exceptions import GetTimeoutError
from miniray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from miniray.util.tpu_nodes import (
    POD_TYPE,
    SLICE_NAME,
    WORKER_ID,
    TpuHost,
    head_resource,
    intact_slices,
    known_slices,
    ready_slices,
    useless_slices,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from miniray.object_ref import ObjectRef

#: Seconds that a slice's head is waited for.
DEFAULT_TPU_HEAD_RESERVATION_TIMEOUT_S = 100.0


def get_tpu_worker_resources(
    topology: str,
    accelerator_type: str,
    resources_per_worker: Mapping[str, float] | None = None,
    num_slices: int = 1,
    chips_per_vm: int | None = None,
) -> tuple[int, dict[str, float]]:
    """How many workers slices have room for, and what each of them needs.

    Args:
        topology: Chips along each axis of a slice: ``4x4`` or ``2x2x4``.
        accelerator_type: The generation: ``TPU-V6E`` or ``v6e``.
        resources_per_worker: What a worker needs. By default 1 CPU, and of TPU all chips of
            a host.
        num_slices: How many slices.
        chips_per_vm: Chips of a host where the topology can be had in several ways: 4 for a
            ``2x4`` of v6e on two hosts.

    Returns:
        The number of workers, and the resources of one.

    Raises:
        ValueError: There is no such slice, or its hosts can't be divided so.
    """
    shape = _shape(topology, accelerator_type, chips_per_vm)
    if num_slices < 1:
        raise ValueError(f"num_slices must be at least 1, not {num_slices}.")
    resources = {"CPU": 1, "TPU": shape.chips_per_host, **(resources_per_worker or {})}
    chips = check.amount("TPU of a worker", resources["TPU"], "TPU")
    if not chips or shape.chips_per_host % chips:
        fitting = [str(count) for count in CHIP_COUNTS if not shape.chips_per_host % count]
        raise ValueError(
            f"A host of {topology} has {shape.chips_per_host} chips, which can't be divided into "
            f"workers of TPU {chips:g}: use {' or '.join(fitting)}."
        )
    return num_slices * int(shape.chips // chips), dict(resources)


def _shape(topology: str, accelerator_type: str, chips_per_vm: int | None) -> SliceShape:
    """The shape of a slice, on hosts of so many chips."""
    shape = slice_shape(topology, accelerator_type)
    if chips_per_vm is None:
        return shape
    if chips_per_vm not in CHIP_COUNTS or shape.chips % chips_per_vm:
        raise ValueError(
            f"chips_per_vm must be one of {', '.join(map(str, CHIP_COUNTS))} and divide the "
            f"{shape.chips} chips of {topology}, not {chips_per_vm}."
        )
    hosts = shape.chips // chips_per_vm
    return SliceShape(shape.chips, hosts, chips_per_vm, shape.pod_type)


# --- one slice -------------------------------------------------------------------------------
def reserve_tpu_slice(
    topology: str,
    accelerator_type: str,
    timeout_s: float | None = DEFAULT_TPU_HEAD_RESERVATION_TIMEOUT_S,
    slice_name: str | None = None,
) -> tuple[str, PlacementGroup]:
    """Reserve a slice against others who reserve slices, by the head resource of its host 0.

    A slice that is whole and idle is preferred to one of which hosts are missing or in use.

    Args:
        topology: Chips along each axis.
        accelerator_type: The generation: ``TPU-V4`` or ``v4``.
        timeout_s: How long to wait for one, in seconds; None: without end.
        slice_name: This slice and no other.

    Returns:
        The slice's name and the placement group that holds its head, until it is removed or
        this driver ends.

    Raises:
        TimeoutError: None came free in time.
        RuntimeError: The host with the head does not know the slice's name.
        ValueError: The generation has no such topology.
    """
    shape = slice_shape(topology, accelerator_type)
    selector = {WORKER_ID: "0", POD_TYPE: shape.pod_type}
    useless = _useless(shape)
    if slice_name is not None:
        selector[SLICE_NAME] = slice_name
    elif useless:
        selector[SLICE_NAME] = f"!in({','.join(useless)})"
    head = placement_group([{head_resource(shape.pod_type): 1}], bundle_label_selector=[selector])
    with _removed_on_error([head]):
        if not _wait(head, timeout_s):
            hosts = _hosts()
            raise TimeoutError(
                f"No TPU slice {shape.pod_type}{f' {slice_name}' if slice_name else ''} could be "
                f"reserved within {timeout_s:g} s: of such slices "
                f"{len(known_slices(hosts, shape.pod_type))} are there, "
                f"{len(intact_slices(hosts, shape))} of them with all hosts, "
                f"{len(ready_slices(hosts, shape))} idle."
            )
        name = fetch_tpu_slice_name_from_pg(head)
        if name is None:
            raise RuntimeError(
                f"The host with {head_resource(shape.pod_type)} does not know its slice's name: "
                "set TPU_NAME where its node starts."
            )
    return name, head


def fetch_tpu_slice_name_from_pg(pg: PlacementGroup) -> str | None:
    """Name of the slice whose host has the first bundle of a placement group, or None."""
    node_id = placement_group_table(pg)["bundles_to_node_id"][0]
    for node in current_runtime().nodes():
        if node["NodeID"] == node_id:
            name: str | None = node["Labels"].get(SLICE_NAME)
            return name
    return None


def _useless(shape: SliceShape) -> list[str]:
    """Slices not to reserve; none if there are no others."""
    states = current_runtime().head_call("state", "node_states")
    hosts = TpuHost.all_of(states)
    head = head_resource(shape.pod_type)
    heads_in_use = [state["node_id"] for state in states if state["used"].get(head)]
    useless = useless_slices(hosts, shape, heads_in_use)
    return useless if set(known_slices(hosts, shape.pod_type)) > set(useless) else []


def _hosts() -> list[TpuHost]:
    return TpuHost.all_of(current_runtime().head_call("state", "node_states"))


def _wait(group: PlacementGroup, timeout: float | None) -> bool:
    try:
        current_runtime().get([group.ready()], timeout)
    except GetTimeoutError:
        return False
    return True


@contextlib.contextmanager
def _removed_on_error(groups: list[PlacementGroup]) -> Iterator[None]:
    """Nothing stays reserved when what follows fails or is interrupted."""
    try:
        yield
    except BaseException:
        while groups:
            remove_placement_group(groups.pop())
        raise


# --- slices as a group -----------------------------------------------------------------------
class SlicePlacementGroup:
    """Bundles on all hosts of one or several TPU slices, reserved as one.

    The bundles of a slice are on that slice's hosts and no others. To reserve a slice of
    several hosts waits until its head is free; the bundles are placed when all hosts are.

    Args:
        topology: Chips along each axis of a slice: ``4x4`` or ``2x2x4``.
        accelerator_version: The generation: ``v6e`` or ``TPU-V6E``.
        resources_per_bundle: What each bundle reserves. By default 1 CPU and all chips of a
            host; with fewer chips there are several bundles on each host.
        strategy: As of ``placement_group``.
        name: As of ``placement_group``; with ``pg_per_slice`` followed by ``_slice_<N>``.
        lifetime: As of ``placement_group``. The heads are given back with their creator in any
            case, as nobody else could do so; a detached slice is held by its chips then.
        num_slices: How many slices.
        chips_per_vm: Chips of a host, as of ``get_tpu_worker_resources``.
        head_reservation_timeout_s: How long to wait for each slice, in seconds; None: without
            end.
        bundle_label_selector: Further conditions on the labels of the nodes, one dict per
            bundle. One that names a slice (``ray.io/tpu-slice-name``) chooses it, and that one
            is not waited for here.
        pg_per_slice: Make a placement group of each slice instead of one of all.

    Raises:
        ValueError: There is no such slice, or the bundles can't be placed on it.
        TimeoutError: A slice did not come free in time.
    """

    def __init__(
        self,
        topology: str,
        accelerator_version: str,
        resources_per_bundle: Mapping[str, float] | None = None,
        strategy: str = "SPREAD",
        name: str = "",
        lifetime: str | None = None,
        num_slices: int = 1,
        chips_per_vm: int | None = None,
        head_reservation_timeout_s: float | None = DEFAULT_TPU_HEAD_RESERVATION_TIMEOUT_S,
        bundle_label_selector: Sequence[Mapping[str, str]] | None = None,
        pg_per_slice: bool = False,
    ) -> None:
        self._shape = _shape(topology, accelerator_version, chips_per_vm)
        self._topology = topology.strip().lower()
        self._num_slices = check.whole(1)("num_slices", num_slices)
        self._num_bundles, self._resources = get_tpu_worker_resources(
            topology, accelerator_version, resources_per_bundle, num_slices, chips_per_vm
        )
        self._per_slice = pg_per_slice
        given = list(bundle_label_selector or [{}] * self._num_bundles)
        if len(given) != self._num_bundles:
            raise ValueError(
                f"bundle_label_selector has {len(given)} entries for {self._num_bundles} bundles: "
                "give one per bundle."
            )
        self._strategy = self._checked_strategy(strategy)
        self._heads: list[PlacementGroup | None] = []
        self._groups: list[PlacementGroup] = []
        self._selectors: list[dict[str, str]] = []
        with self._shut_down_on_error():
            self._reserve(given, head_reservation_timeout_s)
            self._make_groups(name, lifetime)

    def _checked_strategy(self, strategy: str) -> str:
        """Several bundles of a slice of one host have to be on that host."""
        if self._shape.hosts > 1 or self._bundles_per_slice == 1 or not self._alone:
            return strategy
        if strategy == "STRICT_SPREAD":
            raise ValueError(
                f"The {self._bundles_per_slice} bundles of a {self._topology} slice are on its "
                "one host: STRICT_SPREAD can't place them. Leave strategy out."
            )
        return "STRICT_PACK"

    @property
    def _bundles_per_slice(self) -> int:
        return self._num_bundles // self._num_slices

    @property
    def _alone(self) -> bool:
        """Whether each placement group is of one slice."""
        return self._per_slice or self._num_slices == 1

    def _reserve(self, given: list[Mapping[str, str]], timeout: float | None) -> None:
        """Choose each slice, and say of each bundle which labels its node must have."""
        # A host by itself needs no reservation, unless several bundles have to meet there.
        by_name = self._shape.hosts > 1 or (self._bundles_per_slice > 1 and not self._alone)
        for index in range(self._num_slices):
            start = index * self._bundles_per_slice
            wanted = given[start : start + self._bundles_per_slice]
            named = next((each[SLICE_NAME] for each in wanted if SLICE_NAME in each), None)
            if by_name and named is None:
                named, head = reserve_tpu_slice(self._topology, self._shape.pod_type, timeout)
                self._heads.append(head)
            labels = self._kind() if named is None else {SLICE_NAME: named}
            self._selectors += [{**each, **labels} for each in wanted]

    def _kind(self) -> dict[str, str]:
        """Keeps off hosts of larger slices, where nodes tell which slice they are part of."""
        told = any(POD_TYPE in host.labels for host in _hosts())
        return {POD_TYPE: self._shape.pod_type} if told else {}

    def _make_groups(self, name: str, lifetime: str | None) -> None:
        size = self._bundles_per_slice if self._per_slice else self._num_bundles
        for number, start in enumerate(range(0, self._num_bundles, size)):
            self._groups.append(
                placement_group(
                    [dict(self._resources) for _ in range(size)],
                    self._strategy,
                    f"{name}_slice_{number}" if name and self._per_slice else name,
                    lifetime,
                    bundle_label_selector=self._selectors[start : start + size],
                )
            )

    @contextlib.contextmanager
    def _shut_down_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.shutdown()
            raise

    @property
    def slice_placement_group(self) -> PlacementGroup | None:
        """The placement group of all slices; None after ``shutdown``.

        Raises:
            ValueError: There is one per slice.
        """
        if self._per_slice:
            raise ValueError("There is a group per slice (pg_per_slice): slice_placement_groups.")
        return self._groups[0] if self._groups else None

    @property
    def placement_group(self) -> PlacementGroup | None:
        """The same as ``slice_placement_group``."""
        return self.slice_placement_group

    @property
    def slice_placement_groups(self) -> list[PlacementGroup]:
        """The placement group of each slice.

        Raises:
            ValueError: There is one for all slices.
        """
        if not self._per_slice:
            raise ValueError("There is one group (pg_per_slice=False): slice_placement_group.")
        return list(self._groups)

    @property
    def chips_per_host(self) -> int:
        """Chips of each host."""
        return self._shape.chips_per_host

    @property
    def devices_per_host(self) -> int:
        """The amount of TPU that is all of a host."""
        return self._shape.chips_per_host

    @property
    def num_hosts(self) -> int:
        """Hosts of all slices together."""
        return self._shape.hosts * self._num_slices

    @property
    def num_bundles(self) -> int:
        """Bundles on all slices together."""
        return self._num_bundles

    @property
    def topology(self) -> str:
        """Chips along each axis of a slice."""
        return self._topology

    @property
    def accelerator_version(self) -> str:
        """The generation: ``v6e``."""
        return self._shape.pod_type.partition("-")[0]

    @property
    def num_slices(self) -> int:
        """How many slices."""
        return self._num_slices

    @property
    def head_placement_groups(self) -> list[PlacementGroup]:
        """The groups that hold the heads of the slices, as far as they are not released."""
        return [head for head in self._heads if head is not None]

    @property
    def bundle_label_selector(self) -> list[dict[str, str]]:
        """Conditions on the labels of each bundle's node."""
        return [dict(selector) for selector in self._selectors]

    @property
    def bundle_resources(self) -> dict[str, float]:
        """What each bundle reserves."""
        return dict(self._resources)

    def release_head_pgs(self, slice_index: int | None = None) -> None:
        """Give back the heads, of all slices or of one, once the bundles are placed.

        From then on the bundles hold the slice by its chips. Can be called again.

        Raises:
            ValueError: There is no such slice.
        """
        if slice_index is not None and not 0 <= slice_index < len(self._heads):
            raise ValueError(
                f"slice_index must be from 0 to {len(self._heads) - 1}, not {slice_index}."
            )
        for index, head in enumerate(self._heads):
            if head is not None and slice_index in (None, index):
                remove_placement_group(head)
                self._heads[index] = None

    def shutdown(self) -> None:
        """Give everything back; tasks and actors in the bundles end. Can be called again."""
        while self._groups:
            remove_placement_group(self._groups.pop())
        self.release_head_pgs()


def slice_placement_group(
    topology: str,
    accelerator_version: str,
    resources_per_bundle: Mapping[str, float] | None = None,
    num_slices: int = 1,
    chips_per_vm: int | None = None,
    pg_per_slice: bool = False,
    **kwargs: Any,
) -> SlicePlacementGroup:
    """Reserve TPU slices; arguments and errors are those of ``SlicePlacementGroup``."""
    return SlicePlacementGroup(
        topology,
        accelerator_version,
        resources_per_bundle,
        num_slices=num_slices,
        chips_per_vm=chips_per_vm,
        pg_per_slice=pg_per_slice,
        **kwargs,
    )


def run_on_slice(
    fn: Any,
    *args: Any,
    topology: str | None = None,
    accelerator_version: str | None = None,
    tpu_slice: SlicePlacementGroup | None = None,
    slice_index: int | None = None,
    num_slices: int = 1,
    chips_per_vm: int | None = None,
    head_reservation_timeout_s: float | None = DEFAULT_TPU_HEAD_RESERVATION_TIMEOUT_S,
    pg_ready_timeout_s: float | None = None,
    **kwargs: Any,
) -> list[ObjectRef[Any]]:
    """Run a remote function on every host of a TPU slice, or in every bundle of a group of them.

    Args:
        fn: A remote function. It gets the chips of its bundle and no CPU, whatever it says.
        *args: Its arguments.
        topology: Of a slice that is reserved here, until this driver ends.
        accelerator_version: The generation of that one.
        tpu_slice: Slices that are reserved already; the two before are left out then.
        slice_index: Only this one of them (with ``pg_per_slice``).
        num_slices: How many slices to reserve.
        chips_per_vm: As of ``SlicePlacementGroup``.
        head_reservation_timeout_s: As of ``SlicePlacementGroup``.
        pg_ready_timeout_s: How long to wait for the hosts, in seconds; None: without end.
        **kwargs: Its arguments by name.

    Returns:
        A ref for each bundle, in the order of the bundles.

    Raises:
        TypeError: ``fn`` is no remote function.
        ValueError: It is not said which slice.
        TimeoutError: The slice or its hosts did not come free in time.
    """
    if not hasattr(fn, "options"):
        raise TypeError(f"fn must be a remote function, not {check.shown(fn)}.")
    reserved = tpu_slice
    if reserved is None:
        if topology is None or accelerator_version is None:
            raise ValueError("Say which slice: topology and accelerator_version, or tpu_slice.")
        reserved = SlicePlacementGroup(
            topology,
            accelerator_version,
            num_slices=num_slices,
            chips_per_vm=chips_per_vm,
            head_reservation_timeout_s=head_reservation_timeout_s,
        )
    with contextlib.ExitStack() as undo:
        if tpu_slice is None:
            undo.callback(reserved.shutdown)
        groups = _chosen(reserved, slice_index)
        _wait_for_all(groups, pg_ready_timeout_s)
        if tpu_slice is None:
            reserved.release_head_pgs()
        undo.pop_all()
    chips = reserved.bundle_resources["TPU"]
    return [
        fn.options(
            num_cpus=0,
            resources={"TPU": chips},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote(*args, **kwargs)
        for group in groups
        for index in range(group.bundle_count)
    ]


def _chosen(reserved: SlicePlacementGroup, slice_index: int | None) -> list[PlacementGroup]:
    groups = list(reserved._groups)
    if not groups:
        raise ValueError("The slice was given back: reserve another one.")
    if slice_index is None:
        return groups
    of_each = reserved.slice_placement_groups
    if not 0 <= slice_index < len(of_each):
        raise ValueError(f"slice_index must be from 0 to {len(of_each) - 1}, not {slice_index}.")
    return [of_each[slice_index]]


def _wait_for_all(groups: list[PlacementGroup], timeout: float | None) -> None:
    refs = [group.ready() for group in groups]
    try:
        current_runtime().get(refs, timeout)
    except GetTimeoutError:
        raise TimeoutError(
            f"The hosts of the TPU slice were not free within {timeout or math.inf:g} s: others "
            "use chips of theirs."
        ) from None
