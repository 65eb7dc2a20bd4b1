"""Accelerator families: how devices are found, announced and shown to workers."""

from miniray.accelerators.base import AcceleratorRequestError
from miniray.accelerators.host import Host, this_host
from miniray.accelerators.node_resources import (
    DeviceGroup,
    NodeAccelerators,
    assigned_environment,
    needs_fresh_interpreter,
    resolve_node_accelerators,
)
from miniray.accelerators.registry import DEVICE_RESOURCES, check_amount
from miniray.accelerators.tpu import SliceShape, slice_shape

__all__ = [
    "DEVICE_RESOURCES",
    "AcceleratorRequestError",
    "DeviceGroup",
    "Host",
    "NodeAccelerators",
    "SliceShape",
    "assigned_environment",
    "check_amount",
    "needs_fresh_interpreter",
    "resolve_node_accelerators",
    "slice_shape",
    "this_host",
]
