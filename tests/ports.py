"""Ports for tests: some that nobody else gets meanwhile, and one that nobody listens at."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# The kernel gives ports below 32,768 to nobody who does not ask for them by number, and other test
# processes begin at another place.
_OWN = (20_000 + (199 * os.getpid() + number) % 12_000 for number in itertools.count())


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free, and stay so for whoever binds them later."""
    found: list[int] = []
    while len(found) < count:
        port = next(_OWN)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


@contextlib.contextmanager
def refused_address() -> Iterator[str]:
    """An address at which nothing listens while the block runs: its port is bound to a socket."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
