"""Shapes of TPU slices: chips, hosts and names, computed from a topology.

Nothing here looks at a machine. Facts are those of Google's "TPU architecture"
and "Plan TPUs in GKE" pages.
"""

from __future__ import annotations

import dataclasses
import math
import re

from miniray.accelerators.base import AcceleratorRequestError

#: Chips that one task or actor may ask for on a host.
CHIP_COUNTS = (1, 2, 4, 8)
#: Hosts of all but the smallest slices have so many chips.
_CHIPS_PER_HOST = 4
#: Up to this many chips, a slice of these generations is one host.
_LARGEST_HOST = 8
_LARGE_HOST_GENERATIONS = {"v5litepod", "v6e"}
#: Generations whose pod type counts a core per chip; the others count two.
_SINGLE_CORE_GENERATIONS = {"v5litepod", "v6e"}


def _cubes(x: int, y: int, z: int) -> set[str]:
    """Topologies of whole 4x4x4 cubes up to these lengths."""
    return {
        f"{a}x{b}x{c}"
        for a in range(4, x + 1, 4)
        for b in range(4, y + 1, 4)
        for c in range(4, z + 1, 4)
    }


_SMALL_3D = {"2x2x1", "2x2x2", "2x2x4", "2x4x4"}
_LITE = {"1x1", "2x2", "2x4", "2x8", "4x4", "4x8", "8x8", "8x16", "16x16"}

#: Topologies that exist, by generation.
TOPOLOGIES: dict[str, frozenset[str]] = {
    "v2": frozenset({"4x4", "4x8", "8x8", "8x16", "16x16"}),
    "v3": frozenset({"4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32"}),
    "v4": frozenset(_SMALL_3D | _cubes(12, 12, 16)),
    "v5p": frozenset(_SMALL_3D | _cubes(16, 16, 24)),
    "v5litepod": frozenset(_LITE),
    "v6e": frozenset(_LITE),
    "v7x": frozenset(
        _SMALL_3D | {"4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"},
    ),
}


@dataclasses.dataclass(frozen=True)
class SliceShape:
    """How a TPU slice is made up."""

    chips: int
    hosts: int
    chips_per_host: int
    #: Name of the slice's kind, such as ``v6e-16``.
    pod_type: str


def generation(name: str) -> str:
    """The generation that a type names: ``v6e`` for ``TPU-V6E``, ``v6e-16`` and ``v6e``.

    Raises:
        AcceleratorRequestError: There is no such generation.
    """
    found = re.sub(r"^tpu-?v?", "v", name.strip().lower()).partition("-")[0]
    if found not in TOPOLOGIES:
        raise AcceleratorRequestError(
            f"{name!r} names no TPU generation: use one of "
            + ", ".join(f"TPU-{known.upper()}" for known in TOPOLOGIES)
        )
    return found


def normalize_pod_type(name: str) -> str | None:
    """A pod type in one spelling (``v7x-16`` for ``tpu7x-16``), or None if it is none."""
    match = re.fullmatch(r"(?:v|tpu)(\d+[a-z]*)-(\d+)", name.strip().lower())
    return f"v{match[1]}-{match[2]}" if match else None


def chips_of_pod_type(pod_type: str) -> int:
    """Chips of all hosts of a slice, by the name of its kind: 16 for ``v6e-16``, 8 for ``v4-16``.

    Raises:
        AcceleratorRequestError: It is no kind of slice.
    """
    name = normalize_pod_type(pod_type)
    if name is None:
        raise AcceleratorRequestError(
            f"{pod_type!r} is no kind of TPU slice: use a generation and a number, as in v6e-16"
        )
    cores = int(name.partition("-")[2])
    return cores if generation(name) in _SINGLE_CORE_GENERATIONS else cores // 2


def slice_shape(topology: str, accelerator_type: str) -> SliceShape:
    """Hosts and chips of a slice.

    Args:
        topology: Chips along each axis: ``4x4`` or ``2x2x4``.
        accelerator_type: The generation, as ``TPU-V6E``, ``v6e`` or ``v6e-16``.

    Raises:
        AcceleratorRequestError: The generation has no such topology.
    """
    kind = generation(accelerator_type)
    axes = topology.strip().lower()
    if axes not in TOPOLOGIES[kind]:
        raise AcceleratorRequestError(
            f"TPU-{kind.upper()} has no topology {topology!r}: use one of "
            + ", ".join(sorted(TOPOLOGIES[kind], key=lambda name: (_chips(name), name)))
        )
    chips = _chips(axes)
    one_host = chips <= _LARGEST_HOST and kind in _LARGE_HOST_GENERATIONS
    per_host = chips if one_host else _CHIPS_PER_HOST
    cores = chips if kind in _SINGLE_CORE_GENERATIONS else 2 * chips
    return SliceShape(chips, math.ceil(chips / per_host), per_host, f"{kind}-{cores}")


def host_bounds(chips: int) -> str | None:
    """The grid of a process that uses so many chips of a host, as libtpu reads it."""
    return {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}.get(chips)


def _chips(topology: str) -> int:
    return math.prod(int(length) for length in topology.split("x"))
