"""The door of the page: a listening socket; its first client makes the web process start.

The daemon never speaks to clients. The web process gets the socket, and ends a while after the last
client; then, and if it was killed, the daemon watches the socket again. Single-use codes of the
page are made and redeemed here, as they have to outlive the web process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING

from miniray.common.host_port import join_host_port
from miniray.node.base.control_socket import Control
from miniray.node.base.node_config import WebConfig
from miniray.node.base.template_client import TemplateGoneError
from miniray.security.token import web_token
from miniray.system.boot_options import address_to_show, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

    from miniray.node.base.clients import Answer, Client, ClientServer
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.base.template_client import Helper
    from miniray.system.boot_options import BootOptions
    from miniray.system.session import Session

logger = logging.getLogger(__name__)

_WEB = "miniray.web.process"
#: Ports that are tried after the one that is wanted, before any free one is taken.
_NEXT_PORTS = 100
#: Seconds for which a code is good, and how many there are at a time.
_CODE_SECONDS, _MOST_CODES = 60.0, 100
#: Seconds before another web process is tried after one that could not be started, and how many
#: clients are hung up on then.
_PAUSE, _MOST_TURNED_AWAY = 1.0, 1000


@dataclasses.dataclass(eq=False, repr=False)
class WebDoor:
    """Listens for the page's clients once it is opened."""

    node: NodeConfig
    #: The processes of this node, which request codes.
    clients: ClientServer
    #: Runs ``serve(control)`` of a module in a process of the node's own.
    fork: Callable[[str], Helper]
    #: Called with ``HOST:PORT`` when it listens.
    opened: Callable[[str], object]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since = time.time()
        self._listener: socket.socket | None = None
        #: The socket of the web process, while that runs.
        self._helper: Control | None = None
        #: Whether the web process has reported that it serves.
        self._serves = False
        #: When each code ends, by code.
        self._codes: dict[str, float] = {}
        self.clients.requests["open_page"] = self._open_page
        self.clients.requests["use_page_code"] = self._use_page_code

    def open(self) -> str:
        """Listen, unless that is done; return ``HOST:PORT`` for clients.

        Raises:
            OSError: There is no such address on this machine.
        """
        web = self.node.web
        if self._listener is None:
            self._listener = _listener(web.host, web.port)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener.fileno(), self._knock)
            self.opened(self.address)
        return self.address

    @property
    def address(self) -> str:
        """``HOST:PORT`` for clients; empty while it is closed."""
        if self._listener is None:
            return ""
        _, port, *_ = self._listener.getsockname()
        return join_host_port(self.node.web.shown_host, port)

    def _open_page(self, _client: Client) -> Answer:
        """Answer the page's address, a code that lets one browser in, and a program's token."""
        if not self.node.is_head:
            raise ValueError(
                "The page is served on the machine of the cluster's head, at "
                f"{self.node.cluster_address}: run `miniray dashboard` there."
            )
        address, now = self.open(), self._loop.time()
        self._codes = {code: end for code, end in self._codes.items() if end > now}
        if len(self._codes) >= _MOST_CODES:
            raise ValueError(f"{_MOST_CODES} codes of the page are unused; wait for a minute.")
        code = secrets.token_urlsafe(24)
        self._codes[code] = now + _CODE_SECONDS
        web = self.node.web
        return (web.scheme, address, code, web_token(web.key, "api")), -1

    def _use_page_code(self, _client: Client, code: str) -> Answer:
        """Answer whether a code is good, and use it up."""
        return self._codes.pop(code, 0.0) > self._loop.time(), -1

    # --- the web process -------------------------------------------------------------------
    def _knock(self) -> None:
        """Start the web process for a client that waits."""
        assert self._listener is not None
        node = self.node
        facts = {
            "node_socket": node.socket_path,
            "socket_key": node.socket_key,
            "web_key": node.web.key,
            "cluster": node.web.cluster,
            "cluster_address": node.cluster_address,
            "address": self.address,
            "logs": str(node.logs),
            "since": self._since,
            "certificate": node.web.certificate,
        }
        self._loop.remove_reader(self._listener.fileno())
        copy = -1
        try:
            copy = os.dup(self._listener.fileno())
            helper = self.fork(_WEB)
        except (OSError, TemplateGoneError) as error:
            logger.warning("the web process cannot be started: %s", error)
            if copy >= 0:
                os.close(copy)
            self._turn_away()
            return
        self._serves = False
        self._helper = Control(helper.control, self._begins, self._has_ended)
        self._helper.send(facts, [copy])

    def _begins(self, _message: object) -> None:
        self._serves = True

    def _has_ended(self) -> None:
        self._end_helper()
        if not self._serves:  # nor would the next one
            logger.warning("the web process ended before it served; `miniray logs web` says why")
            self._turn_away()
        else:
            self._watch()

    def _watch(self) -> None:
        """Start the web process at the next client."""
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._knock)

    def _turn_away(self) -> None:
        """Hang up on the clients that wait: no process would serve them."""
        assert self._listener is not None
        with contextlib.suppress(OSError):
            for _ in range(_MOST_TURNED_AWAY):
                self._listener.accept()[0].close()
        self._loop.call_later(_PAUSE, self._watch)  # the cause may last

    def _end_helper(self) -> None:
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def close(self) -> None:
        """Close the socket; the web process ends."""
        self._end_helper()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None


def web_config(options: BootOptions, key: bytes, session: Session) -> WebConfig:
    """Return the facts for the page of a node that is started with these options."""
    host = shown = options.dashboard_host
    _, _, cluster = session.id.rpartition("_")
    with contextlib.suppress(OSError):  # how others reach this machine is unknown
        shown = address_to_show(host)
    return WebConfig(
        host=host,
        port=options.dashboard_port,
        shown_host=shown,
        key=key,
        cluster=cluster,
        certificate="" if is_loopback(host) else str(session.folder),
    )


def _listener(host: str, port: int) -> socket.socket:
    """Listen on a port, or the next one that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for each in (*range(port, min(port + _NEXT_PORTS, 1 << 16)), 0) if port else (0,):
        try:
            return socket.create_server((host, each), family=family)
        except OSError as error:  # noqa: PERF203 - the first port is free mostly
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise OSError(errno.EADDRINUSE, f"No port of {host} is free")
