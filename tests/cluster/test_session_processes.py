"""Sessions and their records, with processes that end and with other users."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from session_folders import session_base

from miniray.exceptions import AuthenticationError
from miniray.security.challenge import require_own_uid
from miniray.system import session as sessions
from miniray.system.session import (
    ClusterRecord,
    ProcessId,
    Session,
    create_session,
    find_clusters,
    session_processes,
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


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


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


def test_a_record_lives_as_long_as_one_of_its_processes(
    sleeper: subprocess.Popen[bytes],
) -> None:
    written = record(create_session(), sleeper.pid, os.getpid())
    write_record(written)
    sleeper.kill()
    sleeper.wait()
    assert find_clusters() == [written]
    assert written.living() == [ProcessId.of(os.getpid())]


def test_a_record_of_ended_processes_is_removed_with_its_sockets(
    sleeper: subprocess.Popen[bytes],
) -> None:
    session = create_session()
    session.token_file.write_text("secret")
    (session.logs / "head.log").write_text("the end")
    path = write_record(record(session, sleeper.pid))
    assert len(find_clusters()) == 1
    sleeper.kill()
    sleeper.wait()
    assert find_clusters() == []
    assert not path.exists()
    assert not session.socket_dir.exists()
    assert not session.token_file.exists()
    assert (session.logs / "head.log").read_text() == "the end"


def test_a_process_that_ended_unreaped_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(sleeper.pid)
    assert process.alive()
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # ended, and still a zombie
    assert not process.alive()


def test_every_process_started_inside_a_session_is_found() -> None:
    marked = {**os.environ, "MINIRAY_SESSION": "the-one"}
    other = {**os.environ, "MINIRAY_SESSION": "the-one-too"}
    code = "import os, time; os.fork(); print('up', flush=True); time.sleep(60)"
    with (
        subprocess.Popen(
            [sys.executable, "-c", code], env=marked, stdout=subprocess.PIPE, text=True
        ) as parent,
        subprocess.Popen(["sleep", "60"], env=other) as stranger,
    ):
        assert parent.stdout is not None
        parent.stdout.readline()
        parent.stdout.readline()
        found = session_processes("the-one")
        assert ProcessId.of(parent.pid) in found
        assert len(found) == 2
        for process in found:
            os.kill(process.pid, signal.SIGKILL)
        stranger.kill()


# --- other users -----------------------------------------------------------------------


def as_other_user(code: str) -> str:
    """Run code as another user, who may be unable to read Python's own files: import first."""
    prelude = (
        "import os\nfrom pathlib import Path\n"
        "from miniray.system.session import create_session, find_clusters\n"
        f"os.setgid({OTHER_UID}); os.setuid({OTHER_UID})\n"
    )
    package = str(Path(sessions.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        env={**os.environ, "PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@needs_root
def test_another_user_cannot_enter_and_has_a_root_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = Path(f"/tmp/mrt{os.getpid()}")
    base.mkdir()
    base.chmod(0o1777)
    monkeypatch.setenv("MINIRAY_TMPDIR", str(base))
    try:
        write_record(record(create_session()))
        printed = as_other_user(
            "try: list(Path(os.environ['MINIRAY_TMPDIR'], 'miniray-0').iterdir())\n"
            "except PermissionError: print('shut')\n"
            "print(find_clusters(), create_session().folder.parent.name)"
        )
        assert printed == f"shut\n[] miniray-{OTHER_UID}"
    finally:
        sessions._remove_tree(base)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_peer_of_another_user_is_refused() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0miniray-test-{os.getpid()}-{os.urandom(4).hex()}")
        listener.listen()
        name = listener.getsockname()
        code = (
            "import os, socket, sys; os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.connect(bytes.fromhex(sys.argv[1]))\n"
            "s.recv(1)"
        )
        with subprocess.Popen([sys.executable, "-c", code, name.hex()]) as client:
            sock, _ = listener.accept()
            with sock, pytest.raises(AuthenticationError, match="of uid 65534 "):
                require_own_uid(sock)
            client.wait()
