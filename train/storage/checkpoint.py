"""``Checkpoint``: the name of a folder of files on some filesystem; and how it is reported.

It holds a path and a filesystem, no data; which checkpoints a run has and keeps is decided
elsewhere. Names and values of options are those of Ray Train. A remote one is fetched once for all
processes of a machine that read it at the same time, and the last reader deletes the copy; how that
is locked is in ``runtime_env/cache.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import json
import logging
import os
import pickle
import shutil
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.runtime_env.cache import folder_in_use
from miniray.train.storage.filesystem import (
    Store,
    download,
    in_memory,
    is_local,
    resolve,
    same,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)


#: Where ``set_metadata`` keeps its dictionary, in the checkpoint's folder.
METADATA_FILE = ".metadata.json"


class Checkpoint:
    """A folder of files on a local or remote filesystem.

    Args:
        path: A local path or a URL; with ``filesystem`` a path on that filesystem.
        filesystem: An fsspec or pyarrow filesystem. Default: the one that the path names.

    Attributes:
        path: Path on ``filesystem``.
        fsspec_filesystem: The fsspec filesystem that holds it.
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        self.fsspec_filesystem, self.path = resolve(path, filesystem)
        self._given = filesystem

    @classmethod
    def stored(cls, path: str, filesystem: Any, given: Any) -> Checkpoint:
        """Return a checkpoint in the folder of a run.

        Args:
            path: Path on ``filesystem``.
            filesystem: The fsspec filesystem that holds it.
            given: What the user gave as filesystem, or None.
        """
        checkpoint = cls(path, filesystem)
        checkpoint._given = given
        return checkpoint

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Return a checkpoint of the files in a local folder."""
        return cls(Path(path).absolute())

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the files into a local folder.

        Args:
            path: The folder; made if it is missing. Default: a new temporary one, which the
                caller has to delete.

        Returns:
            The folder's path.

        Raises:
            FileNotFoundError: The checkpoint does not exist, or not any more.
        """
        self._check_exists()
        target = Path(path).expanduser() if path is not None else temporary_folder()
        try:
            if is_local(self.fsspec_filesystem):
                shutil.copytree(self.path, target, dirs_exist_ok=True)
            else:
                download(self.fsspec_filesystem, self.path, target)
        except BaseException:
            if path is None:
                shutil.rmtree(target, ignore_errors=True)  # the caller does not have its path
            raise
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield a local folder with the files, to be read only.

        A local checkpoint is not copied. A remote one is fetched into a temporary folder, once for
        all processes of the machine that read it at the same time. The last of them deletes it at
        the end of its ``with`` block.

        Raises:
            FileNotFoundError: The checkpoint does not exist, or not any more.
        """
        self._check_exists()
        if is_local(self.fsspec_filesystem):
            yield self.path
            return
        with shared_copy(self.fsspec_filesystem, self.path) as folder:
            yield folder

    def get_metadata(self) -> dict[str, Any]:
        """Return the dictionary stored with ``set_metadata``; empty if there is none."""
        text = self._files.read(METADATA_FILE)
        metadata: dict[str, Any] = {} if text is None else json.loads(text)
        return metadata

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Store a dictionary of JSON values with the files, in place of an earlier one.

        Raises:
            TypeError: It holds something else; nothing is stored.
        """
        try:
            text = json.dumps(dict(metadata))
        except TypeError as error:
            raise TypeError(f"Metadata of a checkpoint are JSON values: {error}.") from error
        self._files.write(METADATA_FILE, text)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the stored dictionary; given keys replace those of the same name."""
        self.set_metadata({**self.get_metadata(), **metadata})

    @property
    def filesystem(self) -> Any:
        """The filesystem that holds the files: the one that was given, else one of pyarrow."""
        return shown(self.fsspec_filesystem, self._given)

    @property
    def _files(self) -> Store:
        return Store(self.fsspec_filesystem, self.path.rstrip("/"))

    def _check_exists(self) -> None:
        self.fsspec_filesystem.invalidate_cache(self.path.rstrip("/").rpartition("/")[0])
        if not self.fsspec_filesystem.isdir(self.path):
            raise FileNotFoundError(
                f"{self!r} does not exist. It was never written, or CheckpointConfig(num_to_keep) "
                f"no longer keeps it."
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Checkpoint)
            and self.path == other.path
            and same(self.fsspec_filesystem, other.fsspec_filesystem)
        )

    def __hash__(self) -> int:
        return hash(self.path)

    def __repr__(self) -> str:
        protocol = self.fsspec_filesystem.protocol
        kind = protocol if isinstance(protocol, str) else protocol[-1]
        return f"{type(self).__name__}(filesystem={kind}, path={self.path})"

    def __fspath__(self) -> str:
        raise TypeError(
            "A Checkpoint is not a path, since it may be on another machine. "
            "Use `with checkpoint.as_directory() as path:` or checkpoint.to_directory()."
        )


def temporary_folder() -> Path:
    """Make a folder, which the caller has to delete."""
    return Path(tempfile.mkdtemp(prefix="miniray_checkpoint_"))


class CheckpointUploadMode(enum.Enum):
    """How ``report()`` brings a checkpoint into the storage."""

    #: ``report()`` returns after this rank's files are there.
    SYNC = "SYNC"
    #: ``report()`` returns at once; a thread uploads the files, one checkpoint after the other.
    ASYNC = "ASYNC"
    #: The files are in a folder of the run's folder already.
    NO_UPLOAD = "NO_UPLOAD"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Return whether local files are deleted after the upload by default."""
        return self is CheckpointUploadMode.ASYNC


