"""The facts that a node daemon starts with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import grpc

    from miniray.accelerators.node_resources import NodeAccelerators
    from miniray.security.certificates import Credentials


class MoverConfig(NamedTuple):
    """Facts for a mover."""

    #: Distinguishes machines and containers.
    machine: str
    #: The folder for its socket, for movers of the same machine.
    folder: str
    #: The address to bind for movers of other machines, and the one to reach it at; empty: none.
    host: str = ""
    advertised_host: str = ""
    #: Its certificate, and the authority of theirs; None in a cluster of one machine.
    credentials: Credentials | None = None


class WebConfig(NamedTuple):
    """Facts for the page that the head's node serves."""

    #: The address to bind, the first port to try, and the address that clients get.
    host: str
    port: int
    shown_host: str
    #: Of cookies and tokens.
    key: bytes
    #: Distinguishes the cookies of clusters, which browsers send to all ports of a host.
    cluster: str
    #: The folder of a certificate, where the page is reached over the network; else empty.
    certificate: str

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"


class NodeConfig(NamedTuple):
    """Facts about one node. Sizes are bytes."""

    node_id: bytes
    session_dir: Path
    logs: Path
    #: Where drivers and workers of this machine connect.
    socket_path: str
    socket_key: bytes
    #: Host and address that other machines reach this node at; the address may be unix:PATH.
    host: str
    address: str
    #: The address that drivers pass to init().
    cluster_address: str
    is_head: bool
    #: No work is placed on it.
    drivers_only: bool
    scalars: Mapping[str, float]
    accelerators: NodeAccelerators
    labels: Mapping[str, str]
    object_store_capacity: int
    environments_folder: Path
    #: For values that do not fit into the object store.
    spill_folder: Path
    #: Distinguishes machines (or containers): a driver's paths are valid on its own only.
    machine: str
    mover: MoverConfig
    web: WebConfig
    #: Makes a channel to another daemon.
    dial: Callable[[str], grpc.aio.Channel]
