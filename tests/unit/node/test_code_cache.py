"""What a daemon keeps of code: what was used lately, for the jobs that use it."""

from __future__ import annotations

import asyncio

from miniray.node.code_cache import CodeCache

ONE, TWO = b"job  one", b"job  two"


class Head:
    """Keeps everything; questions count."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def ask(self, name: bytes) -> bytes | None:
        self.asked.append(name)
        return bytes(40)


def test_what_was_not_used_for_longest_goes_and_is_asked_for_again() -> None:
    head = Head()
    cache = CodeCache(head.ask, limit=100)
    assert cache.put(ONE, b"a", bytes(40))
    assert cache.put(ONE, b"b", bytes(40))
    assert cache.known(ONE, b"a") == bytes(40)
    assert cache.put(ONE, b"c", bytes(40))
    assert cache.known(ONE, b"b") is None
    assert cache.used == 80
    assert asyncio.run(cache.get(ONE, b"b")) == bytes(40)
    assert head.asked == [b"b"]
    assert not cache.put(ONE, b"a", bytes(40))  # the head has it


def test_code_above_the_limit_is_kept_until_the_next_comes() -> None:
    cache = CodeCache(Head().ask, limit=100)
    cache.put(ONE, b"a", bytes(200))
    assert cache.known(ONE, b"a") is not None
    cache.put(ONE, b"b", bytes(1))
    assert (cache.known(ONE, b"a"), cache.used) == (None, 1)


def test_the_head_is_told_what_each_job_uses() -> None:
    cache = CodeCache(Head().ask, limit=100)
    assert cache.put(ONE, b"a", b"code")
    assert not cache.put(ONE, b"a", b"code")
    assert cache.put(TWO, b"a", b"code")


def test_code_goes_with_the_last_job_that_used_it() -> None:
    cache = CodeCache(Head().ask, limit=100)
    cache.put(ONE, b"a", b"code")
    cache.put(ONE, b"b", b"code")
    cache.known(TWO, b"a")
    assert cache.jobs() == {ONE, TWO}
    cache.end_job(ONE)
    assert cache.used == len(b"code")
    cache.end_job(TWO)
    assert (cache.used, cache.jobs()) == (0, set())
