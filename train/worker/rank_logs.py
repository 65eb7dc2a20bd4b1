"""Copies what each rank has printed into the run's folder when an attempt is over.

Nodes keep the output of their processes in files. What was printed by processes of a node
that is gone is gone with it. In local mode there are no such files: a rank's output goes to the
user's terminal, or where torchrun has sent it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.runtime import current_runtime
from miniray.decorator import remote
from miniray.exceptions import MinirayError, TaskUnschedulableError
from miniray.runtime_context import get_runtime_context
from miniray.train.base.ranks import listed
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from miniray.train.base.ranks import WorkerInfo
    from miniray.train.storage.storage import RunStorage

logger = logging.getLogger(__name__)

FOLDER = "logs"

#: Of longer output, this many bytes at the end are kept.
MAX_BYTES = 64 * 1024 * 1024
#: Seconds that a run waits for its output at its end; and when the user has stopped it.
TIMEOUT, ABORT_TIMEOUT = 20.0, 3.0


def output_of_this_process() -> str:
    """Return the pattern of this worker's output files, without ``.out`` and ``.err``."""
    context = get_runtime_context()
    folder = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    return str(folder / f"worker-*{context.get_worker_id()}*")


class RankLogs:
    """The output of all attempts of a run, in a folder for each; they are numbered on over runs."""

    def __init__(self, storage: RunStorage) -> None:
        self._storage = storage
        self._next = 1
        self._copies: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Find out what earlier runs of this name have left; blocks."""
        names = [name.removeprefix("attempt_") for name in self._storage.files.names(FOLDER)]
        self._next = max((int(name) for name in names if name.isdecimal()), default=0) + 1

    def keep(self, infos: Sequence[WorkerInfo]) -> str:
        """Begin to copy the output of an attempt's ranks in the background.

        Returns:
            The folder; empty if there is no output.
        """
        if not any(info.output for info in infos):
            return ""
        folder = f"{FOLDER}/attempt_{self._next:03d}"
        self._next += 1
        self._copies.add(asyncio.create_task(keep(self._storage, folder, infos)))
        return folder

    async def close(self, timeout: float) -> None:
        """Wait for the copies, and give up those that take longer than ``timeout`` seconds."""
        if self._copies:
            _, late = await asyncio.wait(self._copies, timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                logger.warning("The output of some ranks is not in %s.", self._storage.path)


def copy_output(storage: RunStorage, folder: str, outputs: dict[int, str]) -> None:
    """Copy the output of ranks of this node into a folder of the run's; where it is, by rank."""
    for rank, path in outputs.items():
        for kind in ("out", "err"):
            files = Path(path).parent.glob(
                f"{Path(path).name}.{kind}*"
            )  # older ones end in a number
            text = _read(sorted(files, reverse=True))
            if text:
                storage.files.write(f"{folder}/rank_{rank}.{kind}", text)


async def keep(storage: RunStorage, folder: str, infos: Sequence[WorkerInfo]) -> None:
    """Copy the output of an attempt's ranks, each on its node. Failures are logged only."""
    own_node = get_runtime_context().get_node_id()
    by_node: dict[str, dict[int, str]] = {}
    for rank, info in enumerate(infos):
        by_node.setdefault(info.node_id, {})[rank] = info.output
    try:
        # Nodes write to the files what is still in the pipes of this job's processes.
        await current_runtime().head.flush_output()
    except MinirayError as error:
        logger.warning("The end of what ranks printed may be missing in %s: %s", folder, error)
    copies = [
        asyncio.to_thread(copy_output, storage, folder, outputs)
        if node == own_node
        else _copy_elsewhere(node, storage, folder, outputs)
        for node, outputs in by_node.items()
    ]
    results = await asyncio.gather(*copies, return_exceptions=True)
    for outputs, result in zip(by_node.values(), results, strict=True):
        if isinstance(result, BaseException):
            gone = isinstance(result, TaskUnschedulableError)
            logger.warning(
                "What %s printed is not in %s/%s: %s",
                listed(outputs),
                storage.path,
                folder,
                "the node is gone" if gone else result,
            )


async def _copy_elsewhere(
    node: str, storage: RunStorage, folder: str, outputs: dict[int, str]
) -> None:
    copy: Any = remote(copy_output).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    )
    await copy.remote(storage, folder, outputs)


def _read(paths: Sequence[Path]) -> str:
    """Return the end of files' content, at most ``MAX_BYTES``; empty if there is none."""
    before = sum(path.stat().st_size for path in paths) - MAX_BYTES
    skip, parts = before, []
    for path in paths:
        with path.open("rb") as file:
            file.seek(max(0, min(skip, path.stat().st_size)))
            parts.append(file.read())
        skip -= path.stat().st_size
    text = b"".join(parts).decode(errors="replace")
    return text if before <= 0 else f"[{before} bytes before this]\n{text}"
