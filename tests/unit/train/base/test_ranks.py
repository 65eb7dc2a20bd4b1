from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miniray.train.base.ranks import (
    WorkerInfo,
    assign_ranks,
    shared_devices,
    shares_devices,
    unreachable_address,
)


def worker(node, *gpus):
    return WorkerInfo(node, "127.0.0.1", 1, 1, {"GPU": list(gpus)} if gpus else {})


def test_workers_of_one_node_have_neighbouring_ranks():
    ranks = assign_ranks([worker("a"), worker("b"), worker("a"), worker("b")])
    assert [rank.world_rank for rank in ranks] == [0, 2, 1, 3]
    assert [rank.local_rank for rank in ranks] == [0, 0, 1, 1]
    assert [rank.node_rank for rank in ranks] == [0, 1, 0, 1]
    assert {rank.local_world_size for rank in ranks} == {2}


def test_local_ranks_follow_the_numbers_of_the_devices():
    ranks = assign_ranks([worker("a", "10"), worker("a", "9"), worker("a", "0")])
    assert [rank.local_rank for rank in ranks] == [2, 1, 0]


def test_the_devices_of_a_node_are_those_of_all_its_workers():
    workers = [worker("a", "1"), worker("b", "0"), worker("a", "0", "10"), worker("a", "1")]
    assert shared_devices(workers, "a") == {"GPU": ["0", "1", "10"]}
    assert shared_devices([worker("a")], "a") == {}


@given(nodes=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_rank_is_given_once(nodes):
    ranks = assign_ranks([worker(node) for node in nodes])
    assert sorted(rank.world_rank for rank in ranks) == list(range(len(nodes)))
    for node in set(nodes):
        local = [rank for rank, name in zip(ranks, nodes, strict=True) if name == node]
        assert sorted(rank.local_rank for rank in local) == list(range(len(local)))
        assert {rank.local_world_size for rank in local} == {len(local)}
        assert len({rank.node_rank for rank in local}) == 1


def info(node="a", address="10.0.0.1", **ids):
    return WorkerInfo(node, address, 1, 1, ids)


def test_a_device_is_shared_when_two_workers_of_a_node_hold_parts_of_it():
    assert shares_devices([info(GPU=["0"]), info(GPU=["0"])])
    assert not shares_devices([info(GPU=["0"]), info(GPU=["1"])])
    assert not shares_devices([info(GPU=["0"]), info(node="b", GPU=["0"])])
    assert not shares_devices([info(), info()])


def test_a_loopback_address_beside_one_of_the_network_is_named():
    reason = unreachable_address([info(), info(node="b", address="127.0.1.1")])
    assert "Node b is known by 127.0.1.1" in reason
    assert "10.0.0.1" in reason


def test_nodes_of_one_machine_reach_each_other_by_loopback():
    assert unreachable_address([info(address="127.0.0.1"), info("b", "127.0.0.1")]) is None
    assert unreachable_address([info(), info("b", "10.0.0.2")]) is None
    assert unreachable_address([info(address="::1"), info("b", "fd00::2")]) is not None
