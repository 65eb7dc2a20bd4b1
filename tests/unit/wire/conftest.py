from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from miniray.wire.io_loop import IOLoop

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def loop() -> Iterator[IOLoop]:
    """A loop with its thread, which ends with the test."""
    loop = IOLoop()
    loop.start()
    yield loop
    loop.stop()
    assert not loop._thread.is_alive()
