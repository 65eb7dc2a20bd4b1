"""Train on as many workers as there is room for, while one node is killed and others join.

The cluster has a node for each worker, all of them on this machine. In the midst of training
one node is killed, and the run goes on from its newest checkpoint with the worker that is left.
Then two nodes join, and the group grows:

    pip install 'miniray[train]'
    python examples/train_elastic.py
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from miniray import train
from miniray.cluster_utils import Cluster, Node
from miniray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from miniray.util.queue import Queue

ROWS = 240


def train_loop(config: dict) -> None:
    """What every worker runs, until the largest group has trained for some epochs."""
    workers = train.get_context().get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(ROWS, 4)
    data = TensorDataset(torch.arange(ROWS), inputs, inputs.sum(1, keepdim=True))
    # The rows are shared out anew for each group: to two workers, one, or three.
    loader = prepare_data_loader(DataLoader(data, batch_size=20, shuffle=True))
    network = nn.Linear(4, 1)
    model = prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    first = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        network.load_state_dict(state["model"])
        first = state["epoch"] + 1

    for epoch in itertools.count(first):
        if workers > 1:
            loader.sampler.set_epoch(epoch)
        seen = torch.zeros(ROWS)
        for rows, batch, targets in loader:
            loss = nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[rows] += 1
        dist.all_reduce(seen)  # how often all workers together have seen each row
        time.sleep(config["seconds_per_epoch"])  # real data take longer

        metrics = {
            "epoch": epoch,
            "workers": workers,
            "loss": loss.item(),
            "each_row_once": bool((seen == 1).all()),
        }
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                state = {"model": network.state_dict(), "epoch": epoch}
                torch.save(state, Path(folder, "state.pt"))
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report(metrics, checkpoint=checkpoint)
        if workers == config["most"] and epoch - first + 1 >= config["epochs"]:
            return


class GroupSizes(train.Callback):
    """Puts the number of workers that made a report into a queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def after_report(self, run_context, metrics, checkpoint) -> None:
        self.queue.put(len(metrics))


def wait_for(sizes: Queue, workers: int) -> None:
    """Return after three reports of a group of so many workers."""
    reports = 0
    while reports < 3:
        reports += sizes.get() == workers


def disturb(cluster: Cluster, node: Node, sizes: Queue) -> None:
    """Kill a node while two workers train, and add two when one worker has gone on."""
    wait_for(sizes, workers=2)
    print("killing a node", flush=True)
    cluster.remove_node(node, allow_graceful=False)  # SIGKILL
    wait_for(sizes, workers=1)
    print("two nodes join", flush=True)
    for _ in range(2):
        cluster.add_node(num_cpus=1, resources={"slot": 1})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="with the largest group, at the end")
    parser.add_argument("--seconds-per-epoch", type=float, default=0.3)
    parser.add_argument("--storage-path", default=None, help="folder for the run's results")
    arguments = parser.parse_args()

    # Workers run where there are slots: not on the head's node, which must not be lost.
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1})
    nodes = [cluster.add_node(num_cpus=1, resources={"slot": 1}) for _ in range(2)]
    sizes = Queue(actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}})
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={
            "most": 3,
            "epochs": arguments.epochs,
            "seconds_per_epoch": arguments.seconds_per_epoch,
        },
        scaling_config=train.ScalingConfig(
            num_workers=(1, 3),
            resources_per_worker={"slot": 1},
            elastic_resize_monitor_interval_s=0,  # grow at the first checkpoint that finds room
        ),
        run_config=train.RunConfig(
            name=f"elastic-{uuid.uuid4().hex[:8]}",
            storage_path=arguments.storage_path,
            failure_config=train.FailureConfig(max_failures=3),
            callbacks=[GroupSizes(sizes)],
        ),
    )
    threading.Thread(target=disturb, args=[cluster, nodes[1], sizes], daemon=True).start()
    result = trainer.fit()

    history = [metrics for _, metrics in result.best_checkpoints]  # all of them, oldest first
    for workers, group in itertools.groupby(history, lambda metrics: metrics["workers"]):
        epochs = [metrics["epoch"] for metrics in group]
        print(f"epochs {epochs[0]} to {epochs[-1]}: a group of {workers}")
    done = [metrics["epoch"] for metrics in history]
    print("no epoch is missing or done twice:", done == list(range(len(done))))
    print("each row once in every epoch:", all(metrics["each_row_once"] for metrics in history))
    cluster.shutdown()


if __name__ == "__main__":
    main()
