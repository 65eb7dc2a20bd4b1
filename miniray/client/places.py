"""The node that a process attaches to: one that runs on this machine, or one started for it."""

from __future__ import annotations

import dataclasses
import platform
from typing import TYPE_CHECKING

from miniray.common.config import config

if TYPE_CHECKING:
    import subprocess

    from miniray.system.boot_options import BootOptions
    from miniray.system.session import ClusterRecord


@dataclasses.dataclass(frozen=True)
class Place:
    """Where to attach."""

    node_socket: str
    key: bytes
    address: str
    session_dir: str
    node_id: str
    #: The node's process, if this process started it for itself.
    process: subprocess.Popen[bytes] | None = None
    #: What is wrong with what was started, though it runs; empty if nothing is.
    warning: str = ""

    def end(self) -> None:
        """End the node, if this process started it."""
        import subprocess

        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(config().stop_grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def place_of(record: ClusterRecord) -> Place:
    """Where to attach to a node that runs.

    Raises:
        VersionMismatchError: It is of another version of miniray or Python.
        TokenError: The file with its token is gone.
    """
    from miniray.exceptions import VersionMismatchError
    from miniray.security.token import read_token_file
    from miniray.version import VERSION

    if record.miniray != VERSION:
        raise VersionMismatchError("miniray", VERSION, record.miniray)
    ours = platform.python_version()
    if record.python.split(".")[:2] != ours.split(".")[:2]:
        raise VersionMismatchError("Python", ours, record.python)
    token = read_token_file(record.session.token_file)
    return Place(
        record.socket_path,
        token.socket_key,
        record.address,
        str(record.session.folder),
        record.node_id,
    )


def start_node(options: BootOptions) -> Place:
    """Start a node for this process.

    Raises:
        BootError: It could not be started.
        MinirayError: The head refused it.
        OSError: Its folders could not be made, or there is no head at the address.
    """
    from miniray.security.token import parse_token
    from miniray.system.launch import launch

    started = launch(options)
    result = started.result
    return Place(
        result.socket_path,
        parse_token(result.token).socket_key,
        result.address,
        result.session_dir,
        result.node_id,
        started.process,
        result.warning,
    )
