"""`miniray token`: the token of a cluster, made before the cluster is."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def token() -> None:
    """Make a token before its cluster starts."""


@token.command()
@click.argument("folder", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Make a token, and the certificate that it is for, in a new FOLDER.

    The head gets the folder, by `miniray start --head --authority FOLDER` or `miniray run
    --authority FOLDER`; other machines only need its file `token`. For Kubernetes it becomes a
    Secret: `kubectl create secret generic NAME --from-file FOLDER`.
    """
    from miniray.security.certificates import make_authority

    make_authority(folder)
    click.echo(f"The token and its certificate are in {folder}. Who can read them can join.")
