"""Finds the fsspec filesystem of a path, URL or pyarrow filesystem.

The only place that knows which kinds of filesystem a user may give.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[Any, str]:
    """The fsspec filesystem of a path, and the path on it.

    Args:
        path: A local path, a URL that fsspec knows, or with ``filesystem`` a path on it.
        filesystem: An fsspec or pyarrow filesystem, or None.

    Raises:
        ImportError: fsspec, or what it needs for this kind of URL, is not installed.
        ValueError: The URL's scheme or the filesystem is of no known kind.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(
            "Checkpoints are stored through fsspec, which is not installed. "
            "Run `pip install 'miniray[train]'`."
        ) from error

    text = os.fspath(path)
    if filesystem is None:
        if "://" not in text:
            return fsspec.filesystem("file"), str(Path(text).absolute())
        found, found_path = fsspec.core.url_to_fs(text)
        return found, str(found_path)
    if "://" in text:
        raise ValueError(
            f"With a filesystem given, {text!r} must be a path on it and not a URL: "
            f"leave out the part up to '://'."
        )
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        return filesystem, text
    if type(filesystem).__module__.startswith("pyarrow."):
        from fsspec.implementations.arrow import ArrowFSWrapper

        return ArrowFSWrapper(filesystem), text
    raise ValueError(
        f"{filesystem!r} is neither an fsspec nor a pyarrow filesystem. "
        f"Pass one of these, or a URL as the path."
    )


def is_local(filesystem: Any) -> bool:
    """Whether this filesystem is that of the machine itself."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(filesystem, LocalFileSystem)


def files_below(filesystem: Any, folder: str) -> dict[str, int]:
    """Size in bytes of every file below a folder, by its path in the folder."""
    # Filesystems differ in whether the paths that they return begin with a slash.
    prefix = f"{folder.strip('/')}/"
    filesystem.invalidate_cache(folder)
    return {
        path.lstrip("/").removeprefix(prefix): info["size"]
        for path, info in filesystem.find(folder, detail=True).items()
    }


def download(filesystem: Any, folder: str, target: Path) -> None:
    """Copy every file below a folder of a filesystem into a local folder."""
    target.mkdir(parents=True, exist_ok=True)
    for file in files_below(filesystem, folder):
        local = target / file
        local.parent.mkdir(parents=True, exist_ok=True)
        filesystem.get_file(f"{folder.rstrip('/')}/{file}", str(local))
