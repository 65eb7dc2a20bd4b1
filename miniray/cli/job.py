"""`miniray job`: programs that are submitted to a cluster and run there by themselves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from miniray.cli.parsing import JsonObject, Labels, ParamType, Size, cluster_options
from miniray.cli.status import format_duration
from miniray.cli.tables import ID_LENGTH, Section, draw
from miniray.engines import ENGINE_VARIABLE, engine_of
from miniray.job_submission import STOP_GRACE, job_details

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from miniray.cli.services import Services
    from miniray.client.command_connection import JobConnection

#: Characters of a command that a listing shows.
_MAX_COMMAND = 60


class _Pairs(ParamType):
    """``NAME=VALUE``."""

    name = "NAME=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Take the text apart."""
        name, equals, text = value.partition("=")
        if not equals or not name:
            self.fail(f"{value!r} is no NAME=VALUE.", param, ctx)
        return name, text


class _Duration(ParamType):
    """Seconds: ``90``, ``90s``, ``30m``, ``8h`` or ``2d``."""

    name = "TIME"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse the text."""
        match = re.fullmatch(r"(?P<number>\d+(\.\d+)?)(?P<unit>[smhd]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no time. Write seconds, or 90s, 30m, 8h or 2d.", param, ctx)
        seconds = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match["unit"]]
        return float(match["number"]) * seconds


class _ClusterGone(click.ClickException):
    """A log is cut: the job may have ended in any way."""

    exit_code = 3


class _Interrupted(click.ClickException):
    """Ctrl-C has ended the command that followed a job."""

    exit_code = 128 + signal.SIGINT


@click.group()
def job() -> None:
    """Submit programs to a cluster, and look at them.

    They run there whether or not the terminal stays.
    """
    if engine_of(None, None) == "ray":
        raise click.UsageError(
            f"{ENGINE_VARIABLE} is ray, and Ray submits its own jobs: `ray job submit --address "
            f"http://HOST:8265 -- env {ENGINE_VARIABLE}=ray python train.py`"
        )


@job.command(context_settings={"ignore_unknown_options": True})
@cluster_options
@click.option("--id", "--submission-id", "name", help="Id of the job.  [default: one is made]")
@click.option("--working-dir", help="Folder or .zip file that the job runs in a copy of.")
@click.option(
    "--runtime-env-json", type=JsonObject('{"pip": ["emoji"]}'), help="Its runtime environment."
)
@click.option("--env", multiple=True, type=_Pairs(), help="Environment variable of the job.")
@click.option(
    "--env-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with a NAME=VALUE in each line.",
)
@click.option(
    "--secret",
    multiple=True,
    metavar="NAME",
    help="Variable of the job whose value is not shown; if no other option has it, it is that of "
    "this process.",
)
@click.option("--metadata", multiple=True, type=_Pairs(), help="Shown with the job.")
@click.option("--num-cpus", "--entrypoint-num-cpus", type=float, help="CPUs for the command.")
@click.option("--num-gpus", "--entrypoint-num-gpus", type=float, help="GPUs for the command.")
@click.option("--memory", "--entrypoint-memory", type=Size(), help="Memory for the command.")
@click.option(
    "--resources", "--entrypoint-resources", type=JsonObject(), help="What else it holds."
)
@click.option("--label", type=Labels(), help="Conditions on the labels of its node.")
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Runs after an exit code that is not 0, and as many after lost nodes.",
)
@click.option("--max-time", type=_Duration(), default=0.0, help="Such as 90s, 30m or 8h.")
@click.option("--shell", is_flag=True, help="Run the one argument COMMAND with /bin/sh.")
@click.option("--no-wait", is_flag=True, help="Return when the cluster has the job.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.pass_obj
def submit(services: Services, /, command: tuple[str, ...], **options: Any) -> None:
    """Run COMMAND in the cluster; show what it prints, and exit with its code.

    Without resources or a label it runs on the head's node. Write -- before COMMAND.
    """
    with _jobs(services, options["address"], options["token_file"]) as jobs:
        name = _submit(jobs, command, options)
        if options["no_wait"]:
            click.echo(name)
            return
        click.echo(f"Job {name} is submitted.", err=True)
        _follow(jobs, name)


def _submit(jobs: JobConnection, command: tuple[str, ...], options: Mapping[str, Any]) -> str:
    if options["shell"] and len(command) != 1:
        raise click.UsageError("--shell takes COMMAND as one argument; put it into quotes.")
    environment = dict(options["runtime_env_json"] or {})
    if options["working_dir"] is not None:
        environment["working_dir"] = options["working_dir"]
    variables = {**_variables(options["env_file"]), **dict(options["env"])}
    for name in options["secret"]:
        if name in variables or name in environment.get("env_vars", ()):
            continue
        if name not in os.environ:
            raise click.UsageError(
                f"--secret {name}: no variable of that name is set here, in --env, in --env-file "
                "or in --runtime-env-json."
            )
        variables[name] = os.environ[name]
    if variables:
        environment["env_vars"] = {**environment.get("env_vars", {}), **variables}
    amounts = {name: options[f"num_{name.lower()}s"] for name in ("CPU", "GPU")}
    amounts["memory"] = options["memory"]
    held = {name: amount for name, amount in amounts.items() if amount is not None}
    return jobs.submit(
        ["/bin/sh", "-c", command[0]] if options["shell"] else command,
        submission_id=options["name"],
        runtime_env=environment,
        metadata=dict(options["metadata"]),
        resources={**(options["resources"] or {}), **held},
        label_selector=options["label"],
        max_retries=options["retries"],
        max_time=options["max_time"],
        secrets=options["secret"],
    )


def _variables(file: Path | None) -> dict[str, str]:
    """Read a file of variables; empty lines and those that begin with # say nothing."""
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines() if file is not None else (), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise click.UsageError(f"Line {number} of {file} is no NAME=VALUE: {text!r}.")
        found[name.strip()] = value
    return found


