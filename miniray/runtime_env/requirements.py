"""Reads requirements so that their lines mean the same on every node.

Nested files are expanded and relative local paths made absolute, by pip's rules.
What a requirement means is left to pip.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NESTED = re.compile(r"(?:-r\s*|--requirement(?:\s*=\s*|\s+))(?P<path>.+)")
#: Options whose value is a path relative to the file that has them ...
_FILE_OPTION = re.compile(r"(?P<option>-c|--constraint|-f|--find-links)(?:\s*=\s*|\s+)(?P<path>.+)")
#: ... and to the working directory, as paths of requirements are.
_EDITABLE = re.compile(r"(?P<option>-e|--editable)(?:\s*=\s*|\s+)(?P<path>.+)")
#: A comment begins at the start of a line or after a space, as in pip.
_COMMENT = re.compile(r"(^|\s+)#.*$")
_ARCHIVES = (".whl", ".tar.gz", ".zip")


def read_requirements(path: Path) -> list[str]:
    """The requirements and options in a file, and in those it includes with ``-r``.

    Raises:
        ValueError: An included file does not exist, or files include each other.
    """
    return _read(path, ())


def expand(lines: Iterable[str], folder: Path) -> list[str]:
    """Requirements with nested files read and local paths made absolute.

    Args:
        lines: Requirements and options as in a requirements file.
        folder: Where the file with these lines is.

    Raises:
        ValueError: An included file does not exist, or files include each other.
    """
    return _expand(lines, folder, ())


def _read(path: Path, including: tuple[Path, ...]) -> list[str]:
    if path in including:
        raise ValueError(f"The requirements files {path} and {including[-1]} include each other.")
    if not path.is_file():
        raise ValueError(f"The requirements file {path} does not exist.")
    lines = _logical_lines(path.read_text(encoding="utf-8"))
    return _expand(lines, path.parent, (*including, path))


def _expand(lines: Iterable[str], folder: Path, including: tuple[Path, ...]) -> list[str]:
    expanded: list[str] = []
    for line in lines:
        nested = _NESTED.fullmatch(line)
        if nested:
            expanded.extend(_read(_absolute(nested["path"], folder), including))
        else:
            expanded.append(_absolute_line(line, folder))
    return expanded


def _logical_lines(text: str) -> list[str]:
    """Lines without comments, with those that end in a backslash joined to the next."""
    joined = re.sub(r"\\\r?\n", " ", text)
    stripped = (_COMMENT.sub("", line).strip() for line in joined.splitlines())
    return [line for line in stripped if line]


def _absolute_line(line: str, folder: Path) -> str:
    for pattern, base in ((_FILE_OPTION, folder), (_EDITABLE, Path.cwd())):
        option = pattern.fullmatch(line)
        if option:
            value = option["path"]
            return line if "://" in value else f"{option['option']} {_absolute(value, base)}"
    path, bracket, extras = line.partition("[")
    is_path = line.startswith(("./", "../", "~/")) or (
        "://" not in line and path.endswith(_ARCHIVES)
    )
    return f"{_absolute(path, Path.cwd())}{bracket}{extras}" if is_path else line


def _absolute(path: str, base: Path) -> Path:
    return (base / Path(path.strip()).expanduser()).absolute()
