"""`miniray ssh`: `miniray run` on hosts that are reached by ssh."""

from __future__ import annotations

import sys
from pathlib import Path

import click


class _UntilDashes(click.Command):
    """A command whose arguments after -- are a program's, as ``ctx.meta["program"]``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take them off first: click would mix them with the names of hosts."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta["program"] = tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


@click.command(cls=_UntilDashes, options_metavar="[OPTIONS]")
@click.option(
    "--hosts", "file", metavar="FILE", help="Read names of hosts from a file, a line each."
)
@click.option(
    "--python", default=sys.executable, help="Python on the hosts.  [default: the path of this one]"
)
@click.option("--wait", type=float, default=300.0, help="Seconds to wait for all hosts.")
@click.option("--grace", type=float, default=30.0, help="Seconds that the program may take to end.")
@click.option("--strict", is_flag=True, help="End the run when a host is lost.")
@click.argument("names", nargs=-1, metavar="HOST... -- COMMAND...")
@click.pass_context
def ssh(
    ctx: click.Context,
    names: tuple[str, ...],
    file: str | None,
    python: str,
    wait: float,
    grace: float,
    *,
    strict: bool,
) -> None:
    """Run COMMAND on a cluster of hosts, by your own ssh; the first one has the program.

    \b
    miniray ssh host1 user@host2 host3 -- python train.py

    The hosts need miniray and the program at the same paths as here. Nothing is installed, nothing
    is left there, and all ends when the connection does. The program's output and exit code are
    those of this command; it has no input.
    """  # noqa: D301 - click leaves lines as they are after this character, not after its escape
    from miniray.launch.ssh import SshRun, run_over_ssh

    program: tuple[str, ...] = ctx.meta["program"]
    if not program:
        raise click.UsageError("Give the program after --: miniray ssh HOST -- python train.py")
    if file is not None:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        names = (*names, *(line.strip() for line in lines if line.strip()))
    options = ("--wait", f"{wait:g}", "--grace", f"{grace:g}", *(["--strict"] if strict else []))
    try:
        run = SshRun(names, program, python, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    raise SystemExit(run_over_ssh(run, lambda line: click.echo(line, err=True)))
