"""`miniray status`: nodes, resources, actors, and what waits and why.

What is shown is decided by pure functions over `ClusterStatus`; `render` only draws it.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from miniray.cli.options import asks_cluster, json_option, print_json
from miniray.cli.tables import (
    ID_LENGTH,
    Section,
    describe_amounts,
    describe_usage,
    draw,
    drawn,
    format_amount,
    visible_resources,
)
from miniray.common.object_ref import short_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console

    from miniray.client.command_connection import CommandConnection
    from miniray.common.state_types import ClusterStatus, NodeStatus, PendingDemand

#: Rows of one kind that are shown before the rest is only counted.
_MAX_ROWS = 100
#: The resource whose use is measured, not granted.
_STORE = "object_store_memory"


@click.command()
@json_option
@click.option("--watch", is_flag=True, help="Refresh it every second, until Ctrl-C.")
@asks_cluster
def status(cluster: CommandConnection, as_json: bool, watch: bool) -> None:
    """Show the nodes, resources, actors and waiting work of a running cluster."""
    if as_json:
        print_json(cluster.status())
    elif watch:
        watch_status(cluster.status)
    else:
        render(cluster.status())


def watch_status(
    look: Callable[[], ClusterStatus], every: float = 1.0, console: Console | None = None
) -> None:
    """Refresh the status on one screen; without one, show why."""
    from rich.console import Console as Terminal
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    console = console or Terminal()
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True) as live:
        while True:
            try:
                state = look()
                shown = [*drawn(headline(state), sections(state))]
            except (ConnectionError, TimeoutError) as error:
                shown = [Text(str(error))]
            live.update(Group(*shown), refresh=True)
            time.sleep(every)


def render(state: ClusterStatus, console: Console | None = None) -> None:
    """Print a cluster's state: drawn tables on a terminal, plain columns elsewhere.

    Args:
        state: The head's status.
        console: Where to print; None: stdout.
    """
    draw(headline(state), sections(state), console)


def headline(state: ClusterStatus) -> str:
    """Return one line on the cluster as a whole."""
    alive = sum(node["state"] != "DEAD" for node in state["nodes"])
    nodes = f"{alive} node{'' if alive == 1 else 's'}"
    age = format_duration(state["time"] - state["started"])
    line = f"Cluster at {state['address']}: {nodes}, up {age}, miniray {state['version']}"
    if state["head_started"] > state["started"] + 1:
        ago = format_duration(state["time"] - state["head_started"])
        line += f". Its head was lost, and started again {ago} ago"
        if waits := len(state["awaited"]):
            line += f"; it waits for {waits} node{'' if waits == 1 else 's'} to come back"
    return line


def sections(state: ClusterStatus) -> list[Section]:
    """Return what to show, in order."""
    return [
        _nodes(state),
        _resources(state),
        *_quarantines(state),
        _actors(state),
        *_dead_actors(state),
        _placement_groups(state),
        _waiting(state),
    ]


def format_duration(seconds: float) -> str:
    """Write a duration: ``42 s``, ``5 min``, ``3 h 12 min`` or ``2 d 4 h``."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{rest} s"


def starting_for(seconds: float) -> str:
    """Return the state of an actor whose constructor runs, for which Ray has no word."""
    return f"STARTING for {format_duration(seconds)}"


def describe_bundles(bundles: Sequence[Mapping[str, float]], nodes: Sequence[str] | None) -> str:
    """Write the bundles of a placement group, each with its node; ``nodes``: None if it is gone."""
    if nodes is None:
        return "; ".join(map(describe_amounts, bundles))
    return "; ".join(
        f"{describe_amounts(bundle)} on {node[:ID_LENGTH] or 'no node yet'}"
        for bundle, node in zip(bundles, nodes, strict=True)
    )


def _nodes(state: ClusterStatus) -> Section:
    rows = [
        (
            node["node_id"][:ID_LENGTH] + (" (head)" if node["is_head"] else ""),
            node["address"],
            node["hostname"],
            _state(node),
            describe_usage(_used(node), node["total"]),
        )
        for node in state["nodes"]
    ]
    rows += [
        (node["node_id"][:ID_LENGTH], node["address"], node["hostname"], "AWAITED", "-")
        for node in state["awaited"]
    ]
    return Section("Nodes", ("Node", "Address", "Host", "State", "Used/total"), _capped(rows))


