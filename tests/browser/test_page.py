"""The page in a real browser: who is let in, what it shows of a running cluster, how it is used."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import signal
import time
import webbrowser
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from click.testing import CliRunner
from cluster_helpers import takes_less_than
from playwright.sync_api import expect

import miniray
import miniray.data
from miniray.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.engine("miniray")

CLUSTER = {"num_cpus": 4, "num_gpus": 2, "include_dashboard": True, "dashboard_port": 0}

#: What the navigation names.
PAGES = [
    *("", "metrics", "events", "waiting", "actors", "tasks", "jobs", "groups"),
    *("runs", "datasets", "objects", "why"),
]
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


def test_a_used_code_shuts_nobody_out_who_is_in(page: Page, address: Callable[[], str]) -> None:
    page.expected.append(REFUSED)
    url = address()
    for _ in range(2):
        page.goto("about:blank")
        page.goto(url)
        expect(page.get_by_role("heading", name="Devices")).to_be_visible()


def test_an_address_that_somebody_has_mistyped_leads_to_a_page(page: Page) -> None:
    place = page.url
    page.goto("about:blank")
    page.goto(f"{place}%")
    expect(page.get_by_text("There is no page")).to_be_visible()


def test_without_a_cookie_the_page_shows_how_to_get_in(visitor: Page, cluster: Any) -> None:
    visitor.expected.append(REFUSED)
    visitor.goto(f"http://{cluster.dashboard_url}/#/actors")
    expect(visitor.get_by_text("Run miniray dashboard on the machine")).to_be_visible()
    expect(visitor.get_by_role("row")).to_have_count(0)


# --- what it shows --------------------------------------------------------------------------------


def test_devices_show_who_has_which_part_of_them(page: Page) -> None:
    @miniray.remote(num_gpus=0.6)
    class Sharer:
        def ready(self) -> bool:
            return True

    sharers = [Sharer.remote() for _ in range(2)]
    miniray.get([sharer.ready.remote() for sharer in sharers])
    device = page.locator(".device").first
    expect(device).to_contain_text("Sharer")
    expect(device).to_contain_text("0.6")
    expect(device).to_contain_text("0.4 free")
    device.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("Sharer")


def test_an_actor_that_is_killed_changes_its_row_within_a_second(page: Page) -> None:
    show(page, "Actors", "Actors")
    numbers = itertools.count()

    def kill() -> float:
        name = f"to be killed: {next(numbers)}."
        actor = Counter.options(name=name).remote()
        miniray.get(actor.pid.remote())
        expect(row(page, name)).to_contain_text("alive")
        began = time.monotonic()
        miniray.kill(actor)
        expect(row(page, name)).to_contain_text("dead")
        return time.monotonic() - began

    takes_less_than(1, kill)


def test_who_is_dead_cannot_be_looked_into(page: Page) -> None:
    actor = Counter.options(name="no more").remote()
    miniray.get(actor.pid.remote())
    page.goto(f"{page.url.partition('#')[0]}#/actor/{actor._actor_id.hex()}")
    stack = page.get_by_role("button", name="Stack trace")
    expect(stack).to_be_enabled()
    miniray.kill(actor)
    expect(stack).to_be_disabled()
    expect(page.get_by_text("It has ended")).to_be_visible()


def test_names_are_text_and_never_run(page: Page) -> None:
    name = "<script>document.title='run'</script><img src=x onerror=alert(1)>"
    actor = Counter.options(name=name).remote()
    miniray.get(actor.pid.remote())
    show(page, "Actors", "Actors")
    expect(row(page, "<script>")).to_contain_text(name)
    row(page, "<script>").get_by_role("link").first.click()
    expect(page.locator(".facts").get_by_text(name)).to_be_visible()
    assert page.title() == "Actors · miniray"
    assert page.locator("img").count() == 0


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


def test_why_a_get_waits_is_a_chain_down_to_the_stack(page: Page) -> None:
    @miniray.remote(num_cpus=0)
    class Slow:
        def sleep(self) -> None:
            time.sleep(60)

        def add(self) -> None: ...

    slow = Slow.remote()
    slow.sleep.remote()
    waiting = slow.add.remote()
    show(page, "Why does it wait?", "Why does it wait?")
    page.get_by_role("searchbox").fill(waiting.hex())
    page.get_by_role("button", name="Show why").click()
    chain = page.locator(".chain")
    expect(chain).to_contain_text("Slow.add")
    expect(chain.locator(".frames .last")).to_contain_text("sleep")
    miniray.kill(slow)


def test_a_dataset_shows_what_its_operators_do(page: Page) -> None:
    def slow(batch: Any) -> Any:
        time.sleep(0.2)
        return batch

    dataset = miniray.data.range(100_000).map_batches(slow, batch_size=1000)
    show(page, "Datasets", "Datasets")
    batches = iter(dataset.iter_batches(batch_size=1000))
    next(batches)
    expect(row(page, "MapBatches")).to_contain_text("its reader")
    expect(row(page, "MapBatches")).to_contain_text(re.compile(r"[1-9][\d.]* (B|KiB|MiB)"))
    del batches
    gc.collect()  # frames of the browser's calls may still hold it
    expect(row(page, "MapBatches")).to_have_count(0, timeout=30_000)


def test_every_empty_page_says_what_would_be_there(page: Page) -> None:
    for name, heading in (("Train runs", "Train runs"), ("Datasets", "Datasets")):
        show(page, name, heading)
        expect(page.locator(".empty")).to_contain_text("No ")


# --- how it is used -------------------------------------------------------------------------------


def test_it_is_used_from_the_keyboard(page: Page) -> None:
    actors = [Counter.options(name=f"keyboard {n}").remote() for n in range(3)]
    miniray.get([actor.pid.remote() for actor in actors])
    show(page, "Actors", "Actors")
    page.keyboard.press("/")
    page.keyboard.type("keyboard")
    expect(row(page, "keyboard")).to_have_count(3)
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("Actors ?3"))
    page.keyboard.press("Escape")
    for key in "jjjk":
        page.keyboard.press(key)
    expect(page.locator(".chosen")).to_contain_text("keyboard 1")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("open the row")
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    expect(page.locator(".facts").get_by_text("keyboard 1")).to_be_visible()
    assert "#/actor/" in page.url


def test_nothing_scrolls_sideways_and_phones_have_a_menu(page: Page) -> None:
    actor = Counter.options(name="a name that is as long as names of people are").remote()
    pid, node = miniray.get(actor.pid.remote()), miniray.nodes()[0]["NodeID"]
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 800})
        for name in (*PAGES, f"actor/{actor._actor_id.hex()}", f"worker/{node}/{pid}"):
            page.goto(f"{page.url.partition('#')[0]}#/{name}")
            page.get_by_role("heading", level=1).wait_for()
            for element in ("html", "main"):
                wide = page.locator(element).evaluate("e => e.scrollWidth - e.clientWidth")
                assert wide <= 0, f"{name!r} at {width} pixels"
    waiting = page.get_by_role("link", name="Waiting")
    page.get_by_role("button", name="Menu").click()
    expect(waiting).to_be_visible()
    page.keyboard.press("Escape")
    expect(waiting).not_to_be_visible()
    page.get_by_role("button", name="Menu").click()
    show(page, "Jobs", "Jobs")
    expect(waiting).not_to_be_visible()


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


def test_a_view_has_one_stream_which_ends_while_nobody_can_see_it(page: Page) -> None:
    expect(row(page, "alive")).to_be_visible()  # the stream of before is open
    streams: list[str] = []
    page.on("request", lambda asked: streams.append(asked.url) if "/events" in asked.url else None)
    page.reload()
    expect(row(page, "alive")).to_be_visible()
    assert len(streams) == 1
    hide = """hidden => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with page.expect_event("requestfailed", lambda failed: failed.url == streams[0]):
        page.evaluate(hide, True)
    with page.expect_request(streams[0]):
        page.evaluate(hide, False)
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()


