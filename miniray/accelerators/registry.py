"""The families that miniray knows, and how they are found by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.accelerators.amd import AmdGPU
from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.hpu import GaudiHPU
from miniray.accelerators.intel_gpu import IntelGPU
from miniray.accelerators.neuron import NeuronCore
from miniray.accelerators.npu import AscendNPU
from miniray.accelerators.nvidia import NvidiaGPU
from miniray.accelerators.tpu import GoogleTPU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.accelerators.base import Family

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
    """The family of this name.

    Args:
        name: Such as ``nvidia``.
        families: Those to choose from; all by default.

    Raises:
        AcceleratorRequestError: None of them has this name.
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
