"""`miniray start`: a node on this machine, the cluster's first or one more."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import click

from miniray.cli import stop
from miniray.cli.options import boot_arguments, join_token, node_options, wrong_use
from miniray.cli.tables import describe_amounts
from miniray.common.host_port import DEFAULT_PORT, parse_address
from miniray.launch.events import ENDING, StoppedError, events
from miniray.security.token import TOKEN_VARIABLE, parse_token
from miniray.system.boot_options import (
    DEFAULT_DASHBOARD_PORT,
    DEFAULT_HOST,
    BootError,
    BootOptions,
    is_loopback,
)
from miniray.system.session import ProcessId, find_clusters

if TYPE_CHECKING:
    from miniray.cli.options import Services
    from miniray.launch.events import Events
    from miniray.system.boot_options import BootResult


@click.command()
@click.option("--head", is_flag=True, help="Start a new cluster with its head here.")
@click.option(
    "--address",
    metavar="HOST:PORT",
    help=f"Join the cluster of the head at this address.  [default port: {DEFAULT_PORT}]",
)
@click.option(
    "--token",
    help="The cluster's join token. Other users of this machine can see a command line, at least "
    f"for a moment; {TOKEN_VARIABLE} or --token-file keep it to yourself.",
)
@click.option("--token-file", metavar="FILE", help="Read the join token from a file; - is stdin.")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    default=0.0,
    help="With --address: seconds to wait until the head answers there.",
)
@click.option(
    "--authority",
    metavar="FOLDER",
    help="With --head: the token and the certificate that `miniray token new FOLDER` has made.",
)
@click.option(
    "--host",
    help="Address to listen on; 0.0.0.0 is all of this machine's.  [default: 127.0.0.1, which "
    "other machines cannot reach; when joining, the address that leads to the head]",
)
@click.option(
    "--port",
    type=int,
    help=f"Port to listen on; 0 is any free one.  [default: {DEFAULT_PORT} with --head, else 0]",
)
@node_options
@click.option(
    "--include-dashboard",
    type=bool,
    help="With --head: listen for browsers; `miniray dashboard` does so later.  [default: true]",
)
@click.option(
    "--dashboard-host",
    default=DEFAULT_HOST,
    show_default=True,
    help="With --head: address to listen on for browsers; over the network it is TLS.",
)
@click.option(
    "--dashboard-port",
    type=int,
    default=DEFAULT_DASHBOARD_PORT,
    show_default=True,
    help="With --head: the first port to try for that; 0 is any free one.",
)
@click.option("--block", is_flag=True, help="Stay until the node ends; Ctrl-C ends it.")
@click.pass_obj
def start(
    services: Services,
    /,
    *,
    port: int | None,
    token: str | None,
    token_file: str | None,
    block: bool,
    wait: float,
    **given: Any,
) -> None:
    """Start a node on this machine: a new cluster (--head), or one more node of a running one.

    \b
    miniray start --head
    MINIRAY_TOKEN=TOKEN miniray start --address HOST:PORT
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    head = given["head"]
    if head == (given["address"] is not None):
        raise click.UsageError(
            "Say either --head, for a new cluster, or --address HOST:PORT, to join a running one."
        )
    if head and (token is not None or token_file is not None):
        raise click.UsageError(
            "A new cluster makes a token of its own: leave it out with --head. One that was made "
            "ahead is given by --authority."
        )
    if port is None:
        port = DEFAULT_PORT if head else 0
    if head:
        _require_free(port)
    with wrong_use(TypeError):
        token = None if head else join_token(token, token_file)
        if wait and not head and token is not None:
            _await_head(given["address"], token, wait)
        if block:
            given["parent_pid"] = os.getpid()
        options = BootOptions(port=port, token=token, **boot_arguments(given))
        try:
            with events() as requests:
                result = services.start_node(options)
                requests.collect()
                authority = given["authority"]
                click.echo(_head_message(result, authority) if head else _join_message(result))
                if result.warning:
                    click.echo(f"Warning: {result.warning}", err=True)
                if block:
                    _stay(result, requests)
        except StoppedError:
            raise click.Abort from None


def _require_free(port: int) -> None:
    """Raise if a head of this user has the port: the remedy is another one then."""
    for record in find_clusters():
        if not record.ready or not record.is_head or record.embedded:  # these have no port
            continue
        _, taken = parse_address(record.address)
        if taken == port:
            raise BootError(
                f"A head of yours is already running at {record.address}. "
                "End it with `miniray stop`, or choose another port with --port."
            )


def _await_head(address: str, token: str, seconds: float) -> None:
    from miniray.launch.reach import HeadOffer, reach_head

    door = HeadOffer((address,), parse_token(token), listens=False)
    reach_head(lambda: door, seconds)


def _head_message(result: BootResult, authority: str | None) -> str:
    host, _port = parse_address(result.address)
    join = f"{TOKEN_VARIABLE}={result.token} miniray start --address {result.address}"
    if authority is not None:  # what was kept in a file so far is not shown
        join = f"miniray start --address {result.address} --token-file {authority}/token"
    lines = [
        f"The cluster's head is running at {result.address} ({_summary(result)}).",
        "",
        "To join from another machine:" if not is_loopback(host) else "To add another node here:",
        f"  {join}",
    ]
    if is_loopback(host):
        lines += [
            "It listens on this machine only. So that other machines can join, start it with",
            "  miniray start --head --host 0.0.0.0",
        ]
    lines += ["", *_next_steps(result)]
    return "\n".join(lines)


def _join_message(result: BootResult) -> str:
    lines = [
        f"This machine has joined the cluster at {result.address} ({_summary(result)}).",
        "",
        *_next_steps(result),
    ]
    return "\n".join(lines)


def _next_steps(result: BootResult) -> list[str]:
    page = result.dashboard_url
    return [
        "To use it from Python on this machine:",
        "  import miniray",
        '  miniray.init(address="auto")',
        "To look at it:   miniray status",
        *([f"or in a browser: miniray dashboard ({page})"] if page else []),
        "To stop it:      miniray stop",
        f"Its logs are in  {result.session_dir}/logs",
    ]


def _summary(result: BootResult) -> str:
    amounts = describe_amounts(result.resources)
    return f"node {result.node_id[:8]}{': ' if amounts else ''}{amounts}"


def _stay(result: BootResult, requests: Events) -> None:
    """Wait for the node's end; end it when that is requested.

    Raises:
        BootError: It failed.
    """
    boot = result.pids["boot"]
    failure = BootError(
        f"The node has ended by itself. `miniray logs node` says why: {result.session_dir}/logs."
    )
    ended = threading.Event()
    try:
        process = ProcessId.of(boot)
        requests.when_ended(boot, ended.set)
    except ProcessLookupError:
        raise failure from None
    asked: set[int] = set()
    while not ended.is_set() and not asked:
        asked = set(requests.wait(None)) & set(ENDING)  # other signals are not for the node
    if not asked:
        if not _ended_on_purpose(boot):
            raise failure
        click.echo("The node has ended: it, or its cluster, was stopped.")
        return
    records = [record for record in find_clusters() if process in record.processes.values()]
    stop.end_nodes(records)
    click.echo("The node has ended.")


def _ended_on_purpose(child: int) -> bool:
    """Return whether a process that this one has started, and that has ended, says so."""
    try:
        _, status = os.waitpid(child, 0)
        return status == 0
    except ChildProcessError:
        return False
