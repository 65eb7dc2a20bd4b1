"""Which of a host's addresses is told to the others, and what is said of those that are missing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from miniray.cli.run import run
from miniray.launch import several_hosts
from miniray.launch.allocation import HostAllocation
from miniray.launch.lone_host import STREAMS, RunOptions
from miniray.launch.reach import HeadOffer, leading_to
from miniray.launch.rendezvous import (
    HostState,
    MeetingPlace,
    RunEndedError,
    SharedFolder,
    describe_missing,
)
from miniray.launch.several_hosts import FirstHost, OtherHost
from miniray.security.certificates import make_authority
from miniray.security.token import JoinToken
from miniray.system.boot_options import BootError

if TYPE_CHECKING:
    from pathlib import Path


def test_an_address_that_this_host_has_too_leads_to_no_other_one() -> None:
    assert leading_to("127.0.0.1", ["10.0.0.1"]) == "127.0.0.1"
    assert leading_to("172.17.0.1", ["172.17.0.1"]) is None
    assert leading_to("no-such-host.invalid", []) is None


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The address that the head tells, on a host of two networks without a default route."""
    found: list[str] = []

    def no_route(_version: int) -> str:
        raise OSError

    def start(options: Any) -> Any:
        found.append(options.node_ip_address)
        raise BootError("There is no node in this test.")

    monkeypatch.setattr(several_hosts, "address_for_others", no_route)
    monkeypatch.setattr(several_hosts, "reachable_addresses", lambda _: ["10.0.0.1", "10.1.0.1"])
    monkeypatch.setattr(several_hosts, "start_node", start)
    return found


def start_first(options: RunOptions) -> None:
    nothing: Any = SimpleNamespace()  # it waits for no event
    allocation = HostAllocation("by hand", 0, 2, head=("10.0.0.1:7000",))
    with pytest.raises(BootError, match="no node in this test"):
        FirstHost(options, allocation, nothing, print).run()


def test_where_the_others_tell_nothing_the_first_host_does_not_wait_for_their_addresses(
    told: list[str], tmp_path: Path
) -> None:
    make_authority(tmp_path / "a")
    start_first(RunOptions(("true",), authority=str(tmp_path / "a")))
    assert told == ["10.0.0.1"]


def test_over_ssh_the_first_host_tells_the_address_that_ssh_has_come_to(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_hosts, "Pipe", lambda _: MeetingPlace())
    for address in ("10.1.0.1", "10.9.0.1"):  # the second one is that of another host
        monkeypatch.setenv("SSH_CONNECTION", f"10.1.0.9 50000 {address} 22")
        start_first(RunOptions(("true",), rendezvous=STREAMS))
    assert told == ["10.1.0.1", "10.0.0.1"]


def test_a_host_that_cannot_join_as_the_run_has_ended_says_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = SharedFolder(tmp_path, "r1", 0)
    first.publish(HeadOffer(("10.0.0.1:7",), JoinToken(b"f" * 32, b"s" * 32)))

    def start(*_: Any) -> Any:
        first.close("it was stopped by SIGTERM before all hosts had joined.")
        raise ConnectionError("Nothing listens there.")

    monkeypatch.setattr(several_hosts, "meeting_place", lambda *_: SharedFolder(tmp_path, "r1", 1))
    monkeypatch.setattr(several_hosts, "reach_head", lambda find, *_: ("10.0.0.1:7", find().token))
    monkeypatch.setattr(several_hosts, "start_node", start)
    seen: Any = SimpleNamespace(collect=lambda: None)
    with pytest.raises(RunEndedError, match="stopped by SIGTERM before all hosts had joined"):
        OtherHost(RunOptions(("true",)), HostAllocation("Slurm", 1, 2), seen, print).run()


def test_each_missing_host_is_named_with_what_is_known_of_it() -> None:
    reports = {
        2: HostState("n2", "it has Python 3.10, the head 3.11."),
        3: HostState("n3"),
        4: HostState("n4", trouble="No answer from 10.0.0.1:7 within 5 s."),
    }
    assert describe_missing(5, {1, 2, 3, 4}, reports, 12.4) == (
        "1 of 5 hosts joined within 12 s: host 1 has not been heard of; host 2 (n2) cannot join: "
        "it has Python 3.10, the head 3.11; host 3 (n3) has started and not joined yet; host 4 "
        "(n4) has started and not joined yet: No answer from 10.0.0.1:7 within 5 s."
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "Missing argument 'COMMAND...'"),
        (("--wait", "-1", "true"), "Invalid value for '--wait': -1.0 is not in the range"),
        (("--grace", "inf", "true"), "Invalid value for '--grace': inf is not in the range"),
        (("--grace", "1e7", "true"), "Invalid value for '--grace': 10000000.0 is not in the range"),
        (("--labels", "rank=7", "true"), "The label 'rank' is set by miniray run"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(words: tuple[str, ...], text: str) -> None:
    refused = CliRunner().invoke(run, words)
    assert refused.exit_code == 2
    assert text in refused.output
