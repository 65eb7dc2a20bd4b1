"""What the page costs: closed, open, and with many rows; and what looking into processes does.

    python benchmarks/dashboard.py [--only ROW ...] [--repeats N] [--json FILE]

A browser is Debian's ``chromium-headless-shell``, by Playwright.
"""

from __future__ import annotations

from _cli import parser, run
from _common import load_rows


def main() -> None:
    run(
        load_rows(("_rows_dashboard", "_rows_profiles")),
        parser("The page, one table.").parse_args(),
        {},
    )


if __name__ == "__main__":
    main()
