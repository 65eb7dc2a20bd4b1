"""`miniray run` and `miniray ssh`; what `miniray slurm` and `miniray k8s` print to submit one."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from miniray.cli.options import boot_arguments, node_options, wrong_use

if TYPE_CHECKING:
    from collections.abc import Callable

_REST: dict[str, Any] = {"nargs": -1, "required": True, "type": click.UNPROCESSED}
_SETTINGS = {"allow_interspersed_args": False}
_AT_LEAST_ONE = click.IntRange(1)
#: Numbers up to the longest wait of poll(2).
_SECONDS, _WHOLE_SECONDS = click.FloatRange(0, 2 * 10**6), click.IntRange(0, 2 * 10**6)
_LIMITS = (
    click.option("--strict", is_flag=True, help="End the run when a host is lost."),
    click.option(
        "--grace",
        type=_SECONDS,
        default=30.0,
        show_default=True,
        help="Seconds that the program may take to end after SIGTERM; the nodes hold for as long.",
    ),
    click.option(
        "--wait",
        type=_SECONDS,
        default=300.0,
        show_default=True,
        help="Seconds to wait for all hosts.",
    ),
)


def _limits(command: Any) -> Any:
    """Give a command the options that all ways to start a run have."""
    for option in _LIMITS:
        command = option(command)
    return command


@click.command(context_settings=_SETTINGS)
@_limits
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
@click.option("--index", help="Number of this host, from 0, where no scheduler sets it.")
@click.option("--nodes", help="Number of hosts, where no scheduler sets it.")
@click.option("--head", metavar="HOST:PORT", help="Where the first host is; with --authority.")
@click.option("--host", help="Address to listen on.  [default: all of this host's]")
@node_options
@click.argument("command", **_REST)
def run(
    *,
    command: tuple[str, ...],
    index: str | None,
    nodes: str | None,
    head: str | None,
    **given: Any,
) -> None:
    """Run COMMAND on a cluster of all hosts that start this.

    \b
    miniray run -- python train.py          # on this machine alone
    srun miniray run -- python train.py     # on all nodes of a Slurm allocation
    mpirun -N 1 miniray run -- python train.py

    The first host starts the cluster, waits for the others, runs COMMAND with MINIRAY_ADDRESS set,
    ends the cluster and exits with COMMAND's exit code. The others join, and exit with 0 when the
    cluster ends. Slurm, Open MPI, MPICH, SkyPilot, LeaderWorkerSet and Kubernetes number the hosts;
    otherwise --index and --nodes do, or MINIRAY_INDEX and MINIRAY_NODES.
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch import allocation
    from miniray.launch.events import run_below_init
    from miniray.launch.lone_host import RunOptions
    from miniray.launch.run import run as run_part

    by_hand = {
        allocation.RANK_VARIABLE: index,
        allocation.SIZE_VARIABLE: nodes,
        allocation.HEAD_VARIABLE: head,
    }
    environ = {**os.environ, **{name: each for name, each in by_hand.items() if each is not None}}
    own = {name: given.pop(name) for name in ("wait", "grace", "strict", "rendezvous", "authority")}
    with wrong_use():
        options = RunOptions(command, node=boot_arguments(given), **own)
        place = allocation.find_allocation(environ)
        _exit_as(lambda: run_below_init(lambda: run_part(options, place, _tell)))


def _tell(line: str) -> None:
    click.echo(f"miniray: {line}", err=True)


def _exit_as(run_program: Callable[[], int]) -> NoReturn:
    """Exit with the code of a run, or that of whatever ended its program early."""
    from miniray.launch.events import StoppedError
    from miniray.launch.program import ProgramError

    try:
        code = run_program()
    except ProgramError as error:
        click.echo(f"Error: {error}", err=True)
        code = error.code
    except StoppedError as error:
        _tell(f"The run was {error}.")
        code = 128 + error.number
    raise SystemExit(code)


