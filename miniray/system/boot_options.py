"""What starting a node takes and gives: checked options in, addresses and pids out.

Both travel as JSON between the requesting process and the one that boots. All checks of a user's
options for a node are here, for ``init()`` and the command line alike; no process is started here.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any

from miniray.common.host_port import full_address, parse_address
from miniray.security.token import parse_token
from miniray.system import option_checks as check
from miniray.system.machine import (
    address_for_others,
    address_towards,
    check_told,
    memory_limit,
)

DEFAULT_HOST = "127.0.0.1"
#: As Ray's.
DEFAULT_DASHBOARD_PORT = 8265

#: Resources with options of their own, and how to say them.
_OWN_OPTIONS = check.OWN_OPTION | {"object_store_memory": "object_store_memory"}
#: More devices of a resource than any machine has, and than the head should keep a list of.
_MOST_DEVICES = 10_000
_RESERVED_LABEL_PREFIXES = ("ray.io", "miniray.io")
_MIN_OBJECT_STORE = 1024 * 1024
_MAX_PORT = 65535
#: All addresses of this machine, by the version of IP.
_WILDCARDS = {"0.0.0.0": 4, "::": 6}  # noqa: S104 - compared, not bound


class BootError(RuntimeError):
    """A node could not be started. The text is one sentence for the user."""


@dataclasses.dataclass
class BootOptions:
    """How to start a node. Sizes are bytes; None means: detect it on this machine.

    Raises:
        ValueError, TypeError: A value is impossible, or of a wrong type; the text names the option,
            the value given and what is allowed.
    """

    #: Start a cluster with its head here; else join the one at ``address``.
    head: bool = True
    #: ``HOST:PORT`` of the head to join; the port may be left out.
    address: str | None = None
    #: The join token of the cluster to join.
    token: str | None = dataclasses.field(default=None, repr=False)
    #: Folder of a token and a certificate made ahead (`miniray token new`), for a head.
    authority: str | None = None
    #: Address to bind; None: see `bind_host`.
    host: str | None = None
    #: Port to bind; 0 takes a free one.
    port: int = 0
    #: Address at which other machines connect; None: see `advertised_host`.
    node_ip_address: str | None = None
    num_cpus: float | None = None
    num_gpus: int | None = None
    #: Vendor of the GPUs: "nvidia", "amd" or "intel"; None: the first of these that is found.
    gpu_family: str | None = None
    #: Further resources by name: an amount in units, or the declaration of custom devices,
    #: ``{"count": 4, "env": "FPGA_VISIBLE_DEVICES"}`` (see ``accelerators/registry.py``).
    resources: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memory: int | None = None
    object_store_memory: int | None = None
    #: Where session folders go instead of ``/tmp``.
    temp_dir: str | None = None
    #: What is started belongs to one driver and ends with it: a cluster; or, of a cluster
    #: elsewhere, a node that only dials out and runs only that driver.
    embedded: bool = False
    #: A process whose end ends the node: the driver that it is embedded in, or a
    #: `miniray start --block`.
    parent_pid: int | None = None
    #: Listen for browsers from the start on; None: unless it is embedded.
    include_dashboard: bool | None = None
    #: The address to listen on for them, and the first port to try.
    dashboard_host: str = DEFAULT_HOST
    dashboard_port: int = DEFAULT_DASHBOARD_PORT

    def __post_init__(self) -> None:
        self._check_place()
        for name in ("num_cpus", "num_gpus", "memory", "object_store_memory"):
            amount = getattr(self, name)
            if amount is not None:
                _check_amount(name, amount, whole=name != "num_cpus")
        _check_count("num_gpus", self.num_gpus or 0)
        if self.object_store_memory is not None and self.object_store_memory < _MIN_OBJECT_STORE:
            raise ValueError(
                f"object_store_memory must be at least {_MIN_OBJECT_STORE} bytes (1 MiB), "
                f"not {self.object_store_memory}."
            )
        if self.object_store_memory is not None and self.object_store_memory > memory_limit():
            raise ValueError(
                f"object_store_memory is {self.object_store_memory} bytes, and this machine, or "
                f"its container, has {memory_limit()} of memory: the kernel would kill processes "
                f"long before the store is full."
            )
        if self.gpu_family is not None:
            from miniray.accelerators.registry import GPU_FAMILIES, family_named

            family_named(self.gpu_family, GPU_FAMILIES)
        check_resources(self.resources)
        check_labels(self.labels)
        if self.embedded and self.parent_pid is None:
            raise ValueError("What is embedded in a driver needs parent_pid.")

    @property
    def opens_dashboard(self) -> bool:
        """Whether the node listens for browsers from its start on."""
        wanted = self.include_dashboard
        return self.head and (not self.embedded if wanted is None else wanted)

    @property
    def drivers_only(self) -> bool:
        """Whether only the driver that started the node runs on it."""
        return self.embedded and not self.head

    def _check_place(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ValueError(f"port must be from 0 (any free one) to {_MAX_PORT}, not {self.port}.")
        if not 0 <= self.dashboard_port <= _MAX_PORT:
            raise ValueError(
                f"dashboard_port must be from 0 (any free one) to {_MAX_PORT}, not "
                f"{self.dashboard_port}."
            )
        if self.host == "":
            raise ValueError("host must name an address of this machine, such as 127.0.0.1.")
        if self.head and self.address is not None:
            raise ValueError(
                "A head starts a cluster of its own: give either head or address, not both."
            )
        if self.head and self.token is not None:
            raise ValueError("A head makes the token of its cluster: leave token out.")
        if self.authority is not None and (self.embedded or not self.head):
            raise ValueError("authority is for a head that listens on the network.")
        if self.head:
            if self.node_ip_address is not None and not self.embedded:
                check_told(bind_host(self), self.node_ip_address)
            return
        if self.address is None:
            raise ValueError("To join a cluster, give the address of its head as HOST:PORT.")
        self.address = full_address(self.address)
        if not self.token:
            raise ValueError(
                "To join a cluster, give its token; `miniray start --head` printed it."
            )
        parse_token(self.token)


@dataclasses.dataclass
class BootResult:
    """A node that is up."""

    #: ``HOST:PORT`` of the cluster's head, for other machines and for ``init()``.
    address: str
    #: Hex.
    node_id: str
    token: str = dataclasses.field(repr=False)
    #: Where this machine's drivers and workers reach the node daemon.
    socket_path: str
    session_dir: str
    #: Process ids by role: "boot" (ends the others when it receives SIGTERM), "head", "node".
    pids: Mapping[str, int]
    #: The node's totals, in units.
    resources: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: What is wrong with it, though it runs, for the user who started it; empty if nothing is.
    warning: str = ""
    #: Where its page is; empty if nothing listens for that.
    dashboard_url: str = ""


def bind_host(options: BootOptions) -> str:
    """Return the address that a node listens on: the one given, or the most private that works.

    A head listens on loopback only. A joining node must be reached by the other nodes, so
    it listens on its address on the way to the head, which is loopback for a head there.

    Raises:
        OSError: No route leads to the head; the text names it.
    """
    if options.host is not None:
        return options.host
    if options.address is None:
        return DEFAULT_HOST
    return _own_address_towards(options.address)


def advertised_host(options: BootOptions) -> str:
    """Return the address at which other machines connect.

    Raises:
        OSError: The node listens on all addresses, and which one others reach is unknown.
    """
    if options.node_ip_address is not None:
        return options.node_ip_address
    host = bind_host(options)
    if host in _WILDCARDS and options.address is not None:
        return _own_address_towards(options.address)
    return address_to_show(host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_to_show(host: str) -> str:
    """Return the address for others of a listener on ``host``, which may be a wildcard.

    Raises:
        OSError: It listens on all addresses, and which one others reach is unknown.
    """
    return address_for_others(_WILDCARDS[host]) if host in _WILDCARDS else host


def _own_address_towards(address: str) -> str:
    """Return this machine's address on the way to a head."""
    host, _ = parse_address(address)
    try:
        return address_towards(host)
    except OSError as error:
        raise OSError(
            f"This machine's address on the way to {host} is not known ({error.strerror}). "
            "Check the address, or give --host and --node-ip-address."
        ) from None