@job.command(name="list")
@cluster_options
@click.option("--all", "everything", is_flag=True, help="Those that have ended too.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_obj
def list_jobs(
    services: Services,
    address: str | None,
    token_file: str | None,
    *,
    everything: bool,
    as_json: bool,
) -> None:
    """List the submitted jobs that wait or run."""
    with _jobs(services, address, token_file) as jobs:
        told = jobs.ask("job_infos")
    found = [each for each in told if everything or each["end_time"] is None]
    if as_json:
        click.echo(json.dumps([_plain(each) for each in found], indent=2))
        return
    now = time.time()
    rows = [
        (
            each["submission_id"],
            each["status"],
            format_duration((each["end_time"] or now) - (each["start_time"] or each["submitted"])),
            each["driver_node_id"][:ID_LENGTH] or "-",
            _shortened(each["entrypoint"]),
            each["message"] or "-",
        )
        for each in found
    ]
    ended = len(told) - len(found)
    line = f"{len(found)} jobs" + (f"; {ended} have ended (--all shows them)" if ended else "")
    draw(line, [Section("Jobs", ("Job", "State", "For", "Node", "Command", "Why"), rows)])


@job.command()
@cluster_options
@click.argument("name", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.pass_obj
def status(
    services: Services, name: str, address: str | None, token_file: str | None, *, as_json: bool
) -> None:
    """Show how far JOB is, and why it waits or has failed."""
    with _jobs(services, address, token_file) as jobs:
        told = jobs.ask("job_info", name)
    if as_json:
        click.echo(json.dumps(_plain(told), indent=2))
        return
    code = told["driver_exit_code"]
    click.echo(f"{name}: {told['status']}{f', exit code {code}' if code is not None else ''}")
    if told["message"]:
        click.echo(told["message"])


@job.command()
@cluster_options
@click.argument("name", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Until it has ended; exit with its code.")
@click.option("--since", type=_Duration(), help="Only what it has printed in the last 10m, say.")
@click.pass_obj
def logs(
    services: Services,
    name: str,
    address: str | None,
    token_file: str | None,
    *,
    follow: bool,
    since: float | None,
) -> None:
    """Print what JOB has printed.

    With --follow the exit code is that of the job, 128 and a signal's number if a signal has ended
    it, or 3 if the cluster is gone.
    """
    with _jobs(services, address, token_file) as jobs:
        if follow:
            _follow(jobs, name, since)
        else:
            for data in jobs.log(name, since):
                _write(data)


@job.command()
@cluster_options
@click.argument("name", metavar="JOB")
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=STOP_GRACE,
    show_default=True,
    help="Seconds that it has to end by itself.",
)
@click.option("--no-wait", is_flag=True, help="Return at once.")
@click.pass_obj
def stop(
    services: Services,
    name: str,
    address: str | None,
    token_file: str | None,
    grace: float,
    *,
    no_wait: bool,
) -> None:
    """End JOB: SIGTERM to its command, then SIGKILL to all that it has started.

    Detached actors that it has made go on.
    """
    with _jobs(services, address, token_file) as jobs:
        if not jobs.stop(name, grace):
            click.echo(f"Job {name} had ended: {jobs.ask('job_info', name)['status']}.")
            return
        if not no_wait:
            for _ in jobs.follow(name):
                pass
        told = jobs.ask("job_info", name)
        click.echo(f"Job {name} {'is being ended' if no_wait else 'is ' + told['status']}.")
        if told["detached_actors"]:
            click.echo(f"Its detached actors go on: {', '.join(told['detached_actors'])}.")


@job.command()
@cluster_options
@click.argument("name", metavar="JOB")
@click.pass_obj
def delete(services: Services, name: str, address: str | None, token_file: str | None) -> None:
    """Forget JOB, which has ended, and remove its log."""
    with _jobs(services, address, token_file) as jobs:
        jobs.delete(name)
    click.echo(f"Job {name} is deleted.")


@contextlib.contextmanager
def _jobs(
    services: Services, address: str | None, token_file: str | None
) -> Iterator[JobConnection]:
    """Connect for one command; what the user has written wrong is an error of usage."""
    jobs = services.jobs(address, token_file)
    try:
        yield jobs
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    finally:
        jobs.close()


def _follow(jobs: JobConnection, name: str, since: float | None = None) -> None:
    """Show what a job prints until it has ended, then exit with its code."""
    try:
        for data in jobs.follow(name, since):
            _write(data)
        told = jobs.ask("job_info", name)
    except BrokenPipeError:
        raise
    except ConnectionError as error:
        raise _ClusterGone(str(error)) from None
    except KeyboardInterrupt:
        text = f"Job {name} goes on. Look at it: miniray job logs -f {name}"
        raise _Interrupted(text) from None
    code = told["driver_exit_code"]
    if told["status"] == "SUCCEEDED":
        return
    click.echo(f"Job {name}: {told['status']}. {told['message']}", err=True)
    if code is None:
        sys.exit(1)
    sys.exit(128 - code if code < 0 else code)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _plain(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the head tells of a job with Ray's names, as JSON has it."""
    import dataclasses

    return dataclasses.asdict(job_details(told))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_COMMAND else f"{line[: _MAX_COMMAND - 3]}..."
