"""The TPU examples of the page on scale and accelerators, on simulated slices.

Each host is a node with logical chips and with the variables by which GKE tells a host its slice.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import miniray as ray
import miniray.train
from miniray.cluster_utils import Cluster
from miniray.train import RunConfig, ScalingConfig
from miniray.train.v2.jax import JaxTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A node for each host, of which twelve are started.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("slices"), pytest.mark.timeout(600)]

#: Kind and name of each slice; all of them have four hosts with four chips each.
SLICES = (("v6e-16", "first"), ("v6e-16", "second"), ("v4-32", "cube"))


@pytest.fixture(scope="module")
def slices(session_root: Path) -> Iterator[None]:
    """The hosts of three slices, and a node without TPUs for the driver."""
    del session_root
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for kind, name in SLICES:
            for worker in range(4):
                cluster.add_node(
                    num_cpus=1,
                    resources={"TPU": 4},
                    env_vars={
                        "TPU_ACCELERATOR_TYPE": kind,
                        "TPU_NAME": name,
                        "TPU_WORKER_ID": str(worker),
                    },
                )
        ray.init(address=cluster.address)
        cluster.wait_for_nodes()
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def hosts(tmp_path: Path) -> Callable[..., list[list[Any]]]:
    """Runs workers without a framework: kind of slice, slice, host and chips of each, by rank."""

    def run(**scaling: Any) -> list[list[Any]]:
        def train_func(config: dict[str, str]) -> None:
            context = ray.get_runtime_context()
            (node,) = [each for each in ray.nodes() if each["NodeID"] == context.get_node_id()]
            names = ("ray.io/tpu-pod-type", "ray.io/tpu-slice-name", "ray.io/tpu-worker-id")
            facts = [node["Labels"].get(name) for name in names]
            facts.append(len(context.get_accelerator_ids()["TPU"]))
            rank = ray.train.get_context().get_world_rank()
            Path(config["folder"], str(rank)).write_text(repr(facts))

        folder = tmp_path / "hosts"
        folder.mkdir()
        ray.train.DataParallelTrainer(
            train_func,
            train_loop_config={"folder": str(folder)},
            scaling_config=ScalingConfig(use_tpu=True, **scaling),
            run_config=RunConfig(storage_path=tmp_path),
        ).fit()
        found = sorted(folder.iterdir(), key=lambda path: int(path.name))
        return [eval(path.read_text()) for path in found]  # our own repr

    return run


def test_two_slices_of_four_hosts_each(hosts: Any) -> None:
    found = hosts(num_workers=8, topology="4x4", accelerator_type="TPU-V6E")
    assert [kind for kind, _, _, _ in found] == ["v6e-16"] * 8
    assert [chips for _, _, _, chips in found] == [4] * 8
    # The hosts of a slice follow each other, in the slice's own order.
    assert [host for _, _, host, _ in found] == ["0", "1", "2", "3"] * 2
    assert len({name for _, name, _, _ in found[:4]}) == 1
    assert len({name for _, name, _, _ in found}) == 2


def test_workers_that_use_some_chips_are_still_one_on_each_host(hosts: Any) -> None:
    found = hosts(
        num_workers=4,
        topology="4x4",
        accelerator_type="TPU-V6E",
        resources_per_worker={"TPU": 2},
    )
    assert [chips for _, _, _, chips in found] == [2] * 4
    assert len({(name, host) for _, name, host, _ in found}) == 4


def test_the_accelerator_type_is_the_generation(hosts: Any) -> None:
    found = hosts(num_workers=4, topology="2x2x4", accelerator_type="TPU-V4")
    assert found == [["v4-32", "cube", str(host), 4] for host in range(4)]


@pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX comes with the extra 'jax'"
)
def test_a_jax_trainer_connects_the_hosts_of_a_slice(tmp_path: Path) -> None:
    def train_func() -> list[str]:
        import jax

        devices = jax.devices()
        ray.train.report({"num_devices": len(devices)})
        return [os.environ[name] for name in ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES")]

    trainer = JaxTrainer(
        train_func,
        scaling_config=ScalingConfig(
            num_workers=4,
            use_tpu=True,
            topology="4x4",
            accelerator_type="TPU-V6E",
        ),
        # There are no chips, so that JAX runs on a CPU of each host.
        run_config=RunConfig(
            storage_path=tmp_path, worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}}
        ),
    )
    result = trainer.fit()
    assert result.metrics == {"num_devices": 4}
    worker, names = result.return_value
    assert worker == "0"
    assert len(names.split(",")) == 4
