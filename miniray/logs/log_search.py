"""Searches the log files of a folder, in a process of its own where a pattern is searched for.

A regular expression may take hours for one line, and Python's ``re`` lets no other thread run
meanwhile: a daemon that searched itself would fall silent, and be given up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Any

from miniray.common.process_state import python_command
from miniray.logs.log_files import LogQuery, pattern, read
from miniray.system.programs import HelperFailedError, output_of

#: Seconds after which a search ends by itself, as when who has started it is gone.
_LONGEST = 60


async def find(folder: Path, query: LogQuery, seconds: float) -> dict[str, Any]:
    """Do as ``read``.

    Raises:
        ValueError: The regular expression is none.
        TimeoutError: To search takes longer than so many seconds.
        OSError: The folder cannot be read, or the process failed.
    """
    if pattern(query.grep) is None:
        return await asyncio.to_thread(read, folder, query)
    program = sys.executable, "-c", python_command("miniray.logs.log_search")
    asked = json.dumps([str(folder), dataclasses.asdict(query)]).encode()
    try:
        found: dict[str, Any] = json.loads(await output_of(program, seconds, asked))
    except TimeoutError:
        raise TimeoutError(f"to search takes more than {seconds:g} s") from None
    except HelperFailedError as error:
        raise OSError(f"the search failed: {error}") from None
    return found


def main() -> None:
    """Search for another process: folder and query come on stdin."""
    signal.alarm(_LONGEST)
    folder, query = json.load(sys.stdin)
    json.dump(read(Path(folder), LogQuery(**query)), sys.stdout)


if __name__ == "__main__":
    main()
