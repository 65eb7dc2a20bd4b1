"""What the head decides has an order: it is not that of a set, which no two processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_UNIT_TESTS = Path(__file__).parent.parent / "unit" / "head"
_PROCESS = """
import logging
from cluster_model import World

logging.disable(logging.WARNING)
for seed in range(8):
    world = World(seed)
    for _ in range(300):
        world.step()
    world.release_all()
    print(seed, world.told.hexdigest())
"""


def what_heads_say(hash_seed: int) -> list[str]:
    path = os.pathsep.join([str(_UNIT_TESTS), *(each for each in sys.path if each)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", _PROCESS]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def test_heads_to_which_the_same_happens_decide_the_same_whatever_the_order_of_sets() -> None:
    first = what_heads_say(hash_seed=1)
    assert what_heads_say(hash_seed=2) == first
    assert len(set(first)) == 8
