"""Walks a folder before it is packed: which files belong to it, and whether they are too many.

Sizes are checked on the way, so that a folder that is far too large is refused
before all of it was looked at, and before anything is read.
"""

from __future__ import annotations

import collections
import heapq
import os
import re
import stat
from typing import TYPE_CHECKING, NamedTuple

from miniray.exceptions import RuntimeEnvSetupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

#: A package may hold this many bytes, before compression.
MAX_PACKAGE_BYTES = 250 * 1024 * 1024
#: And this many files and folders: each takes a place on the disk of every node, for each job.
MAX_PACKAGE_ENTRIES = 50_000
#: Never part of a package: the first is history, the second is made again on the node.
_NEVER = frozenset({".git", "__pycache__"})
#: Files with exclusion patterns, honoured in every folder as Ray does.
_IGNORE_FILES = (".gitignore", ".rayignore")
_SHOWN_FILES = 10


class PackageMember(NamedTuple):
    """A file or folder that belongs to a package."""

    name: str  # path inside the package, with slashes; ends in one for a folder
    path: str  # where it is on this machine
    size: int  # bytes
    mtime_ns: int
    executable: bool


def scan(folder: Path, excludes: Sequence[str] = ()) -> list[PackageMember]:
    """Return the members of a folder, sorted by name.

    Symbolic links are followed, so that a package holds only plain files; a link
    to a folder that it is in itself, and one that leads nowhere, are left out. So are
    sockets, pipes and devices.

    Args:
        folder: What to pack.
        excludes: Patterns as in a .gitignore file, relative to the folder.

    Raises:
        RuntimeEnvSetupError: The files are too large or too many, or one can't be read.
    """
    members: list[PackageMember] = []
    total = 0
    try:
        for member in _walk(folder, IgnoreRules(excludes)):
            members.append(member)
            total += member.size
            if total > MAX_PACKAGE_BYTES:
                raise RuntimeEnvSetupError(_too_large(folder, members))
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
    """Return what an entry is, its link followed; None if the link leads nowhere."""
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
    """Return the file nearest to a path decides, as for git."""
    for rule in rules:
        decision = rule.decide(name, is_folder)
        if decision is not None:
            return decision
    return False


def _too_large(folder: Path, members: Sequence[PackageMember]) -> str:
    largest = heapq.nlargest(_SHOWN_FILES, members, key=lambda member: member.size)
    listed = "\n".join(
        f"  {member.size / 2**20:8.1f} MiB  {member.name}" for member in largest if member.size
    )
    return (
        f"The folder {folder} of the runtime_env has more than {MAX_PACKAGE_BYTES / 2**20:.0f} "
        "MiB, the most that a package may hold. Leave out what the code does not need with "
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


class _Rule(NamedTuple):
    regex: re.Pattern[str]
    excludes: bool  # False: a '!' pattern, which takes back an earlier one
    folders_only: bool


class IgnoreRules:
    """The patterns of one .gitignore file or ``excludes`` list, by the rules of gitignore(5).

    Args:
        patterns: Lines of a .gitignore file.
        base: The folder that the patterns are relative to, with slashes and relative
            to the root of the package; "" is the root.

    Raises:
        ValueError: A pattern has a range that runs backwards.
    """

    def __init__(self, patterns: Iterable[str], base: str = "") -> None:
        self._prefix = f"{base}/" if base else ""
        self._rules = [rule for rule in map(_parse, patterns) if rule is not None]

    def decide(self, path: str, is_folder: bool) -> bool | None:
        """Return whether a path below ``base`` is left out; None if no pattern speaks of it.

        The last pattern that matches decides. A file below an ignored folder is not
        looked at, so it can't be taken back.
        """
        relative = path.removeprefix(self._prefix)
        for rule in reversed(self._rules):
            if (is_folder or not rule.folders_only) and rule.regex.fullmatch(relative):
                return rule.excludes
        return None


def _parse(line: str) -> _Rule | None:
    pattern = line.rstrip("\r\n")
    while pattern.endswith(" ") and not pattern.endswith("\\ "):
        pattern = pattern[:-1]
    if not pattern or pattern.startswith("#"):
        return None
    excludes = not pattern.startswith("!")
    if not excludes:
        pattern = pattern[1:]
    folders_only = pattern.endswith("/")
    pattern = pattern.rstrip("/")
    if not pattern:
        return None
    anchored = "/" in pattern
    regex = _translate(pattern.lstrip("/"))
    try:
        compiled = re.compile(regex if anchored else f"(?:.*/)?{regex}")
    except re.error as error:
        raise ValueError(f"The ignore pattern {line!r} can't be understood: {error}.") from error
    return _Rule(compiled, excludes, folders_only)


def _translate(pattern: str) -> str:
    """Return a regular expression for a pattern without leading or trailing slashes."""
    regex = ""
    at = 0
    while at < len(pattern):
        if pattern.startswith("**/", at) and (at == 0 or pattern[at - 1] == "/"):
            regex += "(?:.*/)?"
            at += 3
        elif pattern[at:] == "**" and (at == 0 or pattern[at - 1] == "/"):
            regex += ".+"
            at += 2
        elif pattern[at] == "*":
            regex += "[^/]*"
            at += 1
        elif pattern[at] == "?":
            regex += "[^/]"
            at += 1
        elif pattern[at] == "[" and (end := _class_end(pattern, at)) > 0:
            regex += _translate_class(pattern[at + 1 : end])
            at = end + 1
        else:
            if pattern[at] == "\\" and at + 1 < len(pattern):
                at += 1
            regex += re.escape(pattern[at])
            at += 1
    return regex


def _class_end(pattern: str, start: int) -> int:
    """Return where the character class that opens at ``start`` closes, or -1."""
    first = start + 1
    if pattern[first : first + 1] in {"!", "^"}:
        first += 1
    return pattern.find("]", first + 1)  # a ']' that comes first is a member


def _translate_class(members: str) -> str:
    negated = members[0] in "!^"
    content = members[1:] if negated else members
    content = re.sub(r"([\\\[\]&~|^])", r"\\\1", content)
    return f"(?!/)[{'^' if negated else ''}{content}]"
