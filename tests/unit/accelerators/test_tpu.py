"""Google TPUs: chips, slices, and variables for part of a host."""

from __future__ import annotations

import logging

import pytest
from accelerator_helpers import FakeMachine, add_tpu

from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.node_resources import assigned_environment, resolve_node_accelerators
from miniray.accelerators.registry import check_amount
from miniray.accelerators.tpu import GoogleTPU

# Variables of a pod of a v6e slice on GKE (https://cloud.google.com/kubernetes-engine/docs/
# how-to/tpus); TPU_NAME is set for the cluster's own use.
GKE = {
    "TPU_ACCELERATOR_TYPE": "v6e-16",
    "TPU_TOPOLOGY": "4x4",
    "TPU_WORKER_ID": "2",
    "TPU_NAME": "my-slice",
}
# Metadata of a v4 TPU VM (https://cloud.google.com/tpu/docs/reference/metadata); tpu-env as in
# the tests of PyTorch/XLA (https://github.com/pytorch/xla, test/pjrt/test_runtime_tpu.py).
GCE = {
    "accelerator-type": "v4-16",
    "agent-worker-number": "0",
    "instance-id": "my-tpu",
    "tpu-env": "ACCELERATOR_TYPE: 'v4-16'\nCHIPS_PER_HOST_BOUNDS: '2,2,1'\n"
    "HOST_BOUNDS: '1,1,2'\nTOPOLOGY: '2x2x2'\nWORKER_ID: '0'\n",
}


def test_a_pod_on_gke_knows_its_slice_from_variables(machine: FakeMachine) -> None:
    add_tpu(machine, 4)
    machine.environ.update(GKE)
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.resources == {"accelerator_type:TPU-V6E": 1, "my-slice": 1}
    for domain in ("miniray.io", "ray.io"):
        assert found.labels[f"{domain}/accelerator-type"] == "TPU-V6E"
        assert found.labels[f"{domain}/tpu-slice-name"] == "my-slice"
        assert found.labels[f"{domain}/tpu-worker-id"] == "2"
        assert found.labels[f"{domain}/tpu-topology"] == "4x4"
        assert found.labels[f"{domain}/tpu-pod-type"] == "v6e-16"
    assert machine.asked == []


def test_a_tpu_vm_knows_its_slice_from_metadata(machine: FakeMachine) -> None:
    add_tpu(machine, 4)
    machine.metadata = GCE
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.resources == {
        "accelerator_type:TPU-V4": 1,
        "my-tpu": 1,
        "TPU-v4-16-head": 1,
    }
    assert found.labels["ray.io/tpu-topology"] == "2x2x2"


def test_the_newest_generation_is_spelled_as_ray_spells_it(machine: FakeMachine) -> None:
    add_tpu(machine, 4)
    machine.environ.update(GKE, TPU_ACCELERATOR_TYPE="tpu7x-16", TPU_WORKER_ID="0")
    found = resolve_node_accelerators(None, {}, machine.host())
    assert found.resources == {
        "accelerator_type:TPU-V7X": 1,
        "my-slice": 1,
        "TPU-v7x-16-head": 1,
    }


def test_logical_chips_take_the_slice_from_variables_and_ask_nobody(
    machine: FakeMachine,
) -> None:
    machine.environ.update(GKE, TPU_WORKER_ID="0")
    found = resolve_node_accelerators(None, {"TPU": 4}, machine.host())
    assert found.resources["TPU-v6e-16-head"] == 1
    assert machine.asked == []


