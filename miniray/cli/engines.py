"""`miniray engines`: what each engine lacks or does otherwise."""

from __future__ import annotations

import click

from miniray.engines.capabilities import table


@click.command()
def engines() -> None:
    """Show what differs when Ray is the engine."""
    click.echo(table())