def check_resources(resources: Mapping[str, Any]) -> None:
    """Refuse impossible custom resources of a node."""
    if not resources:  # as most nodes: the driver need not load the families of devices
        return
    from miniray.accelerators.registry import DEVICE_RESOURCES, parse_declaration

    for name, amount in resources.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"A resource needs a name, not {name!r}.")
        if name in _OWN_OPTIONS:
            raise ValueError(
                f"resources must not contain {name!r}; use {_OWN_OPTIONS[name]} for it."
            )
        if name.startswith("node:"):
            raise ValueError(
                f"resources must not contain {name!r}: every node has its node:<ip> by itself."
            )
        declared = isinstance(amount, Mapping)
        if declared and name in DEVICE_RESOURCES:
            raise ValueError(
                f"resources[{name!r}] must be a number, not {amount!r}: miniray knows these "
                "devices, and their variable."
            )
        what = f"resources[{name!r}]"
        _, given = parse_declaration(name, amount) if declared else (None, amount)
        devices = declared or name in DEVICE_RESOURCES
        _check_amount(what, given, whole=devices)
        if devices:
            _check_count(what, given)


def check_labels(labels: Mapping[str, Any]) -> None:
    """Refuse labels that a label selector could not name, and those that a node sets itself."""
    for key in check.labels("labels", labels):
        prefix = key.rpartition("/")[0]
        if any(prefix == p or prefix.endswith("." + p) for p in _RESERVED_LABEL_PREFIXES):
            raise ValueError(f"Labels under {prefix}/ are set by the node itself, not {key!r}.")


def _check_amount(what: str, amount: Any, *, whole: bool) -> None:
    check.amount(what, amount)
    if whole and amount != int(amount):
        raise ValueError(f"{what} must be a whole number, not {amount}.")


def _check_count(what: str, count: Any) -> None:
    if count > _MOST_DEVICES:
        raise ValueError(f"{what} must be at most {_MOST_DEVICES} devices, not {count}.")
