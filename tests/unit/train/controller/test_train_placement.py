from __future__ import annotations

from miniray.train.base.ranks import WorkerInfo, shares_devices, unreachable_address
from miniray.train.controller.room import explain


def info(node="a", address="10.0.0.1", **ids):
    return WorkerInfo(node, address, 1, 1, ids)


def test_what_a_group_waits_for_is_told_with_how_much_is_short():
    text = explain(4, {"CPU": 2.0, "GPU": 0.5}, {"CPU": 16, "GPU": 2}, {"CPU": 5, "GPU": 2}, "busy")
    assert text == (
        "Waiting for the resources of 4 workers with {'CPU': 2.0, 'GPU': 0.5} each. "
        "CPU is short by 3: 8 are needed, 5 of the cluster's 16 are free. "
        "The scheduler says: busy."
    )


def test_a_resource_that_the_cluster_does_not_have_is_short_by_all_of_it():
    assert "GPU is short by 2: 2 are needed, 0 of the cluster's 0 are free." in explain(
        2, {"GPU": 1.0}, {"CPU": 4}, {"CPU": 4}
    )


def test_an_accelerator_type_that_no_node_has_is_named():
    resources = {"GPU": 1.0, "accelerator_type:A100": 0.001}
    text = explain(1, resources, {"GPU": 1}, {"GPU": 1})
    assert "No node has the accelerator type A100." in text
    assert "short" not in text


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
