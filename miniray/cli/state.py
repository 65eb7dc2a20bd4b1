"""`miniray list`, `get` and `summary`: the state of a cluster, as tables or JSON.

The records are those of ``miniray.util.state``; this file chooses which of their fields a table
shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.options import CONDITION, asks_cluster, json_option, print_json, wrong_use
from miniray.cli.status import describe_bundles, format_duration, starting_for
from miniray.cli.tables import ID_LENGTH, Section, describe_amounts, draw
from miniray.common.names import format_bytes, printable
from miniray.common.object_ref import PROCESS_ID_LENGTH, short_id
from miniray.common.state_types import MAX_OBJECTS
from miniray.util.state import DEFAULT_TIMEOUT, KINDS, listed, summary
from miniray.util.state_records import ClusterEventState, chosen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from miniray.client.command_connection import CommandConnection
    from miniray.util.state_records import Filter

#: Kinds by the singular that `get` takes; the first field of a record is its id.
_ONES = {thing.removesuffix("s"): thing for thing in KINDS if thing != "waiting"}
#: Kinds by the names that Ray's command has for them.
_OF_RAY = {"placement-groups": "groups", "cluster-events": "events"}


class _Kinds(click.Choice[str]):
    """Names of kinds, which may be one or many, or Ray's."""

    def convert(self, value: str, param: Any, ctx: Any) -> str:
        name = _OF_RAY.get(value, value)
        forms = (name, f"{name}s", name.removesuffix("s"))
        known = next((form for form in forms if form in self.choices), value)
        return super().convert(known, param, ctx)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


#: Of each kind the fields that its table shows, the id of a record first.
_TABLES: dict[str, tuple[str, ...]] = {
    "actors": (
        *("actor_id", "class_name", "name", "state", "node_id", "pid", "num_restarts", "job_id"),
        *("death_cause", "why_waits"),
    ),
    "tasks": (
        *("task_id", "name", "type", "state", "seconds", "node_id", "worker_pid", "job_id"),
        "waits_for",
    ),
    "nodes": (
        *("node_id", "is_head_node", "node_ip", "node_name", "state", "resources_total"),
        "state_message",
    ),
    "workers": ("worker_id", "worker_type", "name", "node_id", "pid", "job_id"),
    "jobs": ("job_id", "status", "start_time", "end_time", "driver_info", "entrypoint"),
    "groups": ("placement_group_id", "name", "state", "strategy", "bundles"),
    "objects": (
        *("object_id", "object_size", "state", "reference_type", "owner", "call_site"),
        *("node_id", "why"),
    ),
    "events": ("event_id", "time", "severity", "event_type", "message"),
    "waiting": ("kind", "names", "count", "since", "reason"),
}
#: How tables write fields that are no short text; the first one of a table is an id, mostly.
_FORMS: dict[str, Callable[[Any], Any]] = {
    "node_id": lambda record: (record.node_id or "")[:ID_LENGTH],
    "job_id": lambda record: (record.job_id or "")[:ID_LENGTH],
    "state": lambda record: (
        starting_for(time.time() - record.since) if record.get("is_starting") else record.state
    ),
    "num_restarts": lambda actor: str(actor.num_restarts),
    "seconds": lambda task: task.seconds is not None and format_duration(task.seconds),
    "waits_for": lambda task: ", ".join(map(short_id, task.waits_for)),
    "resources_total": lambda node: describe_amounts(node.resources_total),
    "start_time": lambda job: _clock(job.start_time / 1000),
    "end_time": lambda job: job.end_time and _clock(job.end_time / 1000),
    "driver_info": lambda job: f"pid {job.driver_info['pid']}",
    "bundles": lambda group: describe_bundles(
        group.bundles, group.bundle_nodes if group.state != "REMOVED" else None
    ),
    "object_size": lambda found: format_bytes(found.object_size),
    "time": lambda event: _clock(event.time),
    "event_type": lambda event: f"{event.source_type} {event.event_type}",
    "names": lambda demand: ", ".join(demand.names),
    "since": lambda demand: _clock(demand.since),
}


def _row(what: str, record: Any) -> tuple[str, ...]:
    first, *others = _TABLES[what]
    values = (_FORMS[each](record) if each in _FORMS else record[each] for each in others)
    id = str(record[first])
    own = short_id(id) if len(id) > 2 * PROCESS_ID_LENGTH else id  # of what a process has made
    return tuple(str(value or "-") for value in (own, *values))


_timeout = click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_TIMEOUT,
    show_default=True,
    help="Seconds that a process may take to list its tasks or objects.",
)


