"""How the hosts of a run exchange the address of its head, and reasons why one cannot join.

Each kind of rendezvous is one small class. The secret is in files that only the user can read, in a
mounted Secret, or in a pipe; never in an argument or a variable of the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.common.host_port import parse_address
from miniray.launch import munge
from miniray.launch.allocation import AllocationError
from miniray.launch.reach import HeadOffer
from miniray.security.certificates import token_in
from miniray.security.token import read_token_file, write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from miniray.launch.allocation import HostAllocation

#: Names of the files of a run, and of one that was being written when its host was killed.
_OURS = re.compile(r"join|end|n[0-9]+|[.](join|end|n[0-9]+)[.].*")
#: Seconds after which what a run has left is removed by the next one.
_OLD = 86_400.0


class RunEndedError(ConnectionError):
    """The first host has ended the run before this one had joined."""


@dataclasses.dataclass(frozen=True)
class HostState:
    """What one host reports to the first one until it has joined."""

    #: Its name.
    host: str
    #: Why it does not join; empty while it tries.
    failure: str = ""
    #: Of its interfaces.
    addresses: list[str] = dataclasses.field(default_factory=list)
    #: Why it has not joined yet, if it has found out.
    trouble: str = ""


def describe_missing(
    size: int, missing: set[int], reports: Mapping[int, HostState], waited: float
) -> str:
    """Say which hosts of a run are missing, and what each has reported."""
    reasons = []
    for rank in sorted(missing):
        state = reports.get(rank)
        if state is None:
            reasons.append(f"host {rank} has not been heard of")
        elif state.failure:
            reasons.append(f"host {rank} ({state.host}) cannot join: {state.failure.rstrip('.')}")
        else:
            why = f": {state.trouble.rstrip('.')}" if state.trouble else ""
            reasons.append(f"host {rank} ({state.host}) has started and not joined yet{why}")
    count = f"{size - len(missing)} of {size} hosts joined within {waited:.0f} s"
    return f"{count}: {'; '.join(reasons)}."


class MeetingPlace:
    """Where the hosts of a run meet. This one is for hosts that have nothing to exchange."""

    #: Port of the head; 0: any free one.
    port = 0

    def publish(self, door: HeadOffer) -> None:
        """Tell the other hosts where the head is."""

    def find(self) -> HeadOffer | None:
        """Return where the head is; None: not known yet. RunEndedError: there is none any more."""
        return None

    def report(self, rank: int, state: HostState) -> None:
        """Tell the first host about this one."""

    def reports(self) -> dict[int, HostState]:
        """Return the reports of the other hosts, by rank."""
        return {}

    def close(self, reason: str = "") -> None:
        """Remove the head's offer; with a reason, leave it for late hosts."""

    def leave(self, rank: int) -> None:
        """Remove what another host than the first one has brought."""


