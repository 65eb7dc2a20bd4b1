"""Keeps the head's state in an SQLite file.

Changes are gathered in the event loop, the latest of each thing only, and written by
one thread in one transaction at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sqlite3
import time
from typing import TYPE_CHECKING

from miniray.config import config
from miniray.head import records
from miniray.head.actor_states import DEAD
from miniray.head.storage import Saved

if TYPE_CHECKING:
    from pathlib import Path

    from miniray.head.actor import Actor
    from miniray.head.jobs import Job
    from miniray.head.kv import Key
    from miniray.head.placement_groups import PlacementGroup

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS cluster (id TEXT NOT NULL, epoch INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS things (
    kind TEXT NOT NULL, key BLOB NOT NULL, record BLOB NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS key_values (
    namespace TEXT NOT NULL, key NOT NULL, value BLOB NOT NULL, PRIMARY KEY (namespace, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (
    kind TEXT NOT NULL, key BLOB NOT NULL, record BLOB NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ended_at ON ended (at);
"""
_ACTOR, _GROUP, _JOB = "actor", "placement_group", "job"
#: So many of each kind that have ended are told to the next head.
_REMEMBERED = 10_000


class SqliteStorage:
    """A database file, made if there is none. Implements ``storage.Storage``.

    Raises:
        sqlite3.Error: the file cannot be opened, or is no such database.
    """

    def __init__(self, path: Path) -> None:
        # Made here, then used by the writing thread only.
        self._database = sqlite3.connect(path, check_same_thread=False)
        path.chmod(0o600)
        self._database.executescript(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _SCHEMA
        )
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="storage")
        #: What changed since the last write, and is not being written.
        self._things: dict[tuple[str, bytes], bytes | None] = {}
        #: What of it has ended, and how.
        self._ended: dict[tuple[str, bytes], bytes] = {}
        self._values: dict[tuple[str, Key], bytes | None] = {}
        self._writing: asyncio.Task[None] | None = None

    def start(self, cluster_id: str) -> Saved:
        """Count this start of the head and read what was kept.

        Args:
            cluster_id: of a new cluster; an older one keeps its own.
        """
        database = self._database
        row = database.execute("SELECT id, epoch FROM cluster").fetchone()
        if row is None:
            row = (cluster_id, 0)
            database.execute("INSERT INTO cluster VALUES (?, ?)", row)
        epoch = row[1] + 1
        database.execute("UPDATE cluster SET epoch = ?", (epoch,))
        database.commit()
        kept: dict[str, list[bytes]] = {_ACTOR: [], _GROUP: [], _JOB: []}
        for kind, record in database.execute("SELECT kind, record FROM things"):
            kept[kind].append(record)
        values = database.execute("SELECT namespace, key, value FROM key_values").fetchall()
        return Saved(
            row[0],
            epoch,
            kept[_ACTOR],
            kept[_GROUP],
            kept[_JOB],
            values,
            [record for _, record in self._read_ended(_ACTOR)],
            [key for key, _ in self._read_ended(_GROUP)],
        )

    def _read_ended(self, kind: str) -> list[tuple[bytes, bytes]]:
        """(key, record) of what ended lately, the latest last."""
        rows = self._database.execute(
            "SELECT key, record FROM ended WHERE kind = ? ORDER BY at DESC LIMIT ?",
            (kind, _REMEMBERED),
        ).fetchall()
        return rows[::-1]

    # --- hearing of changes ----------------------------------------------------------
    def actor(self, actor: Actor) -> None:
        """An actor can start, moved, or died."""
        if actor.state == DEAD:
            self._end(_ACTOR, actor.id, records.dead_actor_record(actor))
        else:
            self._change(_ACTOR, actor.id, records.actor_record(actor))

    def placement_group(self, group: PlacementGroup) -> None:
        """A group was asked for, placed, or removed."""
        if group.removed or group.state is None:
            self._end(_GROUP, group.id, b"")
        else:
            self._change(_GROUP, group.id, records.group_record(group))

    def job(self, job: Job) -> None:
        """A job began or ended."""
        self._change(_JOB, job.id, records.job_record(job))

    def job_forgotten(self, job_id: bytes) -> None:
        """A job that is over is remembered no longer."""
        self._change(_JOB, job_id, None)

    def key_value(self, namespace: str, key: Key, value: bytes | None) -> None:
        """A value was set, or removed."""
        self._values[namespace, key] = value
        self._write_soon()

    def _change(self, kind: str, key: bytes, record: bytes | None) -> None:
        self._things[kind, key] = record
        self._write_soon()

    def _end(self, kind: str, key: bytes, record: bytes) -> None:
        self._ended[kind, key] = record
        self._change(kind, key, None)

    # --- writing -----------------------------------------------------------------
    def _write_soon(self) -> None:
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_all())

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._things or self._values:
            things, self._things = self._things, {}
            values, self._values = self._values, {}
            ended, self._ended = self._ended, {}
            try:
                await loop.run_in_executor(self._writer, self._write, things, values, ended)
            except sqlite3.Error:
                # The cluster goes on; only a restart of the head would miss this.
                logger.exception("%d changes could not be kept", len(things) + len(values))

    def _write(
        self,
        things: dict[tuple[str, bytes], bytes | None],
        values: dict[tuple[str, Key], bytes | None],
        ended: dict[tuple[str, bytes], bytes],
    ) -> None:
        now = time.time()
        with self._database as database:
            if ended:
                database.executemany(
                    "REPLACE INTO ended VALUES (?, ?, ?, ?)",
                    [(*key, record, now) for key, record in ended.items()],
                )
                # Daemons that come back later than this have stopped.
                forgotten = now - 2 * config().head_grace
                database.execute("DELETE FROM ended WHERE at < ?", (forgotten,))
            database.executemany(
                "REPLACE INTO things VALUES (?, ?, ?)",
                [(*key, record) for key, record in things.items() if record is not None],
            )
            database.executemany(
                "DELETE FROM things WHERE kind = ? AND key = ?",
                [key for key, record in things.items() if record is None],
            )
            database.executemany(
                "REPLACE INTO key_values VALUES (?, ?, ?)",
                [(*key, value) for key, value in values.items() if value is not None],
            )
            database.executemany(
                "DELETE FROM key_values WHERE namespace = ? AND key = ?",
                [key for key, value in values.items() if value is None],
            )

    async def close(self) -> None:
        """Write what is left, then close the file."""
        if self._writing is not None:
            await self._writing
        await asyncio.get_running_loop().run_in_executor(self._writer, self._database.close)
        self._writer.shutdown()