class _UntilDashes(click.Command):
    """A command whose arguments after -- are a program's, as ``ctx.meta["program"]``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take them off first: click would mix them with the names of hosts."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["program"] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


@click.command(cls=_UntilDashes, options_metavar="[OPTIONS]")
@click.option("--hosts", "file", type=click.File(), help="Read names of hosts from a file, too.")
@click.option(
    "--python", default=sys.executable, help="Python on the hosts.  [default: the path of this one]"
)
@_limits
@click.option(
    "--working-dir",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="Run COMMAND and its workers in a copy of this folder, which is gone afterwards.",
)
@click.option(
    "--here",
    is_flag=True,
    help="Run COMMAND on this machine, from which the hosts have to be reached by network too.",
)
@click.argument("names", nargs=-1, metavar="HOST... -- COMMAND...")
@click.pass_context
def ssh(
    ctx: click.Context,
    names: tuple[str, ...],
    file: TextIO | None,
    python: str,
    wait: float,
    grace: float,
    *,
    strict: bool,
    working_dir: str | None,
    here: bool,
) -> None:
    """Run COMMAND on a cluster of hosts, by your own ssh; the first one has the program.

    \b
    miniray ssh host1 user@host2 host3 -- python train.py

    The hosts need miniray at the same path as here, and the program, unless --working-dir brings
    it. Nothing is installed, nothing is left there, and all ends when the connection does. The
    program's output and exit code are those of this command; only with --here it has an input.
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch.ssh import SshRun, run_over_ssh

    hosts = (*names, *(file.read().split() if file is not None else ()))
    program: tuple[str, ...] = ctx.meta["program"]
    if not hosts or not program:
        raise click.UsageError("Give hosts, -- and a program: miniray ssh HOST -- python train.py")
    options = ("--wait", f"{wait:g}", "--grace", f"{grace:g}", *(["--strict"] if strict else []))
    run = SshRun(hosts, program, python, options, working_dir, here, grace)
    _exit_as(lambda: run_over_ssh(run, lambda line: click.echo(line, err=True)))


@click.group()
def slurm() -> None:
    """Print batch scripts for Slurm."""


@slurm.command(context_settings=_SETTINGS)
@click.option("-N", "--nodes", type=_AT_LEAST_ONE, required=True, help="Nodes of the job.")
@click.option(
    "--cpus-per-task", "cpus", type=_AT_LEAST_ONE, help="CPUs of each node.  [default: all]"
)
@click.option("--gpus-per-node", "gpus", type=click.IntRange(0), help="GPUs of each node.")
@click.option("--time", help="Time limit, as Slurm takes it: 8:00:00.")
@click.option(
    "--grace",
    type=_WHOLE_SECONDS,
    default=110,
    help="Seconds that the program gets to save its state before the time limit.",
)
@click.argument("command", **_REST)
def script(**given: Any) -> None:
    """Print a batch script that runs COMMAND with `miniray run` on all nodes of a job.

    \b
    miniray slurm script -N 4 --gpus-per-node 8 --time 8:00:00 -- python train.py > job.sbatch
    sbatch --partition=long job.sbatch
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch.slurm import script as text_of

    with wrong_use():
        click.echo(text_of(**given), nl=False)


@click.group()
def k8s() -> None:
    """Print manifests for Kubernetes."""


@k8s.command()
@click.argument("name")
@click.option("--image", required=True, help="With Python, miniray and the program in it.")
@click.option(
    "--secret",
    required=True,
    metavar="NAME",
    help="The Secret of the run: `miniray token new FOLDER`, then `kubectl create secret generic "
    "NAME --from-file FOLDER`.",
)
@click.option("--nodes", type=_AT_LEAST_ONE, default=1, help="Pods of the Job.")
@click.option("--cpus", help="CPUs of each pod.")
@click.option("--memory", help="Memory of each pod: 32Gi.")
@click.option("--gpus", type=click.IntRange(0), help="GPUs of each pod (nvidia.com/gpu).")
@click.option(
    "--wait", type=_WHOLE_SECONDS, default=300, help="Seconds for which pods wait for each other."
)
@click.option(
    "--grace", type=_WHOLE_SECONDS, default=30, help="Seconds to save state after SIGTERM."
)
@click.option("--kueue", "queue", metavar="QUEUE", help="Let Kueue start the Job from this queue.")
@click.option(
    "--kind",
    type=click.Choice(["job", "jobset", "lws"]),
    default="job",
    show_default=True,
    help="A Job with its Service, a JobSet, or a LeaderWorkerSet, which starts again what has "
    "ended.",
)
@click.argument("command", **_REST)
def manifest(**given: Any) -> None:
    """Print what runs COMMAND with `miniray run` in all pods of a Job of Kubernetes.

    \b
    miniray k8s manifest train --image app:1 --secret train --nodes 4 -- python train.py > job.yaml
    kubectl apply -f job.yaml
    kubectl logs -f job/train
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch.kubernetes import KubernetesJob
    from miniray.launch.kubernetes import manifest as text_of

    with wrong_use():
        click.echo(text_of(KubernetesJob(**given)), nl=False)
