"""The driver's side of packages: local files become content-addressed archives.

An address is the SHA-256 of the archive, so the same code is uploaded once per
cluster, and a node can tell that it got what was meant.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env import archive
from miniray.runtime_env.scan import MAX_PACKAGE_BYTES, PackageMember, scan
from miniray.runtime_env.validate import PACKAGE_URI

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: What a path held when it was last packed, and the address that came of it.
_known: dict[tuple[str, tuple[str, ...]], tuple[list[PackageMember], str]] = {}
_lock = threading.Lock()


def package_uri(content: bytes, suffix: str = ".zip") -> str:
    """Return the address of a package with this content; ``suffix`` says how it is unpacked."""
    return f"mrpkg://{hashlib.sha256(content).hexdigest()}{suffix}"


def upload(
    spec: Mapping[str, Any],
    put_blob: Callable[[str, bytes], None],
    has_blob: Callable[[str], bool],
) -> dict[str, Any]:
    """Pack and upload the local files of an environment.

    A file tree that this process has packed before and that has the same names, sizes
    and modification times since is not read again.

    Args:
        spec: A validated environment.
        put_blob: Stores a package under its address.
        has_blob: Whether the cluster has a package of this address.

    Returns:
        The environment with addresses in place of paths, and without ``excludes``.

    Raises:
        RuntimeEnvSetupError: The files are too large or can't be read.
    """
    uploaded = {key: value for key, value in spec.items() if key != "excludes"}
    excludes = tuple(spec.get("excludes", ()))

    def address(path: str, parent: bool) -> str:
        return _uploaded(path, excludes, parent, put_blob, has_blob)

    if "working_dir" in uploaded:
        uploaded["working_dir"] = address(uploaded["working_dir"], False)
    if "py_modules" in uploaded:
        uploaded["py_modules"] = [address(path, True) for path in uploaded["py_modules"]]
    return uploaded


def _uploaded(
    text: str,
    excludes: tuple[str, ...],
    parent: bool,
    put_blob: Callable[[str, bytes], None],
    has_blob: Callable[[str], bool],
) -> str:
    """Return the address of a path, whose package is in the cluster when this returns.

    ``parent``: a folder is a package to import, so the archive holds the folder itself.
    """
    if PACKAGE_URI.fullmatch(text):
        return text
    path = Path(text)
    members = _members(path, excludes, parent)
    key = (f"{'parent' if parent else 'content'}:{path}", excludes)
    with _lock:
        known = _known.get(key)
    if known is not None and known[0] == members and has_blob(known[1]):
        return known[1]
    content, suffix = _content(path, members)
    uri = package_uri(content, suffix)
    if not has_blob(uri):
        put_blob(uri, content)
    with _lock:
        _known[key] = (members, uri)
    return uri


def _members(path: Path, excludes: Sequence[str], parent: bool) -> list[PackageMember]:
    """Return the files at a path: all below a folder, or the one that it is."""
    if path.is_dir():
        members = scan(path, excludes)
        if parent:
            members = [member._replace(name=f"{path.name}/{member.name}") for member in members]
        return members
    try:
        status = path.stat()
    except OSError as error:
        raise RuntimeEnvSetupError(f"A file of the runtime_env is gone: {error}.") from error
    if status.st_size > MAX_PACKAGE_BYTES:
        raise RuntimeEnvSetupError(
            f"The file {path} of the runtime_env has {status.st_size / 2**20:.1f} MiB; a package "
            f"may hold {MAX_PACKAGE_BYTES / 2**20:.0f} MiB."
        )
    return [PackageMember(path.name, str(path), status.st_size, status.st_mtime_ns, False)]


def _content(path: Path, members: Sequence[PackageMember]) -> tuple[bytes, str]:
    """Return the package of a path, and the suffix that says how it is unpacked."""
    if path.suffix not in {".zip", ".whl"} or path.is_dir():
        return archive.pack(members), ".zip"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuntimeEnvSetupError(f"{path} of the runtime_env can't be read: {error}.") from error
    archive.check(content, str(path))
    return content, path.suffix
