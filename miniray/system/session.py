"""Where a node keeps its files, and how programs of the same user find running clusters.

A session is one start of a node: a folder for its logs, a short one for its sockets, and a
record that shows other programs where it is. Everything is under folders of the user's own uid that
other users cannot enter. What processes do with these files is not decided here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import signal
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniray.common.process_state import (
    START,
    STATE,
    may_hang_readers,
    stat_of,
    variable_of,
)
from miniray.security.token import write_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

#: Replaces ``/tmp`` as the place of all of this.
TMPDIR_VARIABLE = "MINIRAY_TMPDIR"
#: Every process of a session has the session's id in this variable of its environment.
SESSION_VARIABLE = "MINIRAY_SESSION"
#: The program of `miniray run`, and all that it starts, have the folder of the session here.
RUN_VARIABLE = "MINIRAY_RUN"
_DEFAULT_BASE = Path("/tmp")  # noqa: S108 - what is made in it is checked to be the user's own
_RUNTIME_DIRS = Path("/run/user")
#: A socket's path may have 107 bytes; this much of it may be its folder.
_MAX_SOCKET_DIR = 60
_SOCKET_PREFIX = "mr-"
#: In the folder of the sockets while the node starts.
_STARTING = "starting"
_SESSION_PREFIX = "session_"
#: Logs of this many ended sessions are kept.
_KEPT_SESSIONS = 10
#: How often a process is looked at that waits in the kernel, maybe for a disk, and how long after.
_LOOKS, _BETWEEN_LOOKS = 5, 0.02


def machine_identity() -> tuple[str, str, str]:
    """Return host name, boot id and pid namespace: pids are comparable only if all are equal."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return os.uname().nodename, boot, str(Path("/proc/self/ns/pid").readlink())


@dataclasses.dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    #: When it started, in clock ticks since the machine did.
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Identify a running process; ProcessLookupError if there is none."""
        found = _process_stat(pid)
        if found is None:
            raise ProcessLookupError(f"There is no process {pid}.")
        _, start = found
        return cls(pid, start)

    def alive(self) -> bool:
        """Return whether this very process runs. One that ended but is not reaped does not."""
        state, start = _process_stat(self.pid) or ("X", 0)
        return state not in "ZX" and start == self.start


@dataclasses.dataclass
class Session:
    """The places of one session."""

    id: str
    folder: Path
    #: 0700, with a path of at most 60 bytes.
    socket_dir: Path

    @property
    def logs(self) -> Path:
        """The folder of the log files; it outlives the session."""
        return self.folder / "logs"

    @property
    def head_socket(self) -> Path:
        """Where the head listens, if it is on this node."""
        return self.socket_dir / "head.sock"

    @property
    def token_file(self) -> Path:
        """Where the cluster's join token is kept, 0600."""
        return self.folder / "token"


@dataclasses.dataclass
class ClusterRecord:
    """What programs need to attach to a running node or to end it."""

    session: Session
    #: ``HOST:PORT`` of the cluster's head; "" while it starts.
    address: str
    #: Socket of the node daemon; "" while it starts.
    socket_path: str
    node_id: str
    is_head: bool
    #: It belongs to one driver and ends with it. Others may look at it, and do not attach to it.
    embedded: bool
    #: By role; "boot" ends the others when it gets SIGTERM.
    processes: Mapping[str, ProcessId]
    python: str
    miniray: str
    #: Seconds since the epoch.
    started: float = dataclasses.field(default_factory=time.time)
    #: Where the pids mean something: see `machine_identity`.
    machine: tuple[str, str, str] = dataclasses.field(default_factory=machine_identity)
    #: The driver that it belongs to, if it is embedded.
    driver: ProcessId | None = None
    #: Where its page is; empty if nothing listens for that.
    dashboard_url: str = ""

    @property
    def ready(self) -> bool:
        """Whether programs can attach."""
        return bool(self.address and self.socket_path)

    def living(self) -> list[ProcessId]:
        """Return those of its processes that run."""
        return [process for process in self.processes.values() if process.alive()]


def base_dir() -> Path:
    """Return ``/tmp``, or what ``MINIRAY_TMPDIR`` names.

    If another user has made this user's folder in ``/tmp``, it is the folder that systemd gives to
    each user who has logged in, and to no other user.
    """
    named = os.environ.get(TMPDIR_VARIABLE)
    if named:
        return Path(named)
    runtime = _RUNTIME_DIRS / f"{os.geteuid()}"
    if _owner(_DEFAULT_BASE / f"miniray-{os.geteuid()}") not in (None, os.geteuid()) and (
        _owner(runtime) == os.geteuid()
    ):
        return runtime
    return _DEFAULT_BASE


