from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from miniray.security.certificates import make_head_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from miniray.security.certificates import Identity


@pytest.fixture(scope="module")
def head() -> Identity:
    return make_head_identity()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs
