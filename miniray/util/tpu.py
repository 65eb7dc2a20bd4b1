"""Google TPUs: the slice that a program runs on, shapes of slices, and slices reserved as one.

Ray's ``ray.util.tpu``. Reserving is in ``tpu_reservation.py`` and ``tpu_slices.py``; which
topologies there are is in ``accelerators/tpu.py``.
"""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Any

from miniray.accelerators.host import this_host
from miniray.accelerators.node_resources import detect
from miniray.accelerators.tpu import (
    GoogleTPU,
    chips_of_pod_type,
    generation,
    slice_facts,
    slice_shape,
)
from miniray.common.runtime import runtime_or_none
from miniray.runtime_context import own_node
from miniray.util.tpu_reservation import (
    SLICE_NAME,
    TpuHost,
    fetch_tpu_slice_name_from_pg,
    get_tpu_worker_resources,
    intact_slices,
    ready_slices,
    reserve_tpu_slice,
    tpu_hosts,
)
from miniray.util.tpu_slices import SlicePlacementGroup, run_on_slice, slice_placement_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = [
    "SlicePlacementGroup",
    "fetch_tpu_slice_name_from_pg",
    "get_chips_per_host",
    "get_current_pod_name",
    "get_current_pod_worker_count",
    "get_num_ready_tpu_slices",
    "get_num_tpu_chips_on_node",
    "get_num_tpu_slices",
    "get_tpu_coordinator_env_vars",
    "get_tpu_nodes_for_slice",
    "get_tpu_num_slices_for_workers",
    "get_tpu_slice_name_from_node",
    "get_tpu_version_from_type",
    "get_tpu_worker_resources",
    "infer_tpu_pod_type_from_topology",
    "init_jax_profiler",
    "reserve_tpu_slice",
    "run_on_slice",
    "slice_placement_group",
]

logger = logging.getLogger(__name__)

#: Default port of the coordinator of several slices.
DEFAULT_MEGASCALE_PORT = "8081"


# --- where this code runs --------------------------------------------------------------------
def get_current_pod_name() -> str | None:
    """Return the name of the TPU slice that this host is part of, or None.

    Within a cluster it is what the node has announced; without one, the variable
    ``TPU_NAME`` or the machine's metadata.
    """
    return _facts().get("slice-name")


def get_current_pod_worker_count() -> int | None:
    """Return the number of hosts of this host's TPU slice; None if it is in none."""
    pod_type, chips = _facts().get("pod-type"), get_num_tpu_chips_on_node()
    if pod_type is None or not chips:
        return None
    return math.ceil(chips_of_pod_type(pod_type) / chips)


def get_num_tpu_chips_on_node() -> int:
    """Return the number of TPU chips that this host has, or else that its node offers."""
    found = len(detect(GoogleTPU(), this_host()).ids)
    if found or runtime_or_none() is None:
        return found
    return int(own_node().get("Resources", {}).get("TPU", 0))


def init_jax_profiler(port: int | None = None) -> None:
    """Let tools such as xprof profile JAX in this process.

    Starts JAX's profiler server, one per process. What keeps it from starting is logged,
    as in Ray: a program goes on without it.

    Args:
        port: Where it listens. Default: the variable ``JAX_PROFILER_PORT``, or 9999.
    """
    try:
        from jax import profiler
    except ImportError:
        logger.warning("JAX is not installed: there is nothing to profile.")
        return
    where: int | str = os.environ.get("JAX_PROFILER_PORT", "9999") if port is None else port
    try:
        profiler.start_server(int(where))
    except Exception as error:  # noqa: BLE001 - whatever JAX raises
        logger.error("JAX's profiler cannot listen on port %s: %s", where, error)  # noqa: TRY400
    else:
        logger.info("JAX's profiler listens on port %s", where)


def _facts() -> Mapping[str, str]:
    """Return what is known of the slice of this host, by name without domain and ``tpu-``."""
    if runtime_or_none() is None:
        host = this_host()
        return slice_facts(host, ask=bool(detect(GoogleTPU(), host).ids))
    prefix = SLICE_NAME.removesuffix("slice-name")
    labels: dict[str, str] = own_node().get("Labels", {})
    return {
        name.removeprefix(prefix): value
        for name, value in labels.items()
        if name.startswith(prefix)
    }


