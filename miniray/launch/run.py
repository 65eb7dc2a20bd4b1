"""`miniray run`: what the first host of a run does, and what the others do."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.client.cluster_choice import node_of, start_node
from miniray.client.init_options import ADDRESS_VARIABLE
from miniray.common.host_port import join_host_port, parse_address
from miniray.exceptions import MinirayError
from miniray.launch import pipe
from miniray.launch.allocation import few_cpus
from miniray.launch.events import DEADLY, Events, StoppedError, events
from miniray.launch.program import Program, ProgramError
from miniray.launch.reach import HeadOffer, leading_to, own_addresses_v4, reach_head
from miniray.launch.rendezvous import (
    HostState,
    MeetingPlace,
    RunEndedError,
    describe_missing,
    meeting_place,
)
from miniray.security.token import read_token_file, take_token
from miniray.system.boot_options import BootError, BootOptions
from miniray.system.launch import StartingNode
from miniray.system.machine import address_for_others, cpu_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.client.cluster_choice import LocalNode
    from miniray.launch.allocation import HostAllocation

#: The label by which the first host knows which hosts have joined.
RANK_LABEL = "rank"
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - the other hosts have to reach it
#: Seconds for which the other hosts wait for a head that is lost: it comes back at once, or not.
_GRACE_VARIABLE, _HEAD_GRACE = "MINIRAY_HEAD_GRACE", "10"
#: Seconds between two looks at which hosts have joined, and at whether all still live.
_BETWEEN_LOOKS, _BETWEEN_CHECKS = 0.1, 1.0


class MissingHostsError(BootError):
    """Not all hosts of a run have joined. The text says which, and why."""


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """What `miniray run` is asked to do. Times are seconds."""

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
        return self.rendezvous == pipe.NAME

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("Give the program to run: miniray run -- python train.py")
        for name in ("wait", "grace"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0 s, not {getattr(self, name):g}.")
        if RANK_LABEL in self.node.get("labels", {}):
            raise ValueError(f"The label {RANK_LABEL!r} is set by miniray run: choose another.")


def run(options: RunOptions, allocation: HostAllocation, tell: Callable[[str], object]) -> int:
    """Do this host's part of a run; return the exit code.

    Args:
        options: Of the command.
        allocation: Which host this is.
        tell: Shows a line to the user.

    Raises:
        MissingHostsError: This is the first host, and not all others have joined.
        ProgramError: The program cannot be started.
        BootError, MinirayError, OSError, ValueError: The node cannot be started, or has failed.
    """
    take_token()  # neither the node's workers nor the program may find one
    if allocation.local_rank > 0:
        tell(f"Process {allocation.local_rank} of this host has nothing to do: one is enough.")
        return 0
    warning = few_cpus(allocation, cpu_count())
    if warning:
        tell(f"Warning: {warning}")
    part = FirstHost if allocation.rank == 0 else OtherHost
    # By a pipe, the end of the connection is a signal too, and may have to end a wait to print.
    with events(last=not options.piped) as seen:
        try:
            return part(options, allocation, seen, tell).run()
        except StoppedError as error:
            tell(f"The run was {error}.")
            return 128 + error.number


class _Host:
    """The part of one host.

    Args:
        options: Of the command.
        allocation: Which host this is.
        seen: Signals, and what else happens.
        tell: Shows a line to the user.
    """

    def __init__(
        self,
        options: RunOptions,
        allocation: HostAllocation,
        seen: Events,
        tell: Callable[[str], object],
    ) -> None:
        self._options = options
        self._rank, self._size = allocation.rank, allocation.size
        self._allocation = allocation
        self._events = seen
        self._tell = tell

    def _of_node(self, **further: Any) -> dict[str, Any]:
        """Return the arguments of ``BootOptions`` for the node of this host."""
        given = self._options.node
        labels = {**given.get("labels", {}), RANK_LABEL: str(self._rank)}
        return {**given, **further, "labels": labels, "parent_pid": os.getpid()}

    def _meeting_place(self) -> MeetingPlace:
        if self._options.piped:
            return pipe.Pipe(self._events)
        return meeting_place(self._allocation, self._options.rendezvous, self._options.authority)


class FirstHost(_Host):
    """Has the head, waits for the other hosts, runs the program, and ends the cluster."""

    _failed = False
    #: When what still runs is killed.
    _until: float | None = None

    def run(self) -> int:
        """Return the program's exit code."""
        networked = self._size > 1 or self._options.piped
        if not networked and self._options.node.get("host") is None:
            return self._alone()
        place = self._meeting_place() if networked else MeetingPlace()
        try:
            return self._with_cluster(place)
        finally:
            place.leave(0)

    def _require_program(self) -> None:
        if shutil.which(self._options.command[0]) is None:
            raise ProgramError(f"There is no program {self._options.command[0]!r}.")

    def _alone(self) -> int:
        """Start the program beside its cluster, which needs no network: ``init()`` waits for it."""
        self._require_program()
        starting = StartingNode(
            BootOptions(**self._of_node(embedded=True)), address_variable=ADDRESS_VARIABLE
        )
        node: LocalNode | None = None
        try:
            self._events.collect()
            program = self._start_program(starting.address)

            def answered() -> None:
                nonlocal node
                self._events.forget(starting.answers)
                try:
                    node = node_of(starting.ready())
                except (BootError, MinirayError, OSError) as error:
                    self._give_up(program, str(error))
                else:
                    self._watch(program, node)

            self._events.when_readable(starting.answers, answered)
            return self._until_end(program)
        finally:
            if node is not None:
                node.end()
            else:
                starting.give_up()

    def _with_cluster(self, place: MeetingPlace) -> int:
        node: LocalNode | None = None
        try:
            self._require_program()
            node = start_node(self._boot_options(place))
            place.publish(self._door(node))
            self._await_hosts(node, place)
            place.all_joined()
            self._events.collect()
            program = self._start_program(node.address)
            self._watch(program, node)
            return self._until_end(program, node)
        # Before the node ends: who is about to join it reads why there is nothing to join.
        except StoppedError as error:
            place.give_up(f"it was {error} before all hosts had joined.")
            raise
        except (BootError, MinirayError, OSError, ValueError) as error:
            place.give_up(str(error))
            raise
        finally:
            if node is not None:
                node.end()

    def _boot_options(self, place: MeetingPlace) -> BootOptions:
        given = self._of_node(port=place.port, authority=place.authority)
        given["host"] = given.get("host") or _EVERYWHERE
        if given["host"] == _EVERYWHERE and given.get("node_ip_address") is None:
            given["node_ip_address"] = self._own_address(place)
        return BootOptions(**given)

    def _own_address(self, place: MeetingPlace) -> str:
        """Return the address to tell the nodes, where the head listens on all of this host's.

        Where no default route says which one that is, it is the one that leads to another host.
        """
        until = time.monotonic() + self._options.wait
        with contextlib.suppress(OSError):
            return address_for_others(4)
        usable = own_addresses_v4()
        told = self._size > 1 and place.authority is None  # else others tell nothing
        while len(usable) > 1 and told and time.monotonic() < until:
            reports = place.reports()
            others = [a for state in reports.values() for a in state.addresses]
            for address in filter(None, (leading_to(other, usable) for other in others)):
                return address
            if len(reports) == self._size - 1:
                break
            self._events.wait(time.monotonic() + _BETWEEN_LOOKS)
        return next(iter(usable), "127.0.0.1")

    def _door(self, node: LocalNode) -> HeadOffer:
        """Return every address that this host has: one of them leads here from another host."""
        told, port = parse_address(node.address)
        hosts = [told]
        if self._options.node.get("host") in (None, _EVERYWHERE):
            hosts += [*own_addresses_v4(), "127.0.0.1"]
        token = read_token_file(Path(node.session_dir) / "token")
        return HeadOffer(tuple(join_host_port(host, port) for host in dict.fromkeys(hosts)), token)

    def _await_hosts(self, node: LocalNode, place: MeetingPlace) -> None:
        began = time.monotonic()
        told: set[int] = set()
        while missing := set(range(self._size)) - _living_ranks(node):
            reports = place.reports()
            for rank in missing & reports.keys() - told:
                if reports[rank].trouble:
                    told.add(rank)
                    host = f"host {rank} ({reports[rank].host})"
                    self._tell(f"Still waiting for {host}: {reports[rank].trouble}")
            late = time.monotonic() - began > self._options.wait
            if late or any(reports[rank].failure for rank in missing & reports.keys()):
                waited = min(self._options.wait, time.monotonic() - began)
                raise MissingHostsError(describe_missing(self._size, missing, reports, waited))
            self._events.wait(time.monotonic() + _BETWEEN_LOOKS)

    # --- the program ---------------------------------------------------------------
    def _start_program(self, address: str) -> Program:
        stdin = not self._options.piped
        return Program(self._options.command, {ADDRESS_VARIABLE: address}, stdin=stdin)

    def _watch(self, program: Program, node: LocalNode) -> None:
        """End the program if its node ends."""
        assert node.process is not None
        self._events.when_ended(
            node.process.pid,
            lambda: self._give_up(program, f"The node of this host has ended. {_logs(node)}"),
        )

    def _until_end(self, program: Program, node: LocalNode | None = None) -> int:
        """Wait for the program's end, of which ``node`` tells whether all hosts are still there."""
        ended: list[bool] = []
        self._events.when_ended(program.pid, lambda: ended.append(True))
        while not ended:
            for number in self._events.wait(self._next_look()):
                program.pass_on(number)
                if number in DEADLY:
                    self._limit()
            if self._until is not None and time.monotonic() >= self._until:
                program.send(signal.SIGKILL)
            elif self._options.strict and not self._failed and not ended and node is not None:
                self._require_all(program, node)
        return program.finish() or int(self._failed)

    def _next_look(self) -> float | None:
        if self._until is not None:
            return max(self._until, time.monotonic() + _BETWEEN_LOOKS)
        return time.monotonic() + _BETWEEN_CHECKS if self._options.strict else None

    def _require_all(self, program: Program, node: LocalNode) -> None:
        lost = set(range(self._size)) - _living_ranks(node)
        if lost:
            self._give_up(program, f"{_hosts(lost)} of the run: lost. It ends (--strict).")

    def _give_up(self, program: Program, reason: str) -> None:
        self._tell(reason)
        self._failed = True
        program.send(signal.SIGTERM)
        self._limit()

    def _limit(self) -> None:
        if self._until is None:
            self._until = time.monotonic() + self._options.grace


