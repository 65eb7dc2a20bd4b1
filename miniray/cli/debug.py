"""`miniray debug`: the breakpoints that wait on this machine, and a terminal for one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from miniray.common.config import config
from miniray.common.names import printable
from miniray.exceptions import AuthenticationError
from miniray.security.challenge import answer_blocking, require_own_uid
from miniray.security.token import read_token_file
from miniray.system.session import find_clusters

if TYPE_CHECKING:
    from pathlib import Path

_READ_SIZE = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Breakpoint:
    """A breakpoint that waits for a terminal, and the open connection to it."""

    id: str
    facts: dict[str, Any]
    sock: socket.socket

    def describe(self) -> str:
        """Return one line for a person."""
        facts = self.facts
        task = f" of {facts['task']}" if facts["task"] else ""
        waited = max(0, int(time.time() - facts["since"]))
        where = f"{facts['file']}:{facts['line']} in {facts['function']}"
        return printable(f"{self.id}  {where}{task} (for {waited} s)")


@click.command()
@click.argument("id", required=False)
def debug(id: str | None) -> None:
    """Attach this terminal to a breakpoint() that waits in a worker of this machine.

    ID is what the worker printed. Without it, the only waiting breakpoint is taken, or
    all are listed if there are several.
    """
    waiting = find_waiting()
    try:
        chosen = choose(waiting, id)
        if chosen is None:
            for one in waiting:
                click.echo(one.describe())
            if waiting:
                click.echo("Attach to one of them with `miniray debug ID`.")
            else:
                click.echo("No breakpoint waits on this machine.")
            return
        attach(chosen)
    finally:
        for one in waiting:
            one.sock.close()


def choose(waiting: list[Breakpoint], id: str | None) -> Breakpoint | None:
    """Return which breakpoint to attach to; None if the user has to say.

    Raises:
        click.ClickException: No breakpoint of this id waits.
    """
    if id is None:
        return waiting[0] if len(waiting) == 1 else None
    for one in waiting:
        if one.id == id:
            return one
    known = ", ".join(one.id for one in waiting) or "none"
    raise click.ClickException(f"No breakpoint {id} waits on this machine. Waiting: {known}.")


def find_waiting() -> list[Breakpoint]:
    """Return the waiting breakpoints of all of this user's clusters, the longest waiting first."""
    from miniray.worker.debugger import SOCKET_PREFIX

    found = []
    for record in find_clusters():
        if not record.ready:
            continue
        key = read_token_file(record.session.token_file).socket_key
        for path in record.session.socket_dir.glob(f"{SOCKET_PREFIX}*"):
            one = _connect(path, path.name.removeprefix(SOCKET_PREFIX), key)
            if one is not None:
                found.append(one)
    return sorted(found, key=lambda one: float(one.facts["since"]))


def _connect(path: Path, id: str, key: bytes) -> Breakpoint | None:
    """Ask a breakpoint where it is; None if it waits no more."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(config().auth_timeout)
        sock.connect(str(path))
        require_own_uid(sock)
        answer_blocking(sock, key, time.monotonic() + config().auth_timeout)
        with sock.makefile("rb", buffering=0) as file:
            return Breakpoint(id, json.loads(file.readline()), sock)
    except FileNotFoundError:
        pass  # a terminal has attached meanwhile
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # its process was killed
    except (AuthenticationError, OSError, ValueError) as error:
        click.echo(f"The breakpoint {id} does not answer: {error}", err=True)
    sock.close()
    return None


def attach(waiting: Breakpoint) -> None:
    """Connect this terminal to a debugger until it ends; end of input or Ctrl-C detaches."""
    from miniray.worker.debugger import ATTACH

    sock, keyboard = waiting.sock, sys.stdin.fileno()
    sock.settimeout(None)
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    poller.register(keyboard, select.POLLIN)
    _send(sock, ATTACH)
    typing = True
    while True:
        try:
            ready = {fd for fd, _ in poller.poll()}
            typed = os.read(keyboard, _READ_SIZE) if keyboard in ready else None
        except KeyboardInterrupt:
            ready, typed = set(), b""
        if typed:
            _send(sock, typed)
        elif typed is not None and typing:
            typing = False
            poller.unregister(keyboard)
            sock.shutdown(socket.SHUT_WR)  # the debugger lets its program go on
        if sock.fileno() in ready:
            output = _receive(sock)
            if not output:
                break
            click.echo(output, nl=False)
    click.echo(f"The session with breakpoint {waiting.id} has ended.")


def _send(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading shows the end
        sock.sendall(data)


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_READ_SIZE)
    except ConnectionResetError:
        return b""