def _state(node: NodeStatus) -> str:
    if node["silent"]:
        return f"{node['state']}, silent for {format_duration(node['silent'])}"
    return f"{node['state']}: {node['reason']}" if node["reason"] else node["state"]


def _used(node: NodeStatus) -> dict[str, float]:
    """Return the granted resources of a node, and the memory that its objects really take."""
    return {**node["used"], _STORE: node["object_store_used"]}


def _resources(state: ClusterStatus) -> Section:
    total = state["total"]
    used = {**state["used"], _STORE: sum(node["object_store_used"] for node in state["nodes"])}
    rows = [
        (name, format_amount(name, used.get(name, 0)), format_amount(name, total.get(name, 0)))
        for name in visible_resources(total)
    ]
    spilled = sum(node["object_store_spilled"] for node in state["nodes"])
    if spilled:
        rows.append(("objects on disk", format_amount(_STORE, spilled), "-"))
    return Section("Resources", ("Resource", "Used", "Total"), rows)


def _quarantines(state: ClusterStatus) -> list[Section]:
    """Show devices out of service, if there are any."""
    rows = [
        (
            node["node_id"][:ID_LENGTH],
            "; ".join(f"{name} {', '.join(ids)}" for name, ids in each["devices"].items()) or "-",
            format_duration(state["time"] - each["since"]),
            each["reason"],
        )
        for node in state["nodes"]
        for each in node["quarantined"]
    ]
    columns = ("Node", "Devices", "Since", "Why")
    return [Section("Quarantined", columns, _capped(rows))] if rows else []


def _actors(state: ClusterStatus) -> Section:
    rows = [
        (
            short_id(actor["actor_id"]),
            actor["class_name"],
            actor["name"] or "-",
            starting_for(state["time"] - actor["since"])
            if actor["state"] == "STARTING"
            else actor["state"],
            actor["node_id"][:ID_LENGTH] or "-",
            str(actor["pid"] or "-"),
            str(actor["restarts"]),
            describe_amounts(actor["resources"]) or "-",
        )
        for actor in state["actors"]
    ]
    columns = ("Actor", "Class", "Name", "State", "Node", "Pid", "Restarts", "Holds")
    return Section("Actors", columns, _capped(rows), "No actors.")


def _dead_actors(state: ClusterStatus) -> list[Section]:
    """Show actors that have died recently, if there are any; reasons are never cut short."""
    rows = [
        (
            short_id(actor["actor_id"]),
            actor["class_name"],
            actor["name"] or "-",
            f"{format_duration(state['time'] - actor['died'])} ago",
            actor["reason"],
        )
        for actor in state["dead_actors"]
    ]
    return [Section("Dead actors", ("Actor", "Class", "Name", "Died", "Why"), rows)] if rows else []


def _placement_groups(state: ClusterStatus) -> Section:
    rows = [
        (
            short_id(group["placement_group_id"]),
            group["name"] or "-",
            group["strategy"],
            group["state"],
            describe_bundles(group["bundles"], group["bundle_nodes"]),
        )
        for group in state["placement_groups"]
    ]
    columns = ("Group", "Name", "Strategy", "State", "Bundles")
    return Section("Placement groups", columns, _capped(rows))


def _waiting(state: ClusterStatus) -> Section:
    # What can never be served needs a person, so it comes first; then the longest waiting.
    demands = sorted(state["pending"], key=lambda d: (not d["infeasible"], d["since"]))
    rows = [
        (
            _who_waits(demand),
            "; ".join(describe_amounts(shape) or "nothing" for shape in demand["shape"]),
            format_duration(state["time"] - demand["since"]),
            ("INFEASIBLE: " if demand["infeasible"] else "") + demand["reason"],
        )
        for demand in demands
    ]
    # Never cut short: this shows a user why nothing happens.
    return Section("Waiting", ("What", "Asks for", "Since", "Why"), rows, "Nothing waits.")


def _who_waits(demand: PendingDemand) -> str:
    kind = demand["kind"].replace("_", " ")
    names = ", ".join(name for name in demand["names"] if name)
    plural = "" if demand["count"] == 1 else "s"
    return f"{demand['count']} {kind}{plural}{f' ({names})' if names else ''}"


def _capped(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    if len(rows) <= _MAX_ROWS:
        return rows
    more = f"and {len(rows) - _MAX_ROWS} more"
    return [*rows[:_MAX_ROWS], (more, *[""] * (len(rows[0]) - 1))]
