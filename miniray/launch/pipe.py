"""The rendezvous of hosts without a shared folder: standard input and output, to their starter.

Each line is one JSON object. The token is in one of them, and nowhere else. What stands at the
other end is in ``ssh.py``; as long as it lives it sends a line every few seconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.launch.reach import HeadOffer
from miniray.launch.rendezvous import HostState, MeetingPlace

if TYPE_CHECKING:
    from miniray.launch.events import Events

#: Seconds between two lines of the other end, and of silence after which it is gone.
BEAT, SILENCE = 5, 20


class Pipe(MeetingPlace):
    """Lines from and to the process that has started this one.

    The end of the input is taken for SIGTERM: the connection is gone.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._input = sys.stdin.fileno()
        self._rest = b""
        self._door: HeadOffer | None = None
        self._reports: dict[int, HostState] = {}
        os.set_blocking(self._input, False)
        events.when_readable(self._input, self._read)
        signal.signal(signal.SIGALRM, self._silent)
        signal.alarm(SILENCE)

    def publish(self, door: HeadOffer) -> None:
        """Write the line that goes to the other hosts."""
        sys.stdout.write(f"{door.as_json()}\n")
        sys.stdout.flush()

    def find(self) -> HeadOffer | None:
        """Return what the line of the first host said."""
        return self._door

    def report(self, rank: int, state: HostState) -> None:
        """Say what keeps this host from joining; why it does not is said as it ends."""
        if state.trouble:
            sys.stderr.write(f"miniray: {state.trouble}\n")

    def reports(self) -> dict[int, HostState]:
        """Return what the other end says of the hosts that have ended."""
        return self._reports

    # --- lines ------------------------------------------------------------------------
    def _read(self) -> None:
        try:
            data = os.read(self._input, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._events.forget(self._input)
            signal.alarm(0)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        signal.alarm(SILENCE)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in filter(None, lines):
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if "signal" in message:
            os.kill(os.getpid(), message["signal"])
        elif "token" in message:
            self._door = HeadOffer.parse(message)
        elif "rank" in message:
            rank = message.pop("rank")
            self._reports[rank] = HostState(**message)

    def _silent(self, _number: int, _frame: Any) -> None:
        """Handle SIGALRM: the other end has not read or written for long."""
        if select.select([self._input], [], [], 0)[0]:
            signal.alarm(SILENCE)
        else:
            os.kill(os.getpid(), signal.SIGTERM)


def unpack_input(size: int) -> None:
    """Unpack an archive of ``size`` bytes from the beginning of standard input in this folder."""
    from miniray.runtime_env.packages import unpack

    archive = bytearray()
    while len(archive) < size and (data := os.read(0, size - len(archive))):  # and no byte more
        archive += data
    unpack(bytes(archive), Path.cwd(), "The working folder")
