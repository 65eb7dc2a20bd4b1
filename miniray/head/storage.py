"""The part of the head's state that survives it: when it is written, its form, and the database."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import marshal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.common.config import config
from miniray.common.series import COUNTED
from miniray.common.specs import ActorSpec, Allocation, CommandSpec, JobSpec, field_names
from miniray.common.state_types import DEAD
from miniray.head.directories.actor_table import Actor, DeadActor, remembered
from miniray.head.directories.jobs import Job
from miniray.head.directories.placement_groups import PlacementGroupEntry
from miniray.head.directories.submitted_job import SubmittedJob
from miniray.head.scheduling.bundles import GroupPlacement
from miniray.messages.value import Death

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from miniray.head.directories.jobs import Key


class Storage:
    """Keeps what must survive the head. Here a no-op: an embedded cluster ends with its head."""

    #: Where the logs of submitted jobs are kept.
    job_logs: Path | None = None

    def actor(self, actor: Actor) -> None:
        """Keep an actor that can start or has moved; forget one that died."""

    def placement_group(self, group: PlacementGroupEntry) -> None:
        """Keep a group that was created or placed; forget one that was removed."""

    def job(self, job: Job) -> None:
        """Keep a job that began or ended."""

    def job_forgotten(self, job_id: bytes) -> None:
        """Forget a job."""

    def submitted_job(self, job: SubmittedJob) -> None:
        """Keep a submitted job that is new or has changed."""

    def submitted_job_forgotten(self, name: str) -> None:
        """Forget a submitted job."""

    def key_value(self, namespace: str, key: Key, value: bytes | None) -> None:
        """Keep a value; None forgets it."""

    def event(self, number: int, record: bytes | None) -> None:
        """Keep an event; None forgets it."""

    def when_written(self, then: Callable[[], object]) -> None:
        """Call back when all changes up to now are kept, or cannot be."""
        then()


@dataclasses.dataclass(eq=False, repr=False)
class Saved:
    """The records that earlier heads of this cluster kept."""

    cluster_id: str
    #: Of this start; the first one is 1.
    epoch: int
    actors: list[bytes]
    groups: list[bytes]
    jobs: list[bytes]
    #: (namespace, key, value)
    values: list[tuple[str, Key, bytes]]
    #: Recently dead actors, and removed groups: daemons may request them again.
    dead_actors: list[bytes] = dataclasses.field(default_factory=list)
    removed_groups: list[bytes] = dataclasses.field(default_factory=list)
    #: When the first head started, in seconds since the epoch.
    started: float = dataclasses.field(default_factory=time.time)
    submitted_jobs: list[bytes] = dataclasses.field(default_factory=list)
    events: list[bytes] = dataclasses.field(default_factory=list)


_ACTOR_FIELDS = (
    "id",
    "spec",
    "job_id",
    "near",
    "restarts_left",
    "state",
    "restarts",
    "arguments",
    "lease",
    "process_id",
    "pid",
)
_GROUP_FIELDS = (
    "id",
    "name",
    "namespace",
    "detached",
    "strategy",
    "bundles",
    "selectors",
    "asked",
    "placed",
)


def actor_record(actor: Actor) -> bytes:
    fields = {name: getattr(actor, name) for name in _ACTOR_FIELDS}
    fields["spec"] = actor.spec.to_wire()
    return marshal.dumps((fields, actor.node.id if actor.node is not None else b""))


def read_actor(record: bytes) -> tuple[Actor, bytes]:
    """Decode an actor, without its job, and the id of its node (empty: none)."""
    fields, node_id = marshal.loads(record)
    fields["spec"] = ActorSpec.from_wire(fields["spec"])
    return Actor(job=None, **fields), node_id


def dead_actor_record(actor: Actor) -> bytes:
    dead = remembered(actor)
    return marshal.dumps((actor.id, tuple(dead.death), *dead[1:]))


def read_dead_actor(record: bytes) -> tuple[bytes, DeadActor]:
    id, death, *others = marshal.loads(record)
    return id, DeadActor(Death(*death), *others)


def group_record(group: PlacementGroupEntry) -> bytes:
    fields = {name: getattr(group, name) for name in _GROUP_FIELDS}
    state = group.state
    # What this head still awaits, the next one has to await too.
    placed = state.allocations | state.awaited if state is not None else {}
    bundles = {index: tuple(allocation) for index, allocation in placed.items()}
    return marshal.dumps((fields, bundles))


def read_group(record: bytes) -> PlacementGroupEntry:
    """Decode a group, whose bundles await their nodes."""
    fields, bundles = marshal.loads(record)
    group = PlacementGroupEntry(**fields)
    group.state = GroupPlacement.of(group.id, group.bundles, group.strategy, group.selectors)
    group.state.awaited = {index: Allocation(*data) for index, data in bundles.items()}
    return group


def job_record(job: Job | SubmittedJob) -> bytes:
    fields = {name: getattr(job, name) for name in field_names(type(job))}
    return marshal.dumps({**fields, "spec": job.spec.to_wire()})


def read_job(record: bytes) -> Job:
    fields = marshal.loads(record)
    return Job(**{**fields, "spec": JobSpec.from_wire(fields["spec"])})


def read_submitted_job(record: bytes) -> SubmittedJob:
    fields = marshal.loads(record)
    return SubmittedJob(**{**fields, "spec": CommandSpec.from_wire(fields["spec"])})


logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS cluster (
    id TEXT NOT NULL, epoch INTEGER NOT NULL, started REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS things (
    kind TEXT NOT NULL, key BLOB NOT NULL, record BLOB NOT NULL, PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (
    kind TEXT NOT NULL, key BLOB NOT NULL, record BLOB NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (kind, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ended_at ON ended (at);
"""
_ACTOR, _GROUP, _JOB, _SUBMITTED = "actor", "placement_group", "job", "submitted_job"
_EVENT, _VALUE = "event", "value"
_REPLACE = "REPLACE INTO things VALUES (?, ?, ?)"
_DELETE = "DELETE FROM things WHERE kind = ? AND key = ?"
#: Seconds until a disk that took no writes is tried again, at first and at most.
_RETRY_AFTER, _RETRY_AT_MOST_AFTER = 0.5, 10.0
#: Bytes of a record at most. SQLite takes no longer ones (10^9), and what is written together with
#: one would never be written.
_LONGEST = 999_000_000
#: What has changed: kind and key.
_What = tuple[str, bytes]
#: Ended things of each kind that the next head restores.
_REMEMBERED = 10_000


