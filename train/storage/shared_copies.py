"""One local copy of a remote folder for all processes of a machine that read it at the same time.

The last reader deletes the copy; how it is locked is in ``runtime_env/cache.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.runtime_env.cache import folder_in_use
from miniray.train.storage.filesystem import download, in_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

#: By which stores tell one content of a file from another.
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
