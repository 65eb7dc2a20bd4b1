"""What every accelerator family has in common.

A family has a resource name, a visibility variable, a way to find its devices, and the variables of
a worker's environment. Which families a node announces is decided in ``node_resources.py``.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.accelerators.host import Host

#: Use of a device: values by (name of the metric without ``device_``, kind). Only errors have a
#: kind, and ``info``, whose kind is the device's UUID.
Use = dict[tuple[str, str], float]

_TRUE = {"1", "true", "yes", "on"}


class AcceleratorRequestError(ValueError):
    """A request for accelerators that a node or a family can't serve."""


class Detected(NamedTuple):
    """Devices found on a machine."""

    #: Ids as the family's variable would name them, in the order to hand out.
    ids: tuple[str, ...] = ()
    #: Model, as in ``accelerator_type=``; None if it is not known.
    type: str | None = None

    @classmethod
    def numbered(cls, count: int, type: str | None = None) -> Detected:
        """Return ``count`` devices with the ids 0, 1 and so on."""
        return cls(tuple(map(str, range(count))), type)


@dataclasses.dataclass(eq=False, repr=False)
class Description:
    """What a node says of a family beside its devices."""

    type: str | None = None
    #: Further resources that the node has, such as the head of a TPU slice.
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: Labels without their domain: ``tpu-topology``.
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Family(abc.ABC):
    """One kind of accelerator."""

    #: What ``--gpu-family`` and a node's announcement call it.
    name: str
    #: Resource that demands name.
    resource: str
    #: Variable that is set for workers unless the daemon has another of ``variables``.
    variable: str | None
    #: Variables that restrict this family, the one that governs first.
    variables: tuple[str, ...]
    #: Whether several workers may share a device.
    fractional: bool
    #: Whether what uses the devices reads the variable no earlier than when user code first uses
    #: one, so that setting it in a forked worker is early enough.
    read_late: bool = False

    @abc.abstractmethod
    def detect(self, host: Host) -> Detected:
        """Find this family's devices without initialising one.

        Raises:
            DetectionError: The driver or its tool is broken.
            OSError: A file of the driver can't be read.
        """

    def describe(self, host: Host, detected: Detected) -> Description:
        """Return what a node with devices of this family says of itself."""
        return Description(type=detected.type)

    def use(self, host: Host, timeout: float) -> dict[str, Use]:
        """Return what this machine's devices use now, by id; empty where no tool reports it.

        Raises:
            DetectionError: A tool is not there, or gives no answer within ``timeout`` seconds.
            ValueError, OSError: The output of the driver or its tool cannot be read.
        """
        return {}

    def governing_variable(self, environ: Mapping[str, str]) -> str | None:
        """Return the variable that decides which devices are visible, given an environment."""
        return next((name for name in self.variables if name in environ), self.variable)

    def visible_ids(self, environ: Mapping[str, str]) -> list[str] | None:
        """Return the devices that an environment restricts this family to.

        Returns:
            Ids as the variable names them, or None where it does not restrict.

        Raises:
            AcceleratorRequestError: The variable can't be read.
        """
        variable = self.governing_variable(environ)
        if variable is None or variable not in environ:
            return None
        return parse_ids(variable, environ[variable])

    def restriction(self, environ: Mapping[str, str]) -> str:
        """Return what restricts this family in an environment, in words for an error."""
        variable = self.governing_variable(environ) or ""
        return f"{variable}={environ.get(variable, '')!r}"

    def existing(
        self, visible: Sequence[str], detected: Detected, environ: Mapping[str, str]
    ) -> list[str]:
        """Return those of the visible ids that can be on this machine.

        Numbers are compared with the devices found. Other forms (a UUID, a MIG or a
        sub-device) name parts that detection does not list, so they count where
        there is any device.
        """
        if not detected.ids:
            return []
        return [id for id in visible if not id.isdecimal() or id in detected.ids]

    def worker_environment(
        self, ids: Sequence[str], environ: Mapping[str, str], detected: int = 0
    ) -> dict[str, str]:
        """Return the variables that show a worker these devices and no other.

        Args:
            ids: Devices, as the daemon's own environment names them.
            environ: The daemon's environment. ``MINIRAY_NOSET_<VARIABLE>=1`` in it
                leaves that variable to the user.
            detected: How many devices the machine has; 0 for logical ones.
        """
        variable = self.governing_variable(environ)
        if variable is None or is_left_alone(variable, environ):
            return {}
        return {variable: self.format_ids(variable, ids)}

    def format_ids(self, variable: str, ids: Sequence[str]) -> str:
        """Return the value of a variable that names these devices."""
        return ",".join(ids)

    def check_amount(self, amount: float) -> None:
        """Refuse an amount that a task, actor or bundle can't have of this family.

        Raises:
            AcceleratorRequestError: The amount is a fraction and the family has none.
        """
        if not self.fractional and amount % 1 != 0:
            raise AcceleratorRequestError(
                f"{self.resource} can't be shared: ask for a whole number, not {amount:g}"
            )


def is_left_alone(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether the user wants to set this variable of the workers themselves."""
    return environ.get(f"MINIRAY_NOSET_{variable}", "").lower() in _TRUE


def parse_ids(variable: str, text: str) -> list[str]:
    """Split the value of a visibility variable.

    An empty value and ``NoDevFiles`` name no device, and a negative number hides itself and all
    later ids, as the CUDA and HIP runtimes have it.

    Raises:
        AcceleratorRequestError: A device is named twice.
    """
    ids: list[str] = []
    if text.strip() == "NoDevFiles":
        return ids
    for item in text.split(","):
        id = item.strip()
        if id.startswith("-"):
            break
        if not id:
            continue
        if id in ids:
            raise AcceleratorRequestError(
                f"{variable}={text!r} names device {id} twice: name each device once"
            )
        ids.append(id)
    return ids


def numbers(names: Sequence[tuple[str, str, float]], told: Sequence[str]) -> Use:
    """Return a device's use from a tool's output: ``37``, ``37 %`` or ``[N/A]``.

    Args:
        names: Of each metric and kind, and its unit.
        told: A text per value.

    Raises:
        ValueError: There are more texts or fewer.
    """
    use: Use = {}
    for (name, kind, unit), text in zip(names, told, strict=True):
        with contextlib.suppress(ValueError):  # the tool has no value for this device
            use[name, kind] = float(text.partition(" ")[0]) * unit
    return use