class CheckpointConsistencyMode(enum.Enum):
    """What ``get_all_reported_checkpoints()`` waits for.

    Both wait until every report that was made before is in the storage: nothing is validated
    later.
    """

    COMMITTED = "COMMITTED"
    VALIDATED = "VALIDATED"


class ReportedCheckpointStatus(enum.Enum):
    """Where a reported checkpoint stands."""

    COMMITTED = "COMMITTED"


@dataclasses.dataclass
class ReportedCheckpoint:
    """A checkpoint that is complete.

    Attributes:
        checkpoint: The checkpoint in the storage.
        metrics: What rank 0 reported with it.
        status: Always COMMITTED.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


def member(kind: type[enum.Enum], argument: str, value: Any) -> Any:
    """Return a member of an enumeration; ValueError names what is allowed if it is none."""
    matches = isinstance(value, kind)
    if not matches:
        allowed = ", ".join(f"{kind.__name__}.{each.name}" for each in kind)
        raise ValueError(f"{argument}={value!r}) is not known. Use one of {allowed}.")
    return value


#: Fields by which stores show that a file's content has changed.
_VERSIONS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated")


@contextlib.contextmanager
def shared_copy(filesystem: Any, path: str) -> Iterator[str]:
    """Yield a local folder with the files, which processes of this machine share."""
    key = _key_of(filesystem, path)
    folder = _folder_of_copies() if key is not None else None
    if key is None or folder is None:
        with tempfile.TemporaryDirectory(prefix="miniray_checkpoint_") as own:
            download(filesystem, path, Path(own))
            yield own
        return
    with folder_in_use(folder, key, lambda target: download(filesystem, path, target)) as copy:
        yield str(copy)


def _key_of(filesystem: Any, path: str) -> str | None:
    """Return what copies of the same content have in common; None if it is not known."""
    if in_memory(filesystem):
        return None
    try:
        store = pickle.dumps(filesystem)
    except Exception:  # whatever a user's class raises
        logger.debug("%r is not shared between processes.", filesystem, exc_info=True)
        return None
    filesystem.invalidate_cache(path)
    found = filesystem.find(path, detail=True)
    files = [
        (name, info["size"], *(str(info.get(version)) for version in _VERSIONS))
        for name, info in sorted(found.items())
    ]
    return hashlib.sha256(store + repr((path, files)).encode()).hexdigest()[:24]


def _folder_of_copies() -> Path | None:
    """Return the folder that holds the copies of this user; None if there can be none."""
    folder = Path(tempfile.gettempdir(), f"miniray_checkpoints_{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        logger.warning("Checkpoints are fetched by each process for itself: %s", error)
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        logger.warning(
            "Checkpoints are fetched by each process for itself: %s is not a folder of this user "
            "alone",
            folder,
        )
        return None
    return folder
