"""Patterns as in a .gitignore file: which files of a folder are left out of a package.

Pure: reads no files. The rules are those of gitignore(5).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Rule(NamedTuple):
    regex: re.Pattern[str]
    excludes: bool  # False: a '!' pattern, which takes back an earlier one
    folders_only: bool


class IgnoreRules:
    """The patterns of one .gitignore file or ``excludes`` list.

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
        """Whether a path below ``base`` is left out; None if no pattern speaks of it.

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
    """A regular expression for a pattern without leading or trailing slashes."""
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
    """Where the character class that opens at ``start`` closes, or -1."""
    first = start + 1
    if pattern[first : first + 1] in {"!", "^"}:
        first += 1
    return pattern.find("]", first + 1)  # a ']' that comes first is a member


def _translate_class(members: str) -> str:
    negated = members[0] in "!^"
    content = members[1:] if negated else members
    content = re.sub(r"([\\\[\]&~|^])", r"\\\1", content)
    return f"(?!/)[{'^' if negated else ''}{content}]"
