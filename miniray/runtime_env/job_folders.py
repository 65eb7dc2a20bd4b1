"""What jobs work in: their own copies of packages, which go with them.

A node has one copy per job and package, for all workers of the job. Who is told that a job is
over is the daemon; the copies stay until no worker uses them either.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from typing import TYPE_CHECKING

from miniray.runtime_env.cache import FolderCache, uninterrupted

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


class JobFolders:
    """The folders of each job. Belongs to one event loop.

    Args:
        root: Where they are; made when it is needed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._jobs: dict[bytes, FolderCache] = {}
        self._over: set[bytes] = set()
        self._removals: set[asyncio.Task[None]] = set()

    def of(self, job_id: bytes) -> FolderCache:
        """The folders of a job, which nothing but the job's end removes."""
        if job_id not in self._jobs:
            self._jobs[job_id] = FolderCache(self._root / job_id.hex(), None)
        return self._jobs[job_id]

    def jobs(self) -> set[bytes]:
        """The jobs that have folders."""
        return set(self._jobs)

    def end_job(self, job_id: bytes) -> None:
        """A job is over: its folders go, as soon as no worker uses them."""
        if job_id in self._jobs:
            self._over.add(job_id)
            self.remove_unused()

    def remove_unused(self) -> None:
        """Remove the folders of jobs that are over and that nobody uses."""
        for job_id in [each for each in self._over if not self._jobs[each].in_use]:
            self._over.discard(job_id)
            removal = asyncio.create_task(_end(self._jobs.pop(job_id), self._root / job_id.hex()))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    async def close(self) -> None:
        """Stop what is being made; what is there goes with the node's session."""
        await asyncio.gather(
            *(folders.close() for folders in self._jobs.values()),
            *self._removals,
            return_exceptions=True,
        )


async def _end(folders: FolderCache, root: Path) -> None:
    await folders.close()
    await uninterrupted(_remove, root)


def _remove(folder: Path) -> None:
    # A worker that starts late makes it anew, and never in one that is being removed.
    going = folder.with_name(f"{folder.name}.{os.urandom(4).hex()}")
    try:
        folder.rename(going)
        shutil.rmtree(going)
    except OSError as error:
        logger.warning("the folder %s of a job that is over cannot be removed: %s", going, error)
