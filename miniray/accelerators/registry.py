"""The families that miniray supports, and devices that users declare themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from miniray.accelerators.amd import AmdGPU
from miniray.accelerators.base import AcceleratorRequestError, Detected, Family
from miniray.accelerators.hpu import GaudiHPU
from miniray.accelerators.intel_gpu import IntelGPU
from miniray.accelerators.neuron import NeuronCore
from miniray.accelerators.npu import AscendNPU
from miniray.accelerators.nvidia import NvidiaGPU
from miniray.accelerators.tpu import GoogleTPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.accelerators.host import Host

#: Every family; those of GPUs in the order in which a node prefers them.
FAMILIES: tuple[Family, ...] = (
    NvidiaGPU(),
    AmdGPU(),
    IntelGPU(),
    NeuronCore(),
    GoogleTPU(),
    GaudiHPU(),
    AscendNPU(),
)
GPU_FAMILIES = tuple(family for family in FAMILIES if family.resource == "GPU")
#: Resources that are devices on every node that has them: GPU, neuron_cores, TPU, HPU, NPU.
DEVICE_RESOURCES = tuple(dict.fromkeys(family.resource for family in FAMILIES))


def family_named(name: str, families: Sequence[Family] = FAMILIES) -> Family:
    """Return the family of this name.

    Args:
        name: Such as ``nvidia``.
        families: Those to choose from; all by default.

    Raises:
        AcceleratorRequestError: No family has this name.
    """
    for family in families:
        if family.name == name:
            return family
    raise AcceleratorRequestError(
        f"There is no accelerator family {name!r} here: use one of "
        + ", ".join(family.name for family in families)
    )


def check_amount(resource: str, amount: float) -> None:
    """Refuse an amount that no node could give of an accelerator resource.

    Resources that are no accelerators are not looked at.

    Raises:
        AcceleratorRequestError: The family has no fractions, or no such group of chips.
    """
    for family in FAMILIES:
        if family.resource == resource and amount > 0:
            family.check_amount(amount)
            return


_KEYS = ("count", "env", "fractional")


class CustomDevice(Family):
    """Devices of one declared resource; detection is skipped.

    ``{"FPGA": {"count": 4, "env": "FPGA_VISIBLE_DEVICES"}}`` gives a node four devices that are
    handed out like GPUs.
    """

    name = "custom"

    def __init__(self, resource: str, variable: str | None, fractional: bool) -> None:
        self.resource = resource
        self.variable = variable
        self.variables = () if variable is None else (variable,)
        self.fractional = fractional
        self.read_late = variable is None  # who reads a variable, and when, is not known

    def detect(self, host: Host) -> Detected:
        """Detect nothing: the user declares custom devices."""
        return Detected()


def parse_declaration(resource: str, given: object) -> tuple[CustomDevice, object]:
    """Read the declaration of a custom device resource.

    Args:
        resource: Its name.
        given: A mapping with ``count`` (how many), ``env`` (the variable that names a
            worker's devices; none is set by default) and ``fractional`` (whether
            workers may share one; default True).

    Returns:
        The family, and the count as it was given.

    Raises:
        AcceleratorRequestError: The declaration is incomplete or has unknown keys.
    """
    if not isinstance(given, Mapping) or "count" not in given or set(given) - set(_KEYS):
        raise AcceleratorRequestError(
            f"The devices of {resource!r} are declared as {given!r}: write "
            f'{{"{resource}": {{"count": 4, "env": "{resource}_VISIBLE_DEVICES"}}}}'
            " with the keys " + ", ".join(_KEYS)
        )
    variable = given.get("env")
    if variable is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(variable)):
        raise AcceleratorRequestError(
            f"The devices of {resource!r} can't be named in {variable!r}: "
            "env must be the name of an environment variable"
        )
    fractional = given.get("fractional", True)
    if not isinstance(fractional, bool):
        raise AcceleratorRequestError(
            f"fractional of {resource!r} must be true or false, not {fractional!r}"
        )
    name = None if variable is None else str(variable)
    return CustomDevice(resource, name, fractional), given["count"]
