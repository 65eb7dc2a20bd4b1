"""`miniray job`: programs that are submitted to a cluster and run there by themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from miniray.cli.options import (
    DURATION,
    JSON,
    LABELS,
    PAIR,
    SIZE,
    Parsed,
    finds_cluster,
    json_object,
    json_option,
    pair,
    print_json,
    wrong_use,
)
from miniray.cli.status import format_duration
from miniray.cli.tables import ID_LENGTH, Section, draw
from miniray.client.command_connection import JobConnection
from miniray.job_submission import STOP_GRACE, JobSubmissionClient, job_details
from miniray.runtime_env.validate import check_env_vars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from miniray.client.command_connection import CommandConnection

#: Characters of a command that a listing shows.
_MAX_COMMAND = 60
#: An environment, for help and errors.
_ENVIRONMENT = '{"pip": ["emoji"]}'
#: Exit codes of following a log: after a lost cluster, and after Ctrl-C.
_CLUSTER_GONE, _INTERRUPTED = 3, 128 + signal.SIGINT


@click.group()
def job() -> None:
    """Submit programs to a cluster, and look at them.

    They run there whether or not the terminal stays.
    """


def _asks_jobs(function: Callable[..., Any]) -> Any:
    """Do as ``finds_cluster``, and give the function a connection for jobs.

    Show errors in the user's arguments as errors of usage.
    """

    def run(connect: Callable[[], CommandConnection], /, **options: Any) -> None:
        with contextlib.closing(JobConnection(connect)) as jobs, wrong_use(TypeError):
            function(jobs, **options)

    return finds_cluster(functools.update_wrapper(run, function))


@job.command(context_settings={"ignore_unknown_options": True})
@click.option("--submission-id", "--id", help="Id of the job.  [default: one is made]")
@click.option("--working-dir", help="Folder or .zip file that the job runs in a copy of.")
@click.option(
    "--runtime-env-json",
    type=Parsed("JSON", lambda text: json_object(text, _ENVIRONMENT)),
    help=f"Its environment: '{_ENVIRONMENT}'.",
)
@click.option("--env", multiple=True, type=PAIR, help="Environment variable of the job.")
@click.option(
    "--env-file",
    type=click.File(),
    help="File with a NAME=VALUE in each line; empty ones and those with # say nothing.",
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME",
    help="Variable whose value is never shown; taken from this process if no other option sets it.",
)
@click.option("--metadata", multiple=True, type=PAIR, help="Shown with the job.")
@click.option("--entrypoint-num-cpus", "--num-cpus", type=float, help="CPUs for the command.")
@click.option("--entrypoint-num-gpus", "--num-gpus", type=float, help="GPUs for the command.")
@click.option("--entrypoint-memory", "--memory", type=SIZE, help="Memory for the command.")
@click.option("--entrypoint-resources", "--resources", type=JSON, help="What else it holds.")
@click.option(
    "--label",
    "entrypoint_label_selector",
    type=LABELS,
    help="Conditions on the labels of its node.",
)
@click.option(
    "--retries",
    "max_retries",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Runs after an exit code that is not 0, and as many after lost nodes.",
)
@click.option("--max-time", type=DURATION, default=0.0, help="Such as 90s, 30m or 8h.")
@click.option("--shell", is_flag=True, help="Run the one argument COMMAND with /bin/sh.")
@click.option("--no-wait", is_flag=True, help="Return when the cluster has the job.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@_asks_jobs
def submit(
    jobs: JobConnection, command: tuple[str, ...], *, shell: bool, no_wait: bool, **asked: Any
) -> None:
    """Run COMMAND in the cluster; show what it prints, and exit with its code.

    Without resources or a label it runs on the head's node. Write -- before COMMAND.
    """
    if shell and len(command) != 1:
        raise click.UsageError("--shell takes COMMAND as one argument; put it into quotes.")
    environment = _take_environment(asked)
    name = JobSubmissionClient.over(jobs).submit_job(
        entrypoint=command[0] if shell else command,
        runtime_env=environment,
        metadata=dict(asked.pop("metadata")),
        **asked,
    )
    if no_wait:
        click.echo(name)
        return
    click.echo(f"Job {name} is submitted.", err=True)
    _follow(jobs, name)


def _take_environment(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the runtime environment of a job, made of the options for it, which it takes out."""
    environment = dict(asked.pop("runtime_env_json") or {})
    variables = check_env_vars(environment.get("env_vars") or {})
    variables.update([*_variables_in(asked.pop("env_file") or ()), *asked.pop("env")])
    for name in asked["secrets"]:
        if name in os.environ:
            variables.setdefault(name, os.environ[name])
        if name not in variables:
            raise click.UsageError(
                f"--secret {name}: no variable of that name is set here, in --env, in --env-file "
                "or in --runtime-env-json."
            )
    own = {"working_dir": asked.pop("working_dir"), "env_vars": variables or None}
    return {**environment, **{name: value for name, value in own.items() if value is not None}}


