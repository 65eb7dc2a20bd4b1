"""`miniray drain`: take a node out of service without ending what runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from miniray.cli.parsing import cluster_options
from miniray.cli.tables import ID_LENGTH

if TYPE_CHECKING:
    from miniray.cli.services import Services


@click.command()
@click.argument("node")
@cluster_options
@click.option("--undo", is_flag=True, help="Use the node again.")
@click.option("--wait", is_flag=True, help="Return when nothing runs there any more.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    help="Seconds that --wait may take.  [default: no limit]",
)
@click.pass_obj
def drain(
    services: Services,
    node: str,
    address: str | None,
    token_file: str | None,
    *,
    undo: bool,
    wait: bool,
    timeout: float | None,
) -> None:
    """Place nothing new on NODE: an id as `miniray status` shows it, or its first digits.

    What runs there goes on. Actors that restart, bundles of placement groups and demands that
    prefer the node go to others.
    """
    if undo and wait:
        raise click.UsageError("--undo has nothing to wait for; leave --wait out.")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is for --wait; give both.")
    connection = services.connect(address, token_file)
    try:
        node_id = connection.drain(node, undo=undo)
        short = node_id[:ID_LENGTH]
        if undo:
            click.echo(f"Node {short} is in service again.")
            return
        click.echo(f"Nothing new is placed on node {short}.")
        if wait and not connection.wait_drained(node_id, timeout):
            raise click.ClickException(f"Node {short} was put back into service meanwhile.")
        if wait:
            click.echo("Nothing runs there any more.")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except TimeoutError:
        raise click.ClickException(
            f"Something still runs on node {short} after {timeout:g} s; "
            "`miniray status` shows the actors."
        ) from None
    finally:
        connection.close()
