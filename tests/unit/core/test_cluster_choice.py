"""Which cluster is looked at."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from miniray import session as sessions
from miniray.core.cluster_choice import cluster_to_look_at
from miniray.session import ClusterRecord, ProcessId, Session, find_clusters, write_record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIRAY_TMPDIR", str(tmp_path))
    sessions.user_root()
    return tmp_path


@pytest.fixture
def program(base: Path) -> Any:
    """Publishes a cluster that belongs to this process, as if it were a program."""

    def publish(address: str, **changes: Any) -> ClusterRecord:
        folder = base / f"session_{len(find_clusters())}"
        me = ProcessId.of(os.getpid())
        given: dict[str, Any] = {"embedded": True, "is_head": True, "driver": me, **changes}
        written = ClusterRecord(
            session=Session(id=folder.name, folder=folder, socket_dir=folder / "mr-0"),
            address=address,
            socket_path=str(folder / "node.sock"),
            node_id="ab" * 8,
            processes={"boot": me},
            python="3.11.7",
            miniray="0.1.0",
            **given,
        )
        write_record(written)
        return written

    return publish


def test_the_only_cluster_of_a_program_is_looked_at(program: Any) -> None:
    written = program("unix:/tmp/mr-0-1/head.sock")
    assert cluster_to_look_at(None, "--address") == written
    assert cluster_to_look_at("auto", "--address") == written
    assert cluster_to_look_at(written.address, "--address") == written


def test_a_cluster_that_was_started_comes_before_those_of_programs(program: Any) -> None:
    started = program("127.0.0.1:6379", embedded=False, driver=None, started=1.0)
    own = program("unix:/tmp/mr-0-1/head.sock")
    assert cluster_to_look_at(None, "--address") == started
    assert cluster_to_look_at(own.address, "--address") == own


def test_several_programs_are_listed_and_one_is_chosen_by_its_address(program: Any) -> None:
    program("unix:/tmp/mr-0-1/head.sock")
    second = program("unix:/tmp/mr-0-2/head.sock")
    with pytest.raises(ConnectionError, match=r"^2 programs of yours") as raised:
        cluster_to_look_at(None, "--address")
    for told in ("--address", "mr-0-1/head.sock", "mr-0-2/head.sock", f"(pid {os.getpid()}, "):
        assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert cluster_to_look_at(second.address, "--address") == second


def test_drivers_that_are_attached_to_one_cluster_elsewhere_are_no_choice(program: Any) -> None:
    program("10.0.0.1:6379", is_head=False, started=1.0)
    latest = program("10.0.0.1:6379", is_head=False, started=2.0)
    assert cluster_to_look_at(None, "--address") == latest


def test_one_that_is_not_ready_is_left_out(program: Any) -> None:
    program("")
    with pytest.raises(ConnectionError, match=r"^No cluster of yours is running"):
        cluster_to_look_at(None, "--address")


def test_the_variable_that_programs_heed_is_heeded(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = program("h:1", embedded=False, started=1.0)
    second = program("h:2", embedded=False, started=2.0)
    for address, expected in [("h:1", first), ("auto", second), ("local", second), ("", second)]:
        monkeypatch.setenv("MINIRAY_ADDRESS", address)
        assert cluster_to_look_at(None, "--address") == expected
    monkeypatch.setenv("MINIRAY_ADDRESS", "h:3")
    assert cluster_to_look_at("h:2", "--address") == second
    with pytest.raises(ConnectionError, match=r"^No cluster at h:3 \(given by MINIRAY_ADDRESS\)"):
        cluster_to_look_at(None, "--address")
    with pytest.raises(ConnectionError, match=r"^No cluster at h:4 of yours"):
        cluster_to_look_at("h:4", "--address")
