"""The options that every command takes which starts a node: what the node has, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from miniray.cli.parsing import JsonObject, Labels, Size

if TYPE_CHECKING:
    from collections.abc import Callable

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_DEVICES = '{"FPGA": {"count": 4, "env": "FPGA_VISIBLE_DEVICES"}}'

_OPTIONS = (
    click.option("--node-ip-address", help="Address that other machines are told to connect to."),
    click.option("--num-cpus", type=float, help="Logical CPUs of this node.  [default: detected]"),
    click.option("--num-gpus", type=int, help="Logical GPUs of this node.  [default: detected]"),
    click.option("--gpu-family", help="Whose the GPUs are: nvidia, amd or intel."),
    click.option(
        "--resources",
        type=JsonObject(),
        default="{}",
        help="""Further resources: '{"FPGA": 2}'.""",
    ),
    click.option(
        "--devices",
        type=JsonObject(_DEVICES),
        default="{}",
        help="Custom devices, of which work gets some by their ids in a variable: "
        f"""'{_DEVICES}'; "fractional": false if one can't be shared.""",
    ),
    click.option(
        "--labels",
        type=Labels(),
        default="{}",
        help="Labels of this node: zone=a,disk=ssd, or JSON.",
    ),
    click.option(
        "--memory", type=Size(), help="Memory that tasks may ask for.  [default: detected]"
    ),
    click.option(
        "--object-store-memory",
        type=Size(),
        help="Memory for large values.  [default: a share of this machine's]",
    ),
    click.option("--temp-dir", metavar="FOLDER", help="Where logs go instead of /tmp."),
)


def node_options(command: _Command) -> _Command:
    """Give a command the options of a node; ``boot_arguments`` takes what they give."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def boot_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return these options as ``BootOptions`` takes them: with devices among the resources.

    Raises:
        ValueError: A name is given twice, or not declared as devices are.
    """
    arguments = dict(given)
    resources, devices = arguments["resources"], arguments.pop("devices")
    for name, declared in devices.items():
        if name in resources:
            raise ValueError(f"{name!r} is given in --resources and in --devices; leave one out.")
        if not isinstance(declared, dict):
            raise ValueError(
                f'--devices declares {name!r} as {declared!r}: write {{"{name}": {{"count": 4, '
                f'"env": "{name}_VISIBLE_DEVICES"}}}}, or an amount without devices in --resources.'
            )
    arguments["resources"] = {**resources, **devices}
    return arguments
