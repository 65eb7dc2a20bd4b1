"""A made-up machine for detection: a folder of samples, tools and metadata."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from miniray.accelerators.host import DetectionError, Host, ToolNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclasses.dataclass
class FakeMachine:
    """Builds a ``Host``; tools and metadata that a test does not give are missing."""

    root: Path
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    #: What a tool (by the last part of its path) prints, or the error it ends in.
    tools: dict[str, str | Exception] = dataclasses.field(default_factory=dict)
    #: None: there is no metadata server.
    metadata: dict[str, str] | None = None
    calls: list[tuple[list[str], float]] = dataclasses.field(default_factory=list)
    asked: list[str] = dataclasses.field(default_factory=list)

    def file(self, path: str, text: str = "") -> None:
        """Make a file (a device node's stand-in too) with this text."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def folder(self, path: str) -> None:
        """Make a folder."""
        (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def link(self, path: str, target: str) -> None:
        """Make a relative link to another absolute path of this machine."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(self.root / target.lstrip("/"), place.parent))

    def host(self) -> Host:
        """The machine as detection sees it."""
        return Host(self.root, self.environ, self._run, self._ask)

    def _run(self, command: Sequence[str], timeout: float) -> str:
        self.calls.append((list(command), timeout))
        name = command[0].rpartition("/")[2]
        answer = self.tools.get(name, ToolNotFoundError(f"{name} is not installed"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ask(self, key: str, timeout: float) -> str | None:
        self.asked.append(key)
        if self.metadata is None:
            raise DetectionError("the metadata server did not answer: timed out")
        return self.metadata.get(key)


# The file as the driver writes it: https://github.com/NVIDIA/open-gpu-kernel-modules,
# kernel-open/nvidia/nv-procfs.c, with the values of an H100 machine.
NVIDIA_INFORMATION = """\
Model: \t\t {model}
IRQ:   \t\t 10
GPU UUID: \t GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b
Video BIOS: \t 96.00.99.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:{bus}:00.0
Device Minor: \t {minor}
GPU Firmware: \t 535.129.03
GPU Excluded:\t {excluded}
"""

# Lines of /sys/class/kfd/kfd/topology/nodes/<N>/properties as the kernel writes them
# (drivers/gpu/drm/amd/amdkfd/kfd_topology.c), with the values of an MI300X machine: the version
# as in https://github.com/ROCm/rocm-cli/pull/343, the device id as in
# https://github.com/ROCm/legacy-rocm-build/issues/4414.
AMD_CPU_PROPERTIES = """\
cpu_cores_count 96
simd_count 0
mem_banks_count 1
caches_count 0
io_links_count 9
cpu_core_id_base 0
simd_id_base 0
vendor_id 0
device_id 0
drm_render_minor 0
"""
AMD_GPU_PROPERTIES = """\
cpu_cores_count 0
simd_count 1216
mem_banks_count 1
caches_count 516
io_links_count 8
max_waves_per_simd 8
lds_size_in_kb 64
gfx_target_version 90402
vendor_id 4098
device_id {device}
location_id 768
domain 0
drm_render_minor {minor}
unique_id 13185361211464229612
num_xcc 8
"""

# neuron-ls --json-output (https://awsdocs-neuron.readthedocs-hosted.com/en/latest/tools/
# neuron-sys-tools/neuron-ls.html) of a trn1.2xlarge, in the form that was captured for
# https://github.com/lablup/all-smi/pull/417: one object per device with its nc_count, null for
# connected_to of a single device, no processes. The second is the same for two devices.
NEURON_LS = (
    '[{"neuron_device":0,"bdf":"00:1e.0","connected_to":null,"nc_count":2,'
    '"memory_size":34359738368,"neuron_processes":[]}]'
)
NEURON_LS_TWO = (
    '[{"neuron_device":0,"bdf":"00:1e.0","connected_to":[1],"nc_count":2,'
    '"memory_size":34359738368,"neuron_processes":[]},'
    '{"neuron_device":1,"bdf":"00:1f.0","connected_to":[0],"nc_count":2,'
    '"memory_size":34359738368,"neuron_processes":[]}]'
)

# hl-smi -Q module_id,name -f csv,noheader of a Gaudi 3 machine. Queries and form are those of
# https://docs.habana.ai/en/latest/Management_and_Monitoring/Embedded_System_Tools_Guide/
# System_Management_Interface_Tool.html; modules need not be listed in order.
HL_SMI = "1, HL-325L\n3, HL-325L\n2, HL-325L\n0, HL-325L\n"

# npu-smi info of a machine with 910B3, in the form of the table with 910B4-1 in
# https://github.com/Project-HAMi/HAMi-WebUI/issues/47 (rows of further NPUs cut).
NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.rc1                 Version: 25.3.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 96.7        32                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          60056/ 65536         |
+===========================+===============+====================================================+
"""

# The same of a machine whose NPUs have two chips each, from
# https://github.com/vllm-project/vllm-ascend/issues/2534 (rows of further NPUs cut).
NPU_SMI_TWO_CHIPS = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
"""


def add_nvidia(machine: FakeMachine, count: int, model: str = "NVIDIA H100 80GB HBM3") -> None:
    """GPUs as the driver's files show them."""
    machine.file("/dev/nvidiactl")
    machine.file("/dev/nvidia-uvm")
    for minor in range(count):
        machine.file(f"/dev/nvidia{minor}")
        machine.file(
            f"/proc/driver/nvidia/gpus/0000:6{minor}:00.0/information",
            NVIDIA_INFORMATION.format(model=model, bus=f"6{minor}", minor=minor, excluded="No"),
        )


def add_amd(machine: FakeMachine, count: int, device: int = 0x74A1) -> None:
    """One processor and GPUs in the topology of the compute driver."""
    nodes = "/sys/class/kfd/kfd/topology/nodes"
    machine.file("/dev/kfd")
    machine.file(f"{nodes}/0/properties", AMD_CPU_PROPERTIES)
    for index in range(count):
        machine.file(f"/dev/dri/renderD{128 + index}")
        text = AMD_GPU_PROPERTIES.format(device=device, minor=128 + index)
        machine.file(f"{nodes}/{index + 1}/properties", text)


def add_intel(
    machine: FakeMachine, count: int, device: str = "0x56c0", slot: str = "0000:4{}:00.0"
) -> None:
    """Cards of the i915 or xe driver; {} in the slot is the card's number.

    Two Max 1100 at 0000:0f:00.0 and so on: https://github.com/huggingface/
    text-generation-inference/issues/1983. Names in /sys/class/drm:
    https://github.com/intel/xpumanager/issues/147.
    """
    for card in range(count):
        machine.file(f"/dev/dri/card{card}")
        machine.file(f"/dev/dri/renderD{128 + card}")
        pci = f"/sys/devices/pci0000:4a/{slot.format(card)}"
        machine.file(f"{pci}/vendor", "0x8086\n")
        machine.file(f"{pci}/device", f"{device}\n")
        machine.folder(f"{pci}/drm/card{card}")
        machine.link(f"{pci}/drm/card{card}/device", pci)
        machine.link(f"/sys/class/drm/card{card}", f"{pci}/drm/card{card}")
    # Connectors and the version file stand beside the cards.
    machine.file("/sys/class/drm/card0-DP-1/status", "connected\n")
    machine.file("/sys/class/drm/version", "drm 1.1.0 20060810\n")


def add_neuron(machine: FakeMachine, listing: str = NEURON_LS_TWO) -> None:
    """Two Trainium devices, with Amazon's tools."""
    machine.file("/dev/neuron0")
    machine.file("/dev/neuron1")
    machine.tools["neuron-ls"] = listing


def add_tpu(machine: FakeMachine, count: int) -> None:
    """Chips of a TPU VM."""
    for index in range(count):
        machine.file(f"/dev/accel{index}")


def add_gaudi(machine: FakeMachine, count: int = 4, listing: str = HL_SMI) -> None:
    """Gaudi cards among the kernel's accel devices."""
    for index in range(count):
        machine.file(f"/dev/accel/accel{index}")
        machine.file(f"/sys/class/accel/accel{index}/device/vendor", "0x1da3\n")
    machine.tools["hl-smi"] = listing


def add_ascend(machine: FakeMachine, count: int) -> None:
    """Ascend NPUs with their driver's tool."""
    machine.file("/dev/davinci_manager")
    for index in range(count):
        machine.file(f"/dev/davinci{index}")
    machine.tools["npu-smi"] = NPU_SMI
