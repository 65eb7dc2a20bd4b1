"""Devices whose processes could not be killed, as daemons tell of them."""

from __future__ import annotations

import pytest
from head_harness import FakeCluster, FakeDaemon, new_id, task_spec

from miniray._proto import head_pb2
from miniray.common.specs import BundleAffinity

DEVICES = {"GPU": ["0", "1"]}


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def daemon(cluster: FakeCluster) -> FakeDaemon:
    return cluster.node({"CPU": 4}, DEVICES)


def quarantine(
    *ids: str, pid: int = 123, name: str = "train.py", job: bytes = b""
) -> head_pb2.Quarantine:
    devices = [head_pb2.DeviceSet(resource="GPU", ids=ids)] if ids else []
    return head_pb2.Quarantine(
        process_id=pid.to_bytes(8, "big"),
        job_id=job,
        processes=[head_pb2.Process(pid=pid, name=name)],
        devices=devices,
        since=1e9,
    )


def tell(daemon: FakeDaemon, *all: head_pb2.Quarantine) -> None:
    daemon.tell(quarantines=head_pb2.Quarantines(all=all))


def granted(daemon: FakeDaemon) -> list[list[str]]:
    leases = daemon.take("start_lease")
    return [lease.devices.get("GPU", []) for lease in leases]


def reasons(daemon: FakeDaemon, driver: bytes) -> list[str]:
    return [demand["reason"] for demand in daemon.ask(driver, "state", "pending")]


def test_a_quarantined_device_is_granted_only_when_it_is_back(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    tell(daemon, quarantine("0"))
    tell(daemon, quarantine("0"))  # twice is once
    daemon.notice(driver, "want_leases", 1, task_spec(resources={"GPU": 1}), 2)
    assert granted(daemon) == [["1"]]
    tell(daemon)
    assert granted(daemon) == [["0"]]


def test_the_map_of_devices_shows_it_with_the_reason_and_what_is_held_beside(
    daemon: FakeDaemon,
) -> None:
    driver = daemon.driver()
    daemon.notice(driver, "want_leases", 1, task_spec(resources={"GPU": 0.25}), 1)
    tell(daemon, quarantine("1"))
    held, broken = daemon.ask(driver, "state", "devices")
    assert [(each["kind"], each["name"], each["share"]) for each in held["held"]] == [
        ("task", "work", 0.25)
    ]
    assert (held["free"], held["quarantined"]) == (0.75, None)
    assert (broken["device"], broken["free"], broken["held"]) == ("1", 0.0, [])
    assert "train.py" in broken["quarantined"]
    tell(daemon)
    _, repaired = daemon.ask(driver, "state", "devices")
    assert (repaired["free"], repaired["quarantined"]) == (1.0, None)


def test_who_waits_for_it_hears_which_process_keeps_it(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    driver = daemon.driver()
    name = daemon.node_id.hex()[:8]
    tell(daemon, quarantine("1"))
    daemon.notice(driver, "want_leases", 1, task_spec(resources={"GPU": 2}), 1)
    why = f"GPU 1 of node {name} is quarantined: pid 123 (train.py) could not be killed"
    assert reasons(daemon, driver) == [f"needs GPU 2; {why}"]
    # Word comes soon, and without saying that no node could ever serve it.
    cluster.timers.pass_time(1)
    assert daemon.pushes(driver, "pending") == [()]
    daemon.notice(driver, "want_leases", 2, task_spec(resources={"GPU": 1}), 2)
    assert granted(daemon) == [["0"]]
    [busy] = [reason for reason in reasons(daemon, driver) if "GPU 1 in" in reason]
    assert busy.endswith(f"has 0 of 1 wholly free; {why}")


def test_a_group_that_lacks_only_what_is_quarantined_says_so(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    tell(daemon, quarantine("0"))
    group = (driver + new_id(), [{"GPU": 1}, {"GPU": 1}], "PACK", "", "tests", False, None)
    daemon.notice(driver, "create_placement_group", *group)
    [reason] = reasons(daemon, driver)
    assert reason.startswith("GPU 0 of node ")
    assert reason.endswith("is quarantined: pid 123 (train.py) could not be killed")
    tell(daemon)
    assert reasons(daemon, driver) == []


def test_a_device_that_two_processes_keep_is_back_with_the_last(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    tell(daemon, quarantine("0", pid=1), quarantine("0", "1", pid=2))
    daemon.notice(driver, "want_leases", 1, task_spec(resources={"GPU": 0.5}), 1)
    tell(daemon, quarantine("0", pid=1))
    assert granted(daemon) == [["1"]]
    assert daemon.ask(driver, "cluster_resources")["GPU"] == 1


def test_the_driver_of_its_job_is_warned_once(daemon: FakeDaemon) -> None:
    driver, other = daemon.driver(), daemon.driver()
    tell(daemon, quarantine("0", job=driver))
    tell(daemon, quarantine("0", job=driver), quarantine(pid=7, name="loader", job=driver))
    first, second = (text for (text,) in daemon.pushes(driver, "warning"))
    assert "pid 123 (train.py) could not be killed. GPU 0 will not be handed out" in first
    assert "pid 7 (loader) could not be killed. It held no device" in second
    assert daemon.pushes(other, "warning") == []


def test_a_node_that_comes_back_tells_again_before_anything_is_granted(
    cluster: FakeCluster, daemon: FakeDaemon
) -> None:
    other = cluster.node({"CPU": 1})
    driver = other.driver()
    tell(daemon, quarantine("0"))
    other.notice(driver, "want_leases", 1, task_spec(resources={"GPU": 1}), 2)
    assert granted(daemon) == [["1"]]
    told = head_pb2.Quarantines(all=[quarantine("0")])
    back = FakeDaemon(cluster, {"CPU": 4}, DEVICES, daemon.node_id, quarantines=told)
    assert granted(back) == [["1"]]
    [node] = [n for n in other.ask(driver, "state", "node_states") if n["quarantined"]]
    assert node["quarantined"] == [
        {
            "pids": [123],
            "names": ["train.py"],
            "devices": {"GPU": ["0"]},
            "since": 1e9,
            "reason": "pid 123 (train.py) could not be killed",
        }
    ]
    tell(back)
    assert granted(back) == [["0"]]


def test_bundles_that_are_placed_later_leave_it_alone_too(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    tell(daemon, quarantine("0"))
    id = driver + new_id()
    daemon.notice(
        driver, "create_placement_group", id, [{"GPU": 1}], "PACK", "", "tests", False, None
    )
    spec = task_spec(resources={"GPU": 1}, placement=BundleAffinity(id, 0))
    daemon.notice(driver, "want_leases", 1, spec, 1)
    assert granted(daemon) == [["1"]]


def test_what_is_told_of_unknown_devices_changes_nothing(daemon: FakeDaemon) -> None:
    driver = daemon.driver()
    tell(daemon, quarantine("9"))
    daemon.notice(driver, "want_leases", 1, task_spec(resources={"GPU": 1}), 2)
    assert granted(daemon) == [["0"], ["1"]]
