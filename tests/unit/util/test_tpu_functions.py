"""TPU slices without a cluster: shapes, workers, what listings of nodes say."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from accelerator_helpers import FakeMachine, add_tpu

from miniray.accelerators.tpu import slice_shape
from miniray.util import tpu
from miniray.util.tpu_reservation import TpuHost, intact_slices, ready_slices, useless_slices

if TYPE_CHECKING:
    from pathlib import Path

V4 = slice_shape("2x2x2", "v4")  # two hosts of four chips


def host(name: str, worker: int, *, used: float = 0, chips: float = 4, **more: Any) -> TpuHost:
    labels = {
        "ray.io/tpu-pod-type": "v4-16",
        "ray.io/tpu-slice-name": name,
        "ray.io/tpu-worker-id": str(worker),
    }
    return TpuHost(f"{name}-{worker}", labels, chips, used, **more)


def whole(name: str, **more: Any) -> list[TpuHost]:
    return [host(name, 0, **more), host(name, 1)]


# --- listings --------------------------------------------------------------------------------


def test_a_slice_is_intact_with_all_its_chips_and_its_host_0() -> None:
    hosts = [
        *whole("good"),
        host("half", 0),
        host("fewer-chips", 0),
        host("fewer-chips", 1, chips=2),
        host("headless", 1),
        host("headless", 2),
    ]
    assert set(intact_slices(hosts, V4)) == {"good"}


def test_a_slice_of_one_host_needs_no_name() -> None:
    single = slice_shape("2x2x1", "v4")
    hosts = [TpuHost("ab", {"ray.io/tpu-pod-type": "v4-8"}, 4, 0)]
    assert set(intact_slices(hosts, single)) == {"ab"}


def test_a_slice_is_ready_while_nobody_uses_it_or_drains_a_host_of_it() -> None:
    hosts = [*whole("idle"), *whole("used", used=1), *whole("drained", open=False)]
    assert ready_slices(hosts, V4) == ["idle"]


def test_what_nobody_reserved_and_nobody_can_have_whole_is_useless() -> None:
    hosts = [*whole("idle"), *whole("taken", used=4), *whole("busy", used=1), host("half", 0)]
    assert useless_slices(hosts, V4, heads_in_use=["taken-0"]) == ["busy", "half"]


def test_hosts_are_read_from_the_heads_listing() -> None:
    def state(id: str, state: str, total: dict[str, float]) -> dict[str, Any]:
        return {"node_id": id, "labels": {}, "total": total, "used": {}, "state": state}

    states = [
        state("a", "ALIVE", {"TPU": 4}),
        state("b", "DRAINING", {"TPU": 4}),
        state("c", "DEAD", {"TPU": 4}),
        state("d", "ALIVE", {"CPU": 4}),
    ]
    assert TpuHost.all_of(states) == [TpuHost("a", {}, 4, 0), TpuHost("b", {}, 4, 0, open=False)]


def test_nodes_of_a_slice_are_the_living_ones_of_its_name() -> None:
    nodes = [
        {"Alive": True, "Labels": {"ray.io/tpu-slice-name": "a"}},
        {"Alive": False, "Labels": {"ray.io/tpu-slice-name": "a"}},
        {"Alive": True, "Labels": {}},
    ]
    assert tpu.get_tpu_nodes_for_slice("a", nodes) == nodes[:1]
    assert tpu.get_tpu_slice_name_from_node(nodes[2]) is None


# --- shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "workers", "resources"),
    [
        (("4x4", "TPU-V6E"), 4, {"CPU": 1, "TPU": 4}),
        (("4x4", "v6e", {"TPU": 1}), 16, {"CPU": 1, "TPU": 1}),
        (("4x4", "v6e", {"CPU": 8, "disk": 2}), 4, {"CPU": 8, "TPU": 4, "disk": 2}),
        (("4x4", "v6e", None, 2), 8, {"CPU": 1, "TPU": 4}),
        (("2x4", "v6e"), 1, {"CPU": 1, "TPU": 8}),
        (("2x4", "v6e", None, 1, 4), 2, {"CPU": 1, "TPU": 4}),
        (("2x2x4", "TPU-V4"), 4, {"CPU": 1, "TPU": 4}),
        (("1x1", "v5litepod"), 1, {"CPU": 1, "TPU": 1}),
    ],
)
def test_workers_of_slices(
    arguments: tuple[Any, ...], workers: int, resources: dict[str, float]
) -> None:
    assert tpu.get_tpu_worker_resources(*arguments) == (workers, resources)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("4x4", "v6e", {"TPU": 8}), "has 4 chips, which can't be divided.*use 1 or 2 or 4"),
        (("4x4", "v6e", {"TPU": 3}), "groups of 1, 2, 4, 8"),
        (("4x4", "v6e", {"TPU": 0}), "can't be divided"),
        (("4x4", "v6e", None, 0), "num_slices must be at least 1, not 0"),
        (("4x4", "v6e", None, 1, 3), "chips_per_vm must be one of 1, 2, 4, 8"),
        (("2x2", "v6e", None, 1, 8), "divide the 4 chips of 2x2, not 8"),
        (("3x3", "v6e"), "has no topology '3x3'"),
        (("4x4", "A100"), "names no TPU generation"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tpu.get_tpu_worker_resources(*arguments)


@pytest.mark.parametrize(
    ("arguments", "slices"),
    [
        (("4x4", "TPU-V6E", 4), 1),
        (("4x4", "TPU-V6E", 5), 2),
        (("4x4", "TPU-V6E", 8), 2),
        (("4x4", "TPU-V6E", 16, {"TPU": 1}), 1),
        (("4x4", "TPU-V6E", 0), 1),
        (("", "TPU-V6E", 8), 1),
        (("9x9", "TPU-V6E", 8), 1),
    ],
)
def test_slices_for_workers(arguments: tuple[Any, ...], slices: int) -> None:
    assert tpu.get_tpu_num_slices_for_workers(*arguments) == slices


def test_variables_of_several_slices() -> None:
    assert tpu.get_tpu_coordinator_env_vars("10.0.0.1", 2, 1) == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }
    assert tpu.get_tpu_coordinator_env_vars("a", 1, 0, "9")["MEGASCALE_PORT"] == "9"
    with pytest.raises(ValueError, match="slice_id must be from 0 to 1 for 2 slices, not 2"):
        tpu.get_tpu_coordinator_env_vars("10.0.0.1", 2, 2)


def test_names_of_generations_and_kinds() -> None:
    assert tpu.get_tpu_version_from_type("TPU-V6E") == "v6e"
    assert tpu.get_chips_per_host("2x4", "v6e") == 8
    assert tpu.get_chips_per_host("4x4", "TPU-V6E") == 4
    assert tpu.infer_tpu_pod_type_from_topology("2x2x2", "TPU-V4") == "v4-16"
    with pytest.raises(ValueError, match="names no TPU generation"):
        tpu.get_tpu_version_from_type("H100")


# --- without a cluster -----------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """The machine that is looked at where there is no cluster."""
    fake = FakeMachine(tmp_path)
    monkeypatch.setattr(tpu, "this_host", fake.host)
    return fake


def test_a_machine_without_chips_is_in_no_slice(machine: FakeMachine) -> None:
    assert tpu.get_current_pod_name() is None
    assert tpu.get_current_pod_worker_count() is None
    assert tpu.get_num_tpu_chips_on_node() == 0
    assert tpu.get_num_tpu_slices("4x4", "v6e") == 0
    assert tpu.get_tpu_nodes_for_slice("any") == []
    assert machine.asked == []


@pytest.mark.parametrize(
    ("pod_type", "chips", "hosts"), [("v4-16", 4, 2), ("v6e-8", 8, 1), ("v6e-8", 4, 2)]
)
def test_a_host_knows_its_slice_without_a_cluster(
    machine: FakeMachine, pod_type: str, chips: int, hosts: int
) -> None:
    add_tpu(machine, chips)
    machine.environ.update(TPU_NAME="mine", TPU_ACCELERATOR_TYPE=pod_type, TPU_WORKER_ID="0")
    machine.metadata = {}
    assert tpu.get_current_pod_name() == "mine"
    assert tpu.get_current_pod_worker_count() == hosts
    assert tpu.get_num_tpu_chips_on_node() == chips


def test_a_broken_driver_counts_as_no_chips_and_is_logged(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.file("/dev/vfio/7")
    machine.folder("/sys/kernel/iommu_groups/7/devices/0000:00:04.0/vendor")  # unreadable
    assert tpu.get_num_tpu_chips_on_node() == 0
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("port", "variable", "expected"), [(7, "8", 7), (None, "8", 8)])
def test_the_profiler_of_jax_listens_where_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, port: int | None, variable: str, expected: int
) -> None:
    started: list[int] = []
    jax = types.ModuleType("jax")
    jax.profiler = types.SimpleNamespace(start_server=started.append)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setenv("JAX_PROFILER_PORT", variable)
    tpu.init_jax_profiler(port)
    assert started == [expected]


def test_a_profiler_that_cannot_be_started_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_port: int) -> None:
        raise RuntimeError("address in use")

    jax = types.ModuleType("jax")
    jax.profiler = types.SimpleNamespace(start_server=fail)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    tpu.init_jax_profiler(9)
    monkeypatch.setitem(sys.modules, "jax", None)
    tpu.init_jax_profiler()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "JAX's profiler cannot listen on port 9: address in use",
        "JAX is not installed: there is nothing to profile.",
    ]
