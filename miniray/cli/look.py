"""What processes do and use: `stack`, `why`, `profile`, `timeline`, `metrics` and `dashboard`."""

from __future__ import annotations

import contextlib
import functools
import html
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.options import asks_cluster, json_option, print_json, print_notes
from miniray.common.names import printable

if TYPE_CHECKING:
    from miniray.client.command_connection import CommandConnection

_rank = click.option("--rank", type=click.IntRange(0), help="Of a run, this rank only.")


@click.command()
@click.argument("of")
@_rank
@json_option
@asks_cluster
def stack(cluster: CommandConnection, of: str, rank: int | None, as_json: bool) -> None:
    """Show where OF is in its code: a pid, an actor (id, name or class), or a training run.

    Equal stacks of several processes are shown once. It works while user code runs, also if that
    holds Python's lock (the GIL), and for the coroutines of asyncio actors.
    """
    from miniray.profiling.looks import look

    found = look(cluster, of, rank)
    if as_json:
        print_json(found)
        return
    for group in found["groups"]:
        click.echo(f"{printable(', '.join(group['who']))}:")
        for frame in group["stack"] or ["waits for work"]:
            click.echo(f"    {printable(frame)}")
    print_notes(found["notes"])
    if found["way"]:
        click.echo(f"Seen by {found['way']}.", err=True)


@click.command()
@click.argument("of", metavar="[REF|TASK|ACTOR]", default="")
@json_option
@asks_cluster
def why(cluster: CommandConnection, of: str, as_json: bool) -> None:
    """Show why something waits, and name deadlocks.

    It is the id of an object or a task (the first digits, or as errors and lists show it), the id,
    name or class of an actor, or the name of a task; without it, all that drivers wait for.
    """
    from miniray.util.why import why as find

    found = find(cluster, of)
    if as_json:
        print_json(found)
        return
    for depth, link in enumerate(found["chain"]):
        indent = "  " * depth
        if link["kind"] == "deadlock":
            click.echo(f"DEADLOCK: {printable(link['text'])}.")
            continue
        click.echo(f"{indent}{printable(link['name'])} {printable(link['text'])}")
        for frame in link["stack"]:
            click.echo(f"{indent}    {printable(frame)}")
    print_notes(found["notes"])


_seconds = functools.partial(click.option, "--seconds", type=float, show_default=True)


def _writable(_context: click.Context, _option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before anything is recorded for it."""
    if path is not None and not os.access(path.parent, os.W_OK):
        raise click.BadParameter(f"There is no folder {path.parent} to write to.")
    return path


_output = functools.partial(
    click.option,
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_writable,
)


@click.command()
@_seconds(default=10.0, help="How long to record; 0: calls above 1 ms that have run lately.")
@_output(default="timeline.json", show_default=True, help="The file.")
@asks_cluster
def timeline(cluster: CommandConnection, seconds: float, output: Path) -> None:
    """Record what runs where and when: calls, waits, transfers, spills, reports, uploads.

    The file has Chrome trace events: open it in https://ui.perfetto.dev or chrome://tracing.
    """
    from miniray.profiling.timeline import record

    events, notes = record(cluster, seconds)
    data = {"traceEvents": events, "otherData": {"not in it": notes}}
    output.write_text(json.dumps(data), encoding="utf-8")
    print_notes(notes)
    click.echo(f"{sum(event['ph'] == 'X' for event in events):,} spans: {output}")


@click.command()
@asks_cluster
def metrics(cluster: CommandConnection) -> None:
    """Print the cluster's metrics, as Prometheus reads them from the page's /metrics."""
    from miniray.metrics.text import text

    click.echo(text(cluster), nl=False)


@click.command()
@click.argument("kind", type=click.Choice(["cpu", "memory"]))
@click.argument("of")
@_rank
@_seconds(default=5.0, help="How long to record.")
@_output(
    help="The file: .html (a flame graph that needs no network), .collapsed, or .speedscope.json."
    "  [default: KIND.html]",
)
@click.option("--leaks", is_flag=True, help="Of memory: only what is still there at the end.")
@asks_cluster
def profile(
    cluster: CommandConnection, kind: str, of: str, output: Path | None, **how: Any
) -> None:
    """Record for some seconds what OF uses: a pid, an actor (id, name or class), or a training run.

    cpu: by py-spy where it is installed and allowed, else by the process itself. What waits costs
    nothing: `miniray stack` shows where.

    memory: what is allocated, by memray, in the process itself; without memray by tracemalloc,
    which sees only Python's own allocations.
    """
    from miniray.profiling import forms, looks

    path = output or Path(f"{kind}.html")
    if not path.name.endswith(forms.ENDINGS):
        raise click.UsageError(f"The name of {path} has to end in {', '.join(forms.ENDINGS)}.")
    found = looks.profile(cluster, kind, of, **how)
    print_notes(found["notes"])
    if not found["tree"]["value"]:
        raise click.ClickException("Nothing was recorded.")
    path.write_text(forms.as_file(found, f"{kind} of {of}", path), encoding="utf-8")
    click.echo(f"Recorded by {found['way']}: {path}")


#: Variables that say that there is a screen, or which browser the user has chosen.
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
#: A page that leads to an address.
_LEADS = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}">'


@click.command()
@click.option("--no-open", is_flag=True, help="Print the address only.")
@click.option(
    "--token",
    is_flag=True,
    help="Print the bearer token for programs: jobs, rows and metrics.",
)
@asks_cluster
def dashboard(cluster: CommandConnection, no_open: bool, token: bool) -> None:
    """Open the page of the cluster in a browser.

    The address is good for one browser, within a minute. It is served on the machine of the head:
    from elsewhere, forward its port with `ssh -L 8265:127.0.0.1:8265 HOST`, and run this there.
    """
    page = cluster.page()
    if token:
        click.echo(page.token)
        return
    click.echo(page.url)
    # Without a screen it would be a browser in this terminal, which is of no use here.
    if not no_open and any(os.environ.get(name) for name in _SCREENS):
        import webbrowser

        from miniray.security.token import write_private
        from miniray.system.session import user_root

        # Other users can read a browser's command line, but not this user's files.
        leads = user_root() / "dashboard.html"
        write_private(leads, _LEADS.format(html.escape(page.url)).encode())
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(leads.as_uri())
