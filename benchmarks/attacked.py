"""What a user notices of strangers at the ports, and of careless users of the same cluster.

    python benchmarks/attacked.py [--short] [--only ROW ...] [--repeats N] [--json FILE]

A user calls an actor, asks the head and creates actors in a loop, on two nodes of this machine. The
first row is the quiet figure. In the others, somebody without the cluster's secret sends 400 KB/s
over four connections, or holds 2,000, for 25 s; or another driver does what people do. The same
processors do the strangers' work.
"""

from __future__ import annotations

from _cli import parser, run
from _common import load_rows
from _rows_attacked import SHORT


def main() -> None:
    arguments = parser("What a user notices of strangers, and of careless users.")
    arguments.add_argument("--short", action="store_true", help="a tenth of everything, for a test")
    arguments.set_defaults(repeats=1)
    args = arguments.parse_args()
    run(load_rows(("_rows_attacked",)), args, {SHORT: "1" if args.short else ""})


if __name__ == "__main__":
    main()
