"""Devices that a user declares: a resource with a count and a variable of its own.

``{"FPGA": {"count": 4, "env": "FPGA_VISIBLE_DEVICES"}}`` gives a node four
devices that are handed out like GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from miniray.accelerators.base import AcceleratorRequestError, Detected, Family

if TYPE_CHECKING:
    from miniray.accelerators.host import Host

_KEYS = ("count", "env", "fractional")


class CustomDevice(Family):
    """Devices of one declared resource; nothing is detected."""

    name = "custom"

    def __init__(self, resource: str, variable: str | None, fractional: bool) -> None:
        self.resource = resource
        self.variable = variable
        self.variables = () if variable is None else (variable,)
        self.fractional = fractional
        self.read_late = variable is None  # who reads a variable, and when, is not known

    def detect(self, host: Host) -> Detected:
        """Custom devices are what the user says they are."""
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
