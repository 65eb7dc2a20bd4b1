"""What those who follow a run are told of it, and when."""

from __future__ import annotations

import asyncio

import pytest

from miniray.train.controller.feed import MAX_ROWS, ProgressFeed, Row, Seen


def rows(first, count):
    return [Row(number, {}, None) for number in range(first, first + count)]


def after(feed, seen):
    return asyncio.run(asyncio.wait_for(feed.after(seen), 1))


def test_each_reader_gets_the_news_that_it_does_not_have():
    feed = ProgressFeed()
    feed.add_rows(rows(0, 2))
    first = after(feed, Seen())
    feed.note("a remark")
    feed.add_rows(rows(2, 1))
    assert [row.number for row in after(feed, first.seen).rows] == [2]
    everything = after(feed, Seen())
    assert [row.number for row in everything.rows] == [0, 1, 2]
    assert everything.notes == after(feed, first.seen).notes == ["a remark"]
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(feed.after(everything.seen), 0.01))


def test_a_slow_reader_hears_how_many_rows_it_has_missed():
    feed = ProgressFeed()
    feed.add_rows(rows(0, 3))
    seen = after(feed, Seen()).seen
    feed.add_rows(rows(3, MAX_ROWS + 7))
    news = after(feed, seen)
    assert (news.skipped, len(news.rows), news.rows[0].number) == (7, MAX_ROWS, 10)