def test_what_is_asked_again_and_again_is_asked_once_at_a_time(page: Page) -> None:
    asked: list[Any] = []
    page.route("**/api/why", lambda route: asked.append(route))  # no answer comes
    with page.expect_request("**/api/why"):
        show(page, "Why does it wait?", "Why does it wait?")
    for _ in range(3):
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.evaluate("fetch('static/icon.svg').then(answer => answer.text())")
    assert len(asked) == 1
    page.unroute_all(behavior="ignoreErrors")


def test_the_page_goes_on_when_its_process_was_killed(page: Page) -> None:
    page.expected.extend(["ERR_", "Failed to load resource"])
    port = int(re.search(r":(\d+)/", page.url)[1])
    holders = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # others end meanwhile
            if any(each.laddr.port == port for each in process.net_connections("inet")):
                holders.append(process)
    web = max(holders, key=psutil.Process.create_time)  # the daemon holds the socket, too
    web.send_signal(signal.SIGKILL)
    expect(page.get_by_role("alert")).to_contain_text("connection")
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_view_that_is_one_too_many_is_told_that(page: Page) -> None:
    page.expected.append("Failed to load resource")
    page.route("**/api/events*", lambda route: route.fulfill(status=503))
    page.route("**/api/session", lambda route: route.fulfill(json={"full": "100 views are open"}))
    page.get_by_role("link", name="Actors").click()
    expect(page.get_by_role("alert")).to_have_text("100 views are open")
    page.unroute_all()
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_file_that_the_command_opens_leads_a_browser_in(
    browser: Browser, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    assert CliRunner().invoke(main, ["dashboard"]).exit_code == 0
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(opened[0])
        expect(page.get_by_role("heading", name="Devices")).to_be_visible()
