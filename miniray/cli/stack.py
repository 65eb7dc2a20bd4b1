"""`miniray stack`: where processes are in their code."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import click

from miniray.cli.parsing import cluster_options

if TYPE_CHECKING:
    from miniray.cli.services import Services


@click.command()
@click.argument("of")
@cluster_options
@click.option("--rank", type=click.IntRange(0), help="Of a run, this rank only.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def stack(
    services: Services,
    of: str,
    address: str | None,
    token_file: str | None,
    rank: int | None,
    as_json: bool,
) -> None:
    """Show where OF is in its code: a pid, an actor (id, name or class), or a training run.

    Equal stacks of several processes are shown once. It works while user code runs, also if that
    holds Python's lock (the GIL), and for the coroutines of asyncio actors.
    """
    from miniray.profiling.looks import look
    from miniray.profiling.targets import TargetError

    with contextlib.closing(services.connect(address, token_file)) as connection:
        try:
            found = look(connection, of, rank)
        except TargetError as error:
            raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for group in found["groups"]:
        click.echo(f"{', '.join(group['who'])}:")
        for frame in group["stack"] or ["waits for work"]:
            click.echo(f"    {frame}")
    for note in found["notes"]:
        click.echo(note, err=True)
    if found["way"]:
        click.echo(f"Seen {found['way']}.", err=True)
