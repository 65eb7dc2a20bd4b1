"""Options that several commands have, and how their texts become values: JSON, labels, sizes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from miniray.common.names import printable
from miniray.common.process_state import hide_argument
from miniray.security.token import TOKEN_VARIABLE, parse_token, read_token_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from miniray.util.state_records import Filter

    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic at run time in older versions of click

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]i?B?|B)?\Z", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


def cluster_options(command: _Command) -> _Command:
    """Give a command the options that say which cluster it looks at: address, token_file."""
    command = click.option(
        "--token-file",
        metavar="FILE",
        help="Read the token of a cluster elsewhere from a file; - is stdin.  [default: "
        f"{TOKEN_VARIABLE}]",
    )(command)
    return click.option(
        "--address",
        help="Which cluster, as its status or init() tells its address; one that has no node of "
        "yours on this machine needs its token.  [default: MINIRAY_ADDRESS, else the one started "
        "last, else that of a running program]",
    )(command)


json_option = click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")


def print_json(data: Any) -> None:
    """Print plain data as JSON."""
    click.echo(json.dumps(data, indent=2))


def print_notes(notes: Iterable[str]) -> None:
    """Tell what is missing in what is printed."""
    for note in notes:
        click.echo(printable(note), err=True)


class JsonObject(ParamType):
    """A JSON object, such as ``{"FPGA": 2}``."""

    name = "JSON"

    def __init__(self, example: str = '{"FPGA": 2}') -> None:
        """Take ``example`` to show in errors how to write one."""
        self._example = example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Parse the text; what its values may be is checked with the other options."""
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            self.fail(f"{value!r} is not JSON: {error}. Write it as '{self._example}'.", param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"{value!r} is not a JSON object. Write it as '{self._example}'.", param, ctx)
        return parsed


class Labels(ParamType):
    """Labels as ``key=value,key=value`` or as a JSON object."""

    name = "LABELS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Mapping[str, str]:
        """Parse the text; the keys and values are checked with the other options."""
        if value.lstrip().startswith("{"):
            return JsonObject('{"zone": "a"}').convert(value, param, ctx)
        labels: dict[str, str] = {}
        for pair in value.split(","):
            key, equals, text = pair.strip().partition("=")
            if not equals:
                self.fail(
                    f"{pair.strip()!r} is no label. Write labels as key=value,key=value.",
                    param,
                    ctx,
                )
            if key in labels:
                self.fail(f"the label {key!r} is given twice.", param, ctx)
            labels[key] = text
        return labels


class Condition(ParamType):
    """``KEY=VALUE`` or ``KEY!=VALUE``."""

    name = "KEY=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Filter:
        """Parse the text; whether there is such a field is checked for the kind of record."""
        if isinstance(value, tuple):
            return value
        key, equals, wanted = str(value).partition("=")
        if not equals or not key.strip("! "):
            self.fail(f"{value!r} is no condition. Write KEY=VALUE or KEY!=VALUE.", param, ctx)
        return (key.removesuffix("!").strip(), "!=" if key.endswith("!") else "=", wanted)


class Size(ParamType):
    """A number of bytes: ``1000000``, ``512MiB``, ``2G``. Units count in powers of 1024."""

    name = "BYTES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the text."""
        match = _SIZE.match(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no size. Write bytes, or 512MiB or 2GiB.", param, ctx)
        unit = (match["unit"] or "").upper().removesuffix("B").removesuffix("I")
        return int(float(match["number"]) * _FACTORS[unit])


def join_token(option: str | None, file: str | None) -> str | None:
    """Return the token to join with: from ``--token``, a file ("-" is stdin), or the environment.

    Raises:
        TokenError: The text or the file holds no token.
        click.UsageError: Both options are given.
    """
    if option is not None and file is not None:
        raise click.UsageError("Give the token either by --token or by --token-file, not both.")
    if file is not None:
        token = parse_token(sys.stdin.read()) if file == "-" else read_token_file(Path(file))
        return str(token)
    if option is not None:
        hide_argument(option)
    text = option if option is not None else os.environ.get(TOKEN_VARIABLE)
    return None if text is None else str(parse_token(text))


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
