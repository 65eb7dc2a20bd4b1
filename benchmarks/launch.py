"""How long it takes from a command to what it starts: runs on several hosts, and submitted jobs.

    python benchmarks/launch.py [--against ray] [--repeats N] [--json FILE]

With ``--against ray`` the same is done with Ray's client and its commands.
"""

from __future__ import annotations

from _cli import parser, run
from _common import load_rows


def main() -> None:
    run(
        load_rows(("_rows_launch", "_rows_jobs")),
        parser("From a command to what it starts.").parse_args(),
        {},
    )


if __name__ == "__main__":
    main()