@click.command("list")
@click.argument("what", type=_Kinds(KINDS))
@click.option(
    "--filter",
    "filters",
    type=CONDITION,
    multiple=True,
    help="KEY=VALUE or KEY!=VALUE; several must all hold. Keys are those that tables and --json "
    "have.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_OBJECTS),
    default=100,
    show_default=True,
    help="The most that is shown; of events, the latest.",
)
@_timeout
@json_option
@click.option("--follow", is_flag=True, help="Of events: keep printing new ones.")
@asks_cluster
def list_(
    cluster: CommandConnection,
    what: str,
    filters: Sequence[Filter],
    limit: int,
    timeout: float,
    *,
    as_json: bool,
    follow: bool,
) -> None:
    """List actors, tasks, nodes, workers, jobs, groups, objects, events, or what is waiting.

    Dead actors and lost nodes are among them, with the cause. Tasks are those that have not ended.
    """
    if follow and what != "events":
        raise click.UsageError(f"--follow is for events, not for {what}.")
    most = sys.maxsize if what == "events" else limit + 1
    with wrong_use():
        found = listed(cluster, what, filters, most, timeout)
    shown = found[-limit:] if what == "events" else found[:limit]
    if as_json:
        print_json([record.asdict() for record in shown])
    else:
        number = f"More than {limit}" if len(found) > limit else str(len(found))
        title = f"{number} {what if len(shown) != 1 else what.removesuffix('s')}"
        rows = [_row(what, record) for record in shown]
        draw(title, [Section(what.capitalize(), _TABLES[what], rows)])
    if len(found) > limit:
        click.echo(f"There are more than these {limit}: see --limit.", err=True)
    if follow:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(cluster, filters, found[-1].event_id if found else 0, as_json=as_json)


def _follow(
    cluster: CommandConnection, filters: Sequence[Filter], last: int, *, as_json: bool
) -> None:
    """Print the events that come after the one of this number, and how many are left out."""
    known = max((row["event_id"] for row in cluster.listing("events")), default=last)
    for told in cluster.watch("events"):
        number = told["event_id"]
        if (left_out := number - known - 1) > 0:
            click.echo(f"{left_out} left out: events came faster than they were read.", err=True)
        new = [ClusterEventState.of(told)] if number > last else []  # a new head pushes all of them
        known, last = max(known, number), max(last, number)
        for event in chosen(new, filters, 1):
            row = json.dumps(event.asdict()) if as_json else "  ".join(_row("events", event))
            click.echo(printable(row))


@click.command()
@click.argument("what", type=_Kinds(_ONES))
@click.argument("id")
@_timeout
@json_option
@asks_cluster
def get(cluster: CommandConnection, what: str, id: str, timeout: float, as_json: bool) -> None:
    """Show all that is known of one actor, task, node, worker, job, group, object or event.

    ID is its id, the first digits of it, or its short form; of an actor, also its name.
    """
    thing = _ONES[what]
    _, kind = KINDS[thing]
    key = dataclasses.fields(kind)[0].name
    records = listed(cluster, thing, None, sys.maxsize, timeout)
    found = [each for each in records if id in (str(each[key]), what == "actor" and each.name)]
    found = found or [each for each in records if str(each[key]).startswith(id)]
    found = found or [each for each in records if id == short_id(str(each[key]))]
    if not found:
        raise ValueError(f"There is no {what} {id!r}: `miniray list {thing}` shows the ids of all.")
    same = {str(each[key]) for each in found}
    if len(same) > 1:
        raise ValueError(f"{id!r} begins {len(same)} ids: {', '.join(sorted(same)[:5])}.")
    for record in found:
        fields = record.asdict()
        if as_json:
            print_json(fields)
            continue
        rows = [(name, _text(value)) for name, value in fields.items()]
        draw("", [Section(f"{what.capitalize()} {record[key]}", ("Field", "Value"), rows)])


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


#: Columns of a summary of objects, beside where they were made.
_OF_OBJECTS = ("total_objects", "total_size_mb", "total_num_workers", "total_num_nodes")


@click.command("summary")
@click.argument("what", type=click.Choice(["tasks", "actors", "objects"]))
@_timeout
@json_option
@asks_cluster
def summary_(cluster: CommandConnection, what: str, timeout: float, as_json: bool) -> None:
    """Count tasks by function, actors by class, or objects by where they were made.

    Tasks that have ended are counted by the processes that called them, while these live.
    """
    found = summary(cluster, what, timeout)["cluster"]
    if as_json:
        print_json(found)
        return
    entries = found["summary"]
    counts = {
        name or "not recorded": each if what == "objects" else each["state_counts"]
        for name, each in entries.items()
    }
    states = sorted({state for each in counts.values() for state in each})
    columns = _OF_OBJECTS if what == "objects" else states
    rows = [
        (name, *(f"{round(each.get(column, 0), 1):.10g}" for column in columns))
        for name, each in counts.items()
    ]
    by = found["summary_by"]
    title = f"{what.capitalize()} by {by.replace('_', ' ')}"
    draw("", [Section(title, (by, *columns), rows, f"No {what}.")])