def user_root(temp_dir: str | None = None) -> Path:
    """Return the folder of this user, ``<base>/miniray-<uid>``; make it if there is none.

    Raises:
        PermissionError: The folder is not this user's own, or is a symbolic link.
        OSError: It cannot be made.
    """
    base = Path(temp_dir).absolute() if temp_dir else base_dir().absolute()
    root = base / f"miniray-{os.geteuid()}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and base.is_dir():
            _require_own_folder(root)
            return root
        by = "--temp-dir or _temp_dir" if temp_dir else TMPDIR_VARIABLE
        raise OSError(
            f"No folder can be made in {base} ({error.strerror}). Give another one by {by}."
        ) from None
    return root


def create_session(temp_dir: str | None = None) -> Session:
    """Make the folders of a new session; drop the logs of long ended ones.

    Args:
        temp_dir: Where to put the session's folder instead of `base_dir`. Sockets and
            records stay under `base_dir`, so that other programs find them.

    Raises:
        OSError: See `user_root`.
    """
    root = user_root(temp_dir)
    _prune_sessions(root)
    when = time.strftime("%Y-%m-%d_%H-%M-%S")
    id = f"{when}_{os.getpid()}_{os.urandom(4).hex()}"
    folder = root / f"{_SESSION_PREFIX}{id}"
    folder.mkdir(mode=0o700)
    (folder / "logs").mkdir(mode=0o700)
    return Session(id=id, folder=folder, socket_dir=_make_socket_dir())


def write_record(record: ClusterRecord) -> Path:
    """Publish a record, or replace the one of the same session; return its path.

    A booting process may write it early, without address and socket, so that what it
    leaves behind if it is killed is found and removed.
    """
    folder = user_root() / "clusters"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{record.session.id}.json"
    write_private(path, json.dumps(dataclasses.asdict(record), default=str, indent=1).encode())
    return path


class StartingSign:
    """Shows other processes of this user, from now until ``end``, that a node is being started.

    It is a listening socket: the kernel notifies every process that waits for it when it is closed,
    also if this process is killed.
    """

    def __init__(self, session: Session) -> None:
        self._path = session.socket_dir / _STARTING
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self._path))
        self._socket.listen(socket.SOMAXCONN)

    def end(self) -> None:
        """Let those go on who wait: the node is ready, or will never be."""
        self._path.unlink(missing_ok=True)
        self._socket.close()


def await_start(address: str, seconds: float) -> None:
    """Wait until the cluster at a ``unix:`` address is not being started any more.

    Args:
        address: Of its head, known before it runs.
        seconds: The longest wait.
    """
    path = Path(address.removeprefix("unix:")).parent / _STARTING
    with socket.socket(socket.AF_UNIX) as waiting, contextlib.suppress(OSError):
        waiting.settimeout(seconds)
        waiting.connect(str(path))  # fails if no process is starting it
        waiting.recv(1)


def find_clusters() -> list[ClusterRecord]:
    """Return all records of nodes that run on this machine as this user, the newest first.

    Records of nodes whose processes have all ended are removed, with their socket folders.

    Raises:
        PermissionError: See `user_root`.
    """
    living = []
    for record in _read_records():
        host, boot, _ = machine = machine_identity()
        its_host, its_boot, _ = record.machine
        if record.machine == machine:
            if record.living():
                living.append(record)
            else:
                remove_session(record.session)
        elif its_host == host and its_boot != boot:
            remove_session(record.session)  # this machine has been restarted since
        # Else it is of another machine or container that shares the folder.
    return sorted(living, key=lambda record: record.started, reverse=True)


def remove_session(session: Session, *, keep_logs: bool = True) -> None:
    """Remove what a session left: its record, sockets and files, and the logs on request."""
    record = user_root() / "clusters" / f"{session.id}.json"
    # The paths may come from a record: only what looks like a session's is removed.
    if session.socket_dir.name.startswith(_SOCKET_PREFIX):
        _remove_tree(session.socket_dir)
    if not session.folder.name.startswith(_SESSION_PREFIX):
        logger.warning("%s is no folder of a session and was left alone.", session.folder)
    elif not keep_logs:
        _remove_tree(session.folder)
    elif session.folder.is_dir():
        for entry in session.folder.iterdir():
            if entry != session.logs:
                _remove_tree(entry)
    record.unlink(missing_ok=True)  # last, so that an interrupted removal is found again


def session_processes(session: str, variable: str = SESSION_VARIABLE) -> list[ProcessId]:
    """Return all running processes of this user that name a session in their environment.

    One that hangs in the kernel is left out: reading its environment might hang, too.
    """
    found = []
    unread = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    for _ in range(_LOOKS):
        waiting = []
        for pid in unread:
            try:
                if Path(f"/proc/{pid}").stat().st_uid != os.geteuid():
                    continue
                if may_hang_readers(pid):
                    waiting.append(pid)
                    continue
                process = ProcessId.of(pid)
                inside = variable_of(pid, variable) == session
            except BlockingIOError:
                waiting.append(pid)
                continue
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended meanwhile, or hides its environment as set-uid ones do
            if inside and process.alive():
                found.append(process)
        if not waiting:
            break
        unread = waiting
        time.sleep(_BETWEEN_LOOKS)
    return found


