"""Which running cluster the commands and ``miniray.util.state`` look at.

They look at one that ``init()`` of a running program has started too, where there is no other.
What programs attach to is ``bootstrap.py``'s business.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from miniray.core.init_options import ADDRESS_VARIABLE
from miniray.core.process_state import command_of
from miniray.session import find_clusters, latest_cluster

if TYPE_CHECKING:
    from miniray.session import ClusterRecord

#: So much of a program's command line is shown.
_LONGEST_COMMAND = 60


def cluster_to_look_at(address: str | None, argument: str) -> ClusterRecord:
    """The cluster at an address; without one the latest that was started, else a program's own.

    Args:
        address: As the cluster tells it: ``HOST:PORT``, or ``unix:...`` of one that belongs to a
            program. None or "auto": that of ``MINIRAY_ADDRESS``, else any.
        argument: How the user gives an address, to be told of it.

    Raises:
        ConnectionError: There is none; or there are several, each of a program.
    """
    where = f" at {address}"
    if address in (None, "auto"):
        address = os.environ.get(ADDRESS_VARIABLE)
        where = f" at {address} (given by {ADDRESS_VARIABLE})"
    if address in (None, "", "auto", "local"):  # the last two: what programs attach to, or start
        address, where = None, ""
    record = latest_cluster(address)
    if record is not None:
        return record
    found = _of_programs(address)
    if not found:
        raise ConnectionError(
            f"No cluster{where} of yours is running on this machine. Start one with "
            "`miniray start --head`, or join one with `miniray start --address`."
        )
    if len(found) > 1:
        several = "; ".join(f"{each.address} ({_program(each)})" for each in found)
        raise ConnectionError(
            f"{len(found)} programs of yours have a cluster of their own here, and none was "
            f"started with `miniray start --head`. Choose one with {argument}: {several}."
        )
    return found[0]


def _of_programs(address: str | None) -> list[ClusterRecord]:
    """The clusters to which programs of this user are attached by nodes of their own."""
    found: dict[str, ClusterRecord] = {}
    for record in find_clusters():
        if record.ready and record.embedded and address in (None, record.address):
            found.setdefault(record.address, record)  # several drivers may be of one elsewhere
    return list(found.values())


def _program(record: ClusterRecord) -> str:
    """The program of a cluster, for a person."""
    if record.driver is None:
        return f"node {record.node_id[:8]}"
    program, *arguments = command_of(record.driver.pid) or [""]
    command = " ".join(" ".join([os.path.basename(program), *arguments]).split())
    if len(command) > _LONGEST_COMMAND:
        command = f"{command[:_LONGEST_COMMAND]}..."
    return f"pid {record.driver.pid}{f', {command}' if command else ''}"
