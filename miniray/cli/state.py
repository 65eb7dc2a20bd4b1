"""`miniray list`, `get` and `summary`: what there is in a cluster, as tables or as JSON.

The records are those of ``miniray.util.state``; this file chooses which of their fields a table
shows.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.parsing import Condition, cluster_options
from miniray.cli.status import format_duration
from miniray.cli.tables import ID_LENGTH, Section, describe_amounts, draw
from miniray.common.ids import short_id
from miniray.common.names import format_bytes, printable
from miniray.common.state_types import MAX_OBJECTS
from miniray.util.state import DEFAULT_TIMEOUT, KINDS, listed, summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.cli.services import Services

_ONES = {
    "actor": ("actors", "actor_id"),
    "task": ("tasks", "task_id"),
    "node": ("nodes", "node_id"),
    "worker": ("workers", "worker_id"),
    "job": ("jobs", "job_id"),
    "group": ("groups", "placement_group_id"),
    "object": ("objects", "object_id"),
    "event": ("events", "event_id"),
}
#: Seconds between two looks of `--follow`.
_EVERY = 0.5

Row = tuple[str, ...]


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _actor_state(actor: Any) -> str:
    """Return an actor's state; one that is starting for how long, as Ray has no word for that."""
    if actor.is_starting:
        return f"STARTING for {format_duration(time.time() - actor.since)}"
    return str(actor.state)


#: Of each kind the columns of its table, and the row of a record.
_TABLES: dict[str, tuple[Row, Callable[[Any], Row]]] = {
    "actors": (
        ("Actor", "Class", "Name", "State", "Node", "Pid", "Restarts", "Job", "Why"),
        lambda a: (
            a.actor_id,
            a.class_name,
            a.name or "-",
            _actor_state(a),
            (a.node_id or "-")[:ID_LENGTH],
            str(a.pid or "-"),
            str(a.num_restarts),
            a.job_id[:ID_LENGTH],
            a.death_cause or a.why_waits or "-",
        ),
    ),
    "tasks": (
        ("Task", "Name", "Type", "State", "Runs for", "Node", "Pid", "Job", "Waits for"),
        lambda t: (
            t.task_id,
            t.name,
            t.type,
            t.state,
            "-" if t.seconds is None else format_duration(t.seconds),
            t.node_id[:ID_LENGTH] or "-",
            str(t.worker_pid or "-"),
            t.job_id[:ID_LENGTH],
            ", ".join(map(short_id, t.waits_for)) or "-",
        ),
    ),
    "nodes": (
        ("Node", "Address", "Host", "State", "Resources", "Why"),
        lambda n: (
            n.node_id + (" (head)" if n.is_head_node else ""),
            n.node_ip,
            n.node_name,
            n.state,
            describe_amounts(n.resources_total) or "-",
            n.state_message or "-",
        ),
    ),
    "workers": (
        ("Worker", "Type", "Runs", "Node", "Pid", "Job"),
        lambda w: (
            w.worker_id,
            w.worker_type,
            w.name or "-",
            w.node_id[:ID_LENGTH],
            str(w.pid),
            w.job_id[:ID_LENGTH],
        ),
    ),
    "jobs": (
        ("Job", "Status", "Started", "Ended", "Pid", "Entrypoint"),
        lambda j: (
            j.job_id,
            j.status,
            _clock(j.start_time / 1000),
            "-" if j.end_time is None else _clock(j.end_time / 1000),
            str(j.driver_info["pid"]),
            j.entrypoint or "-",
        ),
    ),
    "groups": (
        ("Group", "Name", "State", "Strategy", "Bundles"),
        lambda g: (
            g.placement_group_id,
            g.name or "-",
            g.state,
            g.strategy,
            "; ".join(
                f"{describe_amounts(bundle)} on {node[:ID_LENGTH] or 'no node yet'}"
                for bundle, node in zip(g.bundles, g.bundle_nodes, strict=True)
            ),
        ),
    ),
    "objects": (
        ("Object", "Size", "State", "Type", "Owner", "Made at", "Node", "Why it is held"),
        lambda o: (
            o.object_id or "-",
            format_bytes(o.object_size),
            o.state,
            o.reference_type,
            o.owner or "-",
            o.call_site or "-",
            o.node_id[:ID_LENGTH],
            o.why or "-",
        ),
    ),
    "events": (
        ("Time", "Severity", "What", "Message"),
        lambda e: (
            _clock(e.time),
            e.severity,
            f"{e.source_type} {e.event_type}",
            e.message,
        ),
    ),
    "waiting": (
        ("Kind", "Names", "Count", "Since", "Why"),
        lambda p: (p.kind, ", ".join(p.names) or "-", str(p.count), _clock(p.since), p.reason),
    ),
}


_json = click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
_timeout = click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_TIMEOUT,
    show_default=True,
    help="Seconds that a process may take to tell of its tasks or objects.",
)


