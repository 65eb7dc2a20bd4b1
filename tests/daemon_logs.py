"""What heads and node daemons have logged, in the report of a test that failed.

Collects from the session roots that are in use at that moment: the one that this process works
with, and those of the command lines among the test's fixtures.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

#: Lines of each log, from its end.
LINES = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the ends of the logs to the report of a failure."""
    report = yield
    if report.failed:
        for path in sorted(_logs(getattr(item, "funcargs", {}))):
            try:
                lines = path.read_text(errors="replace").splitlines()
            except FileNotFoundError:  # its cluster ends at this moment
                continue
            if lines:
                name = f"{path.parent.parent.name}/{path.name}"
                report.sections.append((f"end of {name}", "\n".join(lines[-LINES:])))
    return report


def _logs(fixtures: dict[str, Any]) -> Iterator[Path]:
    roots = [getattr(fixture, "root", None) for fixture in fixtures.values()]
    roots += [os.environ.get("MINIRAY_TMPDIR")]
    for root in {Path(root) for root in roots if isinstance(root, str | Path)}:
        for name in ("head.log", "node.log"):
            yield from root.glob(f"*/*/logs/{name}")
