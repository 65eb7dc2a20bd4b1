"""Google TPUs: chips by device node, the slice by environment or metadata.

On GKE the slice is told in variables; on a TPU VM of Compute Engine the metadata
server knows it, and is asked only where there are chips.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from miniray.accelerators.base import (
    AcceleratorRequestError,
    Description,
    Detected,
    Family,
    is_left_alone,
)
from miniray.accelerators.host import METADATA_TIMEOUT, DetectionError
from miniray.accelerators.tpu_topology import (
    CHIP_COUNTS,
    generation,
    host_bounds,
    normalize_pod_type,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from miniray.accelerators.host import Host

logger = logging.getLogger(__name__)

_VENDOR = "0x1ae0"  # Google
_GROUPS = "/sys/kernel/iommu_groups"

_VISIBLE = "TPU_VISIBLE_CHIPS"
_CHIP_BOUNDS = "TPU_CHIPS_PER_HOST_BOUNDS"
_HOST_BOUNDS = "TPU_HOST_BOUNDS"

#: Variable of GKE and metadata key of Compute Engine, by what they tell.
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
        return Detected(tuple(str(index) for index in range(count)))

    def describe(self, host: Host, detected: Detected) -> Description:
        """The TPU's generation, and which part of which slice this host is."""
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
        """Variables for part of a host; all of it keeps what the host's own slice needs."""
        if len(ids) == detected or is_left_alone(_VISIBLE, environ):
            return {}
        variables = {_VISIBLE: ",".join(ids)}
        bounds = host_bounds(len(ids))
        if bounds is not None:
            variables |= {_CHIP_BOUNDS: bounds, _HOST_BOUNDS: "1,1,1"}
        return variables

    def check_amount(self, amount: float) -> None:
        """Refuse what is no grid of chips: libtpu serves 1, 2, 4 or 8 of a host."""
        if amount not in CHIP_COUNTS:
            raise AcceleratorRequestError(
                f"TPU chips are used in groups of {', '.join(map(str, CHIP_COUNTS))}: "
                f"ask for one of these numbers, not {amount:g}"
            )


def _is_tpu(host: Host, group: int) -> bool:
    """Whether a VFIO group is a TPU's; network cards and others have groups too."""
    folder = f"{_GROUPS}/{group}/devices"
    return any(
        host.read(f"{folder}/{device}/vendor").lower() == _VENDOR for device in host.names(folder)
    )


def slice_facts(host: Host, *, ask: bool) -> dict[str, str]:
    """What is known of the slice, by the keys of ``_SOURCES``."""
    facts: dict[str, str] = {}
    for key, (variable, attribute) in _SOURCES.items():
        value = host.environ.get(variable)
        if not value and ask:
            try:
                value = host.metadata(attribute, METADATA_TIMEOUT)
            except DetectionError as error:
                logger.warning(
                    "The TPU's %s is unknown, since %s. Set %s to tell it.", key, error, variable
                )
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
    """The topology itself, or out of the lines ``KEY: 'value'`` of ``tpu-env``."""
    if ":" not in text:
        return text.strip().lower()
    match = re.search(r"^\s*TOPOLOGY:\s*'([^']+)'", text, re.MULTILINE)
    return match[1].strip().lower() if match else None


_READ: dict[str, Callable[[str], str | None]] = {
    "pod-type": _pod_type,
    "slice-name": str.strip,
    "worker-id": _worker_id,
    "topology": _topology,
}
