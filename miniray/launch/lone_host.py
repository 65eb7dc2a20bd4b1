"""The part of a host that is alone: a cluster of this machine, and the program beside it.

Hosts with others add to it (``several_hosts.py``), and this leaves imports that only they need to
it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

from miniray.client.cluster_choice import node_of
from miniray.client.init_options import ADDRESS_VARIABLE
from miniray.exceptions import MinirayError
from miniray.launch.program import Program, ProgramError
from miniray.system.boot_options import BootError, BootOptions
from miniray.system.launch import StartingNode
from miniray.system.session import RUN_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.client.cluster_choice import LocalNode
    from miniray.launch.allocation import HostAllocation
    from miniray.launch.events import Events

#: The label that shows the first host which hosts have joined.
RANK_LABEL = "rank"
#: The rendezvous by standard input and output, where others name a folder.
STREAMS = "-"


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options of `miniray run`. Times are seconds."""

    command: tuple[str, ...]
    #: For which the hosts wait for each other.
    wait: float = 300.0
    #: From SIGTERM on, until what still runs is ended.
    grace: float = 30.0
    #: End the run when a host is lost.
    strict: bool = False
    #: Folder where the hosts meet, and folder of a token made ahead.
    rendezvous: str | None = None
    authority: str | None = None
    #: Further arguments of ``BootOptions``.
    node: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def piped(self) -> bool:
        """Whether standard input and output are the rendezvous."""
        return self.rendezvous == STREAMS

    def __post_init__(self) -> None:
        if RANK_LABEL in self.node.get("labels", {}):
            raise ValueError(f"The label {RANK_LABEL!r} is set by miniray run: choose another.")


@dataclasses.dataclass(eq=False)
class HostPart:
    """What the parts of all hosts have."""

    _options: RunOptions
    _allocation: HostAllocation
    #: Signals and other events.
    _events: Events
    #: Shows a line to the user.
    _tell: Callable[[str], object]

    def _of_node(self, **further: Any) -> dict[str, Any]:
        """Return the arguments of ``BootOptions`` for the node of this host."""
        given = self._options.node
        labels = {**given.get("labels", {}), RANK_LABEL: str(self._allocation.rank)}
        return {**given, **further, "labels": labels, "parent_pid": os.getpid()}


class LoneHost(HostPart):
    """Starts the program beside its cluster, which needs no network: ``init()`` waits for it."""

    _failed = False

    def run(self) -> int:
        """Return the program's exit code."""
        self._require_program()
        starting = StartingNode(
            BootOptions(**self._of_node(embedded=True)), address_variable=ADDRESS_VARIABLE
        )
        node: LocalNode | None = None
        try:
            self._events.collect()
            program = self._start_program(starting.address, starting.session_dir)

            def answered() -> None:
                nonlocal node
                self._events.forget(starting.answers)
                try:
                    node = node_of(starting.ready())
                    self._watch(node)
                except (BootError, MinirayError, OSError) as error:
                    self._give_up(str(error))

            self._events.when_readable(starting.answers, answered)
            return self._until_end(program)
        finally:
            if node is not None:
                node.end()
            else:
                starting.give_up()

    def _require_program(self) -> None:
        if shutil.which(self._options.command[0]) is None:
            raise ProgramError(f"There is no program {self._options.command[0]!r}.")

    def _start_program(self, address: str, session_dir: str) -> Program:
        variables = {ADDRESS_VARIABLE: address, RUN_VARIABLE: session_dir}
        return Program(self._options.command, variables, stdin=not self._options.piped)

    def _watch(self, node: LocalNode) -> None:
        """End the program if its node ends."""
        assert node.process is not None
        why = f"The node of this host has ended. {logs_of(node)}"
        self._events.when_ended(node.process.pid, lambda: self._give_up(why))

    def _until_end(self, program: Program, check: Callable[[], object] | None = None) -> int:
        """Wait for the program's end; return its exit code."""
        code = program.until_end(self._events, self._options.grace, check)
        return code or int(self._failed)

    def _give_up(self, reason: str) -> None:
        """End the program, which has the grace for that."""
        self._tell(reason)
        self._failed = True
        self._events.note(signal.SIGTERM)


def logs_of(node: LocalNode) -> str:
    """Say where the logs of a node are."""
    return f"Its logs are in {node.session_dir}/logs."
