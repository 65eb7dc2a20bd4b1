"""What the commands need from the rest of miniray, loaded only when a command uses it.

Tests give the commands another one of these in place of real nodes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import click

from miniray.cli.parsing import join_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.common.state_types import ClusterStatus, NodeMemory
    from miniray.system.boot_options import BootOptions, BootResult


class ClusterConnection(Protocol):
    """A short attachment to a running cluster."""

    #: ``HOST:PORT`` of its head.
    address: str

    def status(self) -> ClusterStatus:
        """Ask the head for its state."""

    def listing(self, what: str) -> list[dict[str, Any]]:
        """Ask the head for one of its listings."""

    def drain(self, prefix: str, *, undo: bool) -> str:
        """Place nothing new on a node, or again; returns its id. ValueError: which node?"""

    def wait_drained(self, node_id: str, seconds: float | None) -> bool:
        """Wait until nothing runs on a drained node; TimeoutError if that takes longer.

        False: it is not drained any more.
        """

    def memory_report(self, limit: int, detail: bool, seconds: float) -> list[NodeMemory]:
        """Ask every node, and every process for so many seconds, what it holds."""

    def close(self) -> None:
        """Leave the cluster."""


def _start_node(options: BootOptions) -> BootResult:
    from miniray.system.launch import start_node

    return start_node(options)


def _connect(address: str | None, token_file: str | None) -> ClusterConnection:
    from miniray.client.command_connection import connect_for_cli

    try:
        token = join_token(None, token_file) if token_file is not None else None
        return connect_for_cli(address, "--address", token)
    except ValueError as error:  # the address or the token
        raise click.UsageError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class Services:
    """The doors of the command line to nodes and clusters."""

    start_node: Callable[[BootOptions], BootResult] = _start_node
    #: Takes the options of ``cluster_options``.
    connect: Callable[[str | None, str | None], ClusterConnection] = _connect
