"""TPU slices as placement groups: one slice is reserved as one, several for multi-slice.

Choosing and counting slices is in ``tpu_reservation.py``; placing bundles is the head's work.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from miniray.system import option_checks as check
from miniray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from miniray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from miniray.util.tpu_reservation import (
    DEFAULT_TPU_HEAD_RESERVATION_TIMEOUT_S,
    NODE_ID,
    POD_TYPE,
    SLICE_NAME,
    get_tpu_worker_resources,
    head_resource,
    removed_on_error,
    shape_of,
    shortage,
    slice_names,
    tpu_hosts,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.common.object_ref import ObjectRef

    #: Group, index in it, and TPU chips of a bundle.
    _Bundle = tuple[PlacementGroup, int, float]


class SlicePlacementGroup:
    """Bundles on all hosts of one or several TPU slices, reserved as one.

    The bundles of a slice are on that slice's hosts and no others, and all are placed at once
    or none. The first bundle of a slice of several hosts is on host 0 and holds the slice's
    head resource too, so that no other group reserves the slice by that.

    Args:
        topology: Chips along each axis of a slice: ``4x4`` or ``2x2x4``.
        accelerator_version: The generation: ``v6e`` or ``TPU-V6E``.
        resources_per_bundle: What each bundle reserves. By default 1 CPU and all chips of a
            host; with fewer chips there are several bundles on each host.
        strategy: As of ``placement_group``, for the bundles of each slice.
        name: As of ``placement_group``; with ``pg_per_slice`` followed by ``_slice_<N>``.
        lifetime: As of ``placement_group``.
        num_slices: How many slices.
        chips_per_vm: Chips of a host, as of ``get_tpu_worker_resources``.
        head_reservation_timeout_s: How long to wait for slices of several hosts, in seconds;
            None: without end. A slice of one host is not waited for here.
        bundle_label_selector: Further conditions on the labels of the nodes, one dict per
            bundle. If they name the slices (``ray.io/tpu-slice-name``), these are taken, even if
            their heads are in use, and not waited for here.
        pg_per_slice: Make a placement group of each slice instead of one of all.

    Attributes:
        topology: Chips along each axis of a slice.
        accelerator_version: The generation: ``v6e``.
        num_slices: How many slices.
        num_hosts: Hosts of all slices together.
        num_bundles: Bundles on all slices together.
        chips_per_host: Chips of each host.
        devices_per_host: The amount of TPU that is all of a host.
        bundle_resources: What each bundle reserves.

    Raises:
        ValueError: There is no such slice, or the bundles can't be placed on it.
        TimeoutError: The slices did not come free in time.
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
        self._shape = shape = shape_of(topology, accelerator_version, chips_per_vm)
        self.topology = topology.strip().lower()
        self.accelerator_version = shape.pod_type.partition("-")[0]
        self.num_slices: int = check.whole(1)("num_slices", num_slices)
        self.num_hosts = shape.hosts * self.num_slices
        self.chips_per_host = self.devices_per_host = shape.chips_per_host
        self.num_bundles, self.bundle_resources = get_tpu_worker_resources(
            topology, accelerator_version, resources_per_bundle, num_slices, chips_per_vm
        )
        self._per_slice = pg_per_slice
        self._check_strategy(strategy)
        given = list(bundle_label_selector or [{}] * self.num_bundles)
        if len(given) != self.num_bundles:
            raise ValueError(
                f"bundle_label_selector has {len(given)} entries for {self.num_bundles} bundles: "
                "give one per bundle."
            )
        named = any(SLICE_NAME in each for each in given)
        chosen_here = self._shape.hosts > 1 and not named
        self._selectors = self._with_slices(given, named)
        self._groups: list[PlacementGroup] = []
        with removed_on_error(self._groups):
            self._make_groups(strategy, name, lifetime, with_heads=chosen_here)
            if chosen_here:
                self._wait(head_reservation_timeout_s)

    def _check_strategy(self, strategy: str) -> None:
        hosts, bundles = self._shape.hosts, self._bundles_per_slice
        if (strategy == "STRICT_SPREAD" and bundles > hosts) or (
            strategy == "STRICT_PACK" and hosts > 1
        ):
            raise ValueError(
                f"{strategy} can't place the {bundles} bundles of a {self.topology} slice on its "
                f"{hosts} host{'s' if hosts > 1 else ''}: leave strategy out."
            )

    @property
    def _bundles_per_slice(self) -> int:
        return self.num_bundles // self.num_slices

    def _with_slices(self, given: list[Mapping[str, str]], named: bool) -> list[dict[str, str]]:
        """Add to the given selectors that the bundles of a slice are on hosts of one slice."""
        names = [each.get(SLICE_NAME, "") for each in given]
        if named and any(not name or "(" in name or name.startswith("!") for name in names):
            raise ValueError(
                f"Name the slice ({SLICE_NAME}) of every bundle, or of none; by its name, not by "
                "conditions."
            )
        several = self._shape.hosts > 1
        # Where no host says what it is part of (they need not), any with as many chips serves.
        told = several or any(POD_TYPE in host.labels for host in tpu_hosts())
        kind = {POD_TYPE: self._shape.pod_type} if told else {}
        found = []
        for index, each in enumerate(given):
            slice_ = {}
            if not named and (several or self._bundles_per_slice > 1):
                together = f"same({index // self._bundles_per_slice})"
                slice_ = {SLICE_NAME if several else NODE_ID: together}
            found.append({**each, **kind, **slice_})
        return found

    def _make_groups(
        self, strategy: str, name: str, lifetime: str | None, *, with_heads: bool
    ) -> None:
        head = {head_resource(self._shape.pod_type): 1} if with_heads else {}
        bundles = [
            {**self.bundle_resources, **({} if index % self._bundles_per_slice else head)}
            for index in range(self.num_bundles)
        ]
        size = self._bundles_per_slice if self._per_slice else self.num_bundles
        for number, start in enumerate(range(0, self.num_bundles, size)):
            self._groups.append(
                placement_group(
                    bundles[start : start + size],
                    strategy,
                    f"{name}_slice_{number}" if name and self._per_slice else name,
                    lifetime,
                    bundle_label_selector=self._selectors[start : start + size],
                )
            )

    def _wait(self, timeout: float | None) -> None:
        """Wait until all bundles are placed, and note the names of their slices."""
        if not wait_for(self._groups, timeout):
            raise TimeoutError(shortage(self._shape, self.num_slices, timeout))
        names = [name for group in self._groups for name in slice_names(group)]
        for selector, name in zip(self._selectors, names, strict=True):
            selector[SLICE_NAME] = name

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
        """``slice_placement_group``, by another of Ray's names."""
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
    def head_placement_groups(self) -> list[PlacementGroup]:
        """Groups that hold the heads of the slices: none, as the first bundles do."""
        return []

    @property
    def bundle_label_selector(self) -> list[dict[str, str]]:
        """Conditions on the labels of each bundle's node."""
        return [dict(selector) for selector in self._selectors]

    def release_head_pgs(self, slice_index: int | None = None) -> None:
        """Do nothing: only the bundles hold the heads."""

    def shutdown(self) -> None:
        """Give everything back; tasks and actors in the bundles end. Can be called again."""
        while self._groups:
            remove_placement_group(self._groups.pop())


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
        fn: A remote function. It gets the chips of its bundle and no CPU, whatever its options are.
        *args: Its arguments.
        topology: Of a slice that is reserved here, until this driver ends.
        accelerator_version: The generation of that one.
        tpu_slice: Slices that are reserved already; the two before are left out then.
        slice_index: Only this one of them (with ``pg_per_slice``).
        num_slices: How many slices to reserve.
        chips_per_vm: As of ``SlicePlacementGroup``.
        head_reservation_timeout_s: How long to wait for a slice that is reserved here, in
            seconds; None: without end.
        pg_ready_timeout_s: Like the former, for slices that are reserved already; given, it
            replaces the former too.
        **kwargs: Its arguments by name.

    Returns:
        A ref for each bundle, in the order of the bundles.

    Raises:
        TypeError: ``fn`` is not a remote function.
        ValueError: No slice is named.
        TimeoutError: The slice or its hosts did not come free in time.
    """
    if not hasattr(fn, "options"):
        raise TypeError(f"fn must be a remote function, not {check.shown(fn)}.")
    limit = pg_ready_timeout_s
    if tpu_slice is not None:
        return _run_in_bundles(fn, args, kwargs, _ready(tpu_slice, slice_index, limit))
    limit = head_reservation_timeout_s if limit is None else limit
    if topology is None or accelerator_version is None:
        raise ValueError("Say which slice: topology and accelerator_version, or tpu_slice.")
    reserved = SlicePlacementGroup(
        topology,
        accelerator_version,
        num_slices=num_slices,
        chips_per_vm=chips_per_vm,
        head_reservation_timeout_s=limit,
    )
    with contextlib.ExitStack() as undo:
        undo.callback(reserved.shutdown)
        bundles = _ready(reserved, slice_index, limit)
        undo.pop_all()
    return _run_in_bundles(fn, args, kwargs, bundles)


def _run_in_bundles(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bundles: Sequence[_Bundle]
) -> list[ObjectRef[Any]]:
    return [
        fn.options(
            num_cpus=0,
            resources={"TPU": chips},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote(*args, **kwargs)
        for group, index, chips in bundles
    ]


def _ready(
    reserved: SlicePlacementGroup, slice_index: int | None, timeout: float | None
) -> list[_Bundle]:
    """Wait for the bundles of slices, or of the one with this index."""
    groups = _chosen(reserved, slice_index)
    if not wait_for(groups, timeout):
        raise TimeoutError(
            f"The hosts of the TPU slice were not free within {timeout or 0:g} s: other work uses "
            "their chips."
        )
    chips = reserved.bundle_resources["TPU"]
    return [(group, index, chips) for group in groups for index in range(group.bundle_count)]


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
