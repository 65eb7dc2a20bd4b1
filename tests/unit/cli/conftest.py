"""Fixtures of the tests of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests_cli_support import Boot, new_session, publisher, runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from click.testing import Result

    from miniray.system.session import ClusterRecord, Session


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    with new_session(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def boot() -> Boot:
    return Boot()


@pytest.fixture
def miniray(boot: Boot) -> Callable[..., Result]:
    return runner(boot)


@pytest.fixture
def record(session: Session) -> Callable[..., ClusterRecord]:
    return publisher(session)
