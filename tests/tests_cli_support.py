"""What the tests of the command line share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from click.testing import CliRunner

from miniray.cli.main import main
from miniray.cli.options import Services
from miniray.security.token import JoinToken
from miniray.system import session as sessions
from miniray.system.boot_options import BootOptions, BootResult
from miniray.system.session import ClusterRecord, ProcessId, Session, create_session, write_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pytest
    from click.testing import Result

TOKEN = str(JoinToken(b"f" * 32, b"s" * 32))


@dataclasses.dataclass
class Boot:
    """Stands for the code that starts nodes: keeps what was asked, answers or raises."""

    asked: list[BootOptions] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    address: str = "127.0.0.1:6379"
    pid: int = dataclasses.field(default_factory=os.getpid)
    warning: str = ""

    def start_node(self, options: BootOptions) -> BootResult:
        self.asked.append(options)
        if self.error is not None:
            raise self.error
        return BootResult(
            address=self.address,
            node_id="abcdef0123456789",
            token=TOKEN,
            socket_path="/tmp/mr/node.sock",
            session_dir="/tmp/miniray/session_x",
            pids={"boot": self.pid},
            resources={"CPU": 8.0, "GPU": 2.0, "node:127.0.0.1": 1.0, "memory": 3 * 2.0**30},
            warning=self.warning,
        )


@contextlib.contextmanager
def new_session(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session in a place of its own; only what the test records is seen by the commands."""
    monkeypatch.setenv("MINIRAY_TMPDIR", str(place))
    made = create_session()
    yield made
    sessions._remove_tree(made.socket_dir)


def runner(boot: Boot) -> Callable[..., Result]:
    """Runs a command in this process."""

    def run(*args: str, connect: Any = None, **options: Any) -> Result:
        services = Services(start_node=boot.start_node, connect=connect or Services.connect)
        return CliRunner().invoke(main, args, obj=services, **options)

    return run


def publisher(session: Session) -> Callable[..., ClusterRecord]:
    """Publishes a running node made of the given processes."""

    def publish(**changes: Any) -> ClusterRecord:
        written = ClusterRecord(
            session=session,
            address="127.0.0.1:6379",
            socket_path=str(session.socket_dir / "node.sock"),
            node_id="ab" * 14,
            is_head=True,
            embedded=False,
            processes={"boot": ProcessId.of(os.getpid())},
            python="3.11.7",
            miniray="0.1.0",
        )
        written = dataclasses.replace(written, **changes)
        write_record(written)
        return written

    return publish


def one_line(result: Result) -> str:
    """The single line of a failed command's stderr; nothing may be on stdout."""
    assert result.exit_code != 0, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()
