from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from process_doubles import FakeLink

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def link() -> Iterator[FakeLink]:
    """A daemon that answers at once."""
    link = FakeLink()
    yield link
    link.close()
