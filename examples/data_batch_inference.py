"""Batch inference: Parquet files go through tasks and a pool of actors, and out as Parquet.

Tasks read the files and prepare batches; two actors, each with a model that was loaded once, score
them; tasks write the result. All run at the same time, and only a few blocks are in memory.

Needs the extra `data`: pip install 'miniray[data]'
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import miniray

ROWS = 20_000


def write_images(folder: Path) -> None:
    """Write four files of small grey images; the bright ones are those with odd ids."""
    random = np.random.default_rng(0)
    for number in range(4):
        ids = np.arange(number * ROWS // 4, (number + 1) * ROWS // 4)
        pixels = random.integers(0, 100, (len(ids), 64), dtype=np.uint8) + (ids % 2 * 100)[:, None]
        image = pa.FixedSizeListArray.from_arrays(pa.array(pixels.astype(np.uint8).ravel()), 64)
        pq.write_table(pa.table({"id": ids, "image": image}), folder / f"{number}.parquet")


def prepare(batch: dict[str, Any]) -> dict[str, Any]:
    """Make floats between 0 and 1 of the pixels."""
    return {"id": batch["id"], "image": batch["image"].astype(np.float32) / 255}


class Classifier:
    """A model: says how bright an image is."""

    def __init__(self, threshold: float) -> None:
        self.weights = np.full(64, 1 / 64, dtype=np.float32)
        self.threshold = threshold

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"], "bright": batch["image"] @ self.weights > self.threshold}


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        images, results = Path(temporary, "images"), Path(temporary, "results")
        images.mkdir()
        write_images(images)

        dataset = miniray.data.read_parquet(str(images))
        print("columns:", ", ".join(dataset.columns() or []), "rows:", dataset.count())
        scored = dataset.map_batches(prepare, batch_size=512).map_batches(
            Classifier, fn_constructor_args=(0.4,), batch_size=256, concurrency=2
        )
        scored.write_parquet(str(results))

        written = miniray.data.read_parquet(str(results))
        bright = written.filter(expr="bright")
        print("scored:", written.count(), "bright:", bright.count())
        print("odd ids are bright:", all(row["id"] % 2 for row in bright.take(100)))


if __name__ == "__main__":
    miniray.init("local", num_cpus=4)
    main()
