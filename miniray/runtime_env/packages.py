"""Packages: local files become content-addressed archives, and archives are unpacked safely.

An address is the SHA-256 of the archive, and the same files give the same bytes: the same code is
uploaded once per cluster, and a node can verify what it received.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import stat
import threading
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env.scan import MAX_PACKAGE_BYTES, MAX_PACKAGE_ENTRIES, PackageMember, scan
from miniray.runtime_env.validate import PACKAGE_URI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

#: The oldest time a zip archive can hold.
_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
#: Packages are sent once and read once, so speed counts more than the last percent.
_COMPRESSION_LEVEL = 1


def pack(members: Iterable[PackageMember]) -> bytes:
    """Return a zip archive of files, byte for byte the same for the same names and contents.

    Raises:
        RuntimeEnvSetupError: A file can't be read.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            info = zipfile.ZipInfo(member.name, _FIXED_TIME)
            info.create_system = 3  # Unix, where the mode below has its meaning
            is_folder = member.name.endswith("/")
            kind = stat.S_IFDIR if is_folder else stat.S_IFREG
            info.external_attr = (kind | (0o755 if member.executable else 0o644)) << 16
            content = b"" if is_folder else _read(Path(member.path))
            archive.writestr(info, content, zipfile.ZIP_DEFLATED, _COMPRESSION_LEVEL)
    return buffer.getvalue()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RuntimeEnvSetupError(
            f"A file of the runtime_env can't be packed: {error}. Make it readable, or leave it "
            "out with 'excludes'."
        ) from error


def check(content: bytes, what: str) -> None:
    """Refuse an archive that ``unpack`` would refuse.

    Args:
        content: A zip archive or wheel.
        what: Its name in messages.

    Raises:
        RuntimeEnvSetupError: The content is no zip archive, too large, of too many entries, or
            holds a link or a path that leads out of it.
    """
    with _opened(content, what) as archive:
        _checked_members(archive, what)


def unpack(content: bytes, target: Path, what: str) -> None:
    """Unpack an archive into an existing, empty folder.

    Args:
        content: A zip archive or wheel.
        target: Where its files go.
        what: Its name in messages.

    Raises:
        RuntimeEnvSetupError: As ``check``, or its content is damaged.
    """
    with _opened(content, what) as archive:
        members = _checked_members(archive, what)
        try:
            for member in members:
                _extract(archive, member, target)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
            # zipfile has RuntimeError for encrypted members and NotImplementedError for
            # compression methods that it lacks.
            raise RuntimeEnvSetupError(f"{what} can't be unpacked: {error}.") from error


def unpack_wheel(content: bytes, target: Path, what: str) -> None:
    """Unpack a wheel so that its modules can be imported from ``target``.

    Modules that a wheel keeps in ``*.data/purelib`` or ``platlib`` are moved to the top
    (Binary distribution format, "Installing a wheel"); scripts are left where they are.
    """
    unpack(content, target, what)
    for scheme in ("purelib", "platlib"):
        for folder in target.glob(f"*.data/{scheme}"):
            shutil.copytree(folder, target, dirs_exist_ok=True)
            shutil.rmtree(folder)


def _opened(content: bytes, what: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BytesIO(content))
    except zipfile.BadZipFile as error:
        raise RuntimeEnvSetupError(f"{what} is not a zip archive: {error}.") from error


def _checked_members(archive: zipfile.ZipFile, what: str) -> list[zipfile.ZipInfo]:
    members = archive.infolist()
    if len(members) > MAX_PACKAGE_ENTRIES:
        raise RuntimeEnvSetupError(
            f"{what} has {len(members)} entries; a package may hold {MAX_PACKAGE_ENTRIES}. Read "
            "data from shared storage instead."
        )
    total = sum(member.file_size for member in members)
    if total > MAX_PACKAGE_BYTES:
        raise RuntimeEnvSetupError(
            f"{what} has {total / 2**20:.1f} MiB when unpacked; a package may hold "
            f"{MAX_PACKAGE_BYTES / 2**20:.0f} MiB. Read data from shared storage instead."
        )
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or not member.filename.strip("/."):
            raise RuntimeEnvSetupError(
                f"{what} is refused: its entry {member.filename!r} leads out of the archive."
            )
        if stat.S_ISLNK(member.external_attr >> 16):
            raise RuntimeEnvSetupError(
                f"{what} is refused: its entry {member.filename!r} is a symbolic link. Give the "
                "folder itself instead of the archive; links are followed when it is packed."
            )
    return members


def _extract(archive: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    path = target / member.filename
    if member.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # zipfile reads no more than the declared size, which was added up before.
    with archive.open(member) as source, path.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    if (member.external_attr >> 16) & stat.S_IXUSR:
        path.chmod(0o755)


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
        then, uri = _known.get(key, ([], ""))
    if uri and then == members and has_blob(uri):
        return uri
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
        return pack(members), ".zip"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RuntimeEnvSetupError(f"{path} of the runtime_env can't be read: {error}.") from error
    check(content, str(path))
    return content, path.suffix
