from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from session_folders import session_base

from miniray.client.cluster_choice import latest_cluster
from miniray.system import session as session_module
from miniray.system import session as sessions
from miniray.system.boot_options import BootOptions
from miniray.system.launch import StartingNode
from miniray.system.session import (
    ClusterRecord,
    ProcessId,
    Session,
    create_session,
    find_clusters,
    remove_session,
    session_processes,
    user_root,
    write_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER_UID = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with session_base(tmp_path, monkeypatch) as made:
        yield made


def record(session: Session, *pids: int, **changes: Any) -> ClusterRecord:
    made = ClusterRecord(
        session=session,
        address="127.0.0.1:6379",
        socket_path=str(session.socket_dir / "node.sock"),
        node_id="ab" * 14,
        is_head=True,
        embedded=False,
        processes={f"p{i}": ProcessId.of(pid) for i, pid in enumerate(pids or [os.getpid()])},
        python="3.11.7",
        miniray="0.1.0",
    )
    return dataclasses.replace(made, **changes)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


# --- folders ---------------------------------------------------------------------------


def test_a_sessions_folders_are_for_their_owner_only(base: Path) -> None:
    previous = os.umask(0)
    try:
        session = create_session()
    finally:
        os.umask(previous)
    root = base / f"miniray-{os.getuid()}"
    assert session.folder.parent == root
    assert {mode(p) for p in (root, session.folder, session.logs, session.socket_dir)} == {0o700}


def test_the_socket_folder_leaves_room_for_names_under_any_base(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIRAY_TMPDIR", str(base / ("long" * 30)))
    session = create_session()
    assert session.socket_dir.parent == Path("/tmp")
    assert len(os.fsencode(session.socket_dir)) <= 60


def test_a_short_base_holds_the_sockets_too(monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(f"/tmp/mrt{os.getpid()}")
    monkeypatch.setenv("MINIRAY_TMPDIR", str(base))
    try:
        assert create_session().socket_dir.parent == base
    finally:
        sessions._remove_tree(base)


def test_two_sessions_of_one_process_do_not_meet() -> None:
    first, second = create_session(), create_session()
    assert first.folder != second.folder
    assert first.socket_dir != second.socket_dir


def test_a_temp_dir_takes_the_session_but_not_what_others_look_for(
    base: Path, tmp_path: Path
) -> None:
    session = create_session(str(tmp_path / "elsewhere"))
    assert session.folder.is_relative_to(tmp_path / "elsewhere")
    path = write_record(record(session))
    assert path.is_relative_to(base / f"miniray-{os.getuid()}")
    assert [found.session for found in find_clusters()] == [session]


def test_a_root_that_is_a_link_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (base / f"miniray-{os.getuid()}").symlink_to(tmp_path / "target")
    with pytest.raises(PermissionError, match=r"a link.*MINIRAY_TMPDIR"):
        user_root()
    with pytest.raises(PermissionError, match="a link"):
        find_clusters()


def test_a_root_that_was_open_to_others_is_closed(base: Path) -> None:
    (base / f"miniray-{os.getuid()}").mkdir(mode=0o777)
    (base / f"miniray-{os.getuid()}").chmod(0o777)
    assert mode(user_root()) == 0o700


@needs_root
def test_a_root_of_another_user_is_refused(base: Path) -> None:
    root = base / f"miniray-{os.getuid()}"
    root.mkdir()
    os.chown(root, OTHER_UID, OTHER_UID)
    with pytest.raises(PermissionError, match=f"belongs to uid {OTHER_UID}, not to uid 0"):
        create_session()
    with pytest.raises(PermissionError, match="MINIRAY_TMPDIR"):
        find_clusters()


@needs_root
def test_a_user_whose_folder_somebody_else_made_has_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MINIRAY_TMPDIR")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # sockets need a short path
        shared, runtime = Path(place) / "tmp", Path(place) / "run"
        taken = shared / f"miniray-{os.getuid()}"
        taken.mkdir(parents=True)
        os.chown(taken, OTHER_UID, OTHER_UID)
        (runtime / f"{os.getuid()}").mkdir(parents=True)
        monkeypatch.setattr(session_module, "_DEFAULT_BASE", shared)
        monkeypatch.setattr(session_module, "_RUNTIME_DIRS", runtime)
        session = create_session()
        assert session.folder.is_relative_to(runtime)
        write_record(record(session))
        assert [found.session for found in find_clusters()] == [session]


# --- records ---------------------------------------------------------------------------


def test_a_record_is_found_as_it_was_written() -> None:
    written = record(create_session())
    path = write_record(written)
    assert mode(path) == 0o600
    assert find_clusters() == [written]


def test_a_record_is_replaced_by_a_later_one_of_its_session() -> None:
    session = create_session()
    write_record(record(session, address="", socket_path=""))
    assert latest_cluster() is None
    write_record(record(session))
    assert latest_cluster() == find_clusters()[0]
    assert len(find_clusters()) == 1


def test_nothing_is_found_and_nothing_made_where_nobody_started(base: Path) -> None:
    assert find_clusters() == []
    assert latest_cluster() is None
    assert list(base.iterdir()) == []


def test_a_reused_pid_is_not_mistaken_for_the_recorded_process() -> None:
    session = create_session()
    earlier = ProcessId(os.getpid(), ProcessId.of(os.getpid()).start - 1)
    write_record(record(session, processes={"boot": earlier}))
    assert find_clusters() == []
    assert not session.socket_dir.exists()


def test_there_is_no_identity_of_a_process_that_does_not_exist() -> None:
    with pytest.raises(ProcessLookupError):
        ProcessId.of(2**22 + 1)


def test_a_record_of_another_container_is_neither_used_nor_removed() -> None:
    host, boot, _ = sessions.machine_identity()
    path = write_record(record(create_session(), machine=(host, boot, "pid:[1]")))
    assert find_clusters() == []
    assert path.exists()


def test_a_record_from_before_a_restart_of_the_machine_is_removed() -> None:
    host, _, namespace = sessions.machine_identity()
    path = write_record(record(create_session(), machine=(host, "earlier", namespace)))
    assert find_clusters() == []
    assert not path.exists()


def test_a_damaged_record_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    path = write_record(record(create_session()))
    (path.parent / "other.json").write_text('{"session": []}')
    (path.parent / "text.json").write_text("{")
    assert len(find_clusters()) == 1
    assert "other.json" in caplog.text
    assert "text.json" in caplog.text


def test_a_record_with_further_fields_is_read() -> None:
    written = record(create_session())
    path = write_record(written)
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert find_clusters() == [written]


def test_a_linked_record_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_record(record(create_session()))
    path.rename(tmp_path / "real.json")
    path.symlink_to(tmp_path / "real.json")
    assert find_clusters() == []
    assert str(path) in caplog.text


@needs_root
def test_a_record_of_another_user_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    path = write_record(record(create_session()))
    os.chown(path, OTHER_UID, OTHER_UID)
    assert find_clusters() == []
    assert f"uid {OTHER_UID}" in caplog.text
    assert path.exists()


# --- which one ---------------------------------------------------------------------------


def test_the_latest_cluster_is_the_one_whose_head_started_last() -> None:
    for started, is_head in [(1.0, True), (3.0, True), (2.0, True), (4.0, False)]:
        write_record(
            record(create_session(), started=started, is_head=is_head, address=f"h:{started:g}")
        )
    latest = latest_cluster()
    assert latest is not None
    assert latest.address == "h:3"
    assert [found.started for found in find_clusters()] == [4.0, 3.0, 2.0, 1.0]


def test_a_machine_that_only_joined_finds_the_cluster_it_joined() -> None:
    write_record(record(create_session(), is_head=False, address="far:1"))
    latest = latest_cluster()
    assert latest is not None
    assert latest.address == "far:1"


# --- removal -----------------------------------------------------------------------------


def test_a_session_can_be_removed_without_a_trace(base: Path) -> None:
    session = create_session()
    write_record(record(session))
    remove_session(session, keep_logs=False)
    assert [p for p in base.rglob("*") if p.is_file()] == []
    assert not session.folder.exists()
    assert not session.socket_dir.exists()
    remove_session(session)  # once more is no error


def test_a_record_cannot_make_us_remove_other_folders(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("")
    remove_session(Session(id="x", folder=precious, socket_dir=precious), keep_logs=False)
    assert (precious / "file").exists()


def test_only_the_latest_logs_of_ended_sessions_are_kept() -> None:
    root = user_root()
    old = [root / f"session_2020-01-{day:02}_00-00-00_{2**22 + 1}_abcd" for day in range(1, 15)]
    for folder in old:
        folder.mkdir()
    live = root / f"session_2019-01-01_00-00-00_{os.getpid()}_abcd"
    live.mkdir()
    recorded = root / f"session_2018-01-01_00-00-00_{2**22 + 1}_abcd"
    recorded.mkdir()
    write_record(record(Session("a", recorded, root / "mr-none")))
    create_session()
    assert [folder.exists() for folder in old] == [False] * 4 + [True] * 10
    assert live.exists()
    assert recorded.exists()


# --- processes of a session ----------------------------------------------------------------


def test_a_process_that_begins_another_program_meanwhile_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its environment can't be read in that moment."""
    refused: list[int] = []

    def variable_of(pid: int, name: str) -> str | None:
        if pid != os.getpid():
            return None
        if not refused:
            refused.append(pid)
            raise BlockingIOError(pid)
        return "here"

    monkeypatch.setattr("miniray.system.session.variable_of", variable_of)
    assert [found.pid for found in session_processes("here")] == [os.getpid()]
    assert refused


# --- starts ------------------------------------------------------------------------------
def test_a_start_that_lacks_a_descriptor_leaves_no_folder(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(_session: Session) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(sessions, "StartingSign", lacks)
    before = {each.name for each in base.rglob("*")}
    with pytest.raises(OSError, match="Too many open files"):
        StartingNode(BootOptions())
    left = {each.name for each in base.rglob("*")} - before
    assert not [name for name in left if name.startswith(("session_", "mr-"))]
