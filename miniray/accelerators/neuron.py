"""AWS Neuron cores of Inferentia and Trainium machines, found with ``neuron-ls``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from miniray.accelerators import models
from miniray.accelerators.base import (
    AcceleratorRequestError,
    Description,
    Detected,
    Family,
    parse_ids,
)
from miniray.accelerators.host import TOOL_TIMEOUT, DetectionError, ToolNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from miniray.accelerators.host import Host

_TOOL = "/opt/aws/neuron/bin/neuron-ls"
_SYSFS = "/sys/devices/virtual/neuron_device"


class NeuronCore(Family):
    """Neuron cores; each device has several."""

    name = "neuron"
    resource = "neuron_cores"
    variable = "NEURON_RT_VISIBLE_CORES"
    variables = ("NEURON_RT_VISIBLE_CORES",)
    fractional = False

    def detect(self, host: Host) -> Detected:
        """Add up the cores of the devices that ``neuron-ls`` or the driver lists."""
        devices = host.numbered("/dev", "neuron")
        if not devices:
            return Detected()
        # The tool's folder is on PATH only in login shells of Amazon's images.
        tool = str(host.path(_TOOL)) if host.exists(_TOOL) else "neuron-ls"
        try:
            count = _count(host.run([tool, "--json-output"], TOOL_TIMEOUT))
        except ToolNotFoundError:
            count = sum(_cores_by_sysfs(host, device) for device in devices)
        return Detected.numbered(count, models.AWS_NEURON_CORE)

    def describe(self, host: Host, detected: Detected) -> Description:
        """Return the one type, which logical cores have too."""
        return Description(type=models.AWS_NEURON_CORE)

    def visible_ids(self, environ: Mapping[str, str]) -> list[str] | None:
        """Parse the variable's cores, ranges included: ``0,4-7``."""
        variable = self.variables[0]
        if variable not in environ:
            return None
        cores: list[str] = []
        for item in environ[variable].split(","):
            first, dash, last = (part.strip() for part in item.partition("-"))
            if not dash or not first:
                cores.append(item)
                continue
            if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
                raise AcceleratorRequestError(
                    f"{variable}={environ[variable]!r} has an invalid range {item.strip()!r}: "
                    "write the lower core first, as in 0-3"
                )
            cores += map(str, range(int(first), int(last) + 1))
        return parse_ids(variable, ",".join(cores))


def _count(listing: str) -> int:
    try:
        return sum(int(device["nc_count"]) for device in json.loads(listing))
    except (ValueError, TypeError, KeyError) as error:
        raise DetectionError(f"neuron-ls printed no list of devices: {error!r}") from error


def _cores_by_sysfs(host: Host, device: int) -> int:
    text = host.read(f"{_SYSFS}/neuron{device}/core_count")
    if not text.isdecimal():
        raise DetectionError(f"the Neuron driver gives device {device} {text!r} cores")
    return int(text)
