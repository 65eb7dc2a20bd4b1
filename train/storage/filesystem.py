"""Finds the fsspec filesystem of a path, URL or pyarrow filesystem, and shows it to users.

The only place that knows which kinds of filesystem a user may give.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

#: Schemes whose URLs may have options: fsspec has none for them, and takes them for a path.
_WITH_OPTIONS = frozenset({"s3", "gs", "gcs", "hdfs", "abfs", "abfss"})


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[Any, str]:
    """Return the fsspec filesystem of a path, and the path on it.

    Args:
        path: A local path, a URL that fsspec knows, one of an object store with options of pyarrow
            behind a question mark, or with ``filesystem`` a path on it.
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
        if "?" in text and text.partition("://")[0] in _WITH_OPTIONS:
            return _resolve_options(text)
        try:
            found, found_path = fsspec.core.url_to_fs(text)
        except (ValueError, ImportError) as error:
            hint = ", or pass a filesystem beside a path" if isinstance(error, ValueError) else ""
            raise type(error)(f"{text!r} can't be reached: {error}{hint}.") from error
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

        if filesystem.type_name == "local":
            return fsspec.filesystem("file"), text
        # One of fsspec in pyarrow's form, as `shown` makes it.
        inner = getattr(getattr(filesystem, "handler", None), "fs", None)
        if isinstance(inner, fsspec.AbstractFileSystem):
            return inner, text
        return ArrowFSWrapper(filesystem), text
    raise ValueError(
        f"{filesystem!r} is neither an fsspec nor a pyarrow filesystem. "
        f"Pass one of these, or a URL as the path."
    )


def _resolve_options(url: str) -> tuple[Any, str]:
    """Return the filesystem of a URL with options, as Ray understands it, and the path on it.

    fsspec would take the options for a part of the path.
    """
    from fsspec.implementations.arrow import ArrowFSWrapper

    try:
        from pyarrow import fs
    except ImportError as error:
        raise ImportError(
            f"{url!r} has options for pyarrow, which is not installed. Run "
            f"`pip install 'miniray[train]'`, or pass a filesystem beside a path."
        ) from error
    try:
        found, path = fs.FileSystem.from_uri(url)
    except (ValueError, OSError) as error:  # an option that is not known, or no such bucket
        raise ValueError(
            f"{url!r} can't be reached: {error}. Correct the options behind the question mark, or "
            f"pass a filesystem beside a path."
        ) from error
    return ArrowFSWrapper(found), path


def shown(filesystem: Any, given: Any) -> Any:
    """Return a filesystem as users see it: the one that was given, else one of pyarrow.

    Raises:
        ImportError: pyarrow is not installed, and the user gave no filesystem.
    """
    if given is not None:
        return given
    try:
        from pyarrow import fs
    except ImportError as error:
        raise ImportError(
            "The filesystem of a path or URL is shown as one of pyarrow, which is not installed. "
            "Run `pip install 'miniray[train]'`."
        ) from error
    if is_local(filesystem):
        return fs.LocalFileSystem()
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem))


def same(one: Any, other: Any) -> bool:
    """Return whether two fsspec filesystems are one place, also if they wrap pyarrow's."""
    if one == other:
        return True
    arrow = sys.modules.get("fsspec.implementations.arrow")  # not loaded: nothing is wrapped
    if arrow is None or not all(isinstance(each, arrow.ArrowFSWrapper) for each in (one, other)):
        return False
    return bool(one.fs == other.fs)


def is_local(filesystem: Any) -> bool:
    """Return whether this filesystem is that of the machine itself."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(filesystem, LocalFileSystem)


def protocols(filesystem: Any) -> set[str]:
    """Return the names that URLs have for this kind of filesystem."""
    names = getattr(filesystem, "protocol", None) or filesystem.type_name  # pyarrow's have that
    return {names} if isinstance(names, str) else set(names)


def refuse_memory(filesystem: Any, path: str) -> None:
    """Raise ValueError for a filesystem that is in the memory of a single process."""
    if in_memory(filesystem):
        raise ValueError(
            f"RunConfig(storage_path={path!r}) is in the memory of one process, and the "
            f"workers of a run are other processes. Use a folder or the URL of a store that "
            f"all of them reach, such as s3://bucket/runs; memory is for local mode "
            f"(num_workers=0) in a single process."
        )


def in_memory(filesystem: Any) -> bool:
    """Return whether a filesystem, or one that it wraps, is in the memory of this process."""
    inner = filesystem
    while inner is not None:
        if protocols(inner) & {"memory", "mock"}:
            return True
        inner = getattr(inner, "fs", None) or getattr(inner, "base_fs", None)
    return False


def files_below(filesystem: Any, folder: str) -> dict[str, int]:
    """Return the size of every file below a folder, by its path there."""
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
    files = sorted(files_below(filesystem, folder))
    local = [target / file for file in files]
    for parent in {path.parent for path in local}:
        parent.mkdir(parents=True, exist_ok=True)
    remote = [f"{folder.rstrip('/')}/{file}" for file in files]
    if files:
        filesystem.get(remote, [str(path) for path in local])
