"""Who waits for more of what comes, and when it is woken."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from miniray.node.transfer import moving
from miniray.node.transfer.moving import CutOffError, Filling

STEP = 100


class Reader:
    """Waits in a thread of its own."""

    def __init__(self, filling: Filling, offset: int) -> None:
        self._there: Future[int] = Future()

        def wait() -> None:
            try:
                self._there.set_result(filling.beyond(offset, STEP))
            except CutOffError as error:
                self._there.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()

    def there(self) -> int:
        return self._there.result(10)

    def waits(self) -> bool:
        return not self._there.done()


def test_who_waits_is_woken_when_a_step_has_come() -> None:
    filling = Filling(50)
    reader = Reader(filling, 10)
    filling.came(59)
    assert reader.waits()
    filling.came(1)
    assert reader.there() == 110


def test_what_is_there_already_is_told_at_once() -> None:
    filling = Filling(150)
    assert filling.beyond(10, STEP) == 150


def test_each_reader_is_woken_for_its_own_step() -> None:
    filling = Filling(0)
    ahead, behind = Reader(filling, 60), Reader(filling, 0)
    filling.came(100)
    assert behind.there() == 100
    assert ahead.waits()
    filling.came(60)
    assert ahead.there() == 160


def test_what_came_in_a_second_is_told_however_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "_LATEST", 0.05)
    filling = Filling(0)
    reader = Reader(filling, 0)
    filling.came(1)
    assert reader.there() == 1


def test_the_end_tells_the_rest() -> None:
    filling = Filling(0)
    reader = Reader(filling, 0)
    filling.came(1)
    filling.end()
    assert reader.there() == 1
    with pytest.raises(CutOffError, match="ended"):
        filling.beyond(1, STEP)
