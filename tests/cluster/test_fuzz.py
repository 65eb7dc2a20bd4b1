"""Whatever is sent to a cluster, no process of it is lost and its memory stays bounded."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fuzzing
import pytest
from running_cluster import running_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def started(session_root: Any) -> Iterator[None]:
    with running_cluster({"num_cpus": 2}):
        yield


@pytest.mark.usefixtures("started")
def test_whatever_is_sent_to_a_cluster_it_serves_others_and_keeps_its_memory() -> None:
    seed = int(os.environ.get("FUZZ_SEED", "0")) or int.from_bytes(os.urandom(4), "big")
    print(f"FUZZ_SEED={seed}")
    assert fuzzing.run(seed, 30, 20_000)
