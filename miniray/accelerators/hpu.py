"""Intel Gaudi accelerators (HPU), found with ``hl-smi``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.accelerators import models
from miniray.accelerators.base import Detected, Family, numbers
from miniray.accelerators.host import TOOL_TIMEOUT, DetectionError, ToolNotFoundError

if TYPE_CHECKING:
    from miniray.accelerators.base import Use
    from miniray.accelerators.host import Host

#: Its field of hl-smi, and the metric, kind and unit of the value.
_USE = {
    "utilization.aip": ("utilization_ratio", "", 0.01),
    "memory.used": ("memory_used_bytes", "", 1 << 20),
    "memory.total": ("memory_size_bytes", "", 1 << 20),
    "power.draw": ("power_watts", "", 1),
    "temperature.aip": ("temperature_celsius", "", 1),
}
_VENDOR = "0x1da3"  # Habana Labs
_COMMAND = ["hl-smi", "-Q", "module_id,name", "-f", "csv,noheader"]
#: Names by the start of the product code.
_TYPES = {
    "HL-3": f"{models.INTEL_GAUDI}3",
    "HL-2": models.INTEL_GAUDI,
    "HL-22": f"{models.INTEL_GAUDI}2",
    "HL-28": f"{models.INTEL_GAUDI}2",
}


class GaudiHPU(Family):
    """Intel Gaudi accelerators, named by their module id."""

    name = "gaudi"
    resource = "HPU"
    variable = "HABANA_VISIBLE_MODULES"
    variables = ("HABANA_VISIBLE_MODULES",)
    fractional = False

    def detect(self, host: Host) -> Detected:
        """List the modules; where the tool is missing, number the device nodes."""
        count = _count_nodes(host)
        if not count:
            return Detected()
        try:
            listing = host.run(_COMMAND, TOOL_TIMEOUT)
        except ToolNotFoundError:
            return Detected.numbered(count)
        return _parse(listing)

    def use(self, host: Host, timeout: float) -> dict[str, Use]:
        """Ask ``hl-smi``."""
        found = {}
        query = ["-Q", f"module_id,{','.join(_USE)}", "-f", "csv,noheader"]
        for line in host.run(["hl-smi", *query], timeout).splitlines():
            module, *told = (field.strip() for field in line.split(","))
            found[module] = numbers([*_USE.values()], told)
        return found


def _count_nodes(host: Host) -> int:
    """Count the nodes of Gaudi devices: ``/dev/hl0``, or among the kernel's accel devices."""
    nodes = len(host.numbered("/dev", "hl"))
    for index in host.numbered("/dev/accel", "accel"):
        vendor = f"/sys/class/accel/accel{index}/device/vendor"
        # NPUs of desktop processors are accel devices too.
        nodes += host.exists(vendor) and host.read(vendor) == _VENDOR
    return nodes


def _parse(listing: str) -> Detected:
    modules = {}
    for line in filter(None, (line.strip() for line in listing.splitlines())):
        module, _, name = (part.strip() for part in line.partition(","))
        if not module.isdecimal():
            raise DetectionError(f"hl-smi printed {line!r} instead of a module id and a name")
        modules[int(module)] = name
    if not modules:
        return Detected()
    ordered = sorted(modules)
    code = modules[ordered[0]]
    known = [prefix for prefix in _TYPES if code.startswith(prefix)]
    return Detected(
        tuple(str(module) for module in ordered),
        _TYPES[max(known, key=len)] if known else None,
    )
