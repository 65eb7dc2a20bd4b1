"""`miniray stop` and `miniray drain`: nodes end, or go out of service while their work goes on.

A signal goes only to the very process that was recorded, by pidfd, never to a later one with the
same pid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time
from typing import TYPE_CHECKING

import click

from miniray.cli.options import asks_cluster, wrong_use
from miniray.cli.tables import ID_LENGTH
from miniray.client.cluster_choice import at_address, program_of, running_here
from miniray.common.config import config
from miniray.common.host_port import full_address
from miniray.system.session import ProcessId, find_clusters, remove_session, session_processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from miniray.client.command_connection import CommandConnection
    from miniray.system.session import ClusterRecord

#: How often processes that appear while others are killed are looked for again.
_KILL_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Ended:
    """The processes of one node, ended or not."""

    record: ClusterRecord
    #: How many ended, the killed ones included.
    ended: int
    #: Pids that had to be killed.
    killed: list[int]
    #: Pids that even SIGKILL did not end.
    left: list[int]


class _Processes:
    """Handles on running processes, until they end."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._running: dict[int, ProcessId] = {}  # by pidfd
        self._seen: set[ProcessId] = set()

    @property
    def running(self) -> set[ProcessId]:
        """Return the processes that live."""
        return set(self._running.values())

    @property
    def ended(self) -> set[ProcessId]:
        """Return the processes that have ended."""
        return self._seen - self.running

    def add(self, processes: Iterable[ProcessId]) -> None:
        """Take hold of processes that still run; signals reach them in this order."""
        for process in processes:
            if process in self._seen or process.pid == os.getpid():
                continue
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            self._stack.callback(os.close, descriptor)
            if process.alive():  # the pidfd is of this very process, not of a later one
                self._running[descriptor] = process
                self._seen.add(process)

    def send(self, number: signal.Signals, to: Iterable[ProcessId]) -> None:
        """Send a signal to those of these processes that run."""
        wanted = set(to)
        for descriptor, process in self._running.items():
            if process in wanted:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    signal.pidfd_send_signal(descriptor, number)

    def wait(self, seconds: float) -> None:
        """Wait until all have ended, at most this long."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        for descriptor in self._running:
            poll.register(descriptor, select.POLLIN)
        while self._running:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            for descriptor, _events in ready:
                poll.unregister(descriptor)
                del self._running[descriptor]
            if not ready:
                return


def end_nodes(
    records: Sequence[ClusterRecord], *, force: bool = False, grace: float | None = None
) -> list[Ended]:
    """End nodes with all their processes and remove what they leave, but their logs.

    Args:
        records: The nodes, all ended at the same time.
        force: Kill at once, without a request to end first.
        grace: Seconds that they may take after the request; None: twice ``stop_grace``, as a
            node gives its workers that much.
    """
    if grace is None:
        grace = 2 * config().stop_grace
    with contextlib.ExitStack() as stack:
        handles = [_Processes(stack) for _ in records]
        for record, processes in zip(records, handles, strict=True):
            # The daemon and the head first: they would report that a worker was killed for memory.
            processes.add([*record.living(), *session_processes(record.session.id)])
            if not force:
                processes.send(signal.SIGTERM, _whom_to_ask(record, processes))
        if not force:
            deadline = time.monotonic() + grace
            for processes in handles:
                processes.wait(deadline - time.monotonic())
        return [
            _finish(record, processes) for record, processes in zip(records, handles, strict=True)
        ]


def _whom_to_ask(record: ClusterRecord, processes: _Processes) -> Iterable[ProcessId]:
    """Return the process that ends the others, or all of them when that one is gone."""
    boot = record.processes.get("boot")
    return [boot] if boot is not None and boot in processes.running else processes.running


def _finish(record: ClusterRecord, processes: _Processes) -> Ended:
    """Kill the remaining processes, and remove the session's files when none is left."""
    killed: set[ProcessId] = set()
    for _ in range(_KILL_ROUNDS):
        processes.add(session_processes(record.session.id))
        if not processes.running:
            break
        killed |= processes.running
        processes.send(signal.SIGKILL, processes.running)
        processes.wait(config().stop_grace)
    if not processes.running:
        remove_session(record.session)
    return Ended(
        record=record,
        ended=len(processes.ended),
        killed=sorted(process.pid for process in killed & processes.ended),
        left=sorted(process.pid for process in processes.running),
    )


_INCLUDE = "--include-programs"


@click.command()
@click.option("--address", help="End only nodes of the cluster with its head at this address.")
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
    with wrong_use():
        wanted = address if address.startswith("unix:") else full_address(address)
    found = at_address(records, wanted)
    if not found:
        raise click.ClickException(
            f"No node of a cluster at {wanted} of yours runs on this machine. {running_here()}"
        )
    return found


def _of_program(record: ClusterRecord, address: str | None) -> bool:
    """Return whether a node belongs to a running program, and its cluster was not named."""
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


@click.command()
@click.argument("node")
@click.option("--undo", is_flag=True, help="Use the node again.")
@click.option("--wait", is_flag=True, help="Return when nothing runs there any more.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    help="Seconds that --wait may take.  [default: no limit]",
)
@asks_cluster
def drain(
    cluster: CommandConnection, node: str, *, undo: bool, wait: bool, timeout: float | None
) -> None:
    """Stop placing work on NODE: an id as `miniray status` shows it, or its first digits.

    What runs there goes on. Actors that restart, bundles of placement groups and demands that
    prefer the node go to others.
    """
    if undo and wait:
        raise click.UsageError("--undo has nothing to wait for; leave --wait out.")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is for --wait; give both.")
    node_id = cluster.drain(node, undo=undo)
    short = node_id[:ID_LENGTH]
    if undo:
        click.echo(f"Node {short} is in service again.")
        return
    click.echo(f"Nothing new is placed on node {short}.")
    if not wait:
        return
    try:
        drained = cluster.wait_drained(node_id, timeout)
    except TimeoutError:
        raise click.ClickException(
            f"Something still runs on node {short} after {timeout:g} s; "
            "`miniray status` shows the actors."
        ) from None
    if not drained:
        raise click.ClickException(f"Node {short} was put back into service meanwhile.")
    click.echo("Nothing runs there any more.")
