"""AMD GPUs: found in the topology that the kernel's compute driver publishes."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from miniray.accelerators import models
from miniray.accelerators.base import Detected, Family, numbers, parse_ids
from miniray.accelerators.host import DetectionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.accelerators.base import Use
    from miniray.accelerators.host import Host

logger = logging.getLogger(__name__)

_ROCR = "ROCR_VISIBLE_DEVICES"
_HIP = "HIP_VISIBLE_DEVICES"
_CUDA = "CUDA_VISIBLE_DEVICES"
#: Ends of the sensor of its power, by how new the driver is.
_POWER = ("average", "input")
_ERRORS = re.compile(r"^(ue|ce): (\d+)", re.MULTILINE)
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

    Two layers of ROCm hide devices, each by a variable of its own. The upper one, HIP,
    numbers from 0 what ``ROCR_VISIBLE_DEVICES`` leaves to it; so where the daemon has both,
    the ids are HIP's, and count among those. HIP reads ``CUDA_VISIBLE_DEVICES`` where its own
    variable is not set. Source: ROCm's pages "GPU isolation techniques" and "HIP environment
    variables" (https://rocm.docs.amd.com).
    """

    name = "amd"
    resource = "GPU"
    variable = _ROCR
    variables = (_HIP, _CUDA, _ROCR)
    fractional = True

    def governing_variable(self, environ: Mapping[str, str]) -> str:
        """Return HIP's variable where the daemon has it, else that of the layer below."""
        if _HIP in environ:
            return _HIP
        # An empty value is meant for NVIDIA's: HIP shows all devices then.
        return _CUDA if environ.get(_CUDA) else _ROCR

    def visible_ids(self, environ: Mapping[str, str]) -> list[str] | None:
        """Return the governing variable's ids; HIP's only if the layer below has them."""
        visible = super().visible_ids(environ)
        below = self._below(environ)
        if visible is None or below is None:
            return visible
        return _first_of(visible, len(below))

    def existing(
        self, visible: Sequence[str], detected: Detected, environ: Mapping[str, str]
    ) -> list[str]:
        """Count HIP's ids as places among those below that exist, not as the machine's numbers."""
        below = self._below(environ)
        if below is None:
            return super().existing(visible, detected, environ)
        return _first_of(visible, len(super().existing(below, detected, environ)))

    def restriction(self, environ: Mapping[str, str]) -> str:
        """Return the governing variable with its value, and what it counts within."""
        text = super().restriction(environ)
        if self._below(environ) is None:
            return text
        return f"{text} within {_ROCR}={environ[_ROCR]!r}"

    def _below(self, environ: Mapping[str, str]) -> list[str] | None:
        """Return what HIP's variable chooses from; None if only one of the two is set."""
        if self.governing_variable(environ) == _ROCR or _ROCR not in environ:
            return None
        return parse_ids(_ROCR, environ[_ROCR])

    def detect(self, host: Host) -> Detected:
        """Count the topology's nodes that have compute units and that we may open."""
        devices = _usable(host)
        model = TYPES.get(devices[0].get("device_id", 0)) if devices else None
        return Detected.numbered(len(devices), model)

    def use(self, host: Host, timeout: float) -> dict[str, Use]:
        """Read the files of the kernel's driver; ids of HIP within ROCm's other variable have none.

        Source: the kernel's pages "amdgpu: GPU power and thermal controls" and "RAS support".
        """
        if self._below(host.environ) is not None:
            return {}
        minors = [facts.get("drm_render_minor", 0) for facts in _usable(host)]
        return {str(id): _use(host, minor) for id, minor in enumerate(minors)}


def _usable(host: Host) -> list[dict[str, int]]:
    if not host.exists("/dev/kfd"):
        return []
    found = (_properties(host, node) for node in host.numbered(_NODES, ""))
    return [facts for facts in found if facts is not None and _is_usable(host, facts)]


def _use(host: Host, minor: int) -> Use:
    folder = f"/sys/class/drm/renderD{minor}/device"
    sensors = [f"{folder}/hwmon/{name}" for name in host.names(f"{folder}/hwmon")]
    use: Use = {}
    for (name, unit), files in {
        ("utilization_ratio", 0.01): [f"{folder}/gpu_busy_percent"],
        ("memory_used_bytes", 1): [f"{folder}/mem_info_vram_used"],
        ("memory_size_bytes", 1): [f"{folder}/mem_info_vram_total"],
        ("power_watts", 1e-6): [f"{each}/power1_{of}" for each in sensors for of in _POWER],
        ("temperature_celsius", 1e-3): [f"{each}/temp1_input" for each in sensors],
    }.items():
        text = next(filter(None, (_content(host, file) for file in files)), "")
        use |= numbers([(name, "", unit)], [text])
    for file in host.names(f"{folder}/ras"):
        if file.endswith("_err_count"):  # lines such as "ue: 0" and "ce: 3"
            for kind, count in _ERRORS.findall(_content(host, f"{folder}/ras/{file}")):
                key = ("errors_total", {"ue": "uncorrected", "ce": "corrected"}[kind])
                use[key] = use.get(key, 0.0) + int(count)
    return use


def _content(host: Host, file: str) -> str:
    """Return what stands in a file of the driver; empty if this device has no such file."""
    try:
        return host.read(file)
    except OSError:  # the driver lists sensors that it can't read on some devices
        return ""


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


def _first_of(ids: Sequence[str], count: int) -> list[str]:
    """Return the ids that can name one of ``count`` devices; forms that are no numbers can."""
    return [id for id in ids if not id.isdecimal() or int(id) < count][:count]
