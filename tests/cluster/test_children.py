from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

#: A process with a child, a grandchild and one that left its session, all of which sleep.
FAMILY = """
import os, subprocess, sys, threading
from miniray.worker.main import kill_descendants

sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
middle = (
    "import subprocess, sys, time;"
    f"p = subprocess.Popen({sleep!r}); q = subprocess.Popen({sleep!r}, start_new_session=True);"
    "print(p.pid, q.pid, flush=True); time.sleep(600)"
)
found = []

def start():
    child = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE)
    found.extend([child.pid, *map(int, child.stdout.readline().split())])
    kill_descendants()
    child.wait()

thread = threading.Thread(target=start)  # children belong to the thread that made them
thread.start()
thread.join()
print(*found, flush=True)
"""


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except FileNotFoundError:
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


def test_all_descendants_are_killed_whatever_thread_made_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAMILY], capture_output=True, text=True, timeout=30, check=True
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.getpid() not in pids
