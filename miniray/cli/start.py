"""`miniray start`: a node on this machine, the cluster's first or one more."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, Any

import click

from miniray.cli import ending
from miniray.cli.parsing import JsonObject, Labels, Size, join_token
from miniray.cli.tables import describe_amounts
from miniray.common.host_port import DEFAULT_PORT, parse_address
from miniray.security.token import TOKEN_VARIABLE
from miniray.system.boot_options import BootError, BootOptions
from miniray.system.session import ProcessId, find_clusters

if TYPE_CHECKING:
    from miniray.cli.services import Services
    from miniray.system.boot_options import BootResult

_DEVICES = '{"FPGA": {"count": 4, "env": "FPGA_VISIBLE_DEVICES"}}'


@click.command()
@click.option("--head", is_flag=True, help="Start a new cluster with its head here.")
@click.option(
    "--address",
    metavar="HOST:PORT",
    help=f"Join the cluster whose head is there.  [default port: {DEFAULT_PORT}]",
)
@click.option(
    "--token",
    help="The cluster's join token. Other users of this machine can see a command line, at least "
    f"for a moment; {TOKEN_VARIABLE} or --token-file keep it to yourself.",
)
@click.option("--token-file", metavar="FILE", help="Read the join token from a file; - is stdin.")
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
@click.option("--node-ip-address", help="Address that other machines are told to connect to.")
@click.option("--num-cpus", type=float, help="Logical CPUs of this node.  [default: detected]")
@click.option("--num-gpus", type=int, help="Logical GPUs of this node.  [default: detected]")
@click.option("--gpu-family", help="Whose the GPUs are: nvidia, amd or intel.")
@click.option(
    "--resources", type=JsonObject(), default="{}", help="""Further resources: '{"FPGA": 2}'."""
)
@click.option(
    "--devices",
    type=JsonObject(_DEVICES),
    default="{}",
    help="Custom devices, of which work gets some by their ids in a variable: "
    f"""'{_DEVICES}'; "fractional": false if one can't be shared.""",
)
@click.option(
    "--labels", type=Labels(), default="{}", help="Labels of this node: zone=a,disk=ssd, or JSON."
)
@click.option("--memory", type=Size(), help="Memory that tasks may ask for.  [default: detected]")
@click.option(
    "--object-store-memory",
    type=Size(),
    help="Memory for large values.  [default: a share of this machine's]",
)
@click.option("--temp-dir", metavar="FOLDER", help="Where logs go instead of /tmp.")
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
        raise click.UsageError("A new cluster makes a token of its own: leave it out with --head.")
    if port is None:
        port = DEFAULT_PORT if head else 0
    if head:
        _require_free(port)
    try:
        token = None if head else join_token(token, token_file)
        given["resources"] = _with_devices(given["resources"], given.pop("devices"))
        if block:
            given["parent_pid"] = os.getpid()
        options = BootOptions(port=port, token=token, **given)
        with ending.stop_requests() as requests:
            result = services.start_node(options)
            requests.collect()
            click.echo(_head_message(result) if head else _join_message(result))
            if result.warning:
                click.echo(f"Warning: {result.warning}", err=True)
            if block:
                _stay(result, requests)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _with_devices(resources: dict[str, Any], devices: dict[str, Any]) -> dict[str, Any]:
    """Merge both; ValueError if a name is in both, or not declared as devices are."""
    for name, declared in devices.items():
        if name in resources:
            raise ValueError(f"{name!r} is given in --resources and in --devices; leave one out.")
        if not isinstance(declared, dict):
            raise ValueError(
                f'--devices declares {name!r} as {declared!r}: write {{"{name}": {{"count": 4, '
                f'"env": "{name}_VISIBLE_DEVICES"}}}}, or an amount without devices in --resources.'
            )
    return {**resources, **devices}


def _require_free(port: int) -> None:
    """Raise if a head of this user has the port: the remedy is another one then."""
    for record in find_clusters():
        if not record.ready or not record.is_head or record.embedded:  # these have no port
            continue
        if parse_address(record.address)[1] == port:
            raise BootError(
                f"A head of yours is already running at {record.address}. "
                "End it with `miniray stop`, or choose another port with --port."
            )


def _head_message(result: BootResult) -> str:
    host, _port = parse_address(result.address)
    lines = [
        f"The cluster's head is running at {result.address} ({_summary(result)}).",
        "",
        "To join from another machine:" if not _loopback(host) else "To add another node here:",
        f"  {TOKEN_VARIABLE}={result.token} miniray start --address {result.address}",
    ]
    if _loopback(host):
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
    return [
        "To use it from Python on this machine:",
        "  import miniray",
        '  miniray.init(address="auto")',
        "To look at it:   miniray status",
        "To stop it:      miniray stop",
        f"Its logs are in  {result.session_dir}/logs",
    ]


def _summary(result: BootResult) -> str:
    amounts = describe_amounts(result.resources)
    return f"node {result.node_id[:8]}{': ' if amounts else ''}{amounts}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _stay(result: BootResult, requests: ending.StopRequests) -> None:
    """Wait for the node's end; end it when that is requested.

    Raises:
        BootError: It ended though nobody asked it to.
    """
    boot = result.pids["boot"]
    failure = BootError(
        f"The node has ended by itself. Its logs in {result.session_dir}/logs say why."
    )
    try:
        process = ProcessId.of(boot)
    except ProcessLookupError:
        raise failure from None
    if not ending.wait_for_end(process, requests.descriptor):
        raise failure
    records = [record for record in find_clusters() if process in record.processes.values()]
    ending.end_nodes(records)
    click.echo("The node has ended.")