class SharedFolder(MeetingPlace):
    """Files in a folder that all hosts see; each is written whole."""

    #: What is done to the text with the secret, when it is written and when it is read.
    _closed: Callable[[str], str] = staticmethod(str)
    _open: Callable[[str], str] = staticmethod(str)

    def __init__(self, base: Path, run_id: str, rank: int) -> None:
        self._folder = base / (run_id or "run")
        self._has_id = bool(run_id)
        base.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            _remove_old(base, time.time() - _OLD)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        _require_private(self._folder)
        if rank == 0:  # an earlier run may have left something: in this one none has tried to join
            reports = self.reports().items()
            failed = [f"n{each}" for each, state in reports if state.failure or state.trouble]
            for name in ("join", "end", *failed):
                (self._folder / name).unlink(missing_ok=True)
        #: What an earlier run may have left: it leads nowhere, until the first host removes it.
        self._left = None if run_id else _text_of(self._folder / "join")

    def publish(self, door: HeadOffer) -> None:
        """Write the file that the others wait for."""
        self._write("join", self._closed(door.as_json()))

    def find(self) -> HeadOffer | None:
        """Read it."""
        end = _text_of(self._folder / "end")
        if end is not None:
            raise RunEndedError(f"The first host has ended the run: {end}")
        text = _text_of(self._folder / "join")
        if text is None:
            return None
        offer = HeadOffer.parse(json.loads(self._open(text)))
        return dataclasses.replace(offer, listens=text != self._left)

    def report(self, rank: int, state: HostState) -> None:
        """Write the file of this host."""
        with contextlib.suppress(FileNotFoundError):  # the folder is gone, as the run has ended
            self._write(f"n{rank}", json.dumps(dataclasses.asdict(state)))

    def reports(self) -> dict[int, HostState]:
        """Read the files of the other hosts."""
        texts = {int(path.name[1:]): _text_of(path) for path in self._folder.glob("n[0-9]*")}
        return {rank: HostState(**json.loads(text)) for rank, text in texts.items() if text}

    def close(self, reason: str = "") -> None:
        """Remove the folder; where a reason cannot be taken for another run's, that stays."""
        (self._folder / "join").unlink(missing_ok=True)
        if not (reason and self._has_id):
            _remove(self._folder)
            return
        with contextlib.suppress(FileNotFoundError):  # the folder is gone: all had joined
            self._write("end", reason)

    def leave(self, rank: int) -> None:
        """Remove the report of this host; the last host removes the folder."""
        (self._folder / f"n{rank}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are still there, or may come
            self._folder.rmdir()

    def _write(self, name: str, text: str) -> None:
        write_private(self._folder / name, text.encode())


class SealedFolder(SharedFolder):
    """A folder in which the file with the secret is encrypted by munge."""

    #: What names it where others name a folder.
    NAME = "munge"
    _closed = staticmethod(munge.seal)
    _open = staticmethod(functools.cache(munge.unseal))  # a host can unseal a text once


class Mounted(MeetingPlace):
    """A folder of `miniray token new` on every host, and a head whose place is known.

    Nothing leads from the other hosts to the first one: they print why they fail.
    """

    def __init__(self, authority: Path, head: tuple[str, ...]) -> None:
        if not head:
            raise AllocationError(
                "Where the head is has to be known with --authority: give --head HOST:PORT."
            )
        _, self.port = parse_address(head[0])
        self._door = HeadOffer(head, read_token_file(token_in(authority)), listens=False)

    def find(self) -> HeadOffer:
        """Return what was given."""
        return self._door


def meeting_place(
    allocation: HostAllocation, rendezvous: str | None, authority: str | None
) -> MeetingPlace:
    """Return where the hosts of an allocation meet.

    Raises:
        AllocationError: The run has no id, and no folder is given.
        TokenError: The authority has no token.
        OSError: The folder cannot be made.
    """
    if authority is not None:
        return Mounted(Path(authority), allocation.head)
    if rendezvous in (None, SealedFolder.NAME) and not allocation.run_id:
        raise AllocationError(
            f"This run ({allocation.launcher}) has no id of its own: give a folder "
            "of it alone, which all hosts see, as --rendezvous FOLDER; or --authority FOLDER."
        )
    if rendezvous == SealedFolder.NAME:
        return SealedFolder(_default_base(), allocation.run_id, allocation.rank)
    base = Path(rendezvous) if rendezvous is not None else _default_base()
    return SharedFolder(base, allocation.run_id, allocation.rank)


def _default_base() -> Path:
    """Return a folder in the home, which nearly all hosts of a batch system share."""
    return Path.home() / ".miniray" / "run"


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # there is none, or a network file system has just lost it
        return None


def _require_private(folder: Path) -> None:
    """Raise PermissionError if others could have put a cluster of theirs there."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder that only uid {os.geteuid()} can use. Remove it, or give "
            "another one as --rendezvous."
        )


def _remove_old(base: Path, before: float) -> None:
    """Remove what runs have left that were killed on every host."""
    for folder in base.iterdir():
        with contextlib.suppress(OSError):
            if folder.lstat().st_mtime <= before:
                _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the folder of a run; one with other files in it stays as it is."""
    with contextlib.suppress(OSError):
        files = list(folder.iterdir())
        if files and all(_OURS.fullmatch(path.name) for path in files):
            for path in files:
                path.unlink(missing_ok=True)
            folder.rmdir()
