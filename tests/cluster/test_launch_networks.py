"""Hosts with several networks, which are network namespaces of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from launch_helpers import PATIENCE, slurm
from needed_tools import missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from command_helpers import CommandLine

#: The first host has a network of its own (10.78.1), listed first, and one with the other host.
SET_UP = """
ip netns add {a}; ip netns add {b}
ip link add {v}0 netns {a} type veth peer name {v}1 netns {b}
ip link add aa0 netns {a} type veth peer name aa1 netns {a}
ip -n {a} link set lo up; ip -n {b} link set lo up
ip -n {a} addr add 10.78.1.1/24 dev aa0; ip -n {a} link set aa0 up; ip -n {a} link set aa1 up
ip -n {a} addr add 10.77.1.1/24 dev {v}0; ip -n {a} link set {v}0 up
ip -n {b} addr add 10.77.1.2/24 dev {v}1; ip -n {b} link set {v}1 up
until ip -n {b} link show {v}1 | grep -q 'state UP'; do sleep 0.05; done
until ip -n {a} link show {v}0 | grep -q 'state UP'; do sleep 0.05; done
until ip -n {a} link show aa0 | grep -q 'state UP'; do sleep 0.05; done
"""


@pytest.fixture
def networks() -> Iterator[tuple[str, str]]:
    """The names of two hosts."""
    a, b = (f"mr{os.getpid()}{letter}" for letter in "ab")
    text = SET_UP.format(a=a, b=b, v=f"mr{os.getpid()}")
    made = subprocess.run(["sh", "-e", "-c", text], capture_output=True, check=False, text=True)
    try:
        if made.returncode != 0:
            missing(f"network namespaces cannot be connected here: {made.stderr.strip()}")
        yield a, b
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


CALLS = """
import miniray
from miniray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
miniray.init()
nodes = {node["Labels"]["rank"]: node for node in miniray.nodes()}

@miniray.remote(num_cpus=0)
class Half:
    def make(self, size):
        return bytes(size)
    def ask(self, other, size):
        return len(miniray.get(other.make.remote(size), timeout=30))

places = [On(nodes[rank]["NodeID"], soft=False) for rank in "01"]
a, b = (Half.options(scheduling_strategy=place).remote() for place in places)
print(nodes["0"]["NodeManagerAddress"], nodes["1"]["NodeManagerAddress"])
print([miniray.get(x.ask.remote(y, size)) for x, y in ((a, b), (b, a)) for size in (9, 10**7)])
"""


def test_of_a_hosts_networks_the_one_that_leads_to_the_others_is_used(
    command: CommandLine, tmp_path: Path, networks: tuple[str, str]
) -> None:
    parts = []
    for rank, name in reversed(list(enumerate(networks))):
        parts.append(
            command.popen(
                *("ip", "netns", "exec", name, "miniray", "run", "--rendezvous", str(tmp_path)),
                *("--", sys.executable, "-c", CALLS),
                variables={**slurm(rank, 2), "MINIRAY_MACHINE_ID": name},
            )
        )
    outputs = [part.communicate(timeout=PATIENCE)[0] for part in parts]
    assert outputs == ["", "10.77.1.1 10.77.1.2\n[9, 10000000, 9, 10000000]\n"]
    command.leaves_nothing()
