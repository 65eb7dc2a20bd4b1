"""What JAX's processes are told: on simulated TPU slices, and elsewhere."""

from __future__ import annotations

import os
import types

import pytest

from miniray.train.base.ranks import SLICE_LABEL, WORKER_LABEL, Ranks, WorkerInfo, assign_ranks
from miniray.train.base.states import ScalingDecision
from miniray.train.controller.worker_group import WorkerGroup
from miniray.train.jax import JaxConfig, JaxTrainer, platform
from miniray.train.v2.jax import JaxTrainer as SameTrainer
from miniray.train.worker.backend import GroupMember


def host(number, slice_name, worker_id, node=None):
    return WorkerInfo(
        node_id=node or f"node{number}",
        address=f"10.0.0.{number}",
        port=5000 + number,
        pid=1,
        accelerator_ids={"TPU": ["0", "1", "2", "3"]},
        labels={SLICE_LABEL: slice_name, WORKER_LABEL: worker_id},
    )


def in_order(workers):
    ranks = [each.world_rank for each in assign_ranks(workers)]
    return [workers[ranks.index(rank)] for rank in range(len(workers))]


def environments(workers, **resources):
    backend = JaxConfig().make_backend()
    return backend.environments(in_order(workers), resources or {"TPU": 4.0})


def test_hosts_of_a_slice_are_ranked_as_the_slice_numbers_them():
    workers = [host(3, "a", "10"), host(1, "b", "1"), host(2, "a", "9"), host(4, "b", "0")]
    assert [worker.address for worker in in_order(workers)] == [
        "10.0.0.2",
        "10.0.0.3",
        "10.0.0.4",
        "10.0.0.1",
    ]


def test_a_single_slice_knows_its_hosts():
    workers = [host(n, "a", str(n)) for n in (2, 0, 3, 1)]
    names = "10.0.0.0,10.0.0.1,10.0.0.2,10.0.0.3"
    assert environments(workers) == [
        {"TPU_WORKER_ID": str(rank), "TPU_WORKER_HOSTNAMES": names} for rank in range(4)
    ]


def test_several_slices_know_their_number_and_the_coordinator():
    workers = [host(n, "ab"[n // 2], str(n % 2)) for n in range(4)]
    common = {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.0",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_NUM_SLICES": "2",
    }
    found = environments(workers)
    assert found == [
        {
            **common,
            "MEGASCALE_SLICE_ID": str(rank // 2),
            "TPU_WORKER_ID": str(rank % 2),
            "TPU_WORKER_HOSTNAMES": ["10.0.0.0,10.0.0.1", "10.0.0.2,10.0.0.3"][rank // 2],
        }
        for rank in range(4)
    ]


def test_each_worker_of_a_group_gets_its_own_variables():
    decision = ScalingDecision(4, {"TPU": 4.0})
    group = WorkerGroup(types.SimpleNamespace(backend=JaxConfig().make_backend()), decision)
    members = group._take_ranks([host(n, "ab"[n // 2], str(n % 2)) for n in (3, 0, 2, 1)], None, 1)
    placed = [
        (
            member.ranks.world_rank,
            member.environment["MEGASCALE_SLICE_ID"],
            member.environment["TPU_WORKER_ID"],
        )
        for member in members
    ]
    # The slice of the first worker comes first, and its hosts in the slice's own order.
    assert placed == [(1, "0", "1"), (2, "1", "0"), (0, "0", "0"), (3, "1", "1")]
    assert {member.master_address for member in members} == {"10.0.0.2"}


@pytest.mark.slow  # it needs JAX
def test_the_run_knows_better_than_the_platform_how_many_slices_there_are(monkeypatch):
    of_platform = {"MEGASCALE_NUM_SLICES": "4", "TPU_WORKER_ID": "7", "JAX_PLATFORMS": "cpu"}
    for name, value in of_platform.items():
        monkeypatch.setenv(name, value)
    told = {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_ID": "0", "MEGASCALE_PORT": "8081"}
    monkeypatch.setenv("MEGASCALE_PORT", "9")
    ranks = Ranks(0, 1, 0, 1, 0)
    member = GroupMember(ranks, "10.0.0.0", "10.0.0.0", 1, None, {"TPU": 4.0}, {}, told)
    JaxConfig().make_backend().on_start(member)
    assert os.environ["MEGASCALE_NUM_SLICES"] == "2"
    # What is that of the host itself the platform knows.
    assert (os.environ["TPU_WORKER_ID"], os.environ["MEGASCALE_PORT"]) == ("7", "9")


def test_slices_of_different_sizes_are_refused():
    workers = [host(0, "a", "0"), host(1, "a", "1"), host(2, "b", "0")]
    with pytest.raises(ValueError, match=r"different numbers of hosts: \{'a': 2, 'b': 1\}"):
        environments(workers)


def test_two_workers_on_one_tpu_host_are_refused():
    with pytest.raises(ValueError, match="one process on each host"):
        environments([host(0, "a", "0", node="n"), host(0, "a", "0", node="n")])


def test_without_tpus_there_is_nothing_to_tell():
    assert environments([host(0, "a", "0")], CPU=1.0) == [{}]


@pytest.mark.parametrize(
    ("config", "resources", "expected"),
    [
        ({}, {"CPU": 1}, "cpu"),
        ({}, {"GPU": 1}, "cuda"),
        ({}, {"TPU": 4}, "tpu"),
        ({"use_tpu": True}, {}, "tpu"),
        ({"use_gpu": True}, {"TPU": 4}, "cuda"),
    ],
)
def test_the_platform_follows_what_workers_hold(config, resources, expected):
    assert platform(JaxConfig(**config), resources) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [({"use_tpu": True, "use_gpu": True}, "one of them"), ({"timeout_s": 0}, r"timeout_s\)")],
)
def test_nonsense_in_a_jax_config_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        JaxConfig(**config)


def test_the_trainer_is_found_under_rays_path_too():
    assert SameTrainer is JaxTrainer
    with pytest.raises(ValueError, match="jax_config"):
        JaxTrainer(print, jax_config=5)