class _Change(NamedTuple):
    #: None: it is removed.
    record: bytes | None
    #: The record of one that has ended.
    ended: bytes | None = None


class SqliteStorage(Storage):
    """A database file, made if there is none; sqlite3.Error if it is no such database.

    ``warn`` gets the warning for users that the disk takes no writes.
    """

    def __init__(self, path: Path, warn: Callable[[str], object] | None = None) -> None:
        self._path = path
        self.job_logs = path.parent / "logs" / "jobs"
        self._warn = warn
        import sqlite3  # the heads of embedded clusters have no database

        # Made here, then used by the writing thread only.
        self._database = sqlite3.connect(path, check_same_thread=False)
        path.chmod(0o600)
        self._database.executescript(
            # What is deleted, as the code of a job, is given back to the disk, and not written
            # over with zeros before, for which everything else would wait.
            "PRAGMA auto_vacuum = FULL; PRAGMA secure_delete = OFF;"
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _SCHEMA
        )
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="storage")
        #: What changed since the last write, and is not being written.
        self._changes: dict[_What, _Change] = {}
        self._in_trouble = False
        #: Callbacks for when the changes up to now are written.
        self._waiting: list[Callable[[], object]] = []
        self._closing = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    def start(self, cluster_id: str) -> Saved:
        """Count this start of the head, and read what was kept; an older cluster keeps its id."""
        database = self._database
        row = database.execute("SELECT id, epoch, started FROM cluster").fetchone()
        if row is None:
            row = (cluster_id, 0, time.time())
            database.execute("INSERT INTO cluster VALUES (?, ?, ?)", row)
        cluster_id, starts, started = row
        database.execute("UPDATE cluster SET epoch = ?", (starts + 1,))
        database.commit()
        kept: dict[str, list[bytes]] = collections.defaultdict(list)
        for kind, record in database.execute("SELECT kind, record FROM things"):
            kept[kind].append(record)
        return Saved(
            cluster_id=cluster_id,
            epoch=starts + 1,
            started=started,
            actors=kept[_ACTOR],
            groups=kept[_GROUP],
            jobs=kept[_JOB],
            submitted_jobs=kept[_SUBMITTED],
            events=kept[_EVENT],
            values=[marshal.loads(record) for record in kept[_VALUE]],
            dead_actors=[record for _, record in self._read_ended(_ACTOR)],
            removed_groups=[key for key, _ in self._read_ended(_GROUP)],
        )

    def _read_ended(self, kind: str) -> list[tuple[bytes, bytes]]:
        """Return (key, record) of what ended recently, the latest last."""
        rows = self._database.execute(
            "SELECT key, record FROM ended WHERE kind = ? ORDER BY at DESC LIMIT ?",
            (kind, _REMEMBERED),
        ).fetchall()
        return rows[::-1]

    # --- changes ---------------------------------------------------------------------
    def actor(self, actor: Actor) -> None:
        if actor.state == DEAD:
            self._end(_ACTOR, actor.id, dead_actor_record(actor))
        else:
            self._change(_ACTOR, actor.id, actor_record(actor))

    def placement_group(self, group: PlacementGroupEntry) -> None:
        if group.removed or group.state is None:
            self._end(_GROUP, group.id, b"")
        else:
            self._change(_GROUP, group.id, group_record(group))

    def job(self, job: Job) -> None:
        self._change(_JOB, job.id, job_record(job))

    def job_forgotten(self, job_id: bytes) -> None:
        self._change(_JOB, job_id, None)

    def submitted_job(self, job: SubmittedJob) -> None:
        self._change(_SUBMITTED, job.name.encode(), job_record(job))

    def submitted_job_forgotten(self, name: str) -> None:
        self._change(_SUBMITTED, name.encode(), None)

    def event(self, number: int, record: bytes | None) -> None:
        self._change(_EVENT, number.to_bytes(8, "big"), record)

    def when_written(self, then: Callable[[], object]) -> None:
        if self._in_trouble or self._writing is None or self._writing.done():
            then()
        else:
            self._waiting.append(then)

    def key_value(self, namespace: str, key: Key, value: bytes | None) -> None:
        record = None if value is None else marshal.dumps((namespace, key, value))
        place = marshal.dumps((namespace, key), 0)  # version 0: equal values, equal bytes
        self._change(_VALUE, place, record)

    def _change(self, kind: str, key: bytes, record: bytes | None) -> None:
        self._note((kind, key), _Change(record))

    def _end(self, kind: str, key: bytes, record: bytes) -> None:
        self._note((kind, key), _Change(None, record))

    def _note(self, what: _What, change: _Change) -> None:
        if len(change.record or b"") > _LONGEST:
            text = "the %s %.80r is too large to be kept: a restart of the head will miss it"
            logger.error(text, *what)
            change = _Change(None)
        self._changes[what] = change
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write_all())

    # --- writing -----------------------------------------------------------------
    async def _write_all(self) -> None:
        """Write all changes; meanwhile keep only the latest of each thing.

        So what waits takes no more than the head's own state, and a key for all that has ended.
        """
        pause = _RETRY_AFTER
        while self._changes or self._waiting:
            changes, self._changes = self._changes, {}
            waiting, self._waiting = self._waiting, []
            trouble = await self._write(changes)
            if trouble is not None:
                self._changes = {**changes, **self._changes}
                waiting, self._waiting = [*waiting, *self._waiting], []
            self._report(trouble)
            for then in waiting:
                _call(then)
            if trouble is not None:
                if self._closing.is_set():
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
                pause = min(2 * pause, _RETRY_AT_MOST_AFTER)

    async def _write(self, changes: dict[_What, _Change]) -> Exception | None:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._writer, self._transact, changes)
        except Exception as error:  # noqa: BLE001 - the callers of when_written report it
            return error
        return None

    def _report(self, trouble: Exception | None) -> None:
        """Warn once that the disk takes no writes, and log once that it does again."""
        if trouble is not None and not self._in_trouble:
            text = (
                f"The head cannot write its state to {self._path} ({trouble}). The cluster goes on "
                f"and the head tries again; what changes meanwhile is lost if the head dies."
            )
            logger.error(text)
            if self._warn is not None:
                self._warn(text)
        elif trouble is None and self._in_trouble:
            logger.warning("all changes are written to %s again", self._path)
        self._in_trouble = trouble is not None

    def _transact(self, changes: dict[_What, _Change]) -> None:
        now = time.time()
        rows: dict[str, list[tuple[Any, ...]]] = collections.defaultdict(list)
        for (kind, key), (record, ended) in changes.items():
            if record is None:
                rows[_DELETE].append((kind, key))
            else:
                rows[_REPLACE].append((kind, key, record))
            if ended is not None:
                rows["REPLACE INTO ended VALUES (?, ?, ?, ?)"].append((kind, key, ended, now))
                # Daemons that come back later than this have stopped.
                rows["DELETE FROM ended WHERE at < ?"] = [(now - 2 * config().head_grace,)]
        began = time.perf_counter()
        with self._database as database:
            for statement, values in rows.items():
                database.executemany(statement, values)
        COUNTED.took("head_storage_write_seconds", time.perf_counter() - began)
        if any(kind == _VALUE for kind, _ in rows[_DELETE]):  # maybe code of a job, which is large
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    async def close(self) -> None:
        """Write the remaining changes, then close the file."""
        self._closing.set()
        if self._writing is not None:
            await self._writing
        if self._changes:
            logger.error("%d changes were never written to %s", len(self._changes), self._path)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._database.close)
        self._writer.shutdown()


def _call(then: Callable[[], object]) -> None:
    """Call a callback; if it fails, the other writes go on."""
    try:
        then()
    except Exception:
        logger.exception("a callback after a write of the head's state failed")
