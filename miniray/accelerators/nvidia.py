"""NVIDIA GPUs: found in the driver's files, else by ``nvidia-smi``, without CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray.accelerators.base import Detected, Family, numbers
from miniray.accelerators.host import TOOL_TIMEOUT, DetectionError, ToolNotFoundError

if TYPE_CHECKING:
    from miniray.accelerators.base import Use
    from miniray.accelerators.host import Host

_PROC = "/proc/driver/nvidia/gpus"
_ASK_NAMES = ("nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader")
#: Its field of nvidia-smi, and the metric, kind and unit of the value.
_USE = {
    "utilization.gpu": ("utilization_ratio", "", 0.01),
    "memory.used": ("memory_used_bytes", "", 1 << 20),
    "memory.total": ("memory_size_bytes", "", 1 << 20),
    "power.draw": ("power_watts", "", 1),
    "temperature.gpu": ("temperature_celsius", "", 1),
    "ecc.errors.corrected.volatile.total": ("errors_total", "corrected", 1),
    "ecc.errors.uncorrected.volatile.total": ("errors_total", "uncorrected", 1),
}


class NvidiaGPU(Family):
    """NVIDIA GPUs, whole or MIG instances."""

    name = "nvidia"
    resource = "GPU"
    variable = "CUDA_VISIBLE_DEVICES"
    variables = ("CUDA_VISIBLE_DEVICES",)
    fractional = True
    read_late = True  # the CUDA driver does when it is initialised, which happens after a fork

    def detect(self, host: Host) -> Detected:
        """Read the driver's ``/proc`` files; WSL and some sandboxes have none, but the tool."""
        minors = host.numbered("/dev", "nvidia")
        # A batch system may show the nodes of all GPUs, and refuse those that a job was not given.
        nodes = [minor for minor in minors if host.may_open(f"/dev/nvidia{minor}")]
        folders = host.names(_PROC)
        if not folders and not nodes and not host.exists("/dev/dxg"):
            return Detected()
        try:
            models = _models_by_proc(host, folders, nodes) if folders else _models_by_tool(host)
        except ToolNotFoundError:
            models = [""] * len(nodes)
        return Detected.numbered(len(models), accelerator_type(models[0]) if models else None)

    def use(self, host: Host, timeout: float) -> dict[str, Use]:
        """Ask ``nvidia-smi``; GPUs are found by index and by UUID."""
        query = f"--query-gpu=index,uuid,{','.join(_USE)}"
        found = {}
        listing = host.run(["nvidia-smi", query, "--format=csv,noheader,nounits"], timeout)
        for line in listing.splitlines():
            index, uuid, *told = (field.strip() for field in line.split(","))
            found[index] = found[uuid] = {("info", uuid): 1.0, **numbers([*_USE.values()], told)}
        return found


def _models_by_tool(host: Host) -> list[str]:
    rows = (line.partition(",") for line in host.run(_ASK_NAMES, TOOL_TIMEOUT).splitlines())
    # Other lines are warnings, or say that there are no devices.
    return [name.strip() for index, _, name in rows if index.strip().isdecimal()]


def _models_by_proc(host: Host, folders: list[str], nodes: list[int]) -> list[str]:
    """Return product names in the order of the PCI bus, which is the tool's order."""
    models = []
    for folder in folders:
        facts = _facts(host.read(f"{_PROC}/{folder}/information"))
        minor = facts.get("Device Minor", "")
        if not minor.isdecimal():
            raise DetectionError(f"the NVIDIA driver gives GPU {folder} no device minor")
        # The files show every GPU of the machine, also in a container that was given few.
        if int(minor) in nodes and facts.get("GPU Excluded") != "Yes":
            models.append(facts.get("Model", ""))
    return models


def _facts(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def accelerator_type(model: str) -> str | None:
    """Return the name that users select a GPU model by, from its product name.

    After the brand, the capital words up to and including the first one with a
    digit: ``NVIDIA A100-SXM4-40GB`` is ``A100``, ``NVIDIA RTX PRO 6000 Blackwell
    Server Edition`` is ``RTX-PRO-6000``. Where there is no such run of words, the
    whole product name: ``NVIDIA GeForce RTX 5090`` is ``GeForce-RTX-5090``.

    Returns:
        None for an empty name.
    """
    run: list[str] = []
    for word in model.split()[1:]:
        head = _capital_head(word)
        if any(char.isdigit() for char in head):
            name = "-".join([*run, head])
            if len(name) > 1:
                return name
            break
        if head != word or not word.isalpha():
            break
        run.append(word)
    product = model.removeprefix("NVIDIA ").split()
    return "-".join(product) or None


def _capital_head(word: str) -> str:
    """Return the longest start of a word that is of ASCII capitals and digits."""
    end = 0
    while end < len(word) and word[end].isascii() and (word[end].isupper() or word[end].isdigit()):
        end += 1
    return word[:end]