def test_a_missing_metadata_server_costs_one_question_and_no_chips(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    add_tpu(machine, 4)
    with caplog.at_level(logging.WARNING):
        found = resolve_node_accelerators(None, {}, machine.host())
    assert len(found.devices["TPU"].ids) == 4
    assert found.resources == {}
    assert machine.asked == ["accelerator-type"]
    assert len(caplog.records) == 1
    assert "Set TPU_ACCELERATOR_TYPE" in caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "lost"),
    [
        ("TPU_ACCELERATOR_TYPE", "gpu", "tpu-pod-type"),
        ("TPU_ACCELERATOR_TYPE", "v99-8", "tpu-pod-type"),
        ("TPU_WORKER_ID", "first", "tpu-worker-id"),
    ],
)
def test_nonsense_about_a_slice_is_logged_and_left_out(
    machine: FakeMachine,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
    lost: str,
) -> None:
    add_tpu(machine, 4)
    machine.environ.update(GKE)
    machine.environ[variable] = value
    with caplog.at_level(logging.WARNING):
        found = resolve_node_accelerators(None, {}, machine.host())
    assert f"ray.io/{lost}" not in found.labels
    assert "my-slice" not in found.resources
    assert len(caplog.records) == 1


def test_a_folder_of_another_driver_is_no_chip(machine: FakeMachine) -> None:
    machine.file("/dev/accel/accel0")
    machine.folder("/dev/accel1")
    assert GoogleTPU().detect(machine.host()).ids == ()


def test_vfio_groups_count_only_where_google_is_the_vendor(machine: FakeMachine) -> None:
    machine.file("/dev/vfio/vfio")
    for group, vendor in ((0, "0x1ae0"), (1, "0x1ae0"), (96, "0x15b3")):
        machine.file(f"/dev/vfio/{group}")
        device = f"/sys/kernel/iommu_groups/{group}/devices/0000:0{group % 9}:00.0"
        machine.file(f"{device}/vendor", f"{vendor}\n")
    assert GoogleTPU().detect(machine.host()).ids == ("0", "1")


@pytest.mark.parametrize(
    ("chips", "bounds"), [(1, "1,1,1"), (2, "1,2,1"), (4, "2,2,1"), (8, "2,4,1")]
)
def test_part_of_a_host_gets_its_bounds(machine: FakeMachine, chips: int, bounds: str) -> None:
    ids = [str(chip) for chip in range(chips)]
    found = resolve_node_accelerators(None, {"TPU": 8}, machine.host())
    assert assigned_environment({"TPU": ids}, found, {}) == {
        "TPU_VISIBLE_CHIPS": ",".join(ids),
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_HOST_BOUNDS": "1,1,1",
    }


@pytest.mark.parametrize("visible", [None, "0,1,2,3"])
def test_all_of_a_host_keeps_the_bounds_of_its_slice(
    machine: FakeMachine, visible: str | None
) -> None:
    add_tpu(machine, 4)
    machine.environ["TPU_HOST_BOUNDS"] = "2,2,1"
    if visible is not None:
        machine.environ["TPU_VISIBLE_CHIPS"] = visible
    found = resolve_node_accelerators(None, {}, machine.host())
    every = {"TPU": ["0", "1", "2", "3"]}
    assert assigned_environment(every, found, machine.environ) == {}


def test_all_that_a_restricted_daemon_has_is_part_of_the_host(machine: FakeMachine) -> None:
    add_tpu(machine, 4)
    machine.environ["TPU_VISIBLE_CHIPS"] = "2,3"
    found = resolve_node_accelerators(None, {}, machine.host())
    variables = assigned_environment({"TPU": ["2", "3"]}, found, machine.environ)
    assert variables["TPU_CHIPS_PER_HOST_BOUNDS"] == "1,2,1"


def test_the_switch_for_the_variable_leaves_the_bounds_too(machine: FakeMachine) -> None:
    found = resolve_node_accelerators(None, {"TPU": 4}, machine.host())
    environ = {"MINIRAY_NOSET_TPU_VISIBLE_CHIPS": "1"}
    assert assigned_environment({"TPU": ["0"]}, found, environ) == {}


@pytest.mark.parametrize("amount", [0.5, 3, 16])
def test_only_groups_of_chips_that_libtpu_serves_can_be_asked_for(amount: float) -> None:
    with pytest.raises(AcceleratorRequestError, match="groups of 1, 2, 4, 8"):
        check_amount("TPU", amount)


@pytest.mark.parametrize("amount", [0, 1, 2, 4.0, 8])
def test_groups_of_chips_that_libtpu_serves(amount: float) -> None:
    check_amount("TPU", amount)
