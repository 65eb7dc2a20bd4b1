"""Train on Parquet files that tasks read and prepare, on two workers, on the CPU.

The files are read anew in each epoch, in another order: each worker starts tasks for its own part,
which read rows, normalize them and hand them over as tensors. No worker waits for the other's data.

    pip install 'miniray[train,data]'
    python examples/train_data.py
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import miniray
from miniray import train
from miniray.train.torch import TorchTrainer, prepare_model

ROWS, CLASSES = 8000, 4


def write_rows(folder: Path) -> None:
    """Write eight files: rows of 16 numbers around the point of their class."""
    random = np.random.default_rng(0)
    points = random.normal(size=(CLASSES, 16)) * 40
    for number in range(8):
        labels = random.integers(CLASSES, size=ROWS // 8)
        values = (points[labels] + random.normal(size=(len(labels), 16)) * 30).astype(np.float32)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 16)
        pq.write_table(pa.table({"x": column, "label": labels}), folder / f"{number}.parquet")


def normalize(batch: dict[str, Any]) -> dict[str, Any]:
    """Scale the values; runs in tasks, beside the training."""
    return {"x": batch["x"] / 40, "label": batch["label"]}


def train_loop(config: dict[str, Any]) -> None:
    """What every worker runs, each on its share of the rows."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=250)
    for epoch in range(config["epochs"]):
        rows = right = 0
        for batch in batches:
            predicted = model(batch["x"])
            loss = nn.functional.cross_entropy(predicted, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(batch["label"])
            right += int((predicted.argmax(1) == batch["label"]).sum())
        train.report({"epoch": epoch, "rows": rows, "accuracy": right / rows})


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on Parquet files that tasks prepare.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--storage-path", default=None, help="where results go; default: a new folder"
    )
    arguments = parser.parse_args()
    storage = arguments.storage_path or tempfile.mkdtemp(prefix="train-data-")
    miniray.init(num_cpus=4)
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder))
        dataset = miniray.data.read_parquet(folder).map_batches(normalize, batch_size=1000)
        print("columns:", ", ".join(dataset.columns() or []), "rows:", dataset.count())
        result = TorchTrainer(
            train_loop,
            train_loop_config={"epochs": arguments.epochs},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=storage),
            datasets={"train": dataset},
        ).fit()
    metrics = result.metrics
    print(f"epoch {metrics['epoch']}: {metrics['rows']} rows of each worker")
    print(f"accuracy {metrics['accuracy']:.2f}")


if __name__ == "__main__":
    main()
