"""The facts that the node daemon sends the web process at its start."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WebFacts:
    """The facts for a web process."""

    node_socket: str
    socket_key: bytes
    #: Of cookies and tokens.
    web_key: bytes
    #: A short name of the cluster, for its cookie.
    cluster: str
    #: Of the head.
    cluster_address: str
    #: ``HOST:PORT`` of the page.
    address: str
    logs: str
    #: When the cluster's first node was started, in seconds since the epoch.
    since: float
    #: The folder of a certificate; empty: plain HTTP, on loopback.
    certificate: str
