"""Fractions of GPUs: eight actors share two devices, and each says which one it has.

The GPUs are logical: the program runs on a machine without any.

    python examples/gpus.py
"""

from __future__ import annotations

import collections
import os

import miniray


@miniray.remote(num_gpus=0.25)
class Model:
    """Needs a quarter of a GPU; four of them share one device."""

    def device(self) -> str:
        """What CUDA would see; set before the process loaded anything."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


@miniray.remote(num_gpus=2)
def whole_devices() -> list[int] | list[str]:
    return miniray.get_gpu_ids()


def main() -> None:
    miniray.init("local", num_cpus=4, num_gpus=2)

    models = [Model.remote() for _ in range(8)]
    devices = collections.Counter(miniray.get([model.device.remote() for model in models]))
    for device in sorted(devices):
        print(f"GPU {device}: {devices[device]} actors")
    print("free:", miniray.available_resources().get("GPU", 0))

    # A ninth would wait until one of the eight is gone. So does a task that needs both.
    task = whole_devices.remote()
    _, waiting = miniray.wait([task], timeout=0.2)
    print("waiting for two whole GPUs:", len(waiting) == 1)
    for model in models:
        miniray.kill(model)
    print("got GPUs:", miniray.get(task))

    miniray.shutdown()


if __name__ == "__main__":
    main()
