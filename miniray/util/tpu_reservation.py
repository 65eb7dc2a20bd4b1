"""TPU slices of the cluster: what fits on one, and its reservation by the head of host 0.

Groups of bundles on whole slices are in ``tpu_slices.py``.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.accelerators.tpu import CHIP_COUNTS, SliceShape, slice_shape
from miniray.common.runtime import current_runtime
from miniray.engines import refuse_on_ray
from miniray.exceptions import GetTimeoutError
from miniray.system import option_checks as check
from miniray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


#: Seconds that a slice's head is waited for.
DEFAULT_TPU_HEAD_RESERVATION_TIMEOUT_S = 100.0


def get_tpu_worker_resources(
    topology: str,
    accelerator_type: str,
    resources_per_worker: Mapping[str, float] | None = None,
    num_slices: int = 1,
    chips_per_vm: int | None = None,
) -> tuple[int, dict[str, float]]:
    """Return how many workers fit on slices, and what each of them needs.

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
    shape = shape_of(topology, accelerator_type, chips_per_vm)
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


def shape_of(topology: str, accelerator_type: str, chips_per_vm: int | None) -> SliceShape:
    """Return the shape of a slice on hosts of ``chips_per_vm`` chips."""
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

    A slice that is whole and idle is preferred to one with hosts missing or in use. Should
    its host 0 be lost, the reservation waits for that one to come back, and takes no other slice.

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
        RuntimeError: The host with the head has no name of the slice.
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
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    names: list[str] = []
    with removed_on_error([head]):
        while not names:  # once more if the host was lost before the group was kept to its slice
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not wait_for([head], left):
                raise TimeoutError(shortage(shape, 1, timeout_s))
            try:
                names = current_runtime().head.head_call("pin_placement_group", head.id, SLICE_NAME)
            except ValueError:
                raise RuntimeError(
                    f"The host with {head_resource(shape.pod_type)} does not know its slice's "
                    "name: set TPU_NAME where its node starts."
                ) from None
    return names[0], head


def fetch_tpu_slice_name_from_pg(pg: PlacementGroup) -> str | None:
    """Return the name of the slice whose host has a placement group's first bundle, or None."""
    return slice_names(pg)[0] or None


def slice_names(group: PlacementGroup) -> list[str]:
    """Return the name of the slice of each bundle's node; empty where there is none."""
    labels = {node["NodeID"]: node["Labels"] for node in current_runtime().head.nodes()}
    placed = placement_group_table(group)["bundles_to_node_id"].values()
    return [labels.get(node_id, {}).get(SLICE_NAME, "") for node_id in placed]


def _useless(shape: SliceShape) -> list[str]:
    """Return the slices not to reserve; none if there are no others."""
    states = _node_states()
    hosts = TpuHost.all_of(states)
    head = head_resource(shape.pod_type)
    heads_in_use = [state["node_id"] for state in states if state["used"].get(head)]
    useless = useless_slices(hosts, shape, heads_in_use)
    return useless if set(known_slices(hosts, shape.pod_type)) > set(useless) else []


def tpu_hosts() -> list[TpuHost]:
    """Return the cluster's living nodes with TPU chips."""
    return TpuHost.all_of(_node_states())


def _node_states() -> list[dict[str, Any]]:
    refuse_on_ray("util.tpu")
    return current_runtime().head.listing("node_states")


def wait_for(groups: list[PlacementGroup], timeout: float | None) -> bool:
    """Wait until all bundles of the groups are placed; False if they are not in time."""
    try:
        current_runtime().objects.get([group.ready() for group in groups], timeout)
    except GetTimeoutError:
        return False
    return True


def shortage(shape: SliceShape, wanted: int, timeout: float | None) -> str:
    """Say what there is of slices that could not be had in time."""
    hosts = tpu_hosts()
    return (
        f"{wanted} TPU slice{'s' if wanted > 1 else ''} {shape.pod_type} could not be reserved "
        f"within {timeout or 0:g} s: of such slices "
        f"{len(known_slices(hosts, shape.pod_type))} are there, "
        f"{len(intact_slices(hosts, shape))} of them with all hosts, "
        f"{len(ready_slices(hosts, shape))} idle."
    )


@contextlib.contextmanager
def removed_on_error(groups: list[PlacementGroup]) -> Iterator[None]:
    """Remove the groups if what follows fails or is interrupted."""
    try:
        yield
    except BaseException:
        while groups:
            remove_placement_group(groups.pop())
        raise


SLICE_NAME = "ray.io/tpu-slice-name"
WORKER_ID = "ray.io/tpu-worker-id"
POD_TYPE = "ray.io/tpu-pod-type"
#: Of every node.
NODE_ID = "ray.io/node-id"


class TpuHost(NamedTuple):
    """A living node with TPU chips."""

    node_id: str
    labels: Mapping[str, str]
    #: Amounts of the resource TPU, in chips.
    chips: float
    used: float
    #: Whether it takes new work: not while it is drained.
    open: bool = True

    @property
    def is_idle(self) -> bool:
        """Whether all its chips could be had now."""
        return self.open and not self.used

    @classmethod
    def all_of(cls, node_states: Iterable[Mapping[str, Any]]) -> list[TpuHost]:
        """Return the TPU hosts in the head's listing of node states."""
        return [
            cls(
                state["node_id"],
                state["labels"],
                state["total"]["TPU"],
                state["used"].get("TPU", 0),
                state["state"] == "ALIVE",
            )
            for state in node_states
            if state["state"] != "DEAD" and state["total"].get("TPU")
        ]


def head_resource(pod_type: str) -> str:
    """Return the resource that host 0 of each slice has once: its holder has the slice."""
    return f"TPU-{pod_type}-head"


def known_slices(hosts: Iterable[TpuHost], pod_type: str) -> dict[str, list[TpuHost]]:
    """Return the hosts of each slice of a kind that is there, whole or not, by the slice's name.

    A host that names no slice (of one host, that need not have a name) is one by itself,
    under its node's id.
    """
    found: dict[str, list[TpuHost]] = {}
    for host in hosts:
        if host.labels.get(POD_TYPE) == pod_type:
            found.setdefault(host.labels.get(SLICE_NAME) or host.node_id, []).append(host)
    return found


def intact_slices(hosts: Iterable[TpuHost], shape: SliceShape) -> dict[str, list[TpuHost]]:
    """Return those of the known slices that have all their chips, and their host 0."""
    return {
        name: members
        for name, members in known_slices(hosts, shape.pod_type).items()
        if sum(host.chips for host in members) == shape.chips
        and (len(members) == 1 or any(host.labels.get(WORKER_ID) == "0" for host in members))
    }


def ready_slices(hosts: Iterable[TpuHost], shape: SliceShape) -> list[str]:
    """Return the names of the intact slices whose chips are all free."""
    return [
        name
        for name, members in intact_slices(hosts, shape).items()
        if all(host.is_idle for host in members)
    ]


def useless_slices(
    hosts: Iterable[TpuHost], shape: SliceShape, heads_in_use: Iterable[str]
) -> list[str]:
    """Return unreserved slices that could not be reserved as a whole now.

    Some of their hosts are missing or in use. A reservation of such a slice would wait while
    other slices are free.

    Args:
        hosts: All hosts.
        shape: Of the wanted slices.
        heads_in_use: Ids of the nodes whose head resource somebody holds.
    """
    hosts = list(hosts)
    reserved, ready = set(heads_in_use), set(ready_slices(hosts, shape))
    return sorted(
        name
        for name, members in known_slices(hosts, shape.pod_type).items()
        if name not in ready and not any(host.node_id in reserved for host in members)
    )
