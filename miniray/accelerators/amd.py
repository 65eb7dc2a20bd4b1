"""AMD GPUs: found in the topology that the kernel's compute driver publishes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from miniray.accelerators import models
from miniray.accelerators.base import Detected, Family
from miniray.accelerators.host import DetectionError

if TYPE_CHECKING:
    from miniray.accelerators.host import Host

logger = logging.getLogger(__name__)

_NODES = "/sys/class/kfd/kfd/topology/nodes"

#: Models by PCI device id. The ids are those of the kernel's amdgpu driver.
TYPES = {
    0x66A1: models.AMD_INSTINCT_MI50,
    0x738C: models.AMD_INSTINCT_MI100,
    0x7408: models.AMD_INSTINCT_MI250x,
    0x740C: models.AMD_INSTINCT_MI250,
    0x740F: models.AMD_INSTINCT_MI210,
    0x74A0: models.AMD_INSTINCT_MI300A,
    0x74A1: models.AMD_INSTINCT_MI300x,
    0x74A2: models.AMD_INSTINCT_MI308x,
    0x74A9: models.AMD_INSTINCT_MI300x_HF,
    0x74A5: models.AMD_INSTINCT_MI325x,
    0x75A0: models.AMD_INSTINCT_MI350x,
    0x75A3: models.AMD_INSTINCT_MI355x,
    0x6798: models.AMD_RADEON_R9_200_HD_7900,
    0x6799: models.AMD_RADEON_HD_7900,
    0x679A: models.AMD_RADEON_HD_7900,
    0x679B: models.AMD_RADEON_HD_7900,
}


class AmdGPU(Family):
    """AMD GPUs, or the partitions of one, as ROCm lists them.

    ``HIP_VISIBLE_DEVICES`` counts within what ``ROCR_VISIBLE_DEVICES`` leaves
    visible, so where the daemon has both, the former governs.
    """

    name = "amd"
    resource = "GPU"
    variable = "ROCR_VISIBLE_DEVICES"
    variables = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    fractional = True

    def detect(self, host: Host) -> Detected:
        """Count the topology's nodes that have compute units and that we may open."""
        if not host.exists("/dev/kfd"):
            return Detected()
        devices = []
        for node in host.numbered(_NODES, ""):
            facts = _properties(host, node)
            if facts is not None and _is_usable(host, facts):
                devices.append(facts)
        ids = tuple(str(index) for index in range(len(devices)))
        return Detected(ids, TYPES.get(devices[0].get("device_id", 0)) if devices else None)


def _properties(host: Host, node: int) -> dict[str, int] | None:
    try:
        text = host.read(f"{_NODES}/{node}/properties")
    except PermissionError:
        # The driver answers so for a device that this container was not given.
        logger.debug("AMD topology node %d is another container's", node)
        return None
    facts = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if not value.strip().isdecimal():
            raise DetectionError(f"AMD topology node {node} has a line {line!r} without a number")
        facts[key] = int(value)
    return facts


def _is_usable(host: Host, facts: dict[str, int]) -> bool:
    if not facts.get("simd_count"):
        return False  # a CPU
    minor = facts.get("drm_render_minor")
    return not minor or host.exists(f"/dev/dri/renderD{minor}")
