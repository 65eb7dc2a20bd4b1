"""The keys by which the ranks of an attempt find each other, and PyTorch's view of them."""

from __future__ import annotations

import asyncio
import datetime
import threading

import pytest

from miniray.train.controller.rendezvous import GroupKeys


def run(scenario):
    return asyncio.run(scenario(GroupKeys()))


def test_a_wait_in_vain_names_the_keys_that_are_missing():
    async def scenario(keys):
        await keys.set({"here": b""})
        return await keys.get(["here", "x", "y"], 0.01), await keys.wait(["x"], 0)

    assert run(scenario) == (([], ["x", "y"]), ["x"])


def test_waits_end_when_the_group_is_given_up():
    async def scenario(keys):
        waits = [asyncio.create_task(keys.wait([key], 600)) for key in "aab"]
        await asyncio.sleep(0)
        keys.close("others run")
        return await asyncio.gather(*waits, keys.wait(["c"], 600), return_exceptions=True)

    assert [str(error) for error in run(scenario)] == ["others run"] * 4


def test_counters_and_comparisons_are_those_of_pytorchs_stores():
    """Each line is what ``torch.distributed.HashStore`` answers to the same."""

    async def scenario(keys):
        assert await keys.add("n", 2) == 2
        assert await keys.add("n", -5) == -3
        assert (await keys.get(["n"], 0))[0] == [b"-3"]
        assert await keys.compare_set("k", b"old", b"new") == b"old"
        assert await keys.absent(["k"]) == ["k"]
        assert await keys.compare_set("k", b"", b"first") == b"first"
        assert await keys.compare_set("k", b"other", b"new") == b"first"
        assert await keys.compare_set("k", b"first", b"second") == b"second"
        await keys.append("k", b"!")
        assert (await keys.get(["k"], 0))[0] == [b"second!"]
        assert await keys.count() == 2
        assert [await keys.delete("k"), await keys.delete("k")] == [True, False]

    run(scenario)


class Controller:
    """Answers as the controller of a run does, from an event loop of its own."""

    def __init__(self):
        self.keys = GroupKeys()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def use_keys(self, operation, *arguments):
        coroutine = getattr(self.keys, operation)(*arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def store():
    pytest.importorskip("torch")
    from miniray.train.torch.process_group import GroupStore

    controller = Controller()
    yield GroupStore(controller, datetime.timedelta(seconds=60))
    controller.close()


def through_cpp(store):
    """The store as PyTorch's own code reaches it: each call goes through C++."""
    import torch.distributed as dist

    return dist.PrefixStore("group", store)


def test_pytorch_uses_every_operation_of_the_store(store):
    prefixed = through_cpp(store)
    prefixed.set("a", "1")
    prefixed.set("bytes", "\x00\x01")
    assert prefixed.get("a") == b"1"
    assert store.get("group/bytes") == b"\x00\x01"
    assert prefixed.add("count", 3) == 3
    assert prefixed.check(["a", "count"])
    assert not prefixed.check(["a", "missing"])
    assert prefixed.compare_set("a", "1", "2") == b"2"
    prefixed.append("a", "3")
    prefixed.multi_set(["x", "y"], ["X", "Y"])
    assert prefixed.multi_get(["a", "x", "y"]) == [b"23", b"X", b"Y"]
    prefixed.wait(["x"])
    prefixed.wait(["x"], datetime.timedelta(seconds=1))
    assert prefixed.delete_key("x")
    assert prefixed.num_keys() == 4
    assert prefixed.has_extended_api()
    assert prefixed.clone().get("y") == b"Y"


def test_a_key_that_never_comes_is_an_error_of_pytorchs_kind_that_names_it(store):
    import torch.distributed as dist

    store.set_timeout(datetime.timedelta(seconds=0.01))
    with pytest.raises(dist.DistStoreError, match=r"0\.01 s for the key 'missing'"):
        store.get("missing")
    with pytest.raises(dist.DistStoreError, match="'group/missing'"):
        through_cpp(store).wait(["missing"], datetime.timedelta(seconds=0.02))


def test_threads_wait_in_the_store_at_the_same_time(store):
    prefixed, got = through_cpp(store), []
    threads = [threading.Thread(target=lambda: got.append(prefixed.get("late"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    prefixed.set("late", "x")
    for thread in threads:
        thread.join()
    assert got == [b"x"] * 4
