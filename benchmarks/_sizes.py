"""How much the rows about training steps and checkpoints do: enough to measure, or just to run.

The environment says which (``SIZE``), since each row runs in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os

#: Name of the environment variable that chooses the sizes.
SIZE = "BENCHMARK_SIZE"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the rows of ``train_step.py`` do.

    Attributes:
        layers: Depth of the vision transformer.
        heads: Its attention heads.
        hidden: Its width.
        mlp: Width of its feed-forward layers.
        batch: Images per step and rank.
        steps: Steps until a group of processes gives the turn to the other one.
        report_every: Steps between two reports.
        pairs: Turns of each group, after one to warm up.
        starts: Starts of each launcher.
        checkpoint: MiB of the checkpoint that is compared with ``copytree``.
        copies: How often it is copied in each way.
        upload: MiB of the checkpoint that is uploaded in the background.
        upload_steps: Steps in which one such upload happens.
        uploads: How often it is uploaded in each way.
        kills: How many ranks are killed.
    """

    layers: int = 6
    heads: int = 8
    hidden: int = 192
    mlp: int = 384
    batch: int = 16
    steps: int = 10
    report_every: int = 5
    pairs: int = 10
    starts: int = 3
    checkpoint: int = 1024
    copies: int = 5
    upload: int = 160
    upload_steps: int = 40
    uploads: int = 5
    kills: int = 5


TINY = Sizes(
    layers=1,
    heads=2,
    hidden=16,
    mlp=16,
    batch=2,
    steps=2,
    report_every=1,
    pairs=2,
    starts=1,
    checkpoint=4,
    copies=1,
    upload=1,
    upload_steps=2,
    uploads=1,
    kills=1,
)


def sizes() -> Sizes:
    """The sizes that the environment asks for."""
    return TINY if os.environ.get(SIZE) == "tiny" else Sizes()