# --- shapes ----------------------------------------------------------------------------------
def get_tpu_version_from_type(accelerator_type: str) -> str:
    """Return the generation that a type names: ``v6e`` for ``TPU-V6E``.

    Raises:
        ValueError: There is no such generation.
    """
    return generation(accelerator_type)


def get_chips_per_host(topology: str, accelerator_version: str) -> int:
    """Return the chips of each host of a slice.

    Args:
        topology: Chips along each axis: ``4x4`` or ``2x2x4``.
        accelerator_version: The generation: ``v6e`` or ``TPU-V6E``.

    Raises:
        ValueError: The generation has no such topology.
    """
    return slice_shape(topology, accelerator_version).chips_per_host


def infer_tpu_pod_type_from_topology(topology: str, accelerator_type: str) -> str:
    """Return a pod type such as ``v4-32``; arguments and errors as of ``get_chips_per_host``."""
    return slice_shape(topology, accelerator_type).pod_type


def get_tpu_num_slices_for_workers(
    topology: str,
    accelerator_type: str,
    num_workers: int,
    resources_per_worker: Mapping[str, float] | None = None,
) -> int:
    """Return how many slices ``num_workers`` workers need.

    Args:
        topology: Of each slice.
        accelerator_type: The generation, as ``TPU-V6E``.
        num_workers: Number of workers.
        resources_per_worker: Of each; by default all chips of a host.

    Returns:
        At least 1; 1 also where the arguments describe no slice, as in Ray.
    """
    if not topology or not accelerator_type:
        return 1
    try:
        workers, _ = get_tpu_worker_resources(topology, accelerator_type, resources_per_worker)
    except ValueError:
        return 1
    return max(1, math.ceil(num_workers / workers))


def get_tpu_coordinator_env_vars(
    coordinator_address: str,
    num_slices: int,
    slice_id: int,
    coordinator_port: str = DEFAULT_MEGASCALE_PORT,
) -> dict[str, str]:
    """Return the variables by which libtpu connects several slices.

    Args:
        coordinator_address: IP address or name of the host of the coordinator.
        num_slices: How many slices there are.
        slice_id: Which of them the process is on, from 0 on.
        coordinator_port: Where the coordinator listens.

    Raises:
        ValueError: There is no such slice.
    """
    if not 0 <= slice_id < num_slices:
        raise ValueError(
            f"slice_id must be from 0 to {num_slices - 1} for {num_slices} slices, not {slice_id}."
        )
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": coordinator_address,
        "MEGASCALE_PORT": str(coordinator_port),
        "MEGASCALE_NUM_SLICES": str(num_slices),
        "MEGASCALE_SLICE_ID": str(slice_id),
    }


# --- the cluster's slices --------------------------------------------------------------------
def get_tpu_slice_name_from_node(node: Mapping[str, Any]) -> str | None:
    """Return the name of the slice of a node as ``nodes()`` lists it, or None."""
    name: str | None = node.get("Labels", {}).get(SLICE_NAME)
    return name


def get_tpu_nodes_for_slice(
    slice_name: str, nodes: Sequence[Mapping[str, Any]] | None = None
) -> list[Mapping[str, Any]]:
    """Return the living nodes of a slice.

    Args:
        slice_name: Its name.
        nodes: Where to look, in the form of ``nodes()``; the cluster's by default.
    """
    if nodes is None:
        runtime = runtime_or_none()
        nodes = [] if runtime is None else runtime.head.nodes()
    return [
        node
        for node in nodes
        if node.get("Alive") and get_tpu_slice_name_from_node(node) == slice_name
    ]


def get_num_tpu_slices(topology: str, accelerator_type: str) -> int:
    """Return how many slices of a kind are there with all their hosts, in use or not.

    Raises:
        ValueError: The generation has no such topology.
    """
    return len(intact_slices(_hosts(), slice_shape(topology, accelerator_type)))


def get_num_ready_tpu_slices(topology: str, accelerator_type: str) -> int:
    """Return how many of the slices that ``get_num_tpu_slices`` counts are free."""
    return len(ready_slices(_hosts(), slice_shape(topology, accelerator_type)))


def _hosts() -> list[TpuHost]:
    return [] if runtime_or_none() is None else tpu_hosts()
