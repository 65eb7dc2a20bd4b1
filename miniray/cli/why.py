"""`miniray why`: what something waits for, and what that waits for, to the end."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import click

from miniray.cli.parsing import cluster_options
from miniray.common.names import printable

if TYPE_CHECKING:
    from miniray.cli.services import Services


@click.command()
@click.argument("of", metavar="[REF|TASK|ACTOR]", default="")
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def why(
    services: Services, of: str, address: str | None, token_file: str | None, as_json: bool
) -> None:
    """Show why something waits, and name deadlocks.

    It is the id of an object or a task (the first digits, or as errors and lists show it), the id,
    name or class of an actor, or the name of a task; without it, whatever drivers wait for.
    """
    from miniray.util.why import NothingWaitsError
    from miniray.util.why import why as find

    with contextlib.closing(services.connect(address, token_file)) as connection:
        try:
            found = find(connection, of)
        except NothingWaitsError as error:
            raise click.ClickException(printable(str(error))) from None
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for depth, link in enumerate(found["chain"]):
        indent = "  " * depth
        if link["kind"] == "deadlock":
            click.echo(f"DEADLOCK: {printable(link['text'])}.")
            continue
        click.echo(f"{indent}{printable(link['name'])} {printable(link['text'])}")
        for frame in link["stack"]:
            click.echo(f"{indent}    {printable(frame)}")
    for note in found["notes"]:
        click.echo(printable(note), err=True)
