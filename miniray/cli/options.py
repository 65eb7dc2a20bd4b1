"""Options that several commands have, and what they become: values, a token, a connection."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from miniray.common.names import printable
from miniray.common.process_state import hide_argument
from miniray.security.token import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    parse_token,
    read_token_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from miniray.util.state_records import Filter

    ParamType = click.ParamType[Any]

    from miniray.client.command_connection import CommandConnection
    from miniray.system.boot_options import BootOptions, BootResult
else:
    ParamType = click.ParamType  # not generic at run time in older versions of click

_Command = TypeVar("_Command", bound="Callable[..., Any]")

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]i?B?|B)?\Z", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@contextlib.contextmanager
def wrong_use(*further: type[Exception]) -> Iterator[None]:
    """Show a ValueError, or another kind of error, as an error of usage."""
    kinds: tuple[type[Exception], ...] = (ValueError, *further)
    try:
        yield
    except kinds as error:
        raise click.UsageError(str(error)) from None


json_option = click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")


def print_json(data: Any) -> None:
    """Print plain data as JSON, indented by two."""
    click.echo(json.dumps(data, indent=2))


def print_notes(notes: Iterable[str]) -> None:
    """Print on stderr what the output lacks."""
    for note in notes:
        click.echo(printable(note), err=True)


class Parsed(ParamType):
    """The type of an option whose text a function makes a value of.

    Args:
        name: What help shows in the place of a value.
        parse: Raises ValueError with what is wrong, and how to write it.
    """

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text; a default may be a value already."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def json_object(text: str, example: str = '{"FPGA": 2}') -> dict[str, Any]:
    """Parse a JSON object; its values are checked with the other options."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{text!r} is not JSON: {error}. Write it as '{example}'.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{text!r} is not a JSON object. Write it as '{example}'.")
    return parsed


def labels(text: str) -> Mapping[str, str]:
    """Parse ``key=value,key=value`` or a JSON object, whose keys and values are checked later."""
    if text.lstrip().startswith("{"):
        return json_object(text, '{"zone": "a"}')
    found: dict[str, str] = {}
    for each in text.split(","):
        key, equals, value = each.strip().partition("=")
        if not equals:
            raise ValueError(f"{each.strip()!r} is no label. Write labels as key=value,key=value.")
        if key in found:
            raise ValueError(f"the label {key!r} is given twice.")
        found[key] = value
    return found


def pair(text: str) -> tuple[str, str]:
    """Take ``NAME=VALUE`` apart."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is no NAME=VALUE.")
    return name.strip(), value


def condition(text: str) -> Filter:
    """Parse ``KEY=VALUE`` or ``KEY!=VALUE``; which keys there are depends on the kind of record."""
    key, equals, wanted = text.partition("=")
    if not equals or not key.strip("! "):
        raise ValueError(f"{text!r} is no condition. Write KEY=VALUE or KEY!=VALUE.")
    return (key.removesuffix("!").strip(), "!=" if key.endswith("!") else "=", wanted)


def size(text: str) -> int:
    """Return the bytes of ``1000000``, ``512MiB`` or ``2G``; units are powers of 1024."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size. Write bytes, or 512MiB or 2GiB.")
    unit = (match["unit"] or "").upper().removesuffix("B").removesuffix("I")
    return int(float(match["number"]) * _FACTORS[unit])


def duration(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``30m``, ``8h`` or ``2d``."""
    match = re.fullmatch(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[smhd]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no time. Write seconds, or 90s, 30m, 8h or 2d.")
    return float(match["number"]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match["unit"]]


JSON, LABELS, SIZE = Parsed("JSON", json_object), Parsed("LABELS", labels), Parsed("BYTES", size)
PAIR, DURATION = Parsed("NAME=VALUE", pair), Parsed("TIME", duration)
CONDITION = Parsed("KEY=VALUE", condition)


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
    click.option("--node-ip-address", help="Address at which other machines connect."),
    click.option("--num-cpus", type=float, help="Logical CPUs of this node.  [default: detected]"),
    click.option("--num-gpus", type=int, help="Logical GPUs of this node.  [default: detected]"),
    click.option("--gpu-family", help="Vendor of the GPUs: nvidia, amd or intel."),
    click.option(
        "--resources",
        type=JSON,
        default="{}",
        help="""Further resources: '{"FPGA": 2}'.""",
    ),
    click.option(
        "--devices",
        type=Parsed("JSON", lambda text: json_object(text, _DEVICES)),
        default="{}",
        help="Custom devices, whose ids work gets in a variable: "
        f"""'{_DEVICES}'; "fractional": false if one can't be shared.""",
    ),
    click.option(
        "--labels",
        type=LABELS,
        default="{}",
        help="Labels of this node: zone=a,disk=ssd, or JSON.",
    ),
    click.option("--memory", type=SIZE, help="Memory that tasks may ask for.  [default: detected]"),
    click.option(
        "--object-store-memory",
        type=SIZE,
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


# --- the cluster that a command is about ------------------------------------------------


def _start_node(options: BootOptions) -> BootResult:
    from miniray.system.launch import start_node

    return start_node(options)


def _connect(address: str | None, token: str | None) -> CommandConnection:
    from miniray.client.command_connection import connect_for_cli

    with wrong_use():  # of the address or the token
        return connect_for_cli(address, "--address", token)


@dataclasses.dataclass(frozen=True)
class Services:
    """How commands reach nodes and clusters; tests put others in their place."""

    start_node: Callable[[BootOptions], BootResult] = _start_node
    #: Takes an address and a token, where the user gives them.
    connect: Callable[[str | None, str | None], CommandConnection] = _connect


def _cluster_options(command: _Command) -> _Command:
    """Give a command the options that say which cluster it is about: address, token_file."""
    command = click.option(
        "--token-file",
        metavar="FILE",
        help="Read the token of a cluster elsewhere from a file; - is stdin.  [default: "
        f"{TOKEN_FILE_VARIABLE}, or the token in {TOKEN_VARIABLE}]",
    )(command)
    return click.option(
        "--address",
        help="Address of the cluster, as its status or init() shows it; one without a node of "
        "yours on this machine needs its token.  [default: MINIRAY_ADDRESS, else the one started "
        "last, else that of a running program]",
    )(command)


def finds_cluster(function: Callable[..., Any]) -> Any:
    """Give a command ``--address`` and ``--token-file``, and its function what connects, first.

    A ValueError of the function says what the user has named wrongly.
    """

    def run(
        services: Services, /, address: str | None, token_file: str | None, **options: Any
    ) -> None:
        with wrong_use():
            token = join_token(None, token_file) if token_file is not None else None
        try:
            function(lambda: services.connect(address, token), **options)
        except ValueError as error:
            raise click.ClickException(printable(str(error))) from None

    return _cluster_options(click.pass_obj(functools.update_wrapper(run, function)))


def asks_cluster(function: Callable[..., Any]) -> Any:
    """Do as ``finds_cluster``, and give the function a connection."""

    def run(connect: Callable[[], CommandConnection], /, **options: Any) -> None:
        with contextlib.closing(connect()) as connection:
            function(connection, **options)

    return finds_cluster(functools.update_wrapper(run, function))
