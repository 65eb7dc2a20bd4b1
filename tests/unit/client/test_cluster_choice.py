"""Which cluster is looked at."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from miniray.client.cluster_choice import (
    at_address,
    cluster_to_look_at,
    latest_cluster,
    running_here,
    wanted_address,
)
from miniray.system import session as sessions
from miniray.system.session import ClusterRecord, ProcessId, Session, find_clusters, write_record

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


def test_drivers_that_are_attached_to_one_cluster_elsewhere_are_no_choice(program: Any) -> None:
    program("10.0.0.1:6379", is_head=False, started=1.0)
    latest = program("10.0.0.1:6379", is_head=False, started=2.0)
    assert cluster_to_look_at(None, "--address") == latest


def test_one_that_is_not_ready_is_left_out(program: Any) -> None:
    program("")
    assert cluster_to_look_at(None, "--address") is None
    assert running_here() == "Running here: none."


def test_the_variable_that_programs_heed_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"h:1": "h:1", "h": "h:6379", "auto": None, "local": None, "": None}
    for address, wanted in said.items():
        monkeypatch.setenv("MINIRAY_ADDRESS", address)
        assert wanted_address(None) == wanted
        assert wanted_address("h:2") == "h:2"
    monkeypatch.delenv("MINIRAY_ADDRESS")
    assert wanted_address(None) is None
    assert wanted_address("unix:/tmp/mr-0-1/head.sock") == "unix:/tmp/mr-0-1/head.sock"
    with pytest.raises(ValueError, match="HOST:PORT"):
        wanted_address("h:x")


def test_an_address_of_no_socket_is_that_of_no_cluster(program: Any) -> None:
    program("unix:/tmp/mr-0-1/head.sock")
    for address in ("unix:", "unix:/", "unix:x", f"unix:/{'x' * 200}/head.sock"):
        assert latest_cluster(address) is None


def test_a_cluster_is_found_by_any_way_to_say_its_address(program: Any) -> None:
    here = program("127.0.0.1:7203", embedded=False, driver=None)
    program("10.77.1.1:7203", embedded=False, driver=None, is_head=False)
    for address in ("localhost:7203", "127.0.0.1:7203", "[::1]:7203"):
        assert latest_cluster(address) == here
        assert at_address(find_clusters(), address) == [here]
    assert latest_cluster("localhost:7204") is None
    assert running_here() == "Running here: 10.77.1.1:7203, 127.0.0.1:7203."


def test_of_two_on_one_machine_the_one_whose_address_is_given_is_meant(program: Any) -> None:
    first = program("127.0.0.1:7203", embedded=False, driver=None)
    second = program("127.0.0.2:7203", embedded=False, driver=None)
    assert latest_cluster("127.0.0.1:7203") == first
    assert latest_cluster("127.0.0.2:7203") == second
