"""Google TPUs: chips by device node, the slice by environment or metadata.

On GKE variables name the slice; on a TPU VM of Compute Engine the metadata server does, which is
queried only where there are chips.
"""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING, NamedTuple

from miniray.accelerators.base import (
    AcceleratorRequestError,
    Description,
    Detected,
    Family,
    is_left_alone,
)
from miniray.accelerators.host import METADATA_TIMEOUT, DetectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.accelerators.host import Host

logger = logging.getLogger(__name__)

_VENDOR = "0x1ae0"  # Google
_GROUPS = "/sys/kernel/iommu_groups"

_VISIBLE = "TPU_VISIBLE_CHIPS"
_CHIP_BOUNDS = "TPU_CHIPS_PER_HOST_BOUNDS"
_HOST_BOUNDS = "TPU_HOST_BOUNDS"

#: Variable of GKE and metadata key of Compute Engine, by what they hold.
_SOURCES = {
    "pod-type": ("TPU_ACCELERATOR_TYPE", "accelerator-type"),
    "slice-name": ("TPU_NAME", "instance-id"),
    "worker-id": ("TPU_WORKER_ID", "agent-worker-number"),
    "topology": ("TPU_TOPOLOGY", "tpu-env"),
}


class GoogleTPU(Family):
    """TPU chips of one host."""

    name = "tpu"
    resource = "TPU"
    variable = _VISIBLE
    variables = (_VISIBLE,)
    fractional = False

    def detect(self, host: Host) -> Detected:
        """Count ``/dev/accel<N>``, or the VFIO groups that hold a Google device."""
        count = sum(
            # Other drivers have a folder /dev/accel, and may number folders.
            not host.path(f"/dev/accel{index}").is_dir()
            for index in host.numbered("/dev", "accel")
        )
        if not count:
            count = sum(_is_tpu(host, group) for group in host.numbered("/dev/vfio", ""))
        return Detected.numbered(count)

    def describe(self, host: Host, detected: Detected) -> Description:
        """Return the TPU's generation, and this host's place in its slice."""
        facts = slice_facts(host, ask=bool(detected.ids))
        pod_type, name, worker = (facts.get(key) for key in ("pod-type", "slice-name", "worker-id"))
        resources: dict[str, float] = {}
        if pod_type and name and worker:
            resources[name] = 1
            if worker == "0":
                resources[f"TPU-{pod_type}-head"] = 1
        return Description(
            type=f"TPU-{pod_type.partition('-')[0].upper()}" if pod_type else None,
            resources=resources,
            labels={f"tpu-{key}": value for key, value in facts.items()},
        )

    def worker_environment(
        self, ids: Sequence[str], environ: Mapping[str, str], detected: int = 0
    ) -> dict[str, str]:
        """Return variables for part of a host; all of it keeps what the host's own slice needs."""
        if len(ids) == detected or is_left_alone(_VISIBLE, environ):
            return {}
        variables = {_VISIBLE: ",".join(ids)}
        bounds = host_bounds(len(ids))
        if bounds is not None:
            variables |= {_CHIP_BOUNDS: bounds, _HOST_BOUNDS: "1,1,1"}
        return variables

    def check_amount(self, amount: float) -> None:
        """Refuse what is not a grid of chips: libtpu serves 1, 2, 4 or 8 of a host."""
        if amount not in CHIP_COUNTS:
            raise AcceleratorRequestError(
                f"TPU chips are used in groups of {', '.join(map(str, CHIP_COUNTS))}: "
                f"ask for one of these numbers, not {amount:g}"
            )


def _is_tpu(host: Host, group: int) -> bool:
    """Return whether a VFIO group is a TPU's; network cards and others have groups too."""
    folder = f"{_GROUPS}/{group}/devices"
    return any(
        host.read(f"{folder}/{device}/vendor").lower() == _VENDOR for device in host.names(folder)
    )


