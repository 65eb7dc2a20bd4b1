"""What the commands need from the rest of miniray, loaded only when a command uses it.

Tests give the commands another one of these in place of real nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.parsing import cluster_options, join_token, wrong_use
from miniray.common.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.client.command_connection import CommandConnection
    from miniray.system.boot_options import BootOptions, BootResult


def _start_node(options: BootOptions) -> BootResult:
    from miniray.system.launch import start_node

    return start_node(options)


def _connect(address: str | None, token: str | None) -> CommandConnection:
    from miniray.client.command_connection import connect_for_cli

    with wrong_use():  # of the address or the token
        return connect_for_cli(address, "--address", token)


@dataclasses.dataclass(frozen=True)
class Services:
    """The doors of the command line to nodes and clusters."""

    start_node: Callable[[BootOptions], BootResult] = _start_node
    #: Takes an address and a token, where the user gives them.
    connect: Callable[[str | None, str | None], CommandConnection] = _connect


def finds_cluster(function: Callable[..., Any]) -> Any:
    """Give a command the options of ``cluster_options``, and its function what connects, first.

    A ValueError of the function says what the user has named wrongly.
    """

    def run(
        services: Services, /, address: str | None, token_file: str | None, **options: Any
    ) -> None:
        with wrong_use():
            token = join_token(None, token_file) if token_file is not None else None
        try:
            function(lambda: services.connect(address, token), **options)
        except ValueError as error:
            raise click.ClickException(printable(str(error))) from None

    return cluster_options(click.pass_obj(functools.update_wrapper(run, function)))


def asks_cluster(function: Callable[..., Any]) -> Any:
    """Do as ``finds_cluster``, and give the function a connection."""

    def run(connect: Callable[[], CommandConnection], /, **options: Any) -> None:
        with contextlib.closing(connect()) as connection:
            function(connection, **options)

    return finds_cluster(functools.update_wrapper(run, function))
