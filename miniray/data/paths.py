"""Paths of users as files on a filesystem: folders, patterns and URLs; hive partitions."""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[Any, str]:
    """Return the fsspec filesystem of a path or URL, and the path on it."""
    import fsspec

    text = os.fspath(path)
    if filesystem is None:
        if text.startswith("~"):
            text = str(Path(text).expanduser())
        found = fsspec.core.url_to_fs(text)
        return found[0], found[1]
    if isinstance(filesystem, fsspec.AbstractFileSystem):
        return filesystem, filesystem._strip_protocol(text)
    from fsspec.implementations.arrow import ArrowFSWrapper

    return ArrowFSWrapper(filesystem), text.partition("://")[2] or text


def is_local(filesystem: Any) -> bool:
    """Return whether a filesystem is that of the machine."""
    return type(filesystem).__name__ == "LocalFileSystem"


def find_files(
    paths: Any, filesystem: Any, extensions: Sequence[str] | None, what: str
) -> tuple[Any, list[tuple[str, int]]]:
    """Return the filesystem of paths, and the files there with their sizes.

    Args:
        paths: A path or several: files, folders or patterns, local or as URLs.
        filesystem: Of fsspec or pyarrow; None: it follows from the paths.
        extensions: Ends of the names that are looked for in folders; None: all files.
        what: The kind of files, for errors.

    Raises:
        FileNotFoundError: There is nothing at a path.
        ValueError: The paths are on different filesystems.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: list[tuple[str, int]] = []
    found_in: Any = None
    for each in given:
        fs, path = resolve(each, filesystem)
        if found_in is not None and fs != found_in:
            raise ValueError(f"The paths are on different filesystems: {given}.")
        found_in = fs
        found = _below(fs, path, extensions)
        if not found:
            raise FileNotFoundError(f"There is no {what} file at {os.fspath(each)!r}.")
        files += found
    if found_in is None:
        raise ValueError(f"No path of {what} files was given.")
    return found_in, files


def _below(fs: Any, path: str, extensions: Sequence[str] | None) -> list[tuple[str, int]]:
    if is_local(fs) and Path(path).is_file():
        return [(path, Path(path).stat().st_size)]
    if any(sign in path for sign in "*?["):
        details = fs.glob(path, detail=True)
    elif fs.isdir(path):
        details = {
            name: info
            for name, info in fs.find(path, detail=True).items()
            if not _hidden(name, path)
            and (extensions is None or name.lower().endswith(tuple(extensions)))
        }
    else:
        details = {path: fs.info(path)} if fs.exists(path) else {}
    return sorted(
        (name, int(info["size"] or 0)) for name, info in details.items() if info["type"] == "file"
    )


def _hidden(name: str, folder: str) -> bool:
    below = name[len(folder) :] if name.startswith(folder) else name
    return any(part.startswith((".", "_")) for part in below.split("/"))


def partitions(path: str) -> dict[str, str]:
    """Return the columns that the folders of a path name, as in ``year=2024/month=5``."""
    found = {}
    for part in path.split("/")[:-1]:
        name, sign, value = part.partition("=")
        if sign and name:
            found[name] = urllib.parse.unquote(value)
    return found
