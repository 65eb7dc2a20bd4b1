"""What the commands need from the rest of miniray, loaded only when a command uses it.

Tests give the commands another one of these in place of real nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.parsing import cluster_options, join_token
from miniray.common.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.client.command_connection import CommandConnection, JobConnection
    from miniray.system.boot_options import BootOptions, BootResult


def _start_node(options: BootOptions) -> BootResult:
    from miniray.system.launch import start_node

    return start_node(options)


def _connect(address: str | None, token_file: str | None) -> CommandConnection:
    from miniray.client.command_connection import connect_for_cli

    try:
        token = join_token(None, token_file) if token_file is not None else None
        return connect_for_cli(address, "--address", token)
    except ValueError as error:  # the address or the token
        raise click.UsageError(str(error)) from None


def _jobs(address: str | None, token_file: str | None) -> JobConnection:
    from miniray.client.command_connection import JobConnection, connect_for_cli

    try:
        token = join_token(None, token_file) if token_file is not None else None
        return JobConnection(lambda: connect_for_cli(address, "--address", token))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class Services:
    """The doors of the command line to nodes and clusters."""

    start_node: Callable[[BootOptions], BootResult] = _start_node
    #: Takes the options of ``cluster_options``.
    connect: Callable[[str | None, str | None], CommandConnection] = _connect
    #: Takes the options of ``cluster_options`` too; its connection is for submitted jobs.
    jobs: Callable[[str | None, str | None], JobConnection] = _jobs


def asks_cluster(function: Callable[..., Any]) -> Any:
    """Give a command the options of ``cluster_options``, and its function the connection first.

    A ValueError of the function says what the user has named wrongly.
    """

    def run(
        services: Services, /, address: str | None, token_file: str | None, **options: Any
    ) -> None:
        with contextlib.closing(services.connect(address, token_file)) as connection:
            try:
                function(connection, **options)
            except ValueError as error:
                raise click.ClickException(printable(str(error))) from None

    return cluster_options(click.pass_obj(functools.update_wrapper(run, function)))
