"""A real browser that reaches nothing but the page, and a cluster per test module."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from module_clusters import _sent_to_workers, cluster, session_root  # noqa: F401 -- fixtures

from miniray.client.command_connection import connect_for_cli

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

#: Of Debian's package of the same name; playwright's own browsers need a download.
CHROMIUM = Path("/usr/bin/chromium-headless-shell")
#: No other host has a name or an address for this browser.
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
#: Milliseconds for which a test waits for what it expects on the page.
PATIENCE = 15_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Ends with the module: other modules look at the processes that this one has started."""
    if not CHROMIUM.exists():
        text = f"{CHROMIUM} is missing: apt-get install chromium-headless-shell"
        if os.environ.get("MISSING_TOOLS_FAIL"):
            pytest.fail(text)
        pytest.skip(text)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", OFFLINE]
        )
        yield browser
        browser.close()


@pytest.fixture
def address(cluster: Any) -> Callable[[], str]:  # noqa: F811 -- the fixture
    """Makes addresses of the page, each with a code that lets one browser in."""

    def make() -> str:
        with contextlib.closing(connect_for_cli(None, "address=", None)) as connection:
            return connection.page().url

    return make


@pytest.fixture
def visitor(browser: Browser, cluster: Any) -> Iterator[Page]:  # noqa: F811
    """A page of a browser that nobody has let in; what it complains of fails the test.

    Every request has to go to the cluster's page; ``page.expected`` holds parts of messages of the
    browser's console that a test provokes.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    complaints: list[str] = []
    requests: list[str] = []
    expected = page.expected = []
    page.on(
        "console",
        lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    yield page
    context.close()
    own = (f"http://{cluster.dashboard_url}/", "data:")
    assert not [url for url in requests if not url.startswith(own)]
    assert not [each for each in complaints if not any(part in each for part in expected)]


@pytest.fixture
def page(visitor: Page, address: Callable[[], str]) -> Page:
    """The page, open and let in."""
    visitor.goto(address())
    visitor.get_by_role("heading", name="Cluster", exact=True).wait_for()
    return visitor
