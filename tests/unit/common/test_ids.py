from __future__ import annotations

import threading

from miniray.common.ids import PROCESS_ID_LENGTH, ObjectIds, new_id, owner_of, short_id
from miniray.common.object_ref import ID_LENGTH


def test_ids_are_random_and_of_one_length() -> None:
    ids = {new_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(id) for id in ids} == {PROCESS_ID_LENGTH}


def test_an_object_id_tells_its_owner() -> None:
    process = new_id()
    id = ObjectIds(process).new()
    assert len(id) == ID_LENGTH
    assert owner_of(id) == process


def test_the_short_ids_of_what_one_process_made_are_distinct() -> None:
    ids = ObjectIds(bytes.fromhex("a132706d00112233"))
    assert [short_id(ids.new().hex()) for _ in range(17)][15:] == ["a132706d-16", "a132706d-17"]


def test_threads_never_get_the_same_id() -> None:
    ids = ObjectIds(new_id())
    found: list[bytes] = []

    def take() -> None:
        found.extend([ids.new() for _ in range(5000)])

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 20_000


def test_ids_sort_in_the_order_they_were_made() -> None:
    ids = ObjectIds(b"12345678")
    made = [ids.new() for _ in range(600)]
    assert made == sorted(made)
