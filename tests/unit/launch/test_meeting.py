"""The folder in which the hosts of a run meet."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import TYPE_CHECKING

import pytest

from miniray.launch.allocation import AllocationError, HostAllocation
from miniray.launch.reach import HeadOffer
from miniray.launch.rendezvous import (
    HostState,
    Mounted,
    RunEndedError,
    SharedFolder,
    meeting_place,
)
from miniray.security.certificates import make_authority
from miniray.security.token import JoinToken

if TYPE_CHECKING:
    from pathlib import Path

DOOR = HeadOffer(("10.0.0.1:7", "[::1]:7"), JoinToken(b"f" * 32, b"s" * 32))


def test_others_find_what_the_first_host_publishes_until_all_have_joined(tmp_path: Path) -> None:
    first, other = (SharedFolder(tmp_path, "r1", rank) for rank in (0, 1))
    assert other.find() is None
    first.publish(DOOR)
    assert other.find() == DOOR
    files = [path for path in (tmp_path / "r1").iterdir() if path.name == "join"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600]
    first.close()
    assert other.find() is None


def test_the_first_host_reads_what_the_others_report(tmp_path: Path) -> None:
    first, other = (SharedFolder(tmp_path, "r1", rank) for rank in (0, 1))
    assert first.reports() == {}
    other.report(1, HostState("n1"))
    assert first.reports() == {1: HostState("n1")}
    other.report(1, HostState("n1", "its disk is full"))
    assert first.reports() == {1: HostState("n1", "its disk is full")}


def test_hosts_that_leave_before_the_first_one_comes_leave_nothing(tmp_path: Path) -> None:
    others = [SharedFolder(tmp_path, "r1", rank) for rank in (1, 2)]
    for rank, other in enumerate(others, 1):
        other.report(rank, HostState(f"n{rank}"))
    others[0].leave(1)
    assert [path.name for path in (tmp_path / "r1").iterdir()] == ["n2"]
    others[1].leave(2)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_given_up_leaves_no_secret(tmp_path: Path) -> None:
    first = SharedFolder(tmp_path, "r1", 0)
    first.publish(DOOR)
    first.close("host 1 did not come.")
    assert [path.name for path in (tmp_path / "r1").iterdir()] == ["end"]


def test_a_host_that_comes_too_late_reads_why(tmp_path: Path) -> None:
    first = SharedFolder(tmp_path, "r1", 0)
    first.close("host 2 did not come.")
    with pytest.raises(RunEndedError, match="ended the run: host 2 did not come"):
        SharedFolder(tmp_path, "r1", 1).find()


def test_without_an_id_what_tells_of_an_earlier_run_counts_no_more(tmp_path: Path) -> None:
    SharedFolder(tmp_path, "", 0).publish(DOOR)
    SharedFolder(tmp_path, "", 1).report(1, HostState("n1", "its disk is full"))
    other = SharedFolder(tmp_path, "", 2)  # of this run, and before its first host
    other.report(2, HostState("n2"))
    first = SharedFolder(tmp_path, "", 0)
    assert other.find() is None
    assert first.reports() == {2: HostState("n2")}
    first.close("host 1 did not come.")
    assert list(tmp_path.iterdir()) == []
    other.report(2, HostState("n2", "no route"))
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_an_earlier_run_may_have_left_is_not_known_to_listen(tmp_path: Path) -> None:
    SharedFolder(tmp_path, "", 0).publish(DOOR)  # and was killed
    other = SharedFolder(tmp_path, "", 1)  # before the first host, which removes what it finds
    assert other.find() == dataclasses.replace(DOOR, listens=False)
    newer = dataclasses.replace(DOOR, addresses=("10.0.0.9:7",))
    SharedFolder(tmp_path, "", 0).publish(newer)
    assert other.find() == newer


def test_what_a_killed_run_left_is_removed_a_day_later_and_nothing_else(tmp_path: Path) -> None:
    SharedFolder(tmp_path, "old", 0).publish(DOOR)
    (tmp_path / "old/join").rename(tmp_path / "old/.join.4711.8d3f21aa")  # killed as it wrote it
    SharedFolder(tmp_path, "new", 0).publish(DOOR)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data").touch()
    (tmp_path / "empty").mkdir()
    for name in ("old", "mine", "empty"):
        os.utime(tmp_path / name, (0, 0))
    SharedFolder(tmp_path, "r1", 0)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "mine", "empty", "r1"}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    (tmp_path / "r1").chmod(0o777)
    with pytest.raises(PermissionError, match="give another one as --rendezvous"):
        SharedFolder(tmp_path, "r1", 1)


def test_with_a_token_made_ahead_the_head_is_where_it_is_said_to_be(tmp_path: Path) -> None:
    token = make_authority(tmp_path / "a")
    place = meeting_place(HostAllocation("hand", 1, 2, head=("a:7000",)), None, str(tmp_path / "a"))
    assert isinstance(place, Mounted)
    assert place.find() == HeadOffer(("a:7000",), token, listens=False)
    assert place.port == 7000


@pytest.mark.parametrize(
    ("authority", "text"), [("a", "give --head HOST:PORT"), (None, "--rendezvous FOLDER")]
)
def test_hosts_that_cannot_meet_are_told(tmp_path: Path, authority: str | None, text: str) -> None:
    make_authority(tmp_path / "a")
    with pytest.raises(AllocationError, match=text):
        meeting_place(
            HostAllocation("hand", 1, 2), None, str(tmp_path / authority) if authority else None
        )
