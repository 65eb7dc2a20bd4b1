"""Shapes of TPU slices."""

from __future__ import annotations

import pytest

from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.tpu import (
    TOPOLOGIES,
    SliceShape,
    generation,
    normalize_pod_type,
    slice_shape,
)


# Machine types and numbers of hosts as in Google's "Plan TPUs in GKE".
@pytest.mark.parametrize(
    ("topology", "kind", "shape"),
    [
        ("1x1", "TPU-V6E", SliceShape(1, 1, 1, "v6e-1")),
        ("2x2", "TPU-V6E", SliceShape(4, 1, 4, "v6e-4")),
        ("2x4", "TPU-V6E", SliceShape(8, 1, 8, "v6e-8")),
        ("4x4", "TPU-V6E", SliceShape(16, 4, 4, "v6e-16")),
        ("16x16", "v6e", SliceShape(256, 64, 4, "v6e-256")),
        ("2x8", "TPU-V5LITEPOD", SliceShape(16, 4, 4, "v5litepod-16")),
        ("2x2x1", "TPU-V4", SliceShape(4, 1, 4, "v4-8")),
        ("2x2x2", "TPU-V4", SliceShape(8, 2, 4, "v4-16")),
        ("2x2x4", "v4-32", SliceShape(16, 4, 4, "v4-32")),
        ("4x4x8", "TPU-V5P", SliceShape(128, 32, 4, "v5p-256")),
        (" 2X2X1 ", "tpu7x", SliceShape(4, 1, 4, "v7x-8")),
        ("4x4", "TPU-V3", SliceShape(16, 4, 4, "v3-32")),
    ],
)
def test_hosts_and_chips_of_a_slice(topology: str, kind: str, shape: SliceShape) -> None:
    assert slice_shape(topology, kind) == shape


def test_hosts_hold_all_chips_of_every_topology() -> None:
    for kind, topologies in TOPOLOGIES.items():
        for topology in topologies:
            shape = slice_shape(topology, kind)
            assert shape.hosts * shape.chips_per_host == shape.chips


def test_an_unknown_topology_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AcceleratorRequestError, match="TPU-V6E has no topology '3x3': use one of"):
        slice_shape("3x3", "TPU-V6E")


def test_an_unknown_generation_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AcceleratorRequestError, match=r"'A100' names no TPU generation.*TPU-V6E"):
        slice_shape("2x2", "A100")


@pytest.mark.parametrize("name", ["TPU-V7X", "tpu7x-8", "v7x", "V7X-16"])
def test_spellings_of_a_generation(name: str) -> None:
    assert generation(name) == "v7x"


@pytest.mark.parametrize(
    ("given", "pod_type"),
    [("v4-16", "v4-16"), ("tpu7x-16", "v7x-16"), ("V6E-8", "v6e-8"), ("v4", None), ("x-1", None)],
)
def test_spellings_of_a_pod_type(given: str, pod_type: str | None) -> None:
    assert normalize_pod_type(given) == pod_type