def kill_program(session: Session) -> None:
    """Kill the program of a run, and all that it has started."""
    for _ in range(_LOOKS):  # what is being killed may start another process
        for process in session_processes(str(session.folder), RUN_VARIABLE):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def _process_stat(pid: int) -> tuple[str, int] | None:
    """Return state and start time of a process, or None if there is none."""
    fields = stat_of(pid)
    return None if fields is None else (fields[STATE], int(fields[START]))


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return None


def _require_own_folder(path: Path) -> None:
    """Raise PermissionError unless this user alone can have put things there."""
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode) or not stat.S_ISDIR(info.st_mode):
        raise PermissionError(
            f"{path} is not a folder but {'a link' if stat.S_ISLNK(info.st_mode) else 'a file'}. "
            f"Remove it, or set {TMPDIR_VARIABLE} to a folder of your own."
        )
    if info.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to uid {info.st_uid}, not to uid {os.geteuid()} who runs this. "
            f"Set {TMPDIR_VARIABLE} to a folder of your own."
        )
    if stat.S_IMODE(info.st_mode) != 0o700:
        path.chmod(0o700)


def _make_socket_dir() -> Path:
    for base in (base_dir().absolute(), _DEFAULT_BASE):
        while True:
            path = base / f"{_SOCKET_PREFIX}{os.geteuid()}-{os.urandom(4).hex()}"
            if len(os.fsencode(path)) > _MAX_SOCKET_DIR:
                break
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return path
    raise AssertionError("the default base is short enough")


def _from_json(text: str) -> ClusterRecord:
    """Read a record, tolerating further fields; KeyError, TypeError, ValueError if damaged."""
    data: dict[str, Any] = {"driver": None, "dashboard_url": "", **json.loads(text)}
    values = {field.name: data[field.name] for field in dataclasses.fields(ClusterRecord)}
    session = data["session"]
    values["session"] = Session(
        id=session["id"], folder=Path(session["folder"]), socket_dir=Path(session["socket_dir"])
    )
    values["processes"] = {
        role: _process_of(process) for role, process in data["processes"].items()
    }
    values["driver"] = _process_of(data["driver"]) if data["driver"] else None
    host, boot, namespace = data["machine"]
    values["machine"] = (host, boot, namespace)
    return ClusterRecord(**values)


def _process_of(data: dict[str, int]) -> ProcessId:
    return ProcessId(data["pid"], data["start"])


def _read_records() -> Iterator[ClusterRecord]:
    """Yield the records in this user's folder, without a look at their processes."""
    root = base_dir().absolute() / f"miniray-{os.geteuid()}"
    try:
        _require_own_folder(root)
        _require_own_folder(root / "clusters")
    except FileNotFoundError:
        return
    for path in sorted((root / "clusters").glob("*.json")):
        text = _read_own_file(path)
        if text is None:
            continue
        try:
            yield _from_json(text)
        except (KeyError, TypeError, ValueError, AttributeError):
            logger.warning("The cluster record %s is damaged and was left out.", path)


def _read_own_file(path: Path) -> str | None:
    """Read a regular file that is this user's own; None for any other or a missing one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None  # its cluster has ended meanwhile
    except OSError as error:
        logger.warning("The cluster record %s was left out: %s.", path, error.strerror)
        return None
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            logger.warning(
                "The cluster record %s belongs to uid %d and was left out.", path, info.st_uid
            )
            return None
        return file.read()


def _prune_sessions(root: Path) -> None:
    """Remove the oldest folders of ended sessions beyond those that are kept."""
    in_use = {record.session.folder for record in _read_records() if record.living()}
    folders = [path for path in root.glob(f"{_SESSION_PREFIX}*") if path not in in_use]
    ended = [path for path in folders if _process_stat(_creator(path)) is None]
    ended.sort(key=lambda path: path.name)
    for path in ended[: max(0, len(ended) - _KEPT_SESSIONS)]:
        _remove_tree(path)


def _creator(folder: Path) -> int:
    """Return the pid in a session folder's name; 0, which no process has, if there is none."""
    *_, pid, _ = ("", "", *folder.name.split("_"))
    return int(pid) if pid.isdigit() else 0


def _remove_tree(path: Path) -> None:
    import shutil

    while os.path.lexists(path):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:  # noqa: PERF203 - rarely more than one round
            # Another process that removes it too was quicker, or one that ends has written again.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
