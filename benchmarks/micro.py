"""Micro benchmarks of miniray, beside Ray if wanted, in one table.

    python benchmarks/micro.py [--against ray] [--only ROW ...] [--repeats N] [--json FILE]

Every row runs in a process and a cluster of its own, started with 8 logical CPUs.
With ``--against ray`` the same functions run on Ray in its own environment; the
engines take turns, so that both see the same machine. Figures are medians.
"""

from __future__ import annotations

from _cli import parser, run
from _common import load_rows

MODULES = ("_rows_cluster", "_rows_calls", "_rows_pool", "_rows_values", "_rows_train")


def main() -> None:
    run(load_rows(MODULES), parser("Micro benchmarks, one table.").parse_args(), {})


if __name__ == "__main__":
    main()