def slice_facts(host: Host, *, ask: bool) -> dict[str, str]:
    """Return what is known of the slice, by the keys of ``_SOURCES``."""
    facts: dict[str, str] = {}
    for key, (variable, attribute) in _SOURCES.items():
        value = host.environ.get(variable)
        if not value and ask:
            try:
                value = host.metadata(attribute, METADATA_TIMEOUT)
            except DetectionError as error:
                logger.warning("The TPU's %s is unknown, since %s. Set %s.", key, error, variable)
                ask = False
        text = _READ[key](value) if value else None
        if text:
            facts[key] = text
    return facts


def _pod_type(text: str) -> str | None:
    name = normalize_pod_type(text)
    try:
        generation(name or text)
    except AcceleratorRequestError as error:
        logger.warning("The TPU's type is not announced: %s", error)
        return None
    return name


def _worker_id(text: str) -> str | None:
    if not text.strip().isdecimal():
        logger.warning("The TPU's worker id %r is not a number and is not announced", text)
        return None
    return str(int(text))


def _topology(text: str) -> str | None:
    """Return the topology itself, or out of the lines ``KEY: 'value'`` of ``tpu-env``."""
    if ":" not in text:
        return text.strip().lower()
    match = re.search(r"^\s*TOPOLOGY:\s*'(?P<name>[^']+)'", text, re.MULTILINE)
    return match["name"].strip().lower() if match else None


_READ: dict[str, Callable[[str], str | None]] = {
    "pod-type": _pod_type,
    "slice-name": str.strip,
    "worker-id": _worker_id,
    "topology": _topology,
}


#: Chips that one task or actor may request on a host.
CHIP_COUNTS = (1, 2, 4, 8)
#: Chips of a host of all but the smallest slices.
_CHIPS_PER_HOST = 4
#: Up to this many chips, a slice of these generations is one host.
_LARGEST_HOST = 8
_LARGE_HOST_GENERATIONS = {"v5litepod", "v6e"}
#: Generations whose pod type counts a core per chip; the others count two.
_SINGLE_CORE_GENERATIONS = {"v5litepod", "v6e"}


def _cubes(x: int, y: int, z: int) -> set[str]:
    """Return the topologies of whole 4x4x4 cubes up to these lengths."""
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


class SliceShape(NamedTuple):
    """How a TPU slice is made up."""

    chips: int
    hosts: int
    chips_per_host: int
    #: Name of the slice's kind, such as ``v6e-16``.
    pod_type: str


def generation(name: str) -> str:
    """Return the generation that a type names: ``v6e`` for ``TPU-V6E``, ``v6e-16`` and ``v6e``.

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
    """Return a pod type in one spelling (``v7x-16`` for ``tpu7x-16``), or None if it is none."""
    match = re.fullmatch(r"(v|tpu)(?P<generation>\d+[a-z]*)-(?P<count>\d+)", name.strip().lower())
    return f"v{match['generation']}-{match['count']}" if match else None


def chips_of_pod_type(pod_type: str) -> int:
    """Return the chips of a slice by its pod type: 16 for ``v6e-16``, 8 for ``v4-16``.

    Raises:
        AcceleratorRequestError: The text names no kind of slice.
    """
    name = normalize_pod_type(pod_type)
    if name is None:
        raise AcceleratorRequestError(
            f"{pod_type!r} is no kind of TPU slice: use a generation and a number, as in v6e-16"
        )
    cores = int(name.split("-")[-1])
    return cores if generation(name) in _SINGLE_CORE_GENERATIONS else cores // 2


def slice_shape(topology: str, accelerator_type: str) -> SliceShape:
    """Return the hosts and chips of a slice.

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
    """Return the grid of a process that uses ``chips`` chips of a host, as libtpu reads it."""
    return {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}.get(chips)


def _chips(topology: str) -> int:
    return math.prod(int(length) for length in topology.split("x"))
