"""Filesystems whose process is killed at a chosen moment: after that, nothing is written any more.

One is a store without rename, where a write can be cut off anywhere; the other is the
machine's own, where every call of the system is such a moment.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar

from fsspec import AbstractFileSystem

if TYPE_CHECKING:
    from collections.abc import Callable


class Killed(BaseException):
    """The process would be gone here."""


class Clock:
    """Counts the moments at which a process can be killed, and kills it at one of them.

    Args:
        fatal: Number of that moment, from 0; None for a process that lives on.
    """

    def __init__(self, fatal: int | None = None) -> None:
        self.fatal = fatal
        self.moments = 0
        self.names: list[str] = []
        self.dead = False

    def tick(self, name: str = "") -> None:
        """One more moment; raise Killed if it is the fatal one, or was."""
        self.dead = self.dead or self.moments == self.fatal
        self.moments += 1
        if self.dead:
            raise Killed(name)
        self.names.append(name)


class TearingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A store in memory with folders that must be made first, and without rename.

    Args:
        content: The files, shared by the processes that use the store.
        clock: When this process is killed; a moment is every byte of a manifest, the middle of
            every other file, and every other change.
    """

    protocol = "tearing"
    cachable = False
    async_impl = False
    folders: ClassVar[set[str]] = set()

    def __init__(self, content: dict[str, bytes], clock: Clock) -> None:
        super().__init__()
        self.content = content
        self.clock = clock

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        parent = path.rpartition("/")[0]
        if parent not in self.content.get("", b"").decode().split("\n"):
            raise FileNotFoundError(parent)
        cuts = range(len(value)) if "/.manifests/" in path else [0, len(value) // 2]
        for cut in cuts:
            self._tear(path, value[:cut], f"write {cut} of {path}")
        self.clock.tick(f"write {path}")
        self.content[path] = value

    def put_file(self, lpath: str, rpath: str, *_: Any, **__: Any) -> None:
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read())

    def _tear(self, path: str, value: bytes, name: str) -> None:
        try:
            self.clock.tick(name)
        except Killed:
            if self.clock.moments == (self.clock.fatal or 0) + 1:
                self.content[path] = value
            raise

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.clock.tick(f"makedirs {path}")
        known = self.content.get("", b"").decode().split("\n")
        parts = self._strip_protocol(path).split("/")
        made = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        self.content[""] = "\n".join(sorted({*known, *made})).encode()

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        if path not in self.content:
            raise FileNotFoundError(path)
        self.clock.tick(f"delete {path}")
        del self.content[path]

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        below = sorted(file for file in self.content if file.startswith(f"{path}/"))
        if not below:
            raise FileNotFoundError(path)
        for file in below:
            self.rm_file(file)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        if path not in self.content:
            raise FileNotFoundError(path)
        return self.content[path]

    def get_file(self, rpath: str, lpath: str, *_: Any, **__: Any) -> None:
        with open(lpath, "wb") as file:
            file.write(self.cat_file(rpath))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        prefix = f"{path}/"
        found: dict[str, dict[str, Any]] = {}
        for file, content in self.content.items():
            if file.startswith(prefix):
                name, slash, _rest = file.removeprefix(prefix).partition("/")
                entry = {"name": prefix + name, "size": len(content), "type": "file"}
                if slash:
                    entry.update(size=0, type="directory")
                found[name] = entry
        if not found:
            raise FileNotFoundError(path)
        entries = [found[name] for name in sorted(found)]
        return entries if detail else [entry["name"] for entry in entries]


#: What the machine's own filesystem does that changes something, as audit events name it.
_CHANGES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.truncate",
    "shutil.copyfile",
}

_watched: tuple[str, Clock] | None = None
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    changes = event in _CHANGES
    if event == "open":
        mode, flags = arguments[1:]  # os.open() has flags alone
        changes = any(letter in mode for letter in "wax+") if mode else bool(flags & os.O_CREAT)
    if changes and any(str(argument).startswith(_watched[0]) for argument in arguments):
        _watched[1].tick(f"{event} {arguments[:2]}")


def kill_on_disk(folder: str, clock: Clock, life: Callable[[], None]) -> None:
    """Run ``life`` with a clock that ticks before each change below a local folder."""
    global _watched, _hooked
    if not _hooked:
        sys.addaudithook(_hook)  # can't be taken out again
        _hooked = True
    _watched = (folder, clock)
    try:
        life()
    finally:
        _watched = None
