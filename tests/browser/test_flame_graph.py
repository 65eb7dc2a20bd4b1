"""The flame graph, as a file that was saved: it needs no network, and is used by mouse and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from miniray.profiling.forms import as_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.engine("miniray")


def leaf(name: str, value: float) -> dict[str, Any]:
    return {"name": name, "value": value, "children": []}


@pytest.fixture
def graph(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    loop = {
        "name": "loop (train.py:3)",
        "value": 3.0,
        "children": [leaf("forward (model.py:8)", 2.0), leaf("</script><b>x (data.py:1)", 1.0)],
    }
    tree = {"name": "all", "value": 4.0, "children": [loop, leaf("idle (wait.py:1)", 1.0)]}
    path = tmp_path / "graph.html"
    found = {"tree": tree, "unit": "seconds", "way": "hand", "notes": []}
    path.write_text(as_file(found, "CPU of <rank>", path))
    with browser.new_context(offline=True, viewport={"width": 1000, "height": 700}) as context:
        page = context.new_page()
        problems: list[str] = []
        page.on("console", lambda said: problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(path.as_uri())
        yield page
        assert not problems


def test_a_saved_file_draws_the_graph_without_a_network(graph: Page) -> None:
    expect(graph.get_by_role("heading")).to_have_text("CPU of <rank>")
    expect(graph.locator(".flame-status")).to_contain_text("4.00 s in all")
    hottest = graph.locator(".flame-hottest li")
    expect(hottest.first).to_contain_text("2.00 s, 50.0 %")
    expect(hottest).to_have_count(3)
    assert graph.locator("main b").count() == 0  # a name is text


def test_search_says_which_part_matches(graph: Page) -> None:
    graph.get_by_label("Search frames").fill("model")
    expect(graph.locator(".flame-found")).to_have_text("50.0 % in frames that match")
    graph.locator(".flame-hottest").get_by_role("button", name="idle").click()
    expect(graph.locator(".flame-found")).to_have_text("25.0 % in frames that match")


def test_a_click_zooms_and_a_frame_says_its_time(graph: Page) -> None:
    canvas = graph.get_by_role("img")
    canvas.click(position={"x": 300, "y": 28})  # the loop: three quarters of the second row
    expect(graph.locator(".flame-status")).to_contain_text("loop (train.py:3) — 3.00 s, 75.0 %")
    graph.get_by_role("button", name="Show all").click()
    expect(graph.get_by_role("button", name="Show all")).to_be_hidden()


def test_the_keyboard_walks_and_zooms(graph: Page) -> None:
    graph.get_by_role("img").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        graph.keyboard.press(key)
    expect(graph.locator(".flame-status")).to_contain_text("</script><b>x (data.py:1) — 1.00 s")
    graph.keyboard.press("Enter")
    expect(graph.get_by_role("button", name="Show all")).to_be_visible()
    graph.keyboard.press("Escape")
    expect(graph.get_by_role("button", name="Show all")).to_be_hidden()
