"""Data sets of miniray, beside Ray Data if wanted: throughput, memory, small data, training.

    python benchmarks/data.py [--against ray] [--full] [--only ROW ...] [--repeats N] [--json FILE]

The same program runs on both engines, in turns, each in a cluster of its own with 2 CPUs. Sizes are
those that end in some minutes; ``--full`` has those of the goals, ten times as large.
"""

from __future__ import annotations

from _cli import parser, run
from _common import load_rows
from _sizes import SIZE


def main() -> None:
    arguments = parser("Data sets, one table.")
    arguments.add_argument("--full", action="store_true", help="ten times as much data")
    arguments.set_defaults(repeats=1)
    args = arguments.parse_args()
    run(load_rows(("_rows_data",)), args, {SIZE: "full" if args.full else "small"})


if __name__ == "__main__":
    main()
