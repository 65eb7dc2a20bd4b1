"""What a head process is told when it starts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Facts about one head."""

    #: Socket for the daemons of this machine; its folder is 0700.
    unix_path: str
    #: The cluster's secret, from which the keys of its connections are derived.
    secret: bytes = dataclasses.field(repr=False)
    session_dir: Path
    cluster_id: str
    #: Called once: with ``address`` and ``fingerprint``, or with ``error``.
    ready: Callable[[dict[str, Any]], None]
    #: Where other machines connect; None: an embedded cluster, which has no network.
    tcp_host: str | None = None
    tcp_port: int | None = None
    #: Seconds for which the port is tried again if another process has it: one that follows an
    #: earlier head has to be where that one was.
    port_patience: float = 0.0
    #: What other machines are told instead of ``tcp_host``, which may be a wildcard.
    advertised_host: str | None = None
    #: Readable when the process that this head belongs to is gone.
    parent_pidfd: int | None = None
