"""What the commands need from the rest of miniray, loaded only when a command uses it.

Tests give the commands another one of these in place of real nodes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.boot_options import BootOptions, BootResult
    from miniray.session import ClusterRecord
    from miniray.util.state_types import ClusterStatus


class Connection(Protocol):
    """A short attachment to a running cluster."""

    def status(self) -> ClusterStatus:
        """Ask the head for its state."""

    def close(self) -> None:
        """Leave the cluster."""


def _start_node(options: BootOptions) -> BootResult:
    from miniray.node.boot import start_node

    return start_node(options)


def _connect(record: ClusterRecord) -> Connection:
    from miniray.core.bootstrap import connect_for_cli

    return connect_for_cli(record)


@dataclasses.dataclass(frozen=True)
class Services:
    """The doors of the command line to nodes and clusters."""

    start_node: Callable[[BootOptions], BootResult] = _start_node
    connect: Callable[[ClusterRecord], Connection] = _connect
