"""The way of a large value is the one that ARCHITECTURE.md shows, file by file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Loaded by each process: while the file ``round`` has a number, it notes in which files of miniray
#: it calls functions, and which.
TRACER = """
import mmap, os, sys, threading

FOLDER = os.environ["TRACES"]
with open(f"{FOLDER}/round", "r+b") as file:
    current = mmap.mmap(file.fileno(), 1)
noted = set()


def note(frame, event, _arg):
    if event != "call" or not current[0]:
        return
    code = frame.f_code
    if "/miniray/" not in code.co_filename:
        return
    path = code.co_filename.rpartition("/miniray/")[2]
    key = os.getpid(), current[0], path, code.co_name
    if key not in noted:
        noted.add(key)
        file = os.open(f"{FOLDER}/notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, ("\\t".join(map(str, key)) + "\\n").encode())
        os.close(file)


threading.setprofile(note)
sys.setprofile(note)
"""

PROGRAM = '''
import gc, mmap, os, sys, time

import numpy as np

import miniray
from miniray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1, resources={"far": 1})
miniray.init(address=cluster.address)


@miniray.remote(resources={"far": 1})
class Reader:
    def size(self, refs):
        return miniray.get(refs[0]).nbytes


def freed(number):
    """Return whether both daemons have their memory back."""
    with open(f"{os.environ['TRACES']}/notes") as notes:
        rows = [row.split() for row in notes]
    return sum(row[1] == str(number) and row[3] == "give_back" for row in rows) == 2


with open(f"{os.environ['TRACES']}/round", "r+b") as file:
    current = mmap.mmap(file.fileno(), 1)
reader, value = Reader.remote(), np.zeros(4 << 20, "u1")
gc.disable()
for number in range(int(sys.argv[1]) + 3):
    begun = max(0, number - 2)  # the first ones start movers, and map memory
    current[0] = begun
    ref = miniray.put(value)
    assert miniray.get(reader.size.remote([ref])) == value.nbytes
    del ref
    deadline = time.monotonic() + 20
    while begun and not freed(begun):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    current[0] = 0
miniray.shutdown()
cluster.shutdown()
'''
ROUNDS = 20
#: Heartbeats do not come amid the rounds, however slow these are.
QUIET = {"MINIRAY_HEARTBEAT_INTERVAL": "60", "MINIRAY_NODE_TIMEOUT": "600"}


def shown(title: str) -> list[str]:
    """Return the files of a section of ARCHITECTURE.md, each of which has a number there."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition(f"## {title}")[2].partition("\n## ")[0]
    found = re.findall(r"^\d+\. `(.+?)`", section, re.MULTILINE)
    assert f"{len(found)} files" in section
    return found


@pytest.mark.usefixtures("session_root")
def test_a_large_value_passes_the_files_that_the_architecture_shows(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TRACER)
    (tmp_path / "round").write_bytes(b"\0")
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROUNDS)],
        env={**os.environ, **QUIET, "PYTHONPATH": paths, "TRACES": str(tmp_path)},
        check=True,
        timeout=120,
    )
    rows = [row.split("\t") for row in (tmp_path / "notes").read_text().splitlines()]
    rounds: dict[str, set[str]] = {}
    for _pid, number, path, _name in rows:
        rounds.setdefault(path, set()).add(number)
    # What is seen in few rounds, as a wait that was long, is not part of the way.
    passed = {path for path, numbers in rounds.items() if len(numbers) > ROUNDS / 2}
    assert sorted(passed - {*shown("One call, file by file")}) == sorted(
        shown("One large value, file by file")
    )
