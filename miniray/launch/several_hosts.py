"""The part of a host that has others: it starts the cluster and the program, or joins and stays."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.client.cluster_choice import start_node
from miniray.client.command_connection import CommandConnection
from miniray.common.host_port import join_host_port, parse_address
from miniray.exceptions import MinirayError
from miniray.launch.events import StoppedError
from miniray.launch.lone_host import RANK_LABEL, HostPart, LoneHost, logs_of
from miniray.launch.pipe import Pipe
from miniray.launch.program import await_child
from miniray.launch.reach import HeadOffer, leading_to, reach_head
from miniray.launch.rendezvous import (
    HostState,
    MeetingPlace,
    RunEndedError,
    SharedFolder,
    describe_missing,
    meeting_place,
)
from miniray.security.token import read_token_file
from miniray.system.boot_options import BootError, BootOptions
from miniray.system.machine import address_for_others, reachable_addresses

if TYPE_CHECKING:
    from miniray.client.cluster_choice import LocalNode
    from miniray.launch.allocation import HostAllocation
    from miniray.launch.events import Events
    from miniray.launch.lone_host import RunOptions

_EVERYWHERE = "0.0.0.0"  # noqa: S104 - the other hosts have to reach it
#: Seconds for which the other hosts wait for a head that is lost: it comes back at once, or not.
_GRACE_VARIABLE, _HEAD_GRACE = "MINIRAY_HEAD_GRACE", "10"
#: Seconds between two looks at which hosts have joined.
_BETWEEN_LOOKS = 0.1


def _meeting_place(options: RunOptions, allocation: HostAllocation, seen: Events) -> MeetingPlace:
    if options.piped:
        return Pipe(seen)
    if allocation.size == 1:
        return MeetingPlace()
    return meeting_place(allocation, options.rendezvous, options.authority)


class FirstHost(LoneHost):
    """Has the head, waits for the other hosts, runs the program, and ends the cluster."""

    def run(self) -> int:
        """Return the program's exit code."""
        place = _meeting_place(self._options, self._allocation, self._events)
        node: LocalNode | None = None
        try:
            self._require_program()
            node = start_node(self._boot_options(place))
            place.publish(self._door(node))
            self._await_hosts(node, place)
            place.close()
            self._events.collect()
            program = self._start_program(node.address, node.session_dir)
            self._watch(node)
            require_all = functools.partial(self._require_all, node)
            return self._until_end(program, require_all if self._options.strict else None)
        # Before the node ends: a host that is about to join reads the reason.
        except StoppedError as error:
            place.close(f"it was {error} before all hosts had joined.")
            raise
        except BaseException as error:
            place.close(str(error) or type(error).__name__)
            raise
        finally:
            if node is not None:
                node.end()

    def _boot_options(self, place: MeetingPlace) -> BootOptions:
        given = self._of_node(port=place.port, authority=self._options.authority)
        given["host"] = given.get("host") or _EVERYWHERE
        if given["host"] == _EVERYWHERE and given.get("node_ip_address") is None:
            given["node_ip_address"] = self._own_address(place)
        return BootOptions(**given)

    def _own_address(self, place: MeetingPlace) -> str:
        """Return the address to announce to nodes, where the head listens on all of this host's.

        Where no default route says which one that is, it is the one that leads to another host, or
        that ssh has come to.
        """
        until = time.monotonic() + self._options.wait
        with contextlib.suppress(OSError):
            return address_for_others(4)
        usable = reachable_addresses(4)
        for address in os.environ.get("SSH_CONNECTION", "").split()[2:3]:
            if self._options.piped and address in usable:
                return address
        told = isinstance(place, SharedFolder)  # else others report nothing
        while usable and told and time.monotonic() < until:
            reports = place.reports()
            others = [a for state in reports.values() for a in state.addresses]
            for address in filter(None, (leading_to(other, usable) for other in others)):
                return address
            if len(reports) == self._allocation.size - 1:
                break
            self._events.wait(time.monotonic() + _BETWEEN_LOOKS)
        return next(iter(usable), "127.0.0.1")

    def _door(self, node: LocalNode) -> HeadOffer:
        """Return every address that this host has: one of them leads here from another host."""
        told, port = parse_address(node.address)
        hosts = [told]
        if self._options.node.get("host") in (None, _EVERYWHERE):
            hosts += [*reachable_addresses(4), "127.0.0.1"]
        token = read_token_file(Path(node.session_dir) / "token")
        return HeadOffer(tuple(join_host_port(host, port) for host in dict.fromkeys(hosts)), token)

    def _await_hosts(self, node: LocalNode, place: MeetingPlace) -> None:
        began = time.monotonic()
        told: set[int] = set()
        while missing := self._missing(node):
            reports = {rank: each for rank, each in place.reports().items() if rank in missing}
            for rank, each in reports.items():
                if each.trouble and rank not in told:
                    told.add(rank)
                    self._tell(f"Still waiting for host {rank} ({each.host}): {each.trouble}")
            waited = min(time.monotonic() - began, self._options.wait)
            if waited == self._options.wait or any(each.failure for each in reports.values()):
                raise BootError(describe_missing(self._allocation.size, missing, reports, waited))
            self._events.wait(time.monotonic() + _BETWEEN_LOOKS)

    def _missing(self, node: LocalNode) -> set[int]:
        """Return the ranks without a living node."""
        nodes = CommandConnection(node).listing("nodes")
        labels = [each["Labels"] for each in nodes if each["Alive"]]
        living = {int(each[RANK_LABEL]) for each in labels if RANK_LABEL in each}
        return set(range(self._allocation.size)) - living

    def _require_all(self, node: LocalNode) -> None:
        """End the run if a host is lost."""
        lost = sorted(self._missing(node))
        if lost:
            hosts = f"Host{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            self._give_up(f"{hosts} of the run: lost. It ends (--strict).")


class OtherHost(HostPart):
    """Joins the cluster of the first host, and stays until that ends."""

    def run(self) -> int:
        """Return 0 if the run has ended as it should."""
        place = _meeting_place(self._options, self._allocation, self._events)
        try:
            self._report(place, addresses=reachable_addresses(4))
            node = self._join(place)
        except (StoppedError, RunEndedError):
            place.leave(self._allocation.rank)
            raise
        except (BootError, MinirayError, OSError, ValueError) as error:
            # It stays: the first host has to read it.
            self._report(place, failure=" ".join(str(error).split()))
            raise
        return self._stay(node)

    def _report(self, place: MeetingPlace, **facts: Any) -> None:
        place.report(self._allocation.rank, HostState(socket.gethostname(), **facts))

    def _join(self, place: MeetingPlace) -> LocalNode:
        try:
            address, token = reach_head(
                place.find,
                self._options.wait,
                lambda seconds: self._events.wait(time.monotonic() + seconds),
                lambda reason: self._report(place, trouble=reason),
            )
            # The program may run from the moment when the head has registered this node.
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
        grace = self._options.grace

        def end() -> None:
            self._tell(f"The run did not end within {grace:g} s: this node does.")
            node.end()

        await_child(self._events, node.process.pid, grace, lambda _: None, end)
        if node.process.wait() != 0:
            raise BootError(f"The node of this host has failed. {logs_of(node)}")
        return 0
