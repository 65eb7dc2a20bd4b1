"""`miniray stop`: ends this user's nodes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from miniray.cli.ending import end_nodes
from miniray.session import find_clusters

if TYPE_CHECKING:
    from miniray.cli.ending import Ended
    from miniray.session import ClusterRecord


@click.command()
@click.option("--force", is_flag=True, help="Kill at once, without asking the processes first.")
@click.option(
    "--grace-period",
    type=click.FloatRange(min=0),
    help="Seconds that processes may take before they are killed.",
)
def stop(force: bool, grace_period: float | None) -> None:
    """End all nodes that this user has on this machine, with all their processes.

    Clusters that init() has started in running programs are among them. The programs themselves
    go on, and their next call says that the cluster is gone.
    """
    records = find_clusters()
    if not records:
        click.echo("No node of yours is running on this machine.")
        return
    results = end_nodes(records, force=force, grace=grace_period)
    for result in results:
        click.echo(_report(result, force=force))
    left = [str(pid) for result in results for pid in result.left]
    if left:
        raise click.ClickException(
            f"The kernel did not end {_count(len(left), 'process')} even when killed: "
            f"{', '.join(left)}. They wait for a device or a file system; try again later."
        )


def _report(result: Ended, *, force: bool) -> str:
    record = result.record
    text = f"Ended {_describe(record)}: {_count(result.ended, 'process')}"
    if result.killed and not force:
        text += f", of which {len(result.killed)} had to be killed"
    return f"{text}. Its logs are in {record.session.logs}"


def _describe(record: ClusterRecord) -> str:
    """Which node that was."""
    whose = f" of the program with pid {record.driver.pid}" if record.driver else ""
    if record.embedded and record.is_head:
        return f"the embedded cluster{whose}"
    cluster = f"the cluster at {record.address}" if record.address else "a cluster"
    if record.embedded:
        return f"the attachment{whose} to {cluster}"
    return f"the {'head' if record.is_head else 'node'} of {cluster}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es'}"
