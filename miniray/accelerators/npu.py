"""Huawei Ascend NPUs: counted by device node, named by ``npu-smi`` or the device library (ACL).

Containers often have the library without the tool.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.accelerators.base import Detected, Family, numbers
from miniray.accelerators.host import TOOL_TIMEOUT, DetectionError, ToolNotFoundError

if TYPE_CHECKING:
    from miniray.accelerators.base import Use
    from miniray.accelerators.host import Host

#: By its path, and apart from the user's modules (-I): it uses no module of the package.
_ASK_LIBRARY = (sys.executable, "-I", str(Path(__file__).with_name("ascendcl.py")))


#: Power and temperature of a chip; and in the row below its use, and bytes used and in all.
_CHIP = (
    r"^\| \d+ +\S+ +\| \S+ +\| (\S+) +(\S+) .*\n"
    r"\| \d+ .*?\| \S+:\S+ +\| (\S+) .*?(\d+) */ *(\d+) *\|$"
)
_USE = (
    ("power_watts", "", 1),
    ("temperature_celsius", "", 1),
    ("utilization_ratio", "", 0.01),
    ("memory_used_bytes", "", 1 << 20),
    ("memory_size_bytes", "", 1 << 20),
)


class AscendNPU(Family):
    """Huawei Ascend NPUs."""

    name = "ascend"
    resource = "NPU"
    variable = "ASCEND_RT_VISIBLE_DEVICES"
    variables = ("ASCEND_RT_VISIBLE_DEVICES",)
    fractional = True

    def detect(self, host: Host) -> Detected:
        """Count ``/dev/davinci<N>``; the tool or the library, where it is, must agree to talk."""
        count = len(host.numbered("/dev", "davinci"))
        if not count:
            return Detected()
        # The runtime numbers a container's devices from 0, regardless of the names of their nodes.
        try:
            model = _type(host.run(["npu-smi", "info"], TOOL_TIMEOUT))
        except ToolNotFoundError:
            model = host.run(_ASK_LIBRARY, TOOL_TIMEOUT).strip()
        return Detected.numbered(count, model or None)

    def use(self, host: Host, timeout: float) -> dict[str, Use]:
        """Read the table of ``npu-smi``: two rows a chip, which the runtime numbers from 0."""
        chips = re.findall(_CHIP, host.run(["npu-smi", "info"], timeout), re.MULTILINE)
        return {str(id): numbers(_USE, told) for id, told in enumerate(chips)}


def _type(listing: str) -> str:
    """Return the chip of the first NPU in the table that ``npu-smi info`` draws.

    Each NPU has a row ``| 0     910B3  | OK  | ...`` (number and name, health).
    """
    for line in listing.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) < 3 or len(cells[0]) != 2:
            continue
        number, chip = cells[0]
        if number.isdecimal():
            return chip if chip.startswith("Ascend") else f"Ascend{chip}"
    said = " ".join(listing.split())[:200]
    raise DetectionError(f"npu-smi listed no NPU: {said}")
