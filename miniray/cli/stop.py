"""`miniray stop`: ends this user's nodes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from miniray.cli.ending import end_nodes
from miniray.client.cluster_choice import at_address, program_of, running_here
from miniray.common.host_port import full_address
from miniray.system.session import find_clusters

if TYPE_CHECKING:
    from miniray.cli.ending import Ended
    from miniray.system.session import ClusterRecord

_INCLUDE = "--include-programs"


@click.command()
@click.option("--address", help="End only the nodes of the cluster whose head is there.")
@click.option(
    _INCLUDE,
    is_flag=True,
    help="End clusters and attachments that init() of running programs has started, too.",
)
@click.option("--force", is_flag=True, help="Kill at once, without asking the processes first.")
@click.option(
    "--grace-period",
    type=click.FloatRange(min=0),
    help="Seconds that processes may take before they are killed.",
)
def stop(
    address: str | None, include_programs: bool, force: bool, grace_period: float | None
) -> None:
    """End the nodes that this user has started on this machine, with all their processes.

    What a running program has started with init() is left alone, unless --address is that
    of its cluster or --include-programs is given: the program goes on then, and its next call
    says that the cluster is gone.
    """
    records = _meant(address)
    ending = [record for record in records if include_programs or not _of_program(record, address)]
    for record in records:
        if record not in ending:
            click.echo(f"Left alone ({_INCLUDE} ends it too): {_describe(record)}")
    if not records:
        click.echo("No node of yours is running on this machine.")
    for record in ending:
        click.echo(f"Ending: {_describe(record)}")
    results = end_nodes(ending, force=force, grace=grace_period)
    for result in results:
        click.echo(_report(result, force=force))
    left = [str(pid) for result in results for pid in result.left]
    if left:
        raise click.ClickException(
            f"The kernel did not end {_count(len(left), 'process')} even when killed: "
            f"{', '.join(left)}. They wait for a device or a file system; try again later."
        )


def _meant(address: str | None) -> list[ClusterRecord]:
    """Return all nodes, or those of one cluster; nodes that are about to start are of none."""
    records = find_clusters()
    if address is None:
        return records
    try:
        wanted = address if address.startswith("unix:") else full_address(address)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    found = at_address(records, wanted)
    if not found:
        raise click.ClickException(
            f"No node of a cluster at {wanted} of yours runs on this machine. {running_here()}"
        )
    return found


def _of_program(record: ClusterRecord, address: str | None) -> bool:
    """Return whether a node belongs to a program that runs, and its cluster was not asked for."""
    living = record.driver is not None and record.driver.alive()
    return record.embedded and living and not (address is not None and record.is_head)


def _report(result: Ended, *, force: bool) -> str:
    record = result.record
    text = f"Ended {_describe(record)}: {_count(result.ended, 'process')}"
    if result.killed and not force:
        text += f", of which {len(result.killed)} had to be killed"
    return f"{text}. Its logs are in {record.session.logs}"


def _describe(record: ClusterRecord) -> str:
    """Say which node that is."""
    whose = f" of the program with {program_of(record)}" if record.driver else ""
    if record.embedded and record.is_head:
        return f"the embedded cluster{whose}"
    cluster = f"the cluster at {record.address}" if record.address else "a cluster"
    if record.embedded:
        return f"the attachment{whose} to {cluster}"
    return f"the {'head' if record.is_head else 'node'} of {cluster}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es'}"
