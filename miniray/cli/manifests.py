"""`miniray slurm script` and `miniray k8s manifest`: they print what the user submits."""

from __future__ import annotations

from typing import Any

import click

_REST: dict[str, Any] = {"nargs": -1, "required": True, "type": click.UNPROCESSED}
_SETTINGS = {"allow_interspersed_args": False}


@click.group()
def slurm() -> None:
    """Print batch scripts for Slurm."""


@slurm.command(context_settings=_SETTINGS)
@click.option("-N", "--nodes", type=int, required=True, help="Nodes of the job.")
@click.option("--cpus-per-task", "cpus", type=int, help="CPUs of each node.  [default: all]")
@click.option("--gpus-per-node", "gpus", type=int, help="GPUs of each node.")
@click.option("--time", help="Time limit, as Slurm takes it: 8:00:00.")
@click.option(
    "--grace",
    type=int,
    default=110,
    help="Seconds that the program gets to save its state before the time limit.",
)
@click.option(
    "--sbatch", "options", multiple=True, help="A further option: --sbatch=--partition=long."
)
@click.argument("command", **_REST)
def script(**given: Any) -> None:
    """Print a batch script that runs COMMAND with `miniray run` on all nodes of a job.

    \b
    miniray slurm script -N 4 --gpus-per-node 8 --time 8:00:00 -- python train.py > job.sbatch
    sbatch job.sbatch
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch.slurm import SlurmJob
    from miniray.launch.slurm import script as text_of

    try:
        click.echo(text_of(SlurmJob(**given)), nl=False)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


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
@click.option("--nodes", type=int, default=1, help="Pods of the Job.")
@click.option("--cpus", help="CPUs of each pod.")
@click.option("--memory", help="Memory of each pod: 32Gi.")
@click.option("--gpus", type=int, help="GPUs of each pod (nvidia.com/gpu).")
@click.option("--wait", type=int, default=300, help="Seconds for which pods wait for each other.")
@click.option("--grace", type=int, default=30, help="Seconds to save state after SIGTERM.")
@click.option("--kueue", "queue", metavar="QUEUE", help="Let Kueue start the Job from this queue.")
@click.argument("command", **_REST)
def manifest(**given: Any) -> None:
    """Print a Job of Kubernetes that runs COMMAND with `miniray run` in all of its pods.

    \b
    miniray k8s manifest train --image app:1 --secret train --nodes 4 -- python train.py > job.yaml
    kubectl apply -f job.yaml
    kubectl logs -f job/train
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch.kubernetes import KubernetesJob
    from miniray.launch.kubernetes import manifest as text_of

    try:
        click.echo(text_of(KubernetesJob(**given)), nl=False)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
