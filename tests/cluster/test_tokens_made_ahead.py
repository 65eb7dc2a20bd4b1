"""A cluster whose token exists before it does, and nodes that end because their cluster does."""

from __future__ import annotations

import stat
import sys
from typing import TYPE_CHECKING

import psutil
from cluster_helpers import wait_until
from command_helpers import CommandLine, one_line
from ports import free_ports, refused_address

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    read = ""
    while text not in read:
        line = process.stdout.readline()
        assert line, read
        read += line
    return read


def test_a_token_is_made_before_its_cluster_and_is_not_shown(
    command: CommandLine, tmp_path: Path
) -> None:
    folder = tmp_path / "authority"
    made = command.run("token", "new", str(folder))
    assert made.returncode == 0, made.stderr
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert files == {"token": 0o600, "head.pem": 0o600, "head.key": 0o600}
    secret = (folder / "token").read_text().strip()
    assert secret not in made.stdout

    begun = command.run("start", "--head", "--port", "0", "--authority", str(folder))
    assert begun.returncode == 0, begun.stderr
    assert secret not in begun.stdout
    address = command.records()[0]["address"]
    joined = command.run("start", "--address", address, "--token-file", str(folder / "token"))
    assert joined.returncode == 0, joined.stderr
    assert len(command.records()) == 2


def test_a_token_is_not_replaced(command: CommandLine, tmp_path: Path) -> None:
    assert command.run("token", "new", str(tmp_path)).returncode == 0
    before = (tmp_path / "token").read_text()
    assert "has a token already" in one_line(command.run("token", "new", str(tmp_path)))
    assert (tmp_path / "token").read_text() == before


def test_a_token_and_a_certificate_that_do_not_belong_together_are_refused(
    command: CommandLine, tmp_path: Path
) -> None:
    for name in "ab":
        assert command.run("token", "new", str(tmp_path / name)).returncode == 0
    (tmp_path / "a/token").write_text((tmp_path / "b/token").read_text())
    line = one_line(
        command.run("start", "--head", "--port", "0", "--authority", str(tmp_path / "a"))
    )
    assert "is for another certificate" in line
    command.leaves_nothing()


def test_a_blocking_node_whose_cluster_is_stopped_has_not_failed(command: CommandLine) -> None:
    head = command.start_head()
    join = command.popen(
        "miniray",
        *("start", "--block", "--address", head.address),
        variables={"MINIRAY_TOKEN": head.token},
    )
    _read_until(join, "Its logs are in")
    first = command.records()[0]["processes"]["boot"]["pid"]
    psutil.Process(first).terminate()
    output, _ = join.communicate(timeout=30)
    assert join.returncode == 0, output
    assert "its cluster, was stopped" in output
    wait_until(lambda: not command.pids())


def test_a_node_that_is_started_first_waits_for_its_head(
    command: CommandLine, tmp_path: Path
) -> None:
    folder, (port,) = tmp_path / "authority", free_ports(1)
    assert command.run("token", "new", str(folder)).returncode == 0
    join = command.popen(
        *("miniray", "start", "--address", f"127.0.0.1:{port}", "--wait", "60"),
        *("--token-file", str(folder / "token")),
    )
    begun = command.run("start", "--head", "--port", str(port), "--authority", str(folder))
    assert begun.returncode == 0, begun.stderr
    output, _ = join.communicate(timeout=60)
    assert join.returncode == 0, output
    assert len(command.records()) == 2


def test_the_wait_for_a_head_ends_with_the_reason(command: CommandLine, tmp_path: Path) -> None:
    assert command.run("token", "new", str(tmp_path / "a")).returncode == 0
    token = str(tmp_path / "a/token")
    with refused_address() as nobody:
        line = one_line(
            command.run("start", "--address", nobody, "--wait", "0.5", "--token-file", token)
        )
    assert f"The head was not found within 0.5 s: Nothing listens at {nobody}." in line
    command.leaves_nothing()


def test_what_runs_in_a_cluster_is_not_told_where_the_token_of_another_one_is(
    command: CommandLine,
) -> None:
    command.start_head(MINIRAY_TOKEN_FILE="of-another-cluster")
    driver = (sys.executable, "-c", "import miniray; miniray.init(); print('attached')")
    done = command.run("job", "submit", "--", *driver)
    assert done.stdout == "attached\n", done.stdout
    assert command.run("stop").returncode == 0