class OtherHost(_Host):
    """Joins the cluster of the first host, and stays until that ends."""

    def run(self) -> int:
        """Return 0 if the run has ended as it should."""
        place = self._meeting_place()
        keep = False
        try:
            self._report(place, addresses=tuple(own_addresses_v4()))
            try:
                node = self._join(place)
            except RunEndedError:
                raise
            except (BootError, MinirayError, OSError, ValueError) as error:
                self._report(place, failure=" ".join(str(error).split()))
                keep = True  # the first host has to read it
                raise
            return self._stay(node)
        finally:
            if not keep:
                place.leave(self._rank)

    def _report(self, place: MeetingPlace, **facts: Any) -> None:
        place.report(self._rank, HostState(socket.gethostname(), **facts))

    def _join(self, place: MeetingPlace) -> LocalNode:
        try:
            address, token = reach_head(
                place.find,
                self._options.wait,
                lambda seconds: self._events.wait(time.monotonic() + seconds),
                lambda reason: self._report(place, trouble=reason),
            )
            # The program may run from the moment when the head knows this node.
            self._events.collect()
            return start_node(
                BootOptions(**self._of_node(head=False, address=address, token=str(token))),
                {_GRACE_VARIABLE: os.environ.get(_GRACE_VARIABLE, _HEAD_GRACE)},
            )
        except (BootError, MinirayError, OSError):
            place.find()  # which raises if the first host has ended the run meanwhile
            raise

    def _stay(self, node: LocalNode) -> int:
        """Hold through SIGTERM, which all hosts get: the program may save what it has."""
        assert node.process is not None
        ended: list[bool] = []
        self._events.when_ended(node.process.pid, lambda: ended.append(True))
        until: float | None = None
        while not ended:
            for number in self._events.wait(until):
                if until is None and number in DEADLY:
                    until = time.monotonic() + self._options.grace
            if until is not None and time.monotonic() >= until and not ended:
                self._tell(f"The run did not end within {self._options.grace:g} s: this node does.")
                node.end()
                return 0
        if node.process.wait() != 0:
            raise BootError(f"The node of this host has failed. {_logs(node)}")
        return 0


def _living_ranks(node: LocalNode) -> set[int]:
    from miniray.client.command_connection import CommandConnection  # a host alone needs it not

    nodes = CommandConnection(node).listing("nodes")
    labels = [each["Labels"] for each in nodes if each["Alive"]]
    return {int(each[RANK_LABEL]) for each in labels if RANK_LABEL in each}


def _hosts(ranks: set[int]) -> str:
    return f"Host{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _logs(node: LocalNode) -> str:
    return f"Its logs are in {node.session_dir}/logs."
