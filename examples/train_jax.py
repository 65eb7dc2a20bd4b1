"""Train a classifier of handwritten digits with JAX on two workers, on the CPU.

The workers' devices form one mesh. Each worker reads its half of the digits,
and JAX puts the halves together into arrays that are spread over the mesh:

    pip install 'miniray[train,jax,examples]'
    python examples/train_jax.py
"""

from __future__ import annotations

import argparse

import pyarrow as pa
from sklearn.datasets import load_digits

import miniray
from miniray import train
from miniray.train.jax import JaxTrainer


def make_table() -> pa.Table:
    """The digits: 64 numbers from 0 to 1 in each row, and which digit it is."""
    digits = load_digits()
    return pa.table({"image": list(digits.data / 16), "label": digits.target})


def train_loop(config: dict) -> None:
    """What every worker runs, each on its share of the digits."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    spread = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))

    def loss(weights, images, labels):
        scores = jax.nn.log_softmax(images @ weights)
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

    @jax.jit
    def step(weights, images, labels):
        value, gradient = jax.value_and_grad(loss)(weights, images, labels)
        accuracy = jnp.mean((images @ weights).argmax(1) == labels)
        return weights - config["lr"] * gradient, value, accuracy

    weights = jnp.zeros((64, 10))
    # Batches of one size: others would be compiled anew.
    batches = train.get_dataset_shard("train").iter_batches(batch_size=64, drop_last=True)
    for epoch in range(config["epochs"]):
        for batch in batches:
            images, labels = (
                jax.make_array_from_process_local_data(spread, batch[name])
                for name in ("image", "label")
            )
            weights, value, accuracy = step(weights, images, labels)
        train.report({"epoch": epoch, "loss": float(value), "accuracy": float(accuracy)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--storage-path", default=None, help="folder for the run's results")
    arguments = parser.parse_args()

    miniray.init("local", num_cpus=arguments.workers)
    result = JaxTrainer(
        train_loop,
        train_loop_config={"epochs": arguments.epochs, "lr": 0.5},
        scaling_config=train.ScalingConfig(num_workers=arguments.workers),
        run_config=train.RunConfig(
            storage_path=arguments.storage_path,
            callbacks=[train.ProgressCallback(total_epochs=arguments.epochs)],
        ),
        datasets={"train": make_table()},
    ).fit()
    print(f"accuracy of the last batch {result.metrics['accuracy']:.2f}")
    miniray.shutdown()


if __name__ == "__main__":
    main()
