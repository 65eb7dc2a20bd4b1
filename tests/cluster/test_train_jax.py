"""``JaxTrainer`` with two real processes of JAX, on the CPU."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest

from miniray import train
from miniray.train.v2.jax import JaxTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("cluster"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("jax") is None, reason="JAX comes with the extra 'jax'"
    ),
]


@pytest.fixture
def fit(fit: Any) -> Any:
    """Runs a train loop on two workers with JAX's processes connected."""
    return functools.partial(fit, trainer=JaxTrainer)


def test_the_devices_of_all_workers_are_one_mesh(fit: Any) -> None:
    def loop() -> dict[str, Any]:
        import jax
        from jax.experimental import multihost_utils

        sums = multihost_utils.process_allgather(jax.numpy.array([jax.process_index() + 1.0]))
        train.report({"num_devices": len(jax.devices())})
        return {
            "processes": jax.process_count(),
            "rank": (jax.process_index(), train.get_context().get_world_rank()),
            "local": len(jax.local_devices()),
            "platform": jax.devices()[0].platform,
            "gathered": sums.reshape(-1).tolist(),
        }

    result = fit(loop)
    assert result.metrics == {"num_devices": 2}
    assert result.return_value == {
        "processes": 2,
        "rank": (0, 0),
        "local": 1,
        "platform": "cpu",
        "gathered": [1.0, 2.0],
    }


def test_a_model_is_trained_on_the_data_of_both_workers(fit: Any) -> None:
    def loop() -> float:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(jax.devices(), ("data",))
        sharding = NamedSharding(mesh, PartitionSpec("data"))

        @jax.jit
        def step(weight: Any, x: Any, y: Any) -> Any:
            return weight - 0.5 * jax.grad(lambda w: jnp.mean((w * x - y) ** 2))(weight)

        weight = jnp.float32(0)
        batches = train.get_dataset_shard("train").iter_batches(batch_size=8)
        for _ in range(20):
            for batch in batches:
                x, y = (
                    jax.make_array_from_process_local_data(sharding, batch[name].astype("float32"))
                    for name in ("x", "y")
                )
                weight = step(weight, x, y)
        train.report({"weight": float(weight)})
        return float(weight)

    import pyarrow as pa

    values = [n / 16 for n in range(16)]
    table = pa.table({"x": values, "y": [3 * x for x in values]})
    result = fit(loop, given={"datasets": {"train": table}})
    assert result.return_value == pytest.approx(3.0, abs=0.01)
    assert result.metrics == {"weight": result.return_value}


def test_a_rank_that_fails_ends_the_run(fit: Any) -> None:
    def loop() -> None:
        import jax
        from jax.experimental import multihost_utils

        if jax.process_index() == 1:
            raise ValueError("out of data")
        multihost_utils.sync_global_devices("waits for rank 1")

    with pytest.raises(train.WorkerGroupError, match=r"\[Rank 1\] ValueError: out of data"):
        fit(loop)
