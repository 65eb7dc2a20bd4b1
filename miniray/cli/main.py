"""The `miniray` command: its subcommands, and how failures are shown.

Each failure is one line on stderr and a non-zero exit code. What larger commands do is in modules
of their own.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import click

from miniray.cli.options import Services
from miniray.common.config import config
from miniray.common.names import printable
from miniray.engines import refuse_on_ray
from miniray.version import VERSION


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
    click.echo(f"The token and its certificate are in {folder}. Anyone who can read them can join.")


@click.command()
def engines() -> None:
    """Show what differs when Ray is the engine."""
    from miniray.engines.capabilities import table

    click.echo(table())


def describe(error: BaseException) -> str:
    """Return an error as one line for a person."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror + (f": {error.filename}" if error.filename else "")
    return printable(" ".join(text.split())) or type(error).__name__


#: What click suggests, which it puts into brackets.
_SUGGESTION = re.compile(r"\((Did you mean .*\?)\)$")
#: What click raises from 8.2 on for a group without a command, with the help as its text.
_HELP = getattr(click.exceptions, "NoArgsIsHelpError", ())


class _UsageFailure(click.ClickException):
    exit_code = 2


#: The module and the function of each command; only those of the one that is called are imported.
_COMMANDS = {
    "dashboard": "look.dashboard",
    "debug": "debug.debug",
    "drain": "stop.drain",
    "engines": "main.engines",
    "get": "state.get",
    "job": "job.job",
    "k8s": "run.k8s",
    "list": "state.list_",
    "logs": "logs.logs_",
    "memory": "memory.memory",
    "metrics": "look.metrics",
    "profile": "look.profile",
    "run": "run.run",
    "slurm": "run.slurm",
    "ssh": "run.ssh",
    "stack": "look.stack",
    "start": "start.start",
    "status": "status.status",
    "stop": "stop.stop",
    "summary": "state.summary_",
    "timeline": "look.timeline",
    "token": "main.token",
    "why": "look.why",
}

_LAUNCHERS = "`miniray ssh`, `slurm script` and `k8s manifest` start clusters on several hosts"
#: Commands of Ray that are not here, and what to do instead.
_OF_RAY = {
    **dict.fromkeys(("attach", "down", "exec", "rsync-down", "rsync-up", "up"), _LAUNCHERS),
    "drain-node": "use `miniray drain`",
    "health-check": "use `miniray status`",
    "kill-actor": "call miniray.kill(miniray.get_actor(NAME))",
    "submit": "use `miniray job submit`",
    "symmetric-run": "use `miniray run`",
}


class _OneLineGroup(click.Group):
    """Turns the errors that users cause or meet into one line; others keep their traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _UsageFailure(describe_usage(error)) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OF_RAY:
            told = f"miniray has no command '{cmd_name}': {_OF_RAY[cmd_name]}."
            raise click.UsageError(told, ctx)
        if cmd_name not in _COMMANDS:
            return None
        module, _, function = _COMMANDS[cmd_name].partition(".")
        found: click.Command = getattr(importlib.import_module(f"miniray.cli.{module}"), function)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Do as click does, but with whole sentences."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(1000)) for name, each in commands if each]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        from miniray.exceptions import MinirayError
        from miniray.system.boot_options import BootError

        try:
            return super().invoke(ctx)
        except _HELP:
            raise
        except click.UsageError as error:
            raise _UsageFailure(describe_usage(error)) from None
        except BrokenPipeError:
            raise  # who reads the output has enough of it, as `head` has; click ends without a word
        except (BootError, MinirayError, OSError) as error:
            raise click.ClickException(describe(error)) from error


def describe_usage(error: click.UsageError) -> str:
    """Return a usage error as one line, with where to find help."""
    path = error.ctx.command_path if error.ctx else "miniray"
    text = error.format_message().rstrip()
    text = _SUGGESTION.sub(r"\1", text)
    stop = "" if text.endswith((".", "?")) else "."
    return printable(" ".join(f"{text}{stop} See '{path} --help'.".split()))


@click.group(
    cls=_OneLineGroup,
    commands=dict.fromkeys(_COMMANDS),  # `get_command` finds them
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(VERSION, message="miniray %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Start, stop and look at miniray clusters."""
    ctx.ensure_object(Services)
    try:
        config()
        if ctx.invoked_subcommand not in (None, "engines"):
            refuse_on_ray("commands")
    except ValueError as error:
        raise click.ClickException(f"{error}. Correct the variable, or unset it.") from None
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
