"""`miniray run`: the same command on every host of an allocation."""

from __future__ import annotations

import os
from typing import Any

import click

from miniray.cli.parsing import boot_arguments, node_options


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--wait", type=float, default=300.0, help="Seconds to wait for all hosts.")
@click.option(
    "--grace",
    type=float,
    default=30.0,
    help="Seconds that the program may take to end after SIGTERM; the nodes hold for as long.",
)
@click.option("--strict", is_flag=True, help="End the run when a host is lost.")
@click.option(
    "--rendezvous",
    metavar="FOLDER",
    help="Folder that all hosts see, in which they meet; munge: the default one, with the secret "
    "encrypted by munge.  [default: ~/.miniray/run]",
)
@click.option(
    "--authority",
    metavar="FOLDER",
    help="Folder on each host as `miniray token new` makes it, where hosts share none.",
)
@click.option("--index", help="Which host this is, from 0, where no scheduler tells.")
@click.option("--nodes", help="How many hosts there are, where no scheduler tells.")
@click.option("--head", metavar="HOST:PORT", help="Where the first host is; with --authority.")
@click.option("--host", help="Address to listen on.  [default: all of this host's]")
@node_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    *,
    command: tuple[str, ...],
    index: str | None,
    nodes: str | None,
    head: str | None,
    **given: Any,
) -> None:
    """Run COMMAND on a cluster of all hosts on which this is started.

    \b
    miniray run -- python train.py          # on this machine alone
    srun miniray run -- python train.py     # on all nodes of a Slurm allocation
    mpirun -N 1 miniray run -- python train.py

    The first host starts the cluster, waits for the others, runs COMMAND with MINIRAY_ADDRESS set,
    ends the cluster and exits with COMMAND's exit code. The others join, and exit with 0 when the
    cluster ends. Slurm, Open MPI, MPICH, SkyPilot, LeaderWorkerSet and Kubernetes tell which host
    is which; otherwise --index and --nodes do, or MINIRAY_INDEX and MINIRAY_NODES.
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch import allocation
    from miniray.launch.init_process import run_below_init
    from miniray.launch.program import ProgramError
    from miniray.launch.run import RunOptions
    from miniray.launch.run import run as run_part

    names = (allocation.RANK_VARIABLE, allocation.SIZE_VARIABLE, allocation.HEAD_VARIABLE)
    by_hand = zip(names, (index, nodes, head), strict=True)
    environ = {**os.environ, **{name: value for name, value in by_hand if value is not None}}
    own = {name: given.pop(name) for name in ("wait", "grace", "strict", "rendezvous", "authority")}
    try:
        options = RunOptions(command, node=boot_arguments(given), **own)
        place = allocation.find_allocation(environ)
        code = run_below_init(lambda: run_part(options, place, _tell))
    except ProgramError as error:
        click.echo(f"Error: {error}", err=True)
        code = error.code
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    raise SystemExit(code)


def _tell(line: str) -> None:
    click.echo(f"miniray: {line}", err=True)
