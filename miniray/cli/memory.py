"""`miniray memory`: the objects in the store, their owners, and why each is still held.

What is shown is decided by pure functions over `ClusterMemoryState`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from miniray.cli.options import asks_cluster, json_option, print_json
from miniray.cli.tables import ID_LENGTH, Section, draw
from miniray.common.names import UNITS, format_bytes
from miniray.common.object_ref import short_id
from miniray.common.state_types import MAX_OBJECTS
from miniray.util.memory_records import ask_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.client.command_connection import CommandConnection
    from miniray.util.state_records import ClusterMemoryState, ObjectState

#: What to sort by: the largest first, others in their order.
_SORTS: dict[str, Callable[[ObjectState], tuple[object, ...]]] = {
    "size": lambda found: (),
    "pid": lambda found: (found.pid,),
    "owner": lambda found: (found.owner,),
    "node": lambda found: (found.node_id,),
    "call-site": lambda found: (found.call_site,),
    "reference-type": lambda found: (found.reference_type,),
}
#: What to sum up by.
_GROUPS: dict[str, Callable[[ObjectState], str]] = {
    "node": lambda found: found.node_id[:ID_LENGTH],
    "owner": lambda found: found.owner or "unknown",
    "call-site": lambda found: found.call_site or "not recorded",
    "reference-type": lambda found: found.reference_type,
}
_UNIT_NAMES = {"b": "B", "kb": "KiB", "mb": "MiB", "gb": "GiB"}
#: What follows the sum of all that is not shown.
_MORE = "not shown; --limit shows more"


@click.command()
@click.option(
    "--sort-by",
    type=click.Choice(list(_SORTS), case_sensitive=False),
    default="size",
    show_default=True,
    help="Order of the objects.",
)
@click.option(
    "--group-by",
    type=click.Choice(list(_GROUPS), case_sensitive=False),
    help="Sum the objects up.",
)
@click.option(
    "--units",
    type=click.Choice(["auto", *_UNIT_NAMES], case_sensitive=False),
    default="auto",
    show_default=True,
    help="Of sizes; 1 KB is 1,024 bytes.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_OBJECTS),
    default=100,
    show_default=True,
    help="Number of objects to show, the largest first.",
)
@click.option("--all", "detail", is_flag=True, help="Small values and handles of actors too.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    show_default=True,
    help="Seconds that a busy process may take to answer.",
)
@json_option
@asks_cluster
def memory(
    cluster: CommandConnection,
    sort_by: str,
    group_by: str | None,
    units: str,
    limit: int,
    detail: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Show the objects in the store, their owners, and why each is still held."""
    state = ask_memory(cluster, limit, timeout, detail=detail)
    if as_json:
        print_json(state.asdict())
        return
    show = MemoryView(state, sort_by.lower(), group_by and group_by.lower(), units.lower())
    draw(show.headline(cluster.address), show.sections())


class MemoryView:
    """What to show of a cluster's memory, and in which form."""

    def __init__(
        self,
        state: ClusterMemoryState,
        sort_by: str = "size",
        group_by: str | None = None,
        units: str = "auto",
    ) -> None:
        self._nodes = state.nodes
        self._objects = sorted(state.objects, key=_SORTS[sort_by])
        self._group_by = group_by
        self._unit = UNITS.index(_UNIT_NAMES[units]) if units != "auto" else None

    def headline(self, address: str) -> str:
        """Return one line on the cluster as a whole."""
        used = self._size(sum(node.used for node in self._nodes))
        capacity = self._size(sum(node.capacity for node in self._nodes))
        count = len(self._nodes)
        where = f"{count} node{'' if count == 1 else 's'}"
        return f"Object store of the cluster at {address}: {used} of {capacity} in use on {where}"

    def sections(self) -> list[Section]:
        """Return what to show, in order."""
        objects = [self._groups()] if self._group_by else [self._list()]
        return [self._stores(), self._freed(), self._silent(), *objects]

    def _stores(self) -> Section:
        rows = [
            (
                node.node_id[:ID_LENGTH],
                node.node_ip,
                self._size(node.used),
                self._size(node.capacity),
                self._size(node.pooled),
                self._size(node.freed),
                self._size(node.spilled),
                str(node.num_segments),
                f"{node.num_inline} ({self._size(node.inline_bytes)})",
            )
            for node in self._nodes
            if node.state_message is None
        ]
        columns = ("Node", "Address", "In use", "Capacity", "Warm", "Freed, mapped", "Spilled")
        return Section("Nodes", (*columns, "Values", "Small values"), rows)

    def _freed(self) -> Section:
        rows = [
            (node.node_id[:ID_LENGTH], process, self._size(size))
            for node in self._nodes
            for process, size in node.freed_by.items()
        ]
        return Section("Freed but still mapped", ("Node", "By", "Size"), rows)

    def _silent(self) -> Section:
        rows = [
            (node.node_id[:ID_LENGTH], "-", f"The node: {node.state_message}.")
            for node in self._nodes
            if node.state_message is not None
        ]
        late = "It was busy: only what its node knows of its objects is shown."
        rows += [
            (node.node_id[:ID_LENGTH], process, late)
            for node in self._nodes
            for process in node.no_answer
        ]
        return Section("Did not answer", ("Node", "Process", "Why"), rows)

    def _list(self) -> Section:
        rows: list[tuple[str, ...]] = [
            (
                short_id(found.object_id) if found.object_id else "-",
                self._size(found.object_size),
                found.owner or "-",
                found.call_site or "-",
                found.reference_type,
                ("a copy; " if found.is_copy else "") + (found.why or "-"),
                found.node_id[:ID_LENGTH] + (" (disk)" if found.is_spilled else ""),
            )
            for found in self._objects
        ]
        if rows:
            rows += self._rest()
        columns = ("Object", "Size", "Owner", "Made at", "Type", "Why it is held", "Node")
        return Section("Objects", columns, rows, "No large objects.")

    def _groups(self) -> Section:
        assert self._group_by is not None
        key = _GROUPS[self._group_by]
        sums: dict[str, tuple[int, int]] = {}
        for found in self._objects:
            count, size = sums.get(key(found), (0, 0))
            sums[key(found)] = (count + 1, size + found.object_size)
        ordered = sorted((-size, name, count) for name, (count, size) in sums.items())
        rows = [(name, str(count), self._size(-size)) for size, name, count in ordered]
        rows += [(why, number, size) for number, size, why in self._left_out()]
        title = self._group_by.capitalize().replace("-", " ")
        return Section(f"Objects by {title.lower()}", (title, "Objects", "Size"), rows, "None.")

    def _rest(self) -> list[tuple[str, ...]]:
        return [
            (f"{number} more", size, "", "", "", why, "") for number, size, why in self._left_out()
        ]

    def _left_out(self) -> list[tuple[str, str, str]]:
        """Return how many values in shared memory are not among the objects, and their size."""
        stored = [found for found in self._objects if found.allocated or found.is_spilled]
        shown = [found.allocated for found in stored]
        number = sum(node.num_segments for node in self._nodes) - len(shown)
        size = sum(node.used for node in self._nodes) - sum(shown)
        return [(str(number), self._size(max(0, size)), _MORE)] if number > 0 else []

    def _size(self, size: int) -> str:
        return format_bytes(size, self._unit)
