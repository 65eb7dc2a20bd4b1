"""`miniray run`: this host's part of a run, which is on one host or on several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.launch.allocation import few_cpus
from miniray.launch.events import events
from miniray.launch.lone_host import LoneHost
from miniray.security.token import take_token
from miniray.system.machine import cpu_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.launch.allocation import HostAllocation
    from miniray.launch.lone_host import RunOptions
    from miniray.launch.several_hosts import OtherHost


def run(options: RunOptions, allocation: HostAllocation, tell: Callable[[str], object]) -> int:
    """Do this host's part of a run; return the exit code.

    Args:
        options: Of the command.
        allocation: Which host this is.
        tell: Shows a line to the user.

    Raises:
        ProgramError: The program cannot be started.
        StoppedError: A signal came before that.
        BootError, MinirayError, OSError, ValueError: The node cannot be started, or has failed, or
            other hosts have not joined the first one.
    """
    take_token()  # neither the node's workers nor the program may find one
    if allocation.local_rank > 0:
        tell(f"Process {allocation.local_rank} of this host has nothing to do: one is enough.")
        return 0
    warning = few_cpus(allocation, cpu_count())
    if warning:
        tell(f"Warning: {warning}")
    # By a pipe, the end of the connection is a signal too, and may have to end a wait to print.
    with events(last=not options.piped) as seen:
        return _part_of(options, allocation)(options, allocation, seen, tell).run()


def _part_of(options: RunOptions, allocation: HostAllocation) -> type[LoneHost] | type[OtherHost]:
    if allocation.size == 1 and not options.piped and options.node.get("host") is None:
        return LoneHost
    from miniray.launch.several_hosts import FirstHost, OtherHost  # a lone host starts faster

    return FirstHost if allocation.rank == 0 else OtherHost