def _variables_in(file: Iterable[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(map(str.strip, file), 1):
        if line and not line.startswith("#"):
            try:
                yield pair(line)
            except ValueError:  # the line is not shown: it may be of a secret
                raise click.UsageError(f"Line {number} of --env-file is no NAME=VALUE.") from None


@job.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Those that have ended too.")
@json_option
@_asks_jobs
def list_jobs(jobs: JobConnection, *, everything: bool, as_json: bool) -> None:
    """List the submitted jobs that wait or run."""
    told = jobs.ask("state", "submissions")
    found = [each for each in told if everything or each["end_time"] is None]
    if as_json:
        print_json([_plain(each) for each in found])
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
@click.argument("name", metavar="JOB")
@json_option
@_asks_jobs
def status(jobs: JobConnection, name: str, *, as_json: bool) -> None:
    """Show how far JOB is, and why it waits or has failed."""
    told = jobs.ask("job_info", name)
    if as_json:
        print_json(_plain(told))
        return
    code = told["driver_exit_code"]
    click.echo(f"{name}: {told['status']}{f', exit code {code}' if code is not None else ''}")
    if told["message"]:
        click.echo(told["message"])


@job.command()
@click.argument("name", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Until it has ended; exit with its code.")
@click.option("--since", type=DURATION, help="Only what it has printed in the last 10m, say.")
@_asks_jobs
def logs(jobs: JobConnection, name: str, *, follow: bool, since: float | None) -> None:
    """Print what JOB has printed.

    With --follow the exit code is that of the job, 128 and a signal's number if a signal has ended
    it, or 3 if the cluster is gone.
    """
    if follow:
        _follow(jobs, name, since)
    else:
        for data in jobs.log(name, since):
            _write(data)


@job.command()
@click.argument("name", metavar="JOB")
@click.option(
    "--grace",
    type=click.FloatRange(0),
    default=STOP_GRACE,
    show_default=True,
    help="Seconds that it has to end by itself.",
)
@click.option("--no-wait", is_flag=True, help="Return at once.")
@_asks_jobs
def stop(jobs: JobConnection, name: str, grace: float, *, no_wait: bool) -> None:
    """End JOB: SIGTERM to its command, then SIGKILL to all that it has started.

    Detached actors that it has made go on.
    """
    if not jobs.ask("stop_job", name, grace):
        click.echo(f"Job {name} had ended: {jobs.ask('job_info', name)['status']}.")
        return
    if not no_wait:
        for _ in jobs.follow(name, since=0.0):
            pass
    told = jobs.ask("job_info", name)
    click.echo(f"Job {name} {'is being ended' if no_wait else 'is ' + told['status']}.")
    if told["detached_actors"]:
        click.echo(f"Its detached actors go on: {', '.join(told['detached_actors'])}.")


@job.command()
@click.argument("name", metavar="JOB")
@_asks_jobs
def delete(jobs: JobConnection, name: str) -> None:
    """Forget JOB, which has ended, and remove its log."""
    jobs.ask("delete_job", name)
    click.echo(f"Job {name} is deleted.")


def _follow(jobs: JobConnection, name: str, since: float | None = None) -> None:
    """Show what a job prints until it has ended, then exit with its code."""
    try:
        for data in jobs.follow(name, since):
            _write(data)
        told = jobs.ask("job_info", name)
    except BrokenPipeError:
        raise
    except ConnectionError as error:
        _exit(_CLUSTER_GONE, str(error))
    except KeyboardInterrupt:
        _exit(_INTERRUPTED, f"Job {name} goes on. Look at it: miniray job logs -f {name}")
    if told["status"] == "SUCCEEDED":
        return
    click.echo(f"Job {name}: {told['status']}. {told['message']}", err=True)
    code = told["driver_exit_code"] or 1  # one that was ended may have exited with 0 then
    sys.exit(128 - code if code < 0 else code)


def _exit(code: int, text: str) -> NoReturn:
    click.echo(f"Error: {text}", err=True)
    sys.exit(code)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _plain(told: Mapping[str, Any]) -> dict[str, Any]:
    """Return the head's description of a job with Ray's names, as JSON has it."""
    return dataclasses.asdict(job_details(told))


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_COMMAND else f"{line[: _MAX_COMMAND - 3]}..."
