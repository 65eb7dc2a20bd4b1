"""The page in a real browser: who is let in, what it shows of a running cluster, how it is used."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from playwright.sync_api import expect

import miniray

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.engine("miniray")

CLUSTER = {"num_cpus": 4, "num_gpus": 2, "include_dashboard": True, "dashboard_port": 0}

#: What the browser itself writes when a request is refused.
REFUSED = "the server responded with a status of 401"


@miniray.remote(num_cpus=0)
class Counter:
    def pid(self) -> int:
        return os.getpid()


def row(page: Page, *texts: str) -> Locator:
    """The rows of the page's tables that have all these texts."""
    rows = page.get_by_role("row")
    for text in texts:
        rows = rows.filter(has_text=text)
    return rows


def show(page: Page, name: str, heading: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(heading)


# --- letting in -----------------------------------------------------------------------------------


def test_a_code_lets_a_browser_in_and_leaves_the_address(page: Page) -> None:
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    assert page.url.endswith("#/")
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    page.reload()
    expect(page.get_by_role("heading", name="Devices")).to_be_visible()


def test_a_used_code_lets_nobody_in_and_the_page_says_what_to_do(
    visitor: Page, address: Callable[[], str], browser: Any
) -> None:
    visitor.expected.append(REFUSED)
    url = address()
    with browser.new_context() as other:
        first = other.new_page()
        first.goto(url)
        first.get_by_role("heading", name="Devices").wait_for()
    visitor.goto(url)
    expect(visitor.get_by_text("This code was used")).to_be_visible()
    assert visitor.context.cookies() == []
    visitor.get_by_label("Address or code").fill(address())
    visitor.get_by_role("button", name="Enter").click()
    expect(visitor.get_by_role("heading", name="Devices")).to_be_visible()


def test_without_a_cookie_the_page_shows_how_to_get_in(visitor: Page, cluster: Any) -> None:
    visitor.expected.append(REFUSED)
    visitor.goto(f"http://{cluster.dashboard_url}/#/actors")
    expect(visitor.get_by_text("Run miniray dashboard on the machine")).to_be_visible()
    expect(visitor.get_by_role("row")).to_have_count(0)


# --- what it shows --------------------------------------------------------------------------------


def test_an_actor_that_is_killed_changes_its_row_within_a_second(page: Page) -> None:
    actor = Counter.options(name="to be killed").remote()
    miniray.get(actor.pid.remote())
    show(page, "Actors", "Actors")
    found = row(page, "to be killed")
    expect(found).to_contain_text("alive")
    began = time.monotonic()
    miniray.kill(actor)
    expect(found).to_contain_text("dead")
    assert time.monotonic() - began < 1


def test_what_waits_stands_there_with_the_reason(page: Page) -> None:
    waiting = Counter.options(num_cpus=100).remote()
    show(page, "Waiting", "Waiting")
    found = row(page, "Counter")
    expect(found).to_contain_text("CPU 100")
    found.click()
    expect(page.locator(".told")).to_contain_text("CPU 100")
    miniray.kill(waiting)
    expect(page.get_by_text("Nothing waits for resources")).to_be_visible()


def test_jobs_groups_and_events_of_a_program_are_there(page: Page) -> None:
    group = miniray.util.placement_group([{"CPU": 1}] * 2, name="a pair")
    miniray.get(group.ready())
    show(page, "Placement groups", "Placement groups")
    expect(row(page, "a pair")).to_contain_text(re.compile("2 . 1 CPU"))
    show(page, "Jobs", "Jobs")
    expect(row(page, "running")).to_have_count(1)
    miniray.util.remove_placement_group(group)


def test_every_empty_page_says_what_would_be_there(page: Page) -> None:
    for name, heading in (("Train runs", "Train runs"), ("Datasets", "Datasets")):
        show(page, name, heading)
        expect(page.locator(".empty")).to_contain_text("No ")


# --- how it is used -------------------------------------------------------------------------------


def test_light_and_dark_follow_the_system_or_the_choice(page: Page) -> None:
    ground = lambda: page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor")  # noqa: E731
    page.emulate_media(color_scheme="light")
    light = ground()
    page.emulate_media(color_scheme="dark")
    assert ground() != light
    page.get_by_label("Colours").select_option("light")
    assert ground() == light
    page.reload()
    page.get_by_role("heading", name="Devices").wait_for()
    assert ground() == light


def test_the_page_goes_on_when_its_process_was_killed(page: Page) -> None:
    page.expected.extend(["ERR_", "Failed to load resource"])
    port = int(re.search(r":(\d+)/", page.url)[1])
    holders = [
        process
        for process in psutil.Process().children(recursive=True)
        if any(each.laddr.port == port for each in process.net_connections("inet"))
    ]
    web = max(holders, key=psutil.Process.create_time)  # the daemon holds the socket, too
    web.send_signal(signal.SIGKILL)
    expect(page.get_by_role("alert")).to_contain_text("connection")
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
