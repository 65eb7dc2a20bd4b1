"""Filesystems that users give, and the files of a folder on any of them.

Only this file handles the kinds of filesystem that a user may give: one of fsspec or pyarrow, or
that of a path or URL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

logger = logging.getLogger(__name__)


#: Schemes whose URLs may have options: fsspec has none for them, and takes them for a path.
_WITH_OPTIONS = frozenset({"s3", "gs", "gcs", "hdfs", "abfs", "abfss"})


def resolve(path: str | os.PathLike[str], filesystem: Any = None) -> tuple[Any, str]:
    """Return the fsspec filesystem of a path, and the path on it.

    Args:
        path: A local path, a URL that fsspec supports, one of an object store with options of
            pyarrow behind a question mark, or with ``filesystem`` a path on it.
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


_PART = re.compile(r"\..+\.part-[0-9a-f]{16}")
#: fsspec takes paths with these for patterns when it deletes.
_MAGIC = re.compile(r"[*?\[]")


class Store:
    """The files below a folder. Paths are relative to it. Picklable."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self.filesystem = filesystem
        self.path = path
        self.is_local = is_local(filesystem)

    def at(self, name: str) -> str:
        """Return the path on the filesystem of a name relative to the folder."""
        return f"{self.path}/{name}" if name else self.path

    def write(self, name: str, text: str) -> None:
        """Write a small file in place of an older one."""
        path, content = self.at(name), _encoded(text)
        if self.is_local:
            _replace(Path(path), lambda part: part.write_bytes(content))
        else:
            self._with_parents([path], lambda: self.filesystem.pipe_file(path, content))

    def read(self, name: str) -> str | None:
        """Return a file's text; None if there is none. Bytes that are no UTF-8 are replaced."""
        try:
            content = bytes(self.filesystem.cat_file(self.at(name)))
        except FileNotFoundError:
            return None
        return content.decode(errors="replace")

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines of a file, one after the other; none if there is no file."""
        path = self.at(name)
        try:
            with Path(path).open("rb") if self.is_local else self.filesystem.open(path) as file:
                for line in file:
                    yield line.decode(errors="replace")
        except FileNotFoundError:
            return

    def append(self, name: str, text: str) -> bool:
        """Append lines to a file; False if this filesystem can't do that cheaply.

        What is appended begins a line, also if an earlier append was cut off in one.
        """
        if not self.is_local:
            return False
        path = Path(self.at(name))
        with _naming(path), path.open("a+b") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = f"\n{text}"
            file.write(_encoded(text))
        return True

    def exists(self, name: str) -> bool:
        self.filesystem.invalidate_cache(self.at(name).rpartition("/")[0])
        return bool(self.filesystem.exists(self.at(name)))

    def names(self, folder: str = "") -> set[str]:
        """Return names of the files and folders that are directly in a folder."""
        path = self.at(folder)
        self.filesystem.invalidate_cache(path)
        try:
            entries = self.filesystem.ls(path, detail=False)
        except FileNotFoundError:
            return set()
        own = path.strip("/")  # object stores may list the folder itself
        return {
            str(entry).rstrip("/").rpartition("/")[2]
            for entry in entries
            if str(entry).strip("/") != own
        }

    def delete(self, name: str) -> None:
        """Delete a file, if there is one."""
        try:
            self.filesystem.rm_file(self.at(name))
        except FileNotFoundError:
            logger.debug("%s is gone already.", self.at(name))

    def clear_parts(self, folder: str = "") -> None:
        """Delete what writes of small files into a folder left that were cut off."""
        for name in self.names(folder):
            if _PART.fullmatch(name):
                self.delete(f"{folder}/{name}" if folder else name)

    def put(self, source: str | os.PathLike[str], files: Iterable[str], folder: str) -> None:
        """Copy files of a local folder into a folder here; of equal names the last one stays."""
        target = self.at(folder)
        files = sorted(files)
        if self.is_local:
            Path(target).mkdir(parents=True, exist_ok=True)
            if Path(source).samefile(target):
                return
            for file in files:
                _copy(Path(source, file), Path(target, file))
        elif not files:
            self.filesystem.makedirs(target, exist_ok=True)
        else:
            local = [os.path.join(source, file) for file in files]  # noqa: PTH118 - fsspec wants text
            remote = [f"{target}/{file}" for file in files]
            self._with_parents(remote, lambda: self.filesystem.put(local, remote))

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size of each file of a folder and its folders, by its path there."""
        try:
            return files_below(self.filesystem, self.at(folder))
        except FileNotFoundError:
            return {}

    def delete_folder(self, folder: str) -> None:
        """Delete a folder with all that is in it, if there is one."""
        path = self.at(folder)
        self.filesystem.invalidate_cache(path)
        try:
            if not self.is_local and _MAGIC.search(path):
                for file in self.sizes(folder):
                    self.delete(f"{folder}/{file}")
            if self.is_local or not _MAGIC.search(path):
                self.filesystem.rm(path, recursive=True)
        except FileNotFoundError:
            logger.debug("%s is gone already.", path)

    def _with_parents(self, paths: Iterable[str], write: Callable[[], Any]) -> None:
        """Write; where the filesystem wants folders to be made first, make them and write again."""
        try:
            write()
        except FileNotFoundError:
            for parent in sorted({path.rpartition("/")[0] for path in paths}):
                self.filesystem.makedirs(parent, exist_ok=True)
            write()


def list_files(folder: str | os.PathLike[str]) -> dict[str, int]:
    """Return the size of every file below a local folder, by its path there."""
    root = Path(folder)
    files: dict[str, int] = {}
    for parent, _, names in os.walk(root, followlinks=True):
        for name in names:
            file = Path(parent, name)
            files[file.relative_to(root).as_posix()] = file.stat().st_size
    return files


def merge(sizes: Iterable[Mapping[str, int]]) -> tuple[dict[str, int], set[str]]:
    """Return all files of folders that were copied into one, and those of unclear size."""
    merged: dict[str, int] = {}
    unclear = set()
    for each in sizes:
        for file, size in each.items():
            if merged.setdefault(file, size) != size:
                unclear.add(file)
    return merged, unclear


def _encoded(text: str) -> bytes:
    """Return text as UTF-8; other characters, as in some names of files, are escaped."""
    return text.encode(errors="backslashreplace")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, lambda part: shutil.copyfile(source, part))


def _replace(target: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its target, then give it the target's name.

    The name in between is random: on shared storage, pids of several machines would collide.
    """
    part = target.with_name(f".{target.name}.part-{secrets.token_hex(8)}")
    try:
        with _naming(part):
            try:
                write(part)
            except FileNotFoundError:
                # The folder may be there by now: another thread or rank makes it too.
                part.parent.mkdir(parents=True, exist_ok=True)
                write(part)
            part.replace(target)
    except BaseException:
        try:
            part.unlink(missing_ok=True)
        except OSError:  # what keeps it from being written may keep it from being deleted
            logger.debug("%s can't be deleted.", part, exc_info=True)
        raise


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let an error say which file it is about: one of writing, such as of a full disk, does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
