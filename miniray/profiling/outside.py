"""Looks at a process from outside, for one that does not answer: by py-spy, else by a signal.

Runs in the daemon. Workers let their daemon, and so the py-spy that it starts, read their memory
where the kernel would else allow that to ancestors only (``_be_seen``, worker/main.py). Python's
``faulthandler`` needs no right, and is used once, as it may crash a process that runs Python code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from miniray.common.process_state import SHOW_STACKS, STATE, WORKER_FILE, python_command, stat_of
from miniray.profiling.inside import samples_of
from miniray.profiling.stacks import trimmed
from miniray.system.programs import HelperFailedError, output_of

if TYPE_CHECKING:
    from miniray.profiling.inside import Samples
    from miniray.profiling.stacks import Frame, Stack

#: Seconds that py-spy and the signal may take.
_PATIENCE = 3.0
_THREAD = re.compile(r"^(?:Current thread|Thread) (?P<id>0x[0-9a-f]+)", re.ASCII)
_LINE = re.compile(r'^  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)$')
#: A frame in py-spy's output; a samples' rate in it; and what it says if there is none.
_RAW = re.compile(r"^(?P<function>.*) \((?P<path>.*?)(?::(?P<line>\d+))?\)$")
_RATE = 100
_NO_SAMPLES = "No stack counts"
_BUSY = "It did not answer: native code holds Python's lock (the GIL)."
_SILENT = "It did not answer: it is stopped (SIGSTOP)."
#: Why a process uses no CPU.
STOPPED = "It is stopped (SIGSTOP)."


async def stacks(pid: int) -> tuple[str, list[Stack], str]:
    """Return how the stacks of a process were seen, the stacks, and a sentence on its state."""
    stopped = is_stopped(pid)
    note = _SILENT if stopped else _BUSY
    output, failure = await run_py_spy("dump", "--json", "--nonblocking", "--pid", str(pid))
    if not failure:
        return "py-spy", _of_py_spy(output), note
    written = "" if stopped else await _by_signal(pid)  # no signal reaches one that is stopped
    if not written:
        return "", [], f"{note} {failure}"
    return "a signal (faulthandler)", _of_faulthandler(written), note


def silence(pid: int, missing: str) -> str:
    """Return a sentence on why a process did not answer a question."""
    if stat_of(pid) is None or "gone" in missing:
        return "It ended meanwhile."
    if "time" not in missing:
        return f"It could not answer: {missing}."
    return _SILENT if is_stopped(pid) else _BUSY


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    fields = stat_of(pid)
    return fields is not None and fields[STATE] in "Tt"


async def run_py_spy(*args: str, patience: float = _PATIENCE) -> tuple[str, str]:
    """Run py-spy; return what it prints, and a sentence if it fails."""
    program = py_spy()
    if program is None:
        return "", "py-spy is not installed: pip install 'miniray[profile]'."
    try:
        return (await output_of((program, *args), patience)).decode(errors="replace"), ""
    except TimeoutError:
        return "", "py-spy took too long."
    except HelperFailedError as error:
        return "", f"py-spy failed: {error}"


async def cpu(pid: int, seconds: float) -> tuple[Samples, str]:
    """Return what a process used the CPU for, and a sentence if that cannot be seen from here."""
    with tempfile.TemporaryDirectory(prefix="miniray-profile-") as folder:
        path = Path(folder, "samples")
        how = ["--nonblocking", "--full-filenames", "--format", "raw", "--output", str(path)]
        rate, length = ["--rate", str(_RATE)], ["--duration", str(math.ceil(seconds))]
        patience = seconds + _PATIENCE
        _, failure = await run_py_spy(
            "record", *how, *rate, *length, "--pid", str(pid), patience=patience
        )
        lines = await asyncio.to_thread(_lines_of, path)
    if failure and not lines and _NO_SAMPLES not in failure:
        return [], failure
    return samples_of(map(_of_raw, lines)), ""


def _lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _frame(match: re.Match[str]) -> Frame:
    return match["function"], match["path"], int(match["line"] or 0)


def _of_raw(line: str) -> tuple[list[Frame], float]:
    stack, _, count = line.rpartition(" ")
    frames = []
    for each in stack.split(";"):
        match = _RAW.match(each)
        frames.append(_frame(match) if match else (each, "", 0))
    return frames, int(count) / _RATE


async def read_memray(path: str, leaks: bool) -> Samples:
    """Return what memray has recorded in a file, read by a process of its own."""
    program = sys.executable, "-c", python_command("miniray.profiling.memray_file")
    try:
        output = await output_of((*program, path, "leaks" if leaks else "peak"))
    except HelperFailedError as error:
        raise ValueError(f"what memray recorded cannot be read: {error}") from None
    return [(frames, size) for frames, size in json.loads(output)]


def py_spy() -> str | None:
    """Return the path of py-spy, of this Python's packages or of the system."""
    own = sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")
    return shutil.which("py-spy", path=os.pathsep.join([*own, os.environ.get("PATH", "")]))


def _of_py_spy(output: str) -> list[Stack]:
    found: list[Stack] = []
    for thread in json.loads(output):
        stack = trimmed(
            (frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"][::-1]
        )
        if stack or thread["thread_name"] == "MainThread":
            name = thread["thread_name"] or f"thread {thread['os_thread_id']}"
            found.append({"who": name, "stack": stack})
    return found


async def _by_signal(pid: int) -> str:
    """Return what a process writes when it is sent the signal; empty if it does not write."""
    file = _file_of(pid)
    if file is None or not _catches(pid):
        return ""
    try:
        before = size = os.fstat(file).st_size
        os.kill(pid, SHOW_STACKS)
        for _ in range(int(_PATIENCE / 0.02)):  # there is no event for a file in memory
            await asyncio.sleep(0.02)
            last, size = size, os.fstat(file).st_size
            if before < last == size:
                break
        return os.pread(file, size - before, before).decode(errors="replace")
    finally:
        os.close(file)


def _file_of(pid: int) -> int | None:
    """Open the file that a worker writes its stacks to."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if str(entry.readlink()).startswith(f"/memfd:{WORKER_FILE}"):
                return os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _catches(pid: int) -> bool:
    """Return whether a process handles the signal, which would end it else."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        caught = status.partition("\nSigCgt:")[2].split(maxsplit=1)[0]
        return bool(int(caught, 16) >> (SHOW_STACKS - 1) & 1)
    return False


def _of_faulthandler(written: str) -> list[Stack]:
    found: list[Stack] = []
    threads: list[tuple[str, list[Frame]]] = []
    for line in written.splitlines():
        if match := _THREAD.match(line):
            threads.append((f"thread {match['id']}", []))
        elif threads and (match := _LINE.match(line)):
            _, frames = threads[-1]
            frames.append(_frame(match))
    for name, frames in threads:
        stack = trimmed(frames[::-1])
        if stack:
            found.append({"who": name, "stack": stack})
    return found
