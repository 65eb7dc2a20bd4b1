from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests_cli_support import Boot

from miniray import session as sessions
from miniray.cli.main import main
from miniray.cli.services import Services
from miniray.session import ClusterRecord, ProcessId, Session, create_session, write_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from click.testing import Result


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session in a place of its own; only what the test records is seen by the commands."""
    monkeypatch.setenv("MINIRAY_TMPDIR", str(tmp_path))
    made = create_session()
    yield made
    sessions._remove_tree(made.socket_dir)


@pytest.fixture
def boot() -> Boot:
    return Boot()


@pytest.fixture
def miniray(boot: Boot) -> Callable[..., Result]:
    def run(*args: str, connect: Any = None, **options: Any) -> Result:
        services = Services(start_node=boot.start_node, connect=connect)
        return CliRunner().invoke(main, args, obj=services, **options)

    return run


@pytest.fixture
def record(session: Session) -> Callable[..., ClusterRecord]:
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
