"""Choice of a running cluster of this machine, for programs that attach and for commands.

Commands and ``miniray.util.state`` look at a cluster that ``init()`` of a running program has
started too, where there is no other; programs never attach to one.

Both attach to a node of this machine; where the cluster has none, one is started.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from miniray.client.init_options import ADDRESS_VARIABLE
from miniray.common.config import config
from miniray.common.host_port import full_address, same_address
from miniray.common.names import printable
from miniray.common.process_state import command_of, ends_within
from miniray.system.session import await_start, find_clusters

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Mapping

    from miniray.system.boot_options import BootOptions
    from miniray.system.launch import StartedNode
    from miniray.system.session import ClusterRecord

logger = logging.getLogger(__name__)

#: How the address of a cluster begins that has no network.
_UNIX = "unix:"
#: So much of a program's command line is shown.
_LONGEST_COMMAND = 60


def at_address(records: Iterable[ClusterRecord], address: str | None) -> list[ClusterRecord]:
    """Return the nodes of a cluster at an address: the same text, or else another form of it.

    Args:
        records: Of running nodes.
        address: As ``full_address`` makes it, or ``unix:...``; None: all that are ready.
    """
    ready = [record for record in records if record.ready]
    if address is None:
        return ready
    exact = [record for record in ready if record.address == address]
    return exact or [record for record in ready if same_address(address, record.address)]


def latest_cluster(address: str | None = None) -> ClusterRecord | None:
    """Return the running cluster that a program attaches to; None if there is none.

    Of several, the one whose head was started last on this machine, else the one that
    this machine joined last. Embedded ones belong to their drivers, and are left out but for
    one that is named: that of `miniray run`. If that is being started, it is waited for.
    """
    named = address is not None and address.startswith(_UNIX)
    if named and address is not None:
        from miniray.system.launch import start_limit

        await_start(address, start_limit())
    started = [record for record in find_clusters() if named or not record.embedded]
    candidates = at_address(started, address)
    heads = [record for record in candidates if record.is_head]
    return next(iter(heads or candidates), None)


def wanted_address(address: str | None) -> str | None:
    """Return the address that a command is given, by option or ``MINIRAY_ADDRESS``; None: any.

    Raises:
        ValueError: The address is malformed.
    """
    if address in (None, "auto"):
        address = os.environ.get(ADDRESS_VARIABLE)
    if address in (None, "", "auto", "local"):  # the last two: what programs attach to, or start
        return None
    return address if address.startswith(_UNIX) else full_address(address)


def cluster_to_look_at(address: str | None, argument: str) -> ClusterRecord | None:
    """Return the cluster at an address; without one the latest started, else a program's own.

    Args:
        address: What ``wanted_address`` gives.
        argument: Name of the option or argument for an address, for errors.

    Returns:
        None if there is no such cluster on this machine.

    Raises:
        ConnectionError: There are several, each of a program.
    """
    record = latest_cluster(address)
    if record is not None:
        return record
    found: dict[str, ClusterRecord] = {}
    for each in at_address(find_clusters(), address):
        found.setdefault(each.address, each)  # several drivers may be of one elsewhere
    if len(found) > 1:
        several = "; ".join(f"{each.address} ({program_of(each)})" for each in found.values())
        raise ConnectionError(
            f"{len(found)} programs of yours have a cluster of their own here, and none was "
            f"started with `miniray start --head`. Choose one with {argument}: {several}."
        )
    return next(iter(found.values()), None)


def cluster_of_page(url: str) -> str:
    """Return the address of the cluster whose page is at a URL, as Ray's clients give it.

    Raises:
        ValueError: No cluster of this user on this machine has its page there.
    """
    scheme, _, place = url.partition("://")
    pages = {record.dashboard_url: record.address for record in find_clusters()}
    host = place.split("/")[0].replace("localhost", "127.0.0.1")
    if scheme in ("http", "https") and host and host in pages:
        return pages[host]
    known = ", ".join(f"http://{page}" for page in pages if page) or "none"
    raise ValueError(
        f"address={url!r}: no cluster of yours on this machine has its page there (pages here: "
        f"{known}). Give HOST:PORT of the cluster's head, as `miniray status` shows it; on another "
        "machine, with the cluster's token in MINIRAY_TOKEN. Over HTTP, Ray's own client submits."
    )


def running_here() -> str:
    """Say which clusters of this user run on this machine."""
    addresses = dict.fromkeys(record.address for record in find_clusters() if record.ready)
    return f"Running here: {', '.join(addresses) or 'none'}."


def program_of(record: ClusterRecord) -> str:
    """Name the program that a node belongs to."""
    if record.driver is None:
        return f"node {record.node_id[:8]}"
    program, *arguments = command_of(record.driver.pid) or [""]
    command = " ".join(" ".join([os.path.basename(program), *arguments]).split())
    if len(command) > _LONGEST_COMMAND:
        command = f"{command[:_LONGEST_COMMAND]}..."
    return f"pid {record.driver.pid}{f', {printable(command)}' if command else ''}"


class LocalNode(NamedTuple):
    """A node of this machine to attach to: one that runs, or one started for this process."""

    node_socket: str
    key: bytes
    address: str
    session_dir: str
    node_id: str
    #: The node's process, if this process started it for itself.
    process: subprocess.Popen[bytes] | None = None
    #: A problem of the started node, though it runs; empty if there is none.
    warning: str = ""
    #: Where the cluster's page is; empty if it is not known here.
    dashboard_url: str = ""

    def end(self) -> None:
        """End the node, if this process started it."""
        if self.process is not None:
            self.process.terminate()
            self.await_end()

    def await_end(self) -> None:
        """Wait for the end of the node that this process started; kill it if that takes long."""
        assert self.process is not None
        if self.process.poll() is None and not ends_within(self.process.pid, config().stop_grace):
            logger.warning("the node %s did not end in time and is killed", self.node_id)
            self.process.kill()
        self.process.wait()


def node_of_cluster(record: ClusterRecord) -> LocalNode:
    """Return the node that a record of a running cluster is of.

    Raises:
        VersionMismatchError: The cluster runs another version of miniray or Python.
        TokenError: The file with its token is gone.
    """
    from miniray.exceptions import VersionMismatchError
    from miniray.security.token import read_token_file
    from miniray.version import PYTHON_VERSION, VERSION

    if record.miniray != VERSION:
        raise VersionMismatchError("miniray", VERSION, record.miniray)
    if record.python.split(".")[:2] != PYTHON_VERSION.split(".")[:2]:
        raise VersionMismatchError("Python", PYTHON_VERSION, record.python)
    token = read_token_file(record.session.token_file)
    return LocalNode(
        record.socket_path,
        token.socket_key,
        record.address,
        str(record.session.folder),
        record.node_id,
        dashboard_url=record.dashboard_url,
    )


def start_node(
    options: BootOptions,
    env_vars: Mapping[str, str] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> LocalNode:
    """Start a node for this process.

    Args:
        options: Options of the node.
        env_vars: Variables of the node and its workers, beside those of this process.
        meanwhile: Called while it starts.

    Raises:
        BootError: It could not be started.
        MinirayError: The head refused it.
        OSError: Its folders could not be made, or there is no head at the address.
    """
    from miniray.system.launch import launch

    return node_of(launch(options, env_vars, meanwhile))


def node_of(started: StartedNode) -> LocalNode:
    """Return a node that this process has started."""
    from miniray.security.token import parse_token

    result = started.result
    return LocalNode(
        result.socket_path,
        parse_token(result.token).socket_key,
        result.address,
        result.session_dir,
        result.node_id,
        started.process,
        result.warning,
        result.dashboard_url,
    )
