"""Answers "logs": lines of this node's log files, and searches of them in a process of their own.

A regular expression may take hours for one line, and Python's ``re`` lets no other thread run
meanwhile: a daemon that searched itself would fall silent, and be given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.process_state import python_command
from miniray.logs.log_files import LogQuery, pattern, read, read_on

if TYPE_CHECKING:
    from miniray.node.base.node_config import NodeConfig
    from miniray.node.relay.questions import Questions

#: Seconds after which a search ends by itself, as when its daemon is gone.
_LONGEST = 60


class LogSearch:
    """Reads the log files of this node for whoever asks."""

    def __init__(self, node: NodeConfig, questions: Questions) -> None:
        self._node = node
        questions.answers["logs"] = self._logs

    async def _logs(self, seconds: float, query: dict[str, Any], ends: Any) -> dict[str, Any]:
        """Read log files, for the fields of a ``LogQuery``.

        ``ends``: by node, what was read already; None: nothing.
        """
        folder, wanted = self._node.logs, LogQuery(**query)
        if ends is not None:
            own = ends.get(self._node.node_id.hex()) or {}
            return await asyncio.to_thread(read_on, folder, wanted, own)
        if pattern(wanted.grep) is not None:
            return await search(folder, query, seconds)
        return await asyncio.to_thread(read, folder, wanted)


async def search(folder: Path, query: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Do as ``read``.

    Raises:
        TimeoutError: It takes longer than so many seconds.
        OSError: The process failed.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", python_command("miniray.node.log_search")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    asked = json.dumps([str(folder), query]).encode()
    try:
        output, errors = await asyncio.wait_for(process.communicate(asked), seconds)
    except asyncio.TimeoutError:
        raise TimeoutError(f"to search takes more than {seconds:g} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"the search failed: {last}")
    found: dict[str, Any] = json.loads(output)
    return found


def main() -> None:
    """Search for the daemon: folder and query come on stdin."""
    signal.alarm(_LONGEST)
    folder, query = json.load(sys.stdin)
    json.dump(read(Path(folder), LogQuery(**query)), sys.stdout)


if __name__ == "__main__":
    main()
