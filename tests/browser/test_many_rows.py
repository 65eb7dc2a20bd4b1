"""Tables of a thousand and of ten thousand actors: only what is seen is in the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

import miniray

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.engine("miniray")

CLUSTER = {"num_cpus": 1, "include_dashboard": True, "dashboard_port": 0}
#: Rows that may be in the document at a time: those that are seen, and a few beyond.
MOST_DRAWN = 60


class Common:
    """Never placed: a row needs no process."""


class Rare:
    """As Common; one in a hundred."""


@pytest.fixture(scope="module")
def actors(cluster: Any) -> list[Any]:
    return start(1000)


def start(count: int) -> list[Any]:
    kinds = [miniray.remote(num_cpus=10)(kind) for kind in (Common, Rare)]
    return [kinds[n % 100 == 0].remote() for n in range(count)]


def row(page: Page, number: int) -> Any:
    """The row at this place of the whole table, if it is drawn."""
    return page.locator(f'[aria-rowindex="{number + 1}"]')


def test_a_thousand_rows_are_searched_sorted_and_scrolled(page: Page, actors: list[Any]) -> None:
    page.get_by_role("link", name="Actors").click()
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text("1,000")
    expect(row(page, 1)).to_contain_text("pending creation")
    page.get_by_role("button", name="Class").click()
    expect(row(page, 1)).to_contain_text("Common")
    page.get_by_role("button", name="Class").click()
    expect(row(page, 1)).to_contain_text("Rare")
    expect(row(page, 11)).to_contain_text("Common")
    assert page.get_by_role("row").count() < MOST_DRAWN
    page.get_by_role("searchbox").fill("rare pending")
    expect(page.get_by_role("row")).to_have_count(11)
    page.get_by_role("searchbox").fill("no such row")
    expect(page.get_by_text("Nothing has “no such row” in it.")).to_be_visible()
    page.get_by_role("button", name="Show all").click()
    expect(heading).to_contain_text("1,000")
    page.reload()
    expect(row(page, 1)).to_contain_text("Rare")  # the address has the order


def test_ten_thousand_rows_are_never_all_in_the_document(page: Page, actors: list[Any]) -> None:
    actors += start(9000)
    page.goto(page.url.partition("#")[0] + "#/actors?sort=-class_name")
    expect(page.get_by_role("heading", level=1)).to_contain_text("10,000")
    page.reload()
    expect(row(page, 100)).to_have_count(0)
    expect(row(page, 1)).to_contain_text("Rare")
    expect(page.get_by_role("heading", level=1)).to_contain_text("10,000")
    table = page.get_by_role("table")
    for part, place in ((0.5, 5001), (1.0, 10_000), (0.0, 1)):
        table.evaluate("(e, part) => e.scrollTop = part * e.scrollHeight", part)
        expect(row(page, place)).to_contain_text("Rare" if place == 1 else "Common")
        assert page.get_by_role("row").count() < MOST_DRAWN
