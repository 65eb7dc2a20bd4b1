"""What `miniray status` says while a node is silent, or the head is gone or has just come back."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest
from cluster_helpers import wait_until
from command_helpers import CommandLine, Started, daemons, one_line

#: A node of which three heartbeats of half a second are missing is silent.
BEATS = {"MINIRAY_HEARTBEAT_INTERVAL": "0.5", "MINIRAY_NODE_TIMEOUT": "60"}


@pytest.fixture
def head(command: CommandLine) -> Started:
    """A cluster of two nodes of different machines, so that their sessions are over the network."""
    head = command.start_head("--num-cpus", "1", **BEATS)
    command.join(head, "--num-cpus", "1", **BEATS, MINIRAY_MACHINE_ID="another")
    return head


def test_a_silent_node_is_shown_as_such_before_it_is_given_up(
    command: CommandLine, head: Started
) -> None:
    del head
    wait_until(lambda: "silent" not in command.run("status").stdout)
    joined = daemons(command)[1]
    joined.suspend()
    try:
        wait_until(lambda: "ALIVE, silent for " in command.run("status").stdout)
    finally:
        joined.resume()
    wait_until(lambda: "silent" not in command.run("status").stdout)


def test_a_head_that_came_back_says_so_and_whom_it_waits_for(
    command: CommandLine, head: Started
) -> None:
    joined = daemons(command)[1]
    wait_until(lambda: _up(command) >= 2)
    joined.suspend()
    try:
        os.kill(command.records()[0]["processes"]["head"]["pid"], signal.SIGKILL)
        wait_until(lambda: "Its head was lost" in command.run("status").stdout)
        shown = command.run("status").stdout
        assert shown.startswith(f"Cluster at {head.address}: 1 node, up ")
        assert "it waits for 1 node to come back" in shown
        assert "AWAITED" in shown
        assert _up(command) >= 2  # the cluster's time, not the head's
    finally:
        joined.resume()
    wait_until(lambda: "2 nodes" in command.run("status").stdout)
    wait_until(lambda: "AWAITED" not in command.run("status").stdout)


def test_a_node_without_its_head_says_so_and_for_how_long(command: CommandLine) -> None:
    head = command.start_head("--num-cpus", "1")
    there = command.root / "there"
    there.mkdir()
    elsewhere = {"MINIRAY_TMPDIR": str(there), "MINIRAY_MACHINE_ID": "another"}
    command.join(head, "--num-cpus", "1", **elsewhere)
    try:
        pids = [process["pid"] for process in command.records()[0]["processes"].values()]
        for sent in (
            signal.SIGSTOP,
            signal.SIGKILL,
        ):  # at once: neither bids farewell for the other
            for pid in pids:
                os.kill(pid, sent)
        told = re.compile(rf"The head at {head.address} has been out of reach .* for \d+ s")
        wait_until(lambda: told.search(command.run("status", **elsewhere).stderr), 40)
        assert told.search(one_line(command.run("memory", **elsewhere)))
    finally:
        command.run("stop", "--force", **elsewhere)
        shutil.rmtree(there)


def test_a_head_that_does_not_answer_is_not_waited_for_long(
    command: CommandLine, head: Started
) -> None:
    pid = command.records()[0]["processes"]["head"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        line = one_line(command.run("status"))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f"The head at {head.address} did not answer within 5 s" in line


def _up(command: CommandLine) -> int:
    """Seconds that the cluster is up, as far as it is told."""
    told = re.search(r"up (\d+) (s|min)", command.run("status").stdout)
    return int(told[1]) * {"s": 1, "min": 60}[told[2]] if told is not None else 0
