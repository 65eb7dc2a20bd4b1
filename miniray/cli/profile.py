"""`miniray stack`, `profile`, `timeline` and `metrics`: what processes do, and what they use."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.parsing import cluster_options
from miniray.common.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from miniray.cli.services import Services
    from miniray.client.command_connection import CommandConnection


@contextlib.contextmanager
def _connected(
    services: Services, address: str | None, token_file: str | None
) -> Iterator[CommandConnection]:
    """Connect for a question; what it says of a wrong one is the user's to know."""
    with contextlib.closing(services.connect(address, token_file)) as connection:
        try:
            yield connection
        except ValueError as error:
            raise click.ClickException(str(error)) from None


def _tell(notes: Iterable[str]) -> None:
    for note in notes:
        click.echo(printable(note), err=True)


@click.command()
@click.argument("of")
@cluster_options
@click.option("--rank", type=click.IntRange(0), help="Of a run, this rank only.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.pass_obj
def stack(
    services: Services,
    of: str,
    address: str | None,
    token_file: str | None,
    rank: int | None,
    as_json: bool,
) -> None:
    """Show where OF is in its code: a pid, an actor (id, name or class), or a training run.

    Equal stacks of several processes are shown once. It works while user code runs, also if that
    holds Python's lock (the GIL), and for the coroutines of asyncio actors.
    """
    from miniray.profiling.looks import look

    with _connected(services, address, token_file) as connection:
        found = look(connection, of, rank)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for group in found["groups"]:
        click.echo(f"{printable(', '.join(group['who']))}:")
        for frame in group["stack"] or ["waits for work"]:
            click.echo(f"    {printable(frame)}")
    _tell(found["notes"])
    if found["way"]:
        click.echo(f"Seen by {found['way']}.", err=True)


@click.command()
@cluster_options
@click.option(
    "--seconds",
    type=click.FloatRange(0, 300),
    default=10.0,
    show_default=True,
    help="How long to record; 0: calls above 1 ms that workers have run lately.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="timeline.json",
    show_default=True,
    help="The file.",
)
@click.pass_obj
def timeline(
    services: Services,
    address: str | None,
    token_file: str | None,
    seconds: float,
    output: Path,
) -> None:
    """Record what runs where and when: calls, waits, transfers, spills, reports, uploads.

    The file has Chrome trace events: open it in https://ui.perfetto.dev or chrome://tracing.
    """
    from miniray.profiling.timeline import record

    with _connected(services, address, token_file) as connection:
        events, notes = record(connection, seconds)
    data = {"traceEvents": events, "otherData": {"not in it": notes}}
    output.write_text(json.dumps(data), encoding="utf-8")
    _tell(notes)
    click.echo(f"{sum(event['ph'] == 'X' for event in events):,} spans: {output}")


@click.command()
@cluster_options
@click.pass_obj
def metrics(services: Services, address: str | None, token_file: str | None) -> None:
    """Print the cluster's metrics, as Prometheus reads them from the page's /metrics."""
    from miniray.metrics.text import text

    with _connected(services, address, token_file) as connection:
        click.echo(text(connection), nl=False)


@click.group()
def profile() -> None:
    """Record for some seconds what processes use: cpu or memory."""


def _profile_options(command: Any) -> Any:
    """Give a command what all profiles take."""
    for option in (
        click.option("--rank", type=click.IntRange(0), help="Of a run, this rank only."),
        click.option(
            "--seconds",
            type=click.FloatRange(0, 300, min_open=True),
            default=5.0,
            show_default=True,
            help="How long to record.",
        ),
        click.option(
            "-o",
            "--output",
            type=click.Path(dir_okay=False, path_type=Path),
            help="The file: .html (a flame graph that needs no network), .collapsed, or "
            ".speedscope.json.  [default: KIND.html]",
        ),
        cluster_options,
        click.argument("of"),
    ):
        command = option(command)
    return command


@profile.command()
@_profile_options
@click.pass_obj
def cpu(services: Services, /, **how: Any) -> None:
    """Record what OF uses the CPU for: a pid, an actor (id, name or class), or a training run.

    By py-spy where it is installed and allowed, else by the process itself. What waits costs
    nothing: `miniray stack` shows where.
    """
    _record(services, "cpu", **how)


@profile.command()
@_profile_options
@click.option("--leaks", is_flag=True, help="Only what is still there at the end.")
@click.pass_obj
def memory(services: Services, /, **how: Any) -> None:
    """Record what OF allocates: a pid, an actor (id, name or class), or a training run.

    By memray, in the process itself; without memray by tracemalloc, which sees only Python's own
    allocations.
    """
    _record(services, "memory", **how)


def _record(
    services: Services,
    kind: str,
    *,
    of: str,
    address: str | None,
    token_file: str | None,
    output: Path | None,
    **how: Any,
) -> None:
    from miniray.profiling import forms, looks

    path = output or Path(f"{kind}.html")
    if not path.name.endswith(forms.ENDINGS):
        raise click.UsageError(f"The name of {path} has to end in {', '.join(forms.ENDINGS)}.")
    with _connected(services, address, token_file) as connection:
        found = looks.profile(connection, kind, of, **how)
    _tell(found["notes"])
    if not found["tree"]["value"]:
        raise click.ClickException("Nothing was recorded.")
    path.write_text(forms.as_file(found, f"{kind} of {of}", path), encoding="utf-8")
    click.echo(f"Recorded by {found['way']}: {path}")
