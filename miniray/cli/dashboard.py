"""`miniray dashboard`: the page's address, with a code that lets one browser in."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import click

from miniray.cli.parsing import cluster_options

if TYPE_CHECKING:
    from miniray.cli.services import Services

#: Variables of which one says that there is a screen, or a browser that the user has chosen.
_SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


@click.command()
@cluster_options
@click.option("--no-open", is_flag=True, help="Print the address only.")
@click.option(
    "--token",
    is_flag=True,
    help="Print what programs show as bearer token: for jobs, rows and metrics.",
)
@click.pass_obj
def dashboard(
    services: Services, address: str | None, token_file: str | None, no_open: bool, token: bool
) -> None:
    """Open the page of the cluster in a browser.

    The address is good for one browser, within a minute. It is served on the machine of the head:
    from elsewhere, forward its port with `ssh -L 8265:127.0.0.1:8265 HOST`, and run this there.
    """
    with contextlib.closing(services.connect(address, token_file)) as cluster:
        page = cluster.page()
    if token:
        click.echo(page.token)
        return
    click.echo(page.url)
    # Without a screen it would be a browser in this terminal, which is of no use here.
    if not no_open and any(os.environ.get(name) for name in _SCREENS):
        import webbrowser

        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(page.url)
