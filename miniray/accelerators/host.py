"""What detection may look at on a machine, in one injectable object.

Families read files, run a vendor's tool, or query a metadata server only through ``Host``, so a
test gives them a folder of samples instead of a machine. What the answers mean is decided by the
families.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.common.config import config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from subprocess import Popen

logger = logging.getLogger(__name__)

#: How long a vendor's tool may take to list its devices, in seconds.
TOOL_TIMEOUT = 10.0
#: How long the metadata server of a Google machine may take for one key, in seconds.
METADATA_TIMEOUT = 1.0
#: How long a killed tool may take to be gone, in seconds.
_KILL_TIMEOUT = 1.0

# By address: a name would cost a DNS timeout on machines outside Google's cloud.
_METADATA_URL = "http://169.254.169.254/computeMetadata/v1/instance/attributes/"


class DetectionError(Exception):
    """A driver, a tool or a metadata server did not give a usable answer."""


class ToolNotFoundError(DetectionError):
    """A vendor's tool is not installed; its devices may still exist."""


def run_tool(command: Sequence[str], timeout: float) -> str:
    """Run a vendor's tool and return what it printed.

    Args:
        command: Program and arguments; no shell is involved.
        timeout: Seconds after which the tool is killed.

    Raises:
        ToolNotFoundError: There is no such program.
        DetectionError: It failed, or took longer than ``timeout``.
    """
    import subprocess

    try:
        # A group of its own: a tool is often a script that starts the real one.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ToolNotFoundError(f"{command[0]} is not installed") from None
    except OSError as error:
        raise DetectionError(f"{command[0]} can't be run: {error}") from error
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise DetectionError(f"{command[0]} gave no answer within {timeout:g} s") from None
    if process.returncode != 0:
        said = " ".join((errors or output).decode(errors="replace").split())[:200]
        raise DetectionError(f"{command[0]} failed with exit code {process.returncode}: {said}")
    return output.decode(errors="replace")


def _kill(process: Popen[bytes]) -> None:
    """End a tool and its children, without waiting for one that is stuck in its driver."""
    import subprocess

    os.killpg(process.pid, signal.SIGKILL)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    try:
        process.wait(_KILL_TIMEOUT)
    except subprocess.TimeoutExpired:
        logger.warning("Process %d does not end: it waits for its driver", process.pid)


def read_metadata(key: str, timeout: float) -> str | None:
    """Ask the metadata server of a Compute Engine machine for an attribute.

    Args:
        key: Name of an instance attribute, such as ``accelerator-type``.
        timeout: Seconds to wait for the connection and for each read.

    Returns:
        The value, or None when the machine has no such attribute.

    Raises:
        DetectionError: No metadata server answered.
    """
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(  # noqa: S310 - the address is the constant above
        _METADATA_URL + key, headers={"Metadata-Flavor": "Google"}
    )
    # The server is link-local: a proxy from the environment could not reach it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as reply:
            text: str = reply.read().decode().strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise DetectionError(f"the metadata server refused {key!r}: {error}") from error
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise DetectionError(f"the metadata server did not answer: {error}") from error
    return text or None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Host:
    """A machine as detection sees it; the defaults are the machine we run on."""

    #: What ``/dev``, ``/proc`` and ``/sys`` are below.
    root: Path = Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    #: Runs a tool within a number of seconds: see ``run_tool``.
    run: Callable[[Sequence[str], float], str] = run_tool
    #: Value of a metadata attribute: see ``read_metadata``.
    metadata: Callable[[str, float], str | None] = read_metadata

    def path(self, path: str) -> Path:
        """Return where the file of this absolute path lies."""
        return self.root / path.lstrip("/")

    def exists(self, path: str) -> bool:
        """Return whether there is a file or folder of this absolute path."""
        return self.path(path).exists()

    def may_open(self, path: str) -> bool:
        """Return whether this process may read and write a file; control groups may forbid it."""
        return os.access(self.path(path), os.R_OK | os.W_OK)

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if there is no such folder."""
        try:
            return sorted(os.listdir(self.path(folder)))  # noqa: PTH208 - no Path per name
        except (FileNotFoundError, NotADirectoryError):
            return []

    def numbered(self, folder: str, prefix: str) -> list[int]:
        """Return the sorted numbers N for which ``folder`` holds a ``<prefix>N``."""
        tails = (name[len(prefix) :] for name in self.names(folder) if name.startswith(prefix))
        return sorted(int(tail) for tail in tails if tail.isdecimal())

    def read(self, path: str) -> str:
        """Return the text of a small file, stripped.

        Raises:
            OSError: It can't be read.
        """
        return self.path(path).read_text(errors="replace").strip()


def this_host() -> Host:
    """Return the machine that this process runs on, with its files where ``device_root`` says."""
    return Host(Path(config().device_root))
