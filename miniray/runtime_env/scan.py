"""Walks a folder that is to be packed: which files belong to it, and are they too many.

Sizes are checked on the way, so that a folder that is far too large is refused
before all of it was looked at, and before anything is read.
"""

from __future__ import annotations

import collections
import heapq
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from miniray.exceptions import RuntimeEnvSetupError
from miniray.runtime_env.ignore import IgnoreRules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

#: A package may hold this many bytes, before compression.
MAX_PACKAGE_BYTES = 250 * 1024 * 1024
#: And this many files and folders: each takes a place on the disk of every node, for each job.
MAX_PACKAGE_ENTRIES = 50_000
#: Never part of a package: the first is history, the second is made again on the node.
_NEVER = frozenset({".git", "__pycache__"})
#: Files with patterns of what to leave out, honoured in every folder as Ray does.
_IGNORE_FILES = (".gitignore", ".rayignore")
_SHOWN_FILES = 10


class PackageMember(NamedTuple):
    """A file or folder that belongs to a package."""

    name: str  # path inside the package, with slashes; ends in one for a folder
    path: str  # where it is on this machine
    size: int  # bytes
    mtime_ns: int
    executable: bool


def scan(
    folder: Path, excludes: Sequence[str] = (), limit: int = MAX_PACKAGE_BYTES
) -> list[PackageMember]:
    """The members of a folder, sorted by name.

    Symbolic links are followed, so that a package holds only plain files; a link
    to a folder that it is in itself, and one that leads nowhere, are left out. So are
    sockets, pipes and devices.

    Args:
        folder: What to pack.
        excludes: Patterns as in a .gitignore file, relative to the folder.
        limit: Bytes the files may have together.

    Raises:
        RuntimeEnvSetupError: The files are too large or too many, or one can't be read.
    """
    members: list[PackageMember] = []
    total = 0
    try:
        for member in _walk(folder, IgnoreRules(excludes)):
            members.append(member)
            total += member.size
            if total > limit:
                raise RuntimeEnvSetupError(_too_large(folder, members, limit))
            if len(members) > MAX_PACKAGE_ENTRIES:
                raise RuntimeEnvSetupError(_too_many(folder, members))
    except OSError as error:
        raise RuntimeEnvSetupError(
            f"The folder {folder} of the runtime_env can't be packed: {error}. Make it readable, "
            "or leave it out with 'excludes'."
        ) from error
    return sorted(members)


def _walk(root: Path, excludes: IgnoreRules) -> Iterator[PackageMember]:
    status = root.stat()
    #: Folders still to visit: name in the package, the rules of the folders above it, and the
    #: identities of those folders and its own, by which a link that leads back is known.
    todo: list[tuple[str, tuple[IgnoreRules, ...], frozenset[tuple[int, int]]]] = [
        ("", (), frozenset({(status.st_dev, status.st_ino)}))
    ]
    while todo:
        base, rules, above = todo.pop()
        folder = root / base
        rules = (*_rules_in(folder, base), *rules)
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            found = _stat(entry)
            name = f"{base}/{entry.name}" if base else entry.name
            if found is None or entry.name in _NEVER:
                continue
            is_folder = stat.S_ISDIR(found.st_mode)
            if excludes.decide(name, is_folder) or _ignored(rules, name, is_folder):
                continue
            if is_folder:
                identity = (found.st_dev, found.st_ino)
                if identity not in above:
                    todo.append((name, rules, above | {identity}))
                    yield PackageMember(f"{name}/", entry.path, 0, 0, True)
            elif stat.S_ISREG(found.st_mode):
                executable = bool(found.st_mode & stat.S_IXUSR)
                yield PackageMember(name, entry.path, found.st_size, found.st_mtime_ns, executable)


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """What an entry is, its link followed; None if the link leads nowhere."""
    try:
        return entry.stat()
    except OSError:
        if entry.is_symlink():
            return None
        raise


def _rules_in(folder: Path, base: str) -> list[IgnoreRules]:
    found = []
    for name in _IGNORE_FILES:
        path = folder / name
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            found.append(IgnoreRules(lines, base))
    return found


def _ignored(rules: Sequence[IgnoreRules], name: str, is_folder: bool) -> bool:
    """The file nearest to a path decides, as for git."""
    for rule in rules:
        decision = rule.decide(name, is_folder)
        if decision is not None:
            return decision
    return False


def _too_large(folder: Path, members: Sequence[PackageMember], limit: int) -> str:
    largest = heapq.nlargest(_SHOWN_FILES, members, key=lambda member: member.size)
    listed = "\n".join(
        f"  {member.size / 2**20:8.1f} MiB  {member.name}" for member in largest if member.size
    )
    return (
        f"The folder {folder} of the runtime_env has more than {limit / 2**20:.0f} MiB, the most "
        "that a package may hold. Leave out what the code does not need with "
        "runtime_env['excludes'] or a .gitignore file, and read data from shared storage. "
        f"The largest files found so far:\n{listed}"
    )


def _too_many(folder: Path, members: Sequence[PackageMember]) -> str:
    most = collections.Counter(member.name.partition("/")[0] for member in members).most_common(3)
    listed = ", ".join(f"{name} ({count})" for name, count in most)
    return (
        f"The folder {folder} of the runtime_env has more than {MAX_PACKAGE_ENTRIES} files and "
        "folders, the most that a package may hold. Leave out what the code does not need with "
        "runtime_env['excludes'] or a .gitignore file, and read data from shared storage. "
        f"Most of those found so far are in: {listed}."
    )
