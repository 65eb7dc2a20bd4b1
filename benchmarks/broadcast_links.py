"""A broadcast between machines whose links are the limit, not the processors of one machine.

    sudo python benchmarks/broadcast_links.py [--nodes N] [--mbit RATE] [--size MIB] [--repeats N]

Each node has a network namespace, a machine id and a session folder of its own, so that all of them
take each other for other machines, and a link of a given rate each way. One value goes from the
first node to one other, then to all others. The tree that receivers make by passing on what they
get shows in the quotient: with a source that serves all of them by itself it is their number.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PORT = 6379

#: What the driver runs, beside the first node.
DRIVER = """
import statistics, sys, time
import numpy as np
import miniray

nodes, size, repeats = map(int, sys.argv[1:])

@miniray.remote(num_cpus=0)
class Receiver:
    def take(self, value):
        return len(value)

def seconds(receivers):
    ref = miniray.put(np.ones(size, dtype=np.uint8))
    start = time.perf_counter()
    miniray.get([receiver.take.remote(ref) for receiver in receivers])
    return time.perf_counter() - start

miniray.init(address="auto")
made = [Receiver.options(resources={f"node{n}": 1}).remote() for n in range(1, nodes)]
miniray.get([receiver.take.remote([]) for receiver in made])
single = statistics.median(seconds([made[n % len(made)]]) for n in range(repeats))
everyone = statistics.median(seconds(made) for _ in range(repeats))
times = f"{everyone / single:.2f} x"
print(f"to one node {single:.2f} s, to {len(made)} nodes {everyone:.2f} s: {times}")
"""


def ip(*arguments: str) -> None:
    """Change the network."""
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def links(nodes: int, mbit: int) -> Iterator[list[str]]:
    """Network namespaces, each with a link of a rate to a switch; their addresses are 10.77.0.N."""
    names = [f"mr{os.getpid()}-{n}" for n in range(nodes)]
    switch = f"mr{os.getpid()}-switch"
    with contextlib.ExitStack() as stack:
        for name in (switch, *names):
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            peer = ("peer", "name", port, "netns", switch)
            ip("-n", name, "link", "add", "eth0", "type", "veth", *peer)
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            ip("-n", switch, "link", "set", port, "master", "switch")
            for end, device in ((name, "eth0"), (switch, port)):
                ip("-n", end, "link", "set", device, "up")
                rate = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
                tbf = ["tc", "-n", end, "qdisc", "add", "dev", device, "root", "tbf", *rate]
                subprocess.run(tbf, check=True)
        yield names


def environment(folder: Path, number: int) -> dict[str, str]:
    """What makes a node of one machine one of another."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MINIRAY_")}
    path = os.pathsep.join(filter(None, (str(ROOT), own.get("PYTHONPATH"))))
    temporary = folder / str(number)
    temporary.mkdir(mode=0o700)
    return {
        **own,
        "PYTHONPATH": path,
        "MINIRAY_TMPDIR": str(temporary),
        "MINIRAY_MACHINE_ID": f"machine{number}",
    }


@contextlib.contextmanager
def node(namespace: str, variables: dict[str, str], *options: str) -> Iterator[str]:
    """A node that runs until the end; gives its words up to how others join."""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "miniray", "start"]
    with subprocess.Popen(
        [*command, *options, "--num-cpus", "1", "--block"],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            words = ""
            for line in process.stdout:
                words += line
                if "logs are in" in line:
                    break
            yield words
        finally:
            process.send_signal(signal.SIGINT)


def main() -> None:
    arguments = argparse.ArgumentParser(description="A broadcast over links of a limited rate.")
    arguments.add_argument("--nodes", type=int, default=8, help="receivers (default 8)")
    arguments.add_argument("--mbit", type=int, default=400, help="rate of a link (default 400)")
    arguments.add_argument("--size", type=int, default=100, help="MiB of the value (default 100)")
    arguments.add_argument("--repeats", type=int, default=3, help="runs of each (default 3)")
    args = arguments.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("Only root can make network namespaces.")
    count = args.nodes + 1
    with (
        tempfile.TemporaryDirectory(prefix="mr-") as folder,
        links(count, args.mbit) as names,
        contextlib.ExitStack() as stack,
    ):
        variables = [environment(Path(folder), number) for number in range(count)]
        head = stack.enter_context(
            node(names[0], variables[0], "--head", "--host", "10.77.0.1", "--port", str(PORT))
        )
        token = next(word for word in head.replace("=", " ").split() if word.startswith("mr1."))
        for number in range(1, count):
            resources = f'{{"node{number}": 1}}'
            join = ("--address", f"10.77.0.1:{PORT}", "--token", token, "--resources", resources)
            stack.enter_context(node(names[number], variables[number], *join))
        sizes = [str(count), str(args.size << 20), str(args.repeats)]
        driver = ["ip", "netns", "exec", names[0], sys.executable, "-c", DRIVER, *sizes]
        subprocess.run(driver, env=variables[0], check=True, timeout=600)


if __name__ == "__main__":
    main()
