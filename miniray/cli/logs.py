"""`miniray logs`: the output of processes on all nodes, ended processes included."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
import time
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.options import Parsed, duration, finds_cluster, print_notes
from miniray.common.names import printable
from miniray.logs.log_files import MOST_LINES, LogQuery, found_in, pattern
from miniray.util.logs import Logs, follow, logs, of_folders, select_logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.client.command_connection import CommandConnection
    from miniray.logs.log_files import LogLineRead

#: Seconds between two looks of `--follow`.
_EVERY = 0.3
_AWAITS_HEAD = "The head of the cluster does not answer; lines printed meanwhile come later."


def since_of(text: str, now: float) -> float:
    """Return the moment that ``10m``, ``14:30`` or ``2026-11-24 14:30`` means.

    Raises:
        ValueError: It means none.
    """
    with contextlib.suppress(ValueError):
        return now - duration(text)
    given = text.strip()
    today = datetime.datetime.fromtimestamp(now).date()
    for date in ("", f"{today} "):
        with contextlib.suppress(ValueError):
            return datetime.datetime.fromisoformat(date + given).timestamp()
    raise ValueError(f"{text!r} is no time. Write 30s, 10m, 2h, 1d, 14:30 or '2026-11-24 14:30'.")


_SINCE = Parsed("TIME", lambda text: since_of(text, time.time()))


@click.command("logs")
@click.argument("of", metavar="[NAME|ACTOR|PID|RUN]", required=False)
@click.option("-f", "--follow", "goes_on", is_flag=True, help="Keep printing new lines.")
@click.option("--rank", type=click.IntRange(0), help="Of a run, this rank only.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(1, MOST_LINES),
    default=200,
    show_default=True,
    help="Number of last lines.",
)
@click.option("--grep", default="", metavar="REGEX", help="Only lines that match; nodes search.")
@click.option("--since", type=_SINCE, help="Only lines since then: 10m, 14:30, a date.")
@click.option("--json", "as_json", is_flag=True, help="Print each line as JSON.")
@finds_cluster
def logs_(connect: Callable[[], CommandConnection], /, of: str | None, **how: Any) -> None:
    """Show what workers have printed: all, or those of a name.

    A name is that of an actor (name, id or class), a task, a training run, a pid (or NODE:PID), or
    `head`, `node` or `web` for miniray's own logs. Ended processes and lost nodes are among them;
    without a running cluster, those of the last one of this machine.
    """
    from miniray.system.session import find_clusters

    query = LogQuery(tail=how["tail"], grep=how["grep"], since=how["since"] or 0.0)
    show = (lambda line: json.dumps(line._asdict())) if how["as_json"] else _as_text
    pattern(query.grep)
    try:
        connection = connect()
    except ConnectionError:
        named = click.get_current_context().params["address"] is not None
        folder = None if named or find_clusters() else _last_session()
        if folder is None:
            raise
        click.echo(f"No cluster is running; these are the logs in {folder}.", err=True)
        works = ", ".join(sorted({file.work for file in found_in(folder) if file.pid})) or "nothing"
        meant = (
            f"Without a cluster no names of actors and runs are known. There are logs of {works}."
        )
        _show(of_folders((folder,), _offline(query, of)), show, of, meant)
        return
    with contextlib.closing(connection), contextlib.suppress(KeyboardInterrupt):
        wanted = select_logs(connection, of, how["rank"], query)
        found = logs(connection, wanted)
        _show(found, show, None if how["goes_on"] else of)
        if not (found.lines or of or how["goes_on"]):
            click.echo("No worker has printed a line that matches.", err=True)
        told = set(found.notes)
        while how["goes_on"] and not wanted.folders:  # what has ended prints no more
            time.sleep(_EVERY)
            try:
                found = follow(connection, wanted, found)
            except ConnectionError:
                if connection.address not in {each.address for each in find_clusters()}:
                    raise
                connection = connect()  # it may be this node that is gone, and not the head
                found = dataclasses.replace(found, lines=[], notes=[_AWAITS_HEAD])
            found.notes = [note for note in found.notes if note not in told]
            told.update(found.notes)
            _show(found, show, None)


#: What may be meant.
_MEANT = (
    "It is the name, id or class of an actor, a task, a training run, a pid, NODE:PID, `head`, "
    "`node` or `web`. `miniray list workers` lists workers."
)


def _show(
    found: Logs, show: Callable[[LogLineRead], str], of: str | None, meant: str = _MEANT
) -> None:
    for each in found.lines:
        click.echo(show(each))
    print_notes(found.notes)
    if of is not None and not found.lines:
        raise click.ClickException(f"Nothing was printed by {of!r}. {meant}")


def _as_text(line: LogLineRead) -> str:
    who = line.name if not line.pid else f"{line.name} pid={line.pid}"
    where = f", node={line.node_id[:8]}" if line.node_id else ""
    # Colours and bars are the user's; other control characters are not.
    return f"{line.time} ({printable(who)}{where}) {_safe(line.text)}"


_COLOUR = re.compile(r"(\x1b\[[0-9;]*m|\t)")


def _safe(text: str) -> str:
    """Escape everything in a line but colours and tabs."""
    if text.isprintable():
        return text
    parts = _COLOUR.split(text)
    return "".join(part if index % 2 else printable(part) for index, part in enumerate(parts))


def _last_session() -> Path | None:
    """Return the folder of the logs of this user's last session on this machine."""
    from miniray.system.session import user_root

    folders = [path for path in user_root().glob("session_*/logs") if any(path.iterdir())]
    return max(folders, key=lambda path: path.parent.name, default=None)


def _offline(query: LogQuery, of: str | None) -> LogQuery:
    """Return the query when there is no cluster to look up actors and runs."""
    if of is None:
        return query
    pid = of.rpartition(":")[2]
    if pid.isdigit():
        return dataclasses.replace(query, pids=(int(pid),))
    return dataclasses.replace(query, names=(of,), actors=(of,))
