"""Benchmarks over several nodes, all of them on this machine.

    python benchmarks/multi_node.py [--nodes N] [--actors N] [--against ray] [--json FILE]

Measures how fast actors come up over all nodes, calls from the driver to every
node, calls of every node's actor to every other's, and what calls and requests to
the head wait while large values move between two nodes. Nodes of one machine share
its cores, so the figures tell what the runtime costs, not what a cluster gives.
"""

from __future__ import annotations

from _cli import parser, run
from _common import load_rows
from _rows_nodes import ACTORS, NODES


def main() -> None:
    arguments = parser("Benchmarks over several nodes on this machine.")
    arguments.add_argument("--nodes", type=int, default=4, help="nodes to start (default 4)")
    arguments.add_argument("--actors", type=int, default=100, help="actors to create (default 100)")
    args = arguments.parse_args()
    if args.nodes < 2:
        arguments.error(f"--nodes must be at least 2, but is {args.nodes}")
    environment = {NODES: str(args.nodes), ACTORS: str(args.actors)}
    run(load_rows(("_rows_nodes",)), args, environment)


if __name__ == "__main__":
    main()
