"""What a listing of nodes says about TPU slices. Pure: the listing is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from miniray.accelerators import SliceShape

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
        """The TPU hosts in the head's listing of node states."""
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
    """The resource of which host 0 of each slice of a kind has 1: who holds it has the slice."""
    return f"TPU-{pod_type}-head"


def known_slices(hosts: Iterable[TpuHost], pod_type: str) -> dict[str, list[TpuHost]]:
    """Hosts of each slice of a kind that is there, whole or not, by the slice's name.

    A host that names no slice (of one host, that need not have a name) is one by itself,
    under its node's id.
    """
    found: dict[str, list[TpuHost]] = {}
    for host in hosts:
        if host.labels.get(POD_TYPE) == pod_type:
            found.setdefault(host.labels.get(SLICE_NAME) or host.node_id, []).append(host)
    return found


def intact_slices(hosts: Iterable[TpuHost], shape: SliceShape) -> dict[str, list[TpuHost]]:
    """Those of the known slices that have all their chips, and their host 0."""
    return {
        name: members
        for name, members in known_slices(hosts, shape.pod_type).items()
        if sum(host.chips for host in members) == shape.chips
        and (len(members) == 1 or any(host.labels.get(WORKER_ID) == "0" for host in members))
    }


def ready_slices(hosts: Iterable[TpuHost], shape: SliceShape) -> list[str]:
    """Names of the intact slices of which nobody uses a chip."""
    return [
        name
        for name, members in intact_slices(hosts, shape).items()
        if all(host.is_idle for host in members)
    ]


def useless_slices(
    hosts: Iterable[TpuHost], shape: SliceShape, heads_in_use: Iterable[str]
) -> list[str]:
    """Slices that nobody has reserved and that could not be had as a whole now.

    Hosts of theirs are missing, or in use by others. Who reserved such a one would wait for
    those while other slices are free or become so.

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