@click.command("list")
@click.argument("what", type=click.Choice(list(KINDS)))
@cluster_options
@click.option(
    "--filter",
    "filters",
    type=Condition(),
    multiple=True,
    help="KEY=VALUE or KEY!=VALUE; several must all hold. Keys are those that --json shows.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_OBJECTS),
    default=100,
    show_default=True,
    help="The most that is shown; of events, the latest.",
)
@_timeout
@_json
@click.option("--follow", is_flag=True, help="Of events: go on with those to come.")
@click.pass_obj
def list_(
    services: Services, /, what: str, address: str | None, token_file: str | None, **how: Any
) -> None:
    """List actors, tasks, nodes, workers, jobs, groups, objects, events, or what is waiting.

    Dead actors and lost nodes are among them, with the cause. Tasks are those that have not ended.
    """
    if how["follow"] and what != "events":
        raise click.UsageError(f"--follow is for events, not for {what}.")
    with contextlib.closing(services.connect(address, token_file)) as connection:
        most = sys.maxsize if what == "events" else how["limit"] + 1
        try:
            found = listed(connection, what, how["filters"], most, how["timeout"])
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        shown = slice(-how["limit"], None) if what == "events" else slice(how["limit"])
        _show(what, found[shown], as_json=how["as_json"])
        if len(found) > how["limit"]:
            click.echo(f"There are more than these {how['limit']}: see --limit.", err=True)
        while how["follow"]:
            time.sleep(_EVERY)
            last = found[-1].event_id if found else 0
            new = listed(connection, what, how["filters"], most, how["timeout"])
            new = [event for event in new if event.event_id > last]
            for event in new:
                row = json.dumps(event.asdict()) if how["as_json"] else "  ".join(_row(what, event))
                click.echo(printable(row))
            found = new or found


def _row(what: str, record: Any) -> Row:
    return _TABLES[what][1](record)


def _show(what: str, records: list[Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([record.asdict() for record in records], indent=2))
        return
    columns, _ = _TABLES[what]
    rows = [_row(what, record) for record in records]
    title = what.capitalize()
    draw(f"{len(rows)} {what if len(rows) != 1 else what[:-1]}", [Section(title, columns, rows)])


@click.command()
@click.argument("what", type=click.Choice(list(_ONES)))
@click.argument("id")
@cluster_options
@_timeout
@_json
@click.pass_obj
def get(
    services: Services,
    what: str,
    id: str,
    address: str | None,
    token_file: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Show all that is known of one actor, task, node, worker, job, group, object or event.

    ID is its id or the first digits of it; of an actor, also its name.
    """
    thing, key = _ONES[what]
    with contextlib.closing(services.connect(address, token_file)) as connection:
        records = listed(connection, thing, None, sys.maxsize, timeout)
    names = [each for each in records if what == "actor" and each.name == id]
    found = names or [each for each in records if str(each[key]) == id]
    found = found or [each for each in records if str(each[key]).startswith(id)]
    if not found:
        raise click.ClickException(
            f"There is no {what} {id!r}: `miniray list {thing}` shows the ids of all."
        )
    same = {str(each[key]) for each in found}
    if len(same) > 1:
        raise click.ClickException(f"{id!r} begins {len(same)} ids: {', '.join(sorted(same)[:5])}.")
    for record in found:
        fields = record.asdict()
        if as_json:
            click.echo(json.dumps(fields, indent=2))
            continue
        rows = [(name, _text(value)) for name, value in fields.items()]
        draw("", [Section(f"{what.capitalize()} {record[key]}", ("Field", "Value"), rows)])


def _text(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) else json.dumps(value)


@click.command("summary")
@click.argument("what", type=click.Choice(["tasks", "actors", "objects"]))
@cluster_options
@_timeout
@_json
@click.pass_obj
def summary_(
    services: Services,
    what: str,
    address: str | None,
    token_file: str | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Count tasks by function, actors by class, or objects by where they were made.

    Tasks that have ended are counted by the processes that called them, while these live.
    """
    with contextlib.closing(services.connect(address, token_file)) as connection:
        found = summary(connection, what, timeout)["cluster"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    entries = found["summary"].items()
    if what == "objects":
        columns: Row = ("Made at", "Objects", "MiB", "Owners", "Nodes")
        rows = [
            (
                site or "not recorded",
                str(each["total_objects"]),
                f"{each['total_size_mb']:.1f}",
                str(each["total_num_workers"]),
                str(each["total_num_nodes"]),
            )
            for site, each in entries
        ]
    else:
        states = sorted({state for _, each in entries for state in each["state_counts"]})
        columns = (found["summary_by"].capitalize().replace("Func_name", "Function"), *states)
        rows = [
            (name, *(str(each["state_counts"].get(state, 0)) for state in states))
            for name, each in entries
        ]
    draw(f"{len(rows)} by {columns[0].lower()}", [Section(what.capitalize(), columns, rows)])
