"""Intel GPUs: discrete cards, found in the kernel's list of graphics devices.

A processor's integrated graphics is not counted: it shares the machine's memory
and would make every desktop a GPU node. ``--num-gpus`` declares it where wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.accelerators.base import AcceleratorRequestError, Detected, Family, parse_ids
from miniray.accelerators.host import DetectionError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from miniray.accelerators.host import Host

_DRM = "/sys/class/drm"
_VENDOR = 0x8086
#: Where Intel processors put their integrated graphics, its virtual functions included.
_INTEGRATED_SLOT = "0000:00:02."
_SELECTOR = "ONEAPI_DEVICE_SELECTOR"
_MASK = "ZE_AFFINITY_MASK"
_BACKEND = "level_zero"

#: Data-centre models with several tiles, by PCI device id (Intel's compute runtime).
_MAX_SERIES = {
    0x0B69: "Max-1450",
    0x0B6E: "Max-1100C",
    0x0BD4: "Max-1550VG",
    0x0BD5: "Max-1550",
    0x0BD6: "Max-1550",
    0x0BD7: "Max-1350",
    0x0BD8: "Max-1350",
    0x0BD9: "Max-1100",
    0x0BDA: "Max-1100",
    0x0BDB: "Max-1100",
}
_FLEX_SERIES = {0x56C0: "Flex-170", 0x56C1: "Flex-140"}


class IntelGPU(Family):
    """Intel GPUs, or the tiles of one, as Level Zero lists them."""

    name = "intel"
    resource = "GPU"
    variable = _SELECTOR
    variables = (_SELECTOR, _MASK)
    fractional = True

    def detect(self, host: Host) -> Detected:
        """Count the discrete cards of the i915 and xe drivers."""
        if not host.names("/dev/dri"):
            return Detected()
        count = 0
        types = []
        for card in host.numbered(_DRM, "card"):
            device = f"{_DRM}/card{card}/device"
            if not host.exists(f"{device}/vendor") or _number(host, device, "vendor") != _VENDOR:
                continue
            model = _number(host, device, "device")
            name = _MAX_SERIES.get(model) or _FLEX_SERIES.get(model)
            slot = host.path(device).resolve().name
            if name is None and slot.startswith(_INTEGRATED_SLOT):
                continue
            count += _tiles(host, card, model)
            types.append(name)
        return Detected.numbered(count, f"Intel-GPU-{types[0]}" if types and types[0] else None)

    def governing_variable(self, environ: Mapping[str, str]) -> str:
        """Return the selector where it names devices, else the affinity mask where it is set."""
        if _selected(environ.get(_SELECTOR)) is None and _MASK in environ:
            return _MASK
        return _SELECTOR

    def visible_ids(self, environ: Mapping[str, str]) -> list[str] | None:
        """Parse ``level_zero:0,1`` or ``0,1``; return None for ``level_zero:*`` and ``*:gpu``."""
        if self.governing_variable(environ) == _MASK:
            return parse_ids(_MASK, environ[_MASK])
        return _selected(environ.get(_SELECTOR))

    def format_ids(self, variable: str, ids: Sequence[str]) -> str:
        """Return a selector names its backend; an affinity mask has bare ids."""
        text = ",".join(ids)
        return text if variable == _MASK else f"{_BACKEND}:{text}"


def _selected(selector: str | None) -> list[str] | None:
    """Return the ids that a selector names; None where it leaves every Level Zero GPU visible.

    The grammar is that of the oneAPI compiler's documentation:
    ``backend:devices[;backend:devices...]``, with ``!`` for devices to leave out.
    """
    if selector is None:
        return None
    ids: list[str] = []
    for term in filter(None, (part.strip() for part in selector.split(";"))):
        if term.startswith("!"):
            raise AcceleratorRequestError(
                f"{_SELECTOR}={selector!r} says what to leave out: "
                f"name the GPUs to use instead, as in {_BACKEND}:0,1"
            )
        backend, colon, devices = term.rpartition(":")
        if colon and backend not in {_BACKEND, "*"}:
            continue  # another backend, which sees no device of Level Zero
        if devices in {"*", "gpu"}:
            return None
        ids += parse_ids(_SELECTOR, devices)
    return ids


def _number(host: Host, device: str, name: str) -> int:
    text = host.read(f"{device}/{name}")
    try:
        return int(text, 16)
    except ValueError:
        raise DetectionError(f"{device}/{name} holds {text!r}, not a PCI id") from None


def _tiles(host: Host, card: int, model: int) -> int:
    """Return how many devices Level Zero makes of a card: each tile is one by default."""
    if host.environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE":
        return 1
    by_xe = host.numbered(f"{_DRM}/card{card}/device", "tile")
    # Under i915 other models have further graphics tables that are no tiles.
    by_i915 = host.numbered(f"{_DRM}/card{card}/gt", "gt") if model in _MAX_SERIES else []
    return len(by_xe) or len(by_i915) or 1
